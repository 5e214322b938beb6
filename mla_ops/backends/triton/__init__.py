"""Our own kernels, one source for ROCm and CUDA. What runs on what: docs/triton.md."""

from __future__ import annotations

from mla_ops.backends.triton.cache import gather_latent_cache, write_latent_cache
from mla_ops.backends.triton.decode import mla_decode
from mla_ops.backends.triton.merge import merge_attn_states
from mla_ops.backends.triton.prefill import mla_prefill
from mla_ops.backends.triton.variants import variants

__all__ = ["gather_latent_cache", "merge_attn_states", "mla_decode", "mla_prefill", "variants", "write_latent_cache"]
