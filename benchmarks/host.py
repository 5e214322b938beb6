"""Host microseconds of the eager calls of a step, from the public call to its return, by backend.

    python -m benchmarks.host --batch 8 --heads 128

Medians of single calls of a signature seen before, the device idle at each start.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

import mla_ops
from benchmarks.common import measure_host, print_table
from benchmarks.inputs import SCALE, DecodeInputs, decode_inputs, prefill_inputs
from mla_ops import DecodePlan, MLAConfig

_REPEATS = 500


def decode_calls(step: DecodeInputs, backend: str, plan: DecodePlan) -> dict[str, Callable[[], Any]]:
    """A decode by lists alone and by a plan, its update, and the write before it."""
    lists = (step.qo_indptr, step.kv_indptr, step.kv_indices, step.kv_last_page_lens)
    lens = torch.tensor(step.lens, dtype=torch.int32, device="cuda")
    plan.update(step.block_table, lens)
    at = plan.at(len(step.lens))
    planned = (at.qo_indptr, at.kv_indptr, at.kv_indices, at.kv_last_page_lens)
    decode = partial(mla_ops.mla_decode, step.q, step.kv_cache, softmax_scale=SCALE, backend=backend)
    rows = torch.randn(len(step.lens), 576, dtype=step.q.dtype, device="cuda")
    write = partial(mla_ops.write_latent_cache, rows[:, :512], rows[:, 512:], step.kv_cache, at.slot_mapping)
    return {
        "mla_decode": lambda: decode(*lists),
        "mla_decode, planned": lambda: decode(*planned, backend_state=at.backend_state),
        "plan.update": lambda: plan.update(step.block_table, lens),
        "write_latent_cache": lambda: write(backend=backend),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--heads", type=int, default=128)
    parser.add_argument("--kv-len", type=int, default=1000)
    parser.add_argument("--backends", default="triton,flash_mla")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    step = decode_inputs([args.kv_len] * args.batch, args.heads, 64, torch.bfloat16)
    prefill = prefill_inputs(1, 256, args.heads, torch.bfloat16)
    calls: dict[tuple[str, str], Callable[[], Any]] = {}
    for backend in args.backends.split(","):
        plan = DecodePlan(
            MLAConfig.preset("deepseek-v3").shard(128 // args.heads), max_batch_size=args.batch,
            max_seq_len=args.kv_len, page_size=64, device="cuda", dtype=torch.bfloat16, backend=backend,
        )  # fmt: skip
        for name, call in decode_calls(step, backend, plan).items():
            calls[backend, name] = call
        calls[backend, "mla_prefill"] = partial(
            mla_ops.mla_prefill, prefill.q, prefill.k, prefill.v, prefill.cu_seqlens, prefill.cu_seqlens,
            max_seqlen_q=256, max_seqlen_k=256, softmax_scale=SCALE, backend=backend,
        )  # fmt: skip
    rows = []
    for (backend, name), call in calls.items():
        row: dict[str, Any] = {"backend": backend, "call": name, "host us": measure_host(call, _REPEATS)}
        with torch.inference_mode():
            row["in inference mode"] = measure_host(call, _REPEATS)
        rows.append(row)
    print(json.dumps(rows)) if args.json else print_table(rows)


if __name__ == "__main__":
    main()
