"""Our own kernels, one source for ROCm and CUDA. What runs on what: docs/triton.md."""

from __future__ import annotations

from mla_ops.backends.triton.cache import BoundWrite, gather_latent_cache, write_latent_cache
from mla_ops.backends.triton.decode import BoundDecode, mla_decode
from mla_ops.backends.triton.merge import merge_attn_states
from mla_ops.backends.triton.prefill import mla_prefill
from mla_ops.backends.triton.variants import variants

BOUND = {"mla_decode": BoundDecode, "write_latent_cache": BoundWrite}
"""Ops whose kernels may be bound to a signature: a class whose instances serve the calls of one."""

__all__ = [
    "BOUND",
    "gather_latent_cache",
    "merge_attn_states",
    "mla_decode",
    "mla_prefill",
    "variants",
    "write_latent_cache",
]
