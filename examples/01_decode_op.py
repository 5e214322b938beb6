"""Paged MLA decode as one op, eager and under ``torch.compile(fullgraph=True)``.

python examples/01_decode_op.py
"""

from __future__ import annotations

import torch

import mla_ops


def main() -> None:
    config = mla_ops.PRESETS["deepseek-v2-lite"]
    device, dtype, page_size = "cpu", torch.float32, 16
    lengths = [5, 40, 17]  # rows of each request

    # The cache holds the latent rows of all requests in pages; a page list per request says which are whose.
    cache = mla_ops.PagedLatentCache(config, num_layers=1, num_pages=16, page_size=page_size, dtype=dtype)
    for request, length in enumerate(lengths):
        cache.allocate(request, length)
    kv_cache = cache.layers[0]
    kv_cache.normal_()

    # A plan turns the block table and the lengths into what the kernels read, in place and on the device.
    plan = mla_ops.DecodePlan(
        config, max_batch_size=4, max_seq_len=128, page_size=page_size, device=device, dtype=dtype
    )
    plan.update(cache.block_table(range(3)), cache.seq_lens(range(3)))
    step = plan.at(len(lengths))
    print(f"backend: {plan.choice.name} ({plan.choice.reason})")

    def decode(q: torch.Tensor) -> mla_ops.AttentionOutput:
        return mla_ops.mla_decode(
            q,
            kv_cache,
            step.qo_indptr,
            step.kv_indptr,
            step.kv_indices,
            step.kv_last_page_lens,
            softmax_scale=config.softmax_scale,  # of 192-wide heads, never of 576-wide rows
            backend_state=step.backend_state,
            backend=step.backend,
        )

    q = torch.randn(len(lengths), config.num_heads, config.latent_dim, dtype=dtype)  # absorbed queries
    out, lse = decode(q)
    print(f"out {tuple(out.shape)}, lse {tuple(lse.shape)}")

    compiled = torch.compile(decode, fullgraph=True)
    torch.testing.assert_close(compiled(q).out, out)
    print("compiled, in one graph: the same")


if __name__ == "__main__":
    main()
