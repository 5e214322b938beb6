"""``DeepseekMLA``: a ragged prefill, decoded tokens, and one compiled function for all layers.

python examples/02_mla_module.py
"""

from __future__ import annotations

import torch
from torch import Tensor

import mla_ops


def main() -> None:
    torch.manual_seed(0)
    config = mla_ops.MLAConfig(
        hidden_size=128,
        num_heads=4,
        q_lora_rank=48,
        kv_lora_rank=64,
        qk_nope_head_dim=32,
        qk_rope_head_dim=16,
        v_head_dim=32,
    )
    dtype, page_size, prompts = torch.float32, 8, [3, 11]
    layers = [mla_ops.DeepseekMLA(config, dtype=dtype).requires_grad_(False) for _ in range(3)]
    cache = mla_ops.PagedLatentCache(config, num_layers=3, num_pages=16, page_size=page_size, dtype=dtype)
    for request, length in enumerate(prompts):
        cache.allocate(request, length)

    # Prefill: the prompts of all requests, one after another in one tensor.
    plan = mla_ops.PrefillPlan.make(
        config, query_lens=prompts, block_table=cache.block_table([0, 1]), page_size=page_size, dtype=dtype
    )
    hidden = torch.randn(sum(prompts), config.hidden_size)
    for layer, kv_cache in zip(layers, cache.layers, strict=True):
        hidden = hidden + layer.prefill(hidden, plan.positions, kv_cache, plan)
    print(f"prefilled {prompts} tokens: {tuple(hidden.shape)}")

    # Decode: one new row per request and step. The plan is updated in place.
    decode = mla_ops.DecodePlan(
        config, max_batch_size=2, max_seq_len=64, page_size=page_size, device="cpu", dtype=dtype
    )
    compiled = mla_ops.compile_layers(layers)  # parameters are inputs: one graph, however many layers

    def step(rows: Tensor, compile: bool) -> Tensor:
        metadata = decode.at(len(prompts))
        for eager, fast, kv_cache in zip(layers, compiled, cache.layers, strict=True):
            rows = rows + (fast if compile else eager)(rows, metadata.positions, kv_cache, metadata)
        return rows

    rows = torch.randn(len(prompts), config.hidden_size)
    for number in range(4):
        for request in range(len(prompts)):
            cache.extend(request)
        decode.update(cache.block_table([0, 1]), cache.seq_lens([0, 1]))
        expected = step(rows, compile=False)
        rows = step(rows, compile=True)
        torch.testing.assert_close(rows, expected)
        print(f"step {number}: lengths {decode.at(2).seq_lens.tolist()}, compiled equals eager")


if __name__ == "__main__":
    main()
