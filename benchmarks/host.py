"""Host microseconds of the eager calls of a step, from the public call to its return, by backend.

    python -m benchmarks.host --batch 8 --heads 128

Medians of single calls of a signature seen before, the device idle at each start; of a step of layers, a layer's part.
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
from capture import BuildOptions
from mla_ops import DecodePlan, MLAConfig
from mla_ops.decode_step import DecodeStep

_REPEATS = 500
_LAYER, _LAYERS = "MLABlock, one of 4", 4


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


def layer_calls(step: DecodeStep, batch: int) -> dict[str, Callable[[], Any]]:
    """The ops around attention, over a layer's weights, and a step of layers without its plan's update."""
    config, layer = step.config, step.blocks[0].self_attn
    inputs = step.inputs(batch, step.generator)
    step.plan.update(inputs["block_table"], inputs["seq_lens"])
    at, hidden, cache = step.plan.at(batch), inputs["hidden_states"], step.cache.layers[0]
    weights = (layer.q_a_proj.weight, layer.kv_a_proj_with_mqa.weight)
    norms = (layer.q_a_layernorm.weight, layer.kv_a_layernorm.weight)
    rows = hidden.new_ones(batch, norms[0].shape[0] + config.latent_dim)
    q_a, latent = rows[:, : -config.latent_dim], rows[:, -config.latent_dim :]
    q, attended = (hidden.new_ones(batch, config.num_heads, n) for n in (config.qk_head_dim, config.kv_lora_rank))
    frequencies, w_uk, w_uv = layer.rotary_emb.inv_freq, layer.W_UK, layer.W_UV

    def layers() -> None:
        rows = hidden
        for block, kv_cache in zip(step.blocks, step.cache.layers, strict=True):
            rows = block(rows, at.positions, kv_cache, at)

    return {
        "rms_norm": lambda: mla_ops.rms_norm(q_a, norms[0], eps=1e-6),
        "linear": lambda: mla_ops.linear(hidden, *weights),
        "norm_rope_write": lambda: mla_ops.norm_rope_write(
            q_a, latent, *norms, at.positions, frequencies, cache, at.slot_mapping, eps=1e-6
        ),
        "absorb_query": lambda: mla_ops.absorb_query(q, w_uk, at.positions, frequencies),
        "expand_values": lambda: mla_ops.expand_values(attended, w_uv),
        _LAYER: layers,
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
    config = MLAConfig.preset("deepseek-v3").shard(128 // args.heads)
    calls: dict[tuple[str, str], Callable[[], Any]] = {}
    for backend in args.backends.split(","):
        plan = DecodePlan(
            config, max_batch_size=args.batch, max_seq_len=args.kv_len, page_size=64, device="cuda",
            dtype=torch.bfloat16, backend=backend,
        )  # fmt: skip
        for name, call in decode_calls(step, backend, plan).items():
            calls[backend, name] = call
        calls[backend, "mla_prefill"] = partial(
            mla_ops.mla_prefill, prefill.q, prefill.k, prefill.v, prefill.cu_seqlens, prefill.cu_seqlens,
            max_seqlen_q=256, max_seqlen_k=256, softmax_scale=SCALE, backend=backend,
        )  # fmt: skip
        options = BuildOptions(
            batch_sizes=(args.batch,), device="cuda", dtype="bfloat16", backend=backend, max_seq_len=args.kv_len
        )
        around = layer_calls(DecodeStep(config, options, _LAYERS), args.batch)
        calls[backend, _LAYER] = around.pop(_LAYER)
    calls |= {("triton", name): call for name, call in around.items()}  # whatever attention's backend is
    rows = []
    for (backend, name), call in calls.items():
        share = _LAYERS if name == _LAYER else 1
        row: dict[str, Any] = {"backend": backend, "call": name, "host us": measure_host(call, _REPEATS) / share}
        with torch.inference_mode():
            row["in inference mode"] = measure_host(call, _REPEATS) / share
        rows.append(row)
    print(json.dumps(rows)) if args.json else print_table(rows)


if __name__ == "__main__":
    main()
