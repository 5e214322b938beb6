"""Our own kernels, one source for ROCm and CUDA. What runs on what: docs/triton.md."""

from __future__ import annotations

from mla_ops.backends.triton.cache import BoundWrite, gather_latent_cache, write_latent_cache
from mla_ops.backends.triton.decode import BoundDecode, mla_decode
from mla_ops.backends.triton.heads import absorb_query, expand_values
from mla_ops.backends.triton.merge import merge_attn_states
from mla_ops.backends.triton.prefill import mla_prefill
from mla_ops.backends.triton.products import linear
from mla_ops.backends.triton.rows import norm_rope_write, rms_norm
from mla_ops.backends.triton.variants import layer_variants, variants

BOUND = {"mla_decode": BoundDecode, "write_latent_cache": BoundWrite}
"""Ops whose kernels may be bound to a signature: a class whose instances serve the calls of one."""

__all__ = [
    "BOUND",
    "absorb_query",
    "expand_values",
    "gather_latent_cache",
    "layer_variants",
    "linear",
    "merge_attn_states",
    "mla_decode",
    "mla_prefill",
    "norm_rope_write",
    "rms_norm",
    "variants",
    "write_latent_cache",
]
