"""Time candidate launch configurations and print the best as rows for mla_ops/backends/triton/configs.py.

python benchmarks/tune.py decode --heads 16 --batch 128 --kv-len 4096
python benchmarks/tune.py prefill --heads 128 --length 16384
python benchmarks/tune.py absorb --heads 128 --batch 128      (or expand)
python benchmarks/tune.py linear --batch 1 --shape 7168,16384
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources

from benchmarks.common import measure, print_table, relative_error
from benchmarks.inputs import SCALE, DecodeInputs, decode_inputs, input_sets, prefill_inputs
from mla_ops.backends import reference
from mla_ops.backends.triton.configs import DecodeConfig, HeadConfig, LinearConfig, PrefillConfig
from mla_ops.backends.triton.decode import decode_launches
from mla_ops.backends.triton.heads import absorb_launch, expand_launch
from mla_ops.backends.triton.launch import Launch, arch_of, compute_units
from mla_ops.backends.triton.prefill import prefill_launch
from mla_ops.backends.triton.products import linear_launch
from mla_ops.config import MLAConfig
from mla_ops.rope import inverse_frequencies

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


def decode_candidates(rows: int) -> Iterator[DecodeConfig]:
    """Tiles that hold ``rows`` rows, or 64-row ones."""
    tile = max(16, min(64, 1 << (rows - 1).bit_length()))
    if tile < 64:
        for block_n, warps, stages, programs in itertools.product((16, 32, 64), (4, 8), (2, 3, 4), (1, 2, 3)):
            yield DecodeConfig(tile, block_n, warps, stages, programs)
    else:
        for block_n, warps, stages in itertools.product((32, 64), (8,), (2, 3)):
            yield DecodeConfig(tile, block_n, warps, stages)
    if HOPPER:
        for warps in (4, 8):
            yield DecodeConfig(tile, 64, warps, 1, kernel="hopper_narrow")
        yield DecodeConfig(64, 64, 4, 1, kernel="hopper")


def prefill_candidates() -> Iterator[PrefillConfig]:
    """Blocks that fit the shared memory of a large GPU."""
    for block_m, block_n, warps, stages in itertools.product((64, 128), (32, 64, 128), (4, 8), (1, 2, 3)):
        yield PrefillConfig(block_m, block_n, warps, stages)
    if HOPPER:
        for block_n in (64, 128):
            yield PrefillConfig(128, block_n, 4, 1, kernel="hopper")


def run_decode(step: DecodeInputs, config: DecodeConfig, out: torch.Tensor, lse: torch.Tensor) -> None:
    """One decode by ``config`` into poisoned outputs."""
    for launch in decode_launches(
        step.q, step.kv_cache, step.qo_indptr, step.kv_indptr, step.kv_indices, step.kv_last_page_lens, 1, 0, SCALE,
        None, step.kv_scale, out, lse, config, compute_units(step.q),
    ):  # fmt: skip
        launch.run()


def tune_decode(heads: int, batch: int, kv_len: int, page_size: int, fp8: bool) -> list[dict[str, Any]]:
    """Microseconds and error of each candidate."""
    first = decode_inputs([kv_len] * batch, heads, page_size, torch.bfloat16, fp8)
    steps = [first]
    while len(steps) < input_sets(first.bytes):
        steps.append(decode_inputs([kv_len] * batch, heads, page_size, torch.bfloat16, fp8))
    out = torch.empty(batch, heads, first.rank, device="cuda", dtype=torch.bfloat16)
    lse = torch.empty(batch, heads, device="cuda")
    expected = first.expected()
    rows = []
    for config in decode_candidates(heads):
        out.fill_(torch.nan)
        try:
            run_decode(first, config, out, lse)
        except OutOfResources:
            continue
        error = relative_error(out[:4], expected)
        us = measure([lambda s=step, c=config: run_decode(s, c, out, lse) for step in steps], 10)  # type: ignore[misc]
        rows.append({"us": us, "error": error, "config": str(config).replace(", extra=()", "")})
    return rows


def tune_prefill(heads: int, length: int) -> list[dict[str, Any]]:
    """Microseconds, TFLOP/s and error of each candidate."""
    step = prefill_inputs(1, length, heads, torch.bfloat16)
    out = torch.empty(length, heads, 128, device="cuda", dtype=torch.bfloat16)
    lse = torch.empty(length, heads, device="cuda")
    expected = step.expected()
    rows = []
    for config in prefill_candidates():
        out.fill_(torch.nan)
        launch = prefill_launch(
            step.q, step.k, step.v, step.cu_seqlens, step.cu_seqlens, length, length, SCALE, True, out, lse, config
        )
        try:
            launch.run()
        except OutOfResources:
            continue
        error = relative_error(out[-64:], expected)
        us = measure([launch.run], 3)
        text = str(config).replace(", extra=()", "")
        rows.append({"us": us, "tflops": step.flop / us / 1e6, "error": error, "config": text})
    return rows


def head_candidates(tokens: int) -> Iterator[HeadConfig]:
    """Tiles of up to 128 tokens."""
    for block_t, block_n, block_k in itertools.product((16, 32, 64, 128), (32, 64, 128, 256), (64, 128, 256, 512)):
        if block_t <= max(16, 2 * tokens) and block_t * block_n <= 1 << 14 and block_n * block_k <= 1 << 15:
            for warps, stages in itertools.product((4, 8), (2, 3)):
                yield HeadConfig(block_t, block_n, block_k, warps, stages)


def _timed(
    make: Callable[[Any, Tensor], Launch], configs: Iterable[Any], weights: Sequence[Tensor], out: Tensor, exact: Tensor
) -> list[dict[str, Any]]:
    """Microseconds and error of ``make(config, weight)`` for each config, over weights that are out of cache."""
    rows = []
    for config in configs:
        out.fill_(torch.nan)
        try:
            make(config, weights[0]).run()
        except OutOfResources:
            continue
        error = relative_error(out, exact)
        us = measure([make(config, weight).run for weight in weights] * 4, 10)
        rows.append({"us": us, "error": error, "config": str(config).replace(", extra=()", "")})
    return rows


def tune_heads(op: str, heads: int, tokens: int) -> list[dict[str, Any]]:
    """``absorb_query`` or ``expand_values`` of DeepSeek-V3's widths."""
    config = MLAConfig.preset("deepseek-v3")
    nope, width, rank, rope = (
        *(config.qk_nope_head_dim, config.v_head_dim),
        *(config.kv_lora_rank, config.qk_rope_head_dim),
    )
    weights = [torch.randn(heads, nope + width, rank, device="cuda").bfloat16() for _ in range(4)]
    arch = arch_of(weights[0])
    if op == "absorb":
        q = torch.randn(tokens, heads, nope + rope, device="cuda").bfloat16()
        positions = torch.randint(0, 4096, (tokens,), device="cuda")
        rotation = (inverse_frequencies(config).cuda(), 1.0, True, 0.0, 1)
        out = q.new_empty(tokens, heads, rank + rope)
        exact = reference.absorb_query(q.double(), weights[0][:, :nope].double(), positions, *rotation)
        return _timed(
            lambda row, w: absorb_launch(q, w[:, :nope], positions, *rotation, out, row, arch),
            *(head_candidates(tokens), weights, out, exact),
        )
    latent = torch.randn(tokens, heads, rank, device="cuda").bfloat16()
    out = latent.new_empty(tokens, heads * width)
    exact = reference.expand_values(latent.double(), weights[0][:, nope:].double())
    return _timed(
        lambda row, w: expand_launch(latent, w[:, nope:], out, row, arch),
        *(head_candidates(tokens), weights, out, exact),
    )


