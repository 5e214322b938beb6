"""Our own kernels, one source for ROCm and CUDA. What runs on what: docs/triton.md."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mla_ops.backends.triton.cache import bind_write, gather_latent_cache, write_latent_cache
from mla_ops.backends.triton.decode import BoundDecode, mla_decode
from mla_ops.backends.triton.heads import absorb_query, bind_absorb, bind_expand, expand_values
from mla_ops.backends.triton.merge import merge_attn_states
from mla_ops.backends.triton.prefill import mla_prefill
from mla_ops.backends.triton.products import BoundLinear, linear
from mla_ops.backends.triton.rows import bind_front, bind_norm, norm_rope_write, rms_norm
from mla_ops.backends.triton.variants import layer_variants, variants

BOUND: dict[str, Callable[[], Callable[..., Any]]] = {
    "absorb_query": bind_absorb,
    "expand_values": bind_expand,
    "linear": BoundLinear,
    "mla_decode": BoundDecode,
    "norm_rope_write": bind_front,
    "rms_norm": bind_norm,
    "write_latent_cache": bind_write,
}
"""Ops whose kernels may be bound to a signature: what makes one that serves the calls of a signature."""

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
