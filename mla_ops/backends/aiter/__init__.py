"""The ops over AMD's AITER: the only package that says its name. Importing it imports no AITER."""

from mla_ops.backends.aiter.backend import (
    check_prefill,
    decode_row,
    describe,
    gather_latent_cache,
    make_decode_state,
    merge_attn_states,
    mla_decode,
    mla_prefill,
    write_latent_cache,
)

__all__ = [
    "check_prefill",
    "decode_row",
    "describe",
    "gather_latent_cache",
    "make_decode_state",
    "merge_attn_states",
    "mla_decode",
    "mla_prefill",
    "write_latent_cache",
]
