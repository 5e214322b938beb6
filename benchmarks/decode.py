"""MLA decode: ours, FlashMLA and AITER's Triton kernels in one run, each with its share of the measured floor.

    python -m benchmarks.decode [--aiter FOLDER] [--json]

``FOLDER`` holds ``aiter/``: a clone of AITER, or its unpacked wheel; see :mod:`benchmarks.aiter`.

Graph-replayed medians over input sets that together exceed the last-level cache. The floor of a step is the larger of
its fewest bytes over the measured copy rate and its operations over the measured rate of a bf16 product.
"""

from __future__ import annotations

import argparse
import importlib
import json
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import mla_ops.ops  # noqa: F401  (registers the ops)
from benchmarks import aiter
from benchmarks.common import measure, measure_ceilings, measure_host, print_table, relative_error
from benchmarks.inputs import SCALE, DecodeInputs, decode_inputs, input_sets

SHAPES = (
    (16, 1, 32768),
    (16, 32, 4096),
    (16, 128, 4096),
    (32, 32, 4096),
    (128, 1, 32768),
    (128, 32, 4096),
    (128, 128, 4096),
)
"""Heads, batch, keys of a request."""
RAGGED = (16, [128 * (1 + i * i % 97) for i in range(128)])

Call = Callable[[], Tensor]


def ours(step: DecodeInputs) -> Call:
    """``mla_decode`` of the Triton backend."""
    return lambda: torch.ops.mla_ops.mla_decode(
        step.q, step.kv_cache, step.qo_indptr, step.kv_indptr, step.kv_indices, step.kv_last_page_lens, [], 1, 0,
        SCALE, None, step.kv_scale, "triton", step.rank,
    )[0]  # fmt: skip


def flash_mla(step: DecodeInputs) -> Call:
    """FlashMLA with its scheduler metadata computed once, outside of what is timed."""
    module = importlib.import_module("flash_mla")
    lens = torch.tensor(step.lens, dtype=torch.int32, device="cuda")
    metadata, _ = module.get_mla_metadata()

    def call() -> Tensor:
        out: Tensor = module.flash_mla_with_kvcache(
            step.q.unsqueeze(1), step.kv_cache.unsqueeze(2), step.block_table, lens, step.rank, metadata,
            softmax_scale=SCALE, causal=False, use_legacy=True,
        )[0]  # fmt: skip
        return out.squeeze(1)

    call()  # fills the metadata
    return call


def run(name: str, make: Callable[[DecodeInputs], Call], steps: list[DecodeInputs], floor_us: float) -> dict[str, Any]:
    """One line of the table; of what cannot be had, the reason."""
    try:
        calls = [make(step) for step in steps]
        out = calls[0]()
        error = relative_error(out[:4], steps[0].expected())
        unwritten = int(out.isnan().sum())
        host_us = measure_host(calls[0])
        us = measure(calls)
    except Exception as reason:  # a peer may fail in any way, and the others are still to be measured
        return {"what": name, "skipped": f"{type(reason).__name__}: {str(reason)[:60]}"}
    return {
        "what": name,
        "us": us,
        "share of floor": floor_us / us,
        "TFLOP/s": steps[0].flop / us / 1e6,
        "GB/s": steps[0].bytes / us / 1e3,
        "host us": host_us,
        "error": error,
        "NaN": unwritten,
    }


def _no_aiter(step: DecodeInputs) -> Call:
    raise FileNotFoundError("no AITER tree was given (--aiter FOLDER)")


def _compared(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of one shape, each with its time over that of the first, which is ours."""
    ours_us = rows[0].get("us")
    return [row | ({"over ours": row["us"] / ours_us} if ours_us and "us" in row else {}) for row in rows]


def main() -> None:
    """Measure every shape and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--aiter", metavar="FOLDER", help="that holds aiter/, of a clone or an unpacked wheel")
    parser.add_argument("--shapes", default="", metavar="H,B,KEYS ...", help="only these, separated by spaces")
    parser.add_argument("--fp8", action="store_true", help="an fp8 cache (ours only)")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    peers = {"mla_ops triton": ours}
    if not args.fp8:
        peers |= {"FlashMLA": flash_mla, **(aiter.peers(args.aiter) if args.aiter else {"AITER Triton": _no_aiter})}
    ceilings = measure_ceilings()
    chosen = [tuple(map(int, shape.split(","))) for shape in args.shapes.split()] or SHAPES
    rows = []
    for heads, lens in [*((h, [n] * b) for h, b, n in chosen), *([] if args.shapes else [RAGGED])]:
        steps = [decode_inputs(lens, heads, 64, torch.bfloat16, args.fp8)]
        while len(steps) < input_sets(steps[0].bytes):
            steps.append(decode_inputs(lens, heads, 64, torch.bfloat16, args.fp8))
        floor = max(steps[0].bytes / ceilings["bytes_per_s"], steps[0].flop / ceilings["flop_per_s"]) * 1e6
        shape = {"H": heads, "B": len(lens), "keys": lens[0] if len(set(lens)) == 1 else "ragged", "floor us": floor}
        rows += _compared([shape | run(name, make, steps, floor) for name, make in peers.items()])
        del steps
        torch.cuda.empty_cache()
    if args.json:
        print(json.dumps({"device": torch.cuda.get_device_name(), "ceilings": ceilings, "rows": rows}))
    else:
        print(torch.cuda.get_device_name(), ceilings)
        print_table(rows)


if __name__ == "__main__":
    main()
