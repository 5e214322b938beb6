"""The public functions of attention and its cache: choose a backend, call the op.

Those of the ops around attention are in :mod:`mla_ops.layer_functional`.

Letters: T query tokens, S keys, B requests, H heads, R kv_lora_rank, P qk_rope_head_dim, D = R + P,
N qk_nope_head_dim, V v_head_dim. A latent row is [normed compressed kv, R | roped k_pe, P], K and V in one.
Pages of request b are ``kv_indices[kv_indptr[b] : kv_indptr[b + 1]]``; its last page holds ``kv_last_page_lens[b]``
rows. slot = page * page_size + offset. LSE is the natural-log log-sum-exp in float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mla_ops import ops  # which defines the operators
from mla_ops.backends.select import resolve
from mla_ops.transforms import goes_straight
from mla_ops.validation import KNOWN_KV_LORA_RANKS

__all__ = [
    "AttentionOutput",
    "gather_latent_cache",
    "merge_attn_states",
    "mla_decode",
    "mla_prefill",
    "write_latent_cache",
]

_ops = torch.ops.mla_ops


class AttentionOutput(NamedTuple):
    """out ``[T, H, width]``, lse ``[T, H]`` float32."""

    out: Tensor
    lse: Tensor


def _decode_widths(q: Tensor, kv_lora_rank: int | None) -> tuple[int, int] | None:
    """(latent_dim, kv_lora_rank) where they are known; what is wrong with them, the op says."""
    if q.dim() != 3:
        return None
    rank = kv_lora_rank or KNOWN_KV_LORA_RANKS.get(q.shape[2])
    return None if rank is None else (q.shape[2], rank)


def mla_decode(
    q: Tensor,
    kv_cache: Tensor,
    qo_indptr: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    kv_last_page_lens: Tensor,
    *,
    softmax_scale: float,
    max_seqlen_q: int = 1,
    num_kv_splits: int = 0,
    backend_state: Sequence[Tensor] = (),
    q_scale: Tensor | None = None,
    kv_scale: Tensor | None = None,
    kv_lora_rank: int | None = None,
    backend: str = "auto",
    out: tuple[Tensor, Tensor] | None = None,
) -> AttentionOutput:
    """Paged attention of absorbed queries over latent rows.

    ``out[t, h] = sum_s softmax_s(softmax_scale * q[t, h] . row[s]) row[s, :R]`` over the keys of t's request,
    causal: the last query of a request sees its last key. A row without keys, or of no request, is 0 with lse -inf.

    Args:
        q: ``[T, H, D]``, absorbed (``[q_nope W_UK | q_pe]``); fp16, bf16, fp32, or fp8 with ``q_scale``.
        kv_cache: ``[pages, page_size, D]`` of q's dtype, or fp8 with ``kv_scale``; dense in the last dim.
        qo_indptr: ``[B + 1]`` int32, query rows of each request.
        kv_indptr: ``[B + 1]`` int32, entries of ``kv_indices`` of each request.
        kv_indices: ``[kv_indptr[-1] or more]`` int32 page ids; what is after ``kv_indptr[-1]`` is never used.
        kv_last_page_lens: ``[B]`` int32, rows in use of each request's last page, 1..page_size.
        softmax_scale: required, ``MLAConfig.softmax_scale``: that of qk_head_dim, never of D.
        max_seqlen_q: most query rows of a request.
        num_kv_splits: shares that a request's keys are split into; 0 lets the backend choose.
        backend_state: what ``DecodePlan`` prepared for the backend.
        q_scale: ``[1]`` float32, multiplies an fp8 q.
        kv_scale: ``[1]`` float32, multiplies an fp8 cache.
        kv_lora_rank: R; may be left out for rows of 576, 512, 320 and 288.
        backend: ``"auto"`` or a name of :data:`mla_ops.backends.select.BACKENDS`.
        out: ``([T, H, R], [T, H] float32)`` buffers to write, in place of new ones.

    Returns:
        out ``[T, H, R]`` of q's dtype (bfloat16 for fp8), lse ``[T, H]``.

    Raises:
        ValueError, TypeError: a shape, dtype, device or stride that no backend takes; names the argument.
        InferenceOnlyError: a gradient is asked of a backend without one.
    """
    if backend == "auto":
        backend = resolve(
            "auto",
            q,
            num_heads=q.shape[1] if q.dim() == 3 else None,
            widths=_decode_widths(q, kv_lora_rank),
            query_len=max_seqlen_q,
            kv_dtype=kv_cache.dtype,
        )
    arguments = (
        *(q, kv_cache, qo_indptr, kv_indptr, kv_indices, kv_last_page_lens),
        *(list(backend_state), max_seqlen_q, num_kv_splits, softmax_scale, q_scale, kv_scale),
        *(backend, kv_lora_rank),
    )
    if out is None:
        # A pass through the dispatcher costs as much as both launches, but it alone refuses or converts a scalar
        scalars = (type(max_seqlen_q), type(num_kv_splits), type(softmax_scale), type(kv_lora_rank or 0))
        straight = scalars == (int, int, float, int) and goes_straight(*arguments[:6], q_scale, kv_scale)
        return AttentionOutput(*(ops.decode if straight else _ops.mla_decode)(*arguments))
    _ops.mla_decode.out(*arguments, out=out[0], lse=out[1])
    return AttentionOutput(*out)


def mla_prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float,
    causal: bool = True,
    backend: str = "auto",
) -> AttentionOutput:
    """Ragged multi-head attention with different widths of qk and v.

    Causal is bottom-right aligned: the last query of a request sees its last key. A row without keys is 0, lse -inf.

    Args:
        q: ``[T, H, N + P]`` fp16, bf16 or fp32.
        k: ``[S, H, N + P]`` of q's dtype.
        v: ``[S, H, V]`` of q's dtype.
        cu_seqlens_q: ``[B + 1]`` int32, rows of q of each request.
        cu_seqlens_k: ``[B + 1]`` int32, rows of k and v of each request.
        max_seqlen_q: most query rows of a request.
        max_seqlen_k: most key rows of a request.
        softmax_scale: required, ``MLAConfig.softmax_scale``.
        causal: whether a query sees only keys up to its own.
        backend: as in :func:`mla_decode`.

    Returns:
        out ``[T, H, V]`` of q's dtype, lse ``[T, H]``.

    Raises:
        ValueError, TypeError: as in :func:`mla_decode`.
    """
    if backend == "auto":
        widths = (q.shape[-1], v.shape[-1]) if q.dim() and v.dim() else None
        backend = resolve("auto", q, op="prefill", widths=widths)
    return AttentionOutput(
        *_ops.mla_prefill(
            *(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k),
            *(softmax_scale, causal, backend),
        )
    )


def write_latent_cache(
    kv_c: Tensor,
    k_pe: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    *,
    kv_scale: Tensor | None = None,
    backend: str = "auto",
) -> None:
    """Store latent rows into their slots of the paged cache, in place.

    Args:
        kv_c: ``[T, R]`` normed compressed kv.
        k_pe: ``[T, P]`` roped shared key.
        kv_cache: ``[pages, page_size, R + P]`` of kv_c's dtype, or fp8 (``row / kv_scale``, saturated). Written.
        slot_mapping: ``[T]`` int64; a slot that the cache does not have (-1) writes nothing.
        kv_scale: ``[1]`` float32, needed for an fp8 cache.
        backend: as in :func:`mla_decode`.

    Raises:
        ValueError, TypeError: as in :func:`mla_decode`.
        InferenceOnlyError: an input requires a gradient.
    """
    tensors = (kv_c, k_pe, kv_cache, slot_mapping, kv_scale)
    op = ops.write if goes_straight(*tensors) else _ops.write_latent_cache
    op(*tensors, resolve(backend, kv_c, op="cache"))


def gather_latent_cache(
    kv_cache: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    kv_last_page_lens: Tensor,
    cu_seqlens: Tensor,
    *,
    num_tokens: int,
    seq_starts: Tensor | None = None,
    kv_scale: Tensor | None = None,
    dtype: torch.dtype | None = None,
    backend: str = "auto",
) -> Tensor:
    """Cached rows of each request as contiguous rows, for prefill over a cached prefix.

    Row i of request b is its cached row ``seq_starts[b] + i``; rows after ``cu_seqlens[-1]``, or past the end of
    a request, are 0.

    Args:
        kv_cache: ``[pages, page_size, D]``.
        kv_indptr, kv_indices, kv_last_page_lens: the requests' pages, as in :func:`mla_decode`.
        cu_seqlens: ``[B + 1]`` int32, result rows of each request.
        num_tokens: S, rows of the result.
        seq_starts: ``[B]`` int32, each request's first row; 0 where ``None``.
        kv_scale: ``[1]`` float32, multiplies an fp8 cache.
        dtype: of the result; the cache's where ``None``, needed for an fp8 cache.
        backend: as in :func:`mla_decode`.

    Returns:
        ``[S, D]``.

    Raises:
        ValueError, TypeError: as in :func:`mla_decode`.
    """
    result: Tensor = _ops.gather_latent_cache(
        *(kv_cache, kv_indptr, kv_indices, kv_last_page_lens, cu_seqlens, num_tokens),
        *(seq_starts, kv_scale, dtype, resolve(backend, kv_cache, op="cache")),
    )
    return result


def merge_attn_states(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor, *, backend: str = "auto"
) -> AttentionOutput:
    """Merge attention over two disjoint sets of keys into attention over both, exactly.

    A side whose lse is -inf saw no key: it counts for nothing, whatever its out holds.

    Args:
        out_a, out_b: ``[T, H, V]``.
        lse_a, lse_b: ``[T, H]`` float32, natural log.
        backend: as in :func:`mla_decode`.

    Returns:
        out ``[T, H, V]`` of out_a's dtype, lse ``[T, H]``.

    Raises:
        ValueError, TypeError: as in :func:`mla_decode`.
    """
    return AttentionOutput(*_ops.merge_attn_states(out_a, lse_a, out_b, lse_b, resolve(backend, out_a, op="cache")))