def tune_linear(tokens: int, columns: int, width: int) -> list[dict[str, Any]]:
    """``linear`` of few rows; last, torch's product."""
    x = torch.randn(tokens, width, device="cuda").bfloat16()
    sets = max(2, (150 << 20) // (2 * columns * width))
    weights = [torch.randn(columns, width, device="cuda").bfloat16() for _ in range(sets)]
    out, arch = x.new_empty(tokens, columns), arch_of(x)
    candidates = [
        LinearConfig(1 if tokens == 1 and single else 8, 0, *blocks, stages, fetched)
        for single, blocks, stages, fetched in itertools.product(
            *((True, False), ((4, 512, 4), (8, 512, 4), (16, 512, 4), (16, 512, 8)), (1, 3, 4), (0, 512))
        )
        if width % blocks[1] == 0
    ]
    rows = _timed(
        lambda row, w: linear_launch(x, [w], None, out, row, arch),
        *(dict.fromkeys(candidates), weights, out, x.double() @ weights[0].double().T),
    )
    torch_us = measure([partial(torch.mm, x, weight.T, out=out) for weight in weights] * 4, 10)
    return [*rows, {"us": torch_us, "config": "torch.mm"}]


def main() -> None:
    """Parse the command line and print the candidates, best first."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("op", choices=("decode", "prefill", "absorb", "expand", "linear"))
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--kv-len", type=int, default=4096)
    parser.add_argument("--page-size", type=int, default=64)
    parser.add_argument("--fp8", action="store_true")
    parser.add_argument("--length", type=int, default=16384)
    parser.add_argument("--shape", default="7168,16384", help="rows and width of a weight, for linear")
    parser.add_argument("--top", type=int, default=8, help="how many rows to print")
    args = parser.parse_args()
    if args.op == "decode":
        rows = tune_decode(args.heads, args.batch, args.kv_len, args.page_size, args.fp8)
    elif args.op == "prefill":
        rows = tune_prefill(args.heads, args.length)
    elif args.op == "linear":
        rows = tune_linear(args.batch, *map(int, args.shape.split(",")))
    else:
        rows = tune_heads(args.op, args.heads, args.batch)
    print(vars(args))
    print_table(sorted(rows, key=lambda row: row["us"])[: args.top])


if __name__ == "__main__":
    main()
