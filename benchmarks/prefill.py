"""Causal MLA prefill, qk 192 and v 128: ours, FA3, cuDNN and flex_attention in one run.

python -m benchmarks.prefill [--json]
"""

from __future__ import annotations

import argparse
import importlib
import json
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import mla_ops.ops  # noqa: F401  (registers the ops)
from benchmarks.common import measure, measure_ceilings, print_table, relative_error
from benchmarks.inputs import SCALE, PrefillInputs, prefill_inputs

SHAPES = ((16, 8, 2048), (128, 1, 4096), (128, 1, 16384))
"""Heads, batch, tokens of a sequence."""

Call = Callable[[], Tensor]


def ours(step: PrefillInputs) -> Call:
    """``mla_prefill`` of the Triton backend."""

    def call() -> Tensor:
        out: Tensor = torch.ops.mla_ops.mla_prefill(
            step.q, step.k, step.v, step.cu_seqlens, step.cu_seqlens, step.length, step.length, SCALE, True, "triton"
        )[0]
        return out

    return call


def flash_attention_3(step: PrefillInputs) -> Call:
    """FA3 of the ``fa3-fwd`` wheel."""
    forward = importlib.import_module("fa3_fwd_interface").flash_attn_varlen_func

    def call() -> Tensor:
        out = forward(
            step.q, step.k, step.v, step.cu_seqlens, step.cu_seqlens, step.length, step.length,
            softmax_scale=SCALE, causal=True,
        )  # fmt: skip
        rows: Tensor = out[0] if isinstance(out, tuple) else out
        return rows

    return call


def _batched(step: PrefillInputs) -> list[Tensor]:
    return [x.view(-1, step.length, *x.shape[1:]).transpose(1, 2) for x in (step.q, step.k, step.v)]


def cudnn(step: PrefillInputs) -> Call:
    """cuDNN through ``scaled_dot_product_attention``."""
    q, k, v = _batched(step)

    def call() -> Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return scaled_dot_product_attention(q, k, v, is_causal=True, scale=SCALE).transpose(1, 2).flatten(0, 1)

    return call


def flex(step: PrefillInputs) -> Call:
    """``flex_attention``, compiled."""
    module = importlib.import_module("torch.nn.attention.flex_attention")
    q, k, v = _batched(step)
    mask = module.create_block_mask(lambda b, h, row, key: row >= key, None, None, step.length, step.length)
    attend: Callable[..., Tensor] = torch.compile(module.flex_attention)
    return lambda: attend(q, k, v, block_mask=mask, scale=SCALE).transpose(1, 2).flatten(0, 1)


def run(name: str, make: Callable[[PrefillInputs], Call], step: PrefillInputs, floor_us: float) -> dict[str, Any]:
    """One line of the table; of what cannot be had, the reason."""
    try:
        call = make(step)
        out = call()
        error = relative_error(out[step.length - 64 : step.length], step.expected())
        unwritten = int(out.isnan().sum())
        us = measure([call], 5)
    except Exception as reason:  # a peer may fail in any way, and the others are still to be measured
        return {"what": name, "skipped": f"{type(reason).__name__}: {str(reason)[:60]}"}
    return {
        "what": name,
        "us": us,
        "share of floor": floor_us / us,
        "TFLOP/s": step.flop / us / 1e6,
        "error": error,
        "NaN": unwritten,
    }


def main() -> None:
    """Measure every shape and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    peers = {"mla_ops triton": ours, "FA3": flash_attention_3, "cuDNN SDPA": cudnn, "flex_attention": flex}
    ceilings = measure_ceilings()
    rows = []
    for heads, batch, length in SHAPES:
        step = prefill_inputs(batch, length, heads, torch.bfloat16)
        floor = step.flop / ceilings["flop_per_s"] * 1e6
        shape = {"H": heads, "B": batch, "tokens": length, "floor us": floor}
        rows += [shape | run(name, make, step, floor) for name, make in peers.items()]
        del step
        torch.cuda.empty_cache()
    if args.json:
        print(json.dumps({"device": torch.cuda.get_device_name(), "ceilings": ceilings, "rows": rows}))
    else:
        print(torch.cuda.get_device_name(), ceilings)
        print_table(rows)


if __name__ == "__main__":
    main()
