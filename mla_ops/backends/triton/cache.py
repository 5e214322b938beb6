# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""Write to and gather from the paged latent cache."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mla_ops.backends.triton.launch import BoundOp, Launch, arch_of
from mla_ops.validation import FLOAT8_DTYPES

__all__ = ["bind_write", "gather_latent_cache", "gather_launch", "stored", "write_latent_cache", "write_launch"]

_TOKENS = 4
_CHUNK = 128


def write_latent_cache(
    kv_c: Tensor, k_pe: Tensor, kv_cache: Tensor, slot_mapping: Tensor, kv_scale: Tensor | None
) -> None:
    """Store latent rows into their slots, in place. See :func:`mla_ops.write_latent_cache`."""
    bind_write()(kv_c, k_pe, kv_cache, slot_mapping, kv_scale)


def bind_write() -> BoundOp:
    """:func:`write_latent_cache` for calls of one signature."""
    return BoundOp(_prepare_write, "kv_c", "k_pe", "kv_cache", "slot_mapping", "kv_scale")


def _prepare_write(kv_c: Tensor, k_pe: Tensor, kv_cache: Tensor, *rest: Any) -> tuple[Launch, tuple[()]]:
    arch_of(kv_cache)
    return write_launch(kv_c, k_pe, kv_cache, *rest), ()


def write_launch(kv_c: Tensor, k_pe: Tensor, kv_cache: Tensor, slot_mapping: Tensor, kv_scale: Tensor | None) -> Launch:
    """The launch of a cache write: one program a token."""
    num_pages, page_size, _ = kv_cache.shape
    args = {
        "kv_c": kv_c,
        "k_pe": k_pe,
        "kv_cache": kv_cache,
        "slot_mapping": slot_mapping,
        "kv_scale": kv_scale if kv_cache.dtype in FLOAT8_DTYPES else None,
        "num_slots": num_pages * page_size,
        "page_size": page_size,
        "stride_c": kv_c.stride(0),
        "stride_c_column": kv_c.stride(1),
        "stride_pe": k_pe.stride(0),
        "stride_pe_column": k_pe.stride(1),
        "stride_slot": slot_mapping.stride(0),
        "stride_page": kv_cache.stride(0),
        "stride_row": kv_cache.stride(1),
        "R": kv_c.shape[1],
        "P": k_pe.shape[1],
        "BLOCK_R": triton.next_power_of_2(kv_c.shape[1]),
        "BLOCK_P": triton.next_power_of_2(max(k_pe.shape[1], 1)),
        "LIMIT": torch.finfo(kv_cache.dtype).max,
    }
    return Launch(write_kernel, (slot_mapping.shape[0],), args, {"num_warps": 2})


@triton.jit
def stored(value, kv_scale, target, LIMIT: tl.constexpr):
    """The value as ``target`` keeps it: over the scale, saturated."""
    if kv_scale is not None:
        scaled = value.to(tl.float32) / tl.load(kv_scale)
        value = tl.clamp(scaled, -LIMIT, LIMIT, propagate_nan=tl.PropagateNan.ALL)
    return value.to(target.dtype.element_ty)


@triton.jit(do_not_specialize=["num_slots", "page_size"])
def write_kernel(
    kv_c, k_pe, kv_cache, slot_mapping, kv_scale, num_slots, page_size,
    stride_c, stride_c_column, stride_pe, stride_pe_column, stride_slot, stride_page, stride_row,
    R: tl.constexpr, P: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_P: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token * stride_slot)
    if (slot >= 0) & (slot < num_slots):
        row = kv_cache + slot // page_size * stride_page + slot % page_size * stride_row
        latent = tl.arange(0, BLOCK_R)
        value = tl.load(kv_c + token * stride_c + latent * stride_c_column, mask=latent < R)
        tl.store(row + latent, stored(value, kv_scale, kv_cache, LIMIT), mask=latent < R)
        if P > 0:
            rope = tl.arange(0, BLOCK_P)
            value = tl.load(k_pe + token * stride_pe + rope * stride_pe_column, mask=rope < P)
            tl.store(row + R + rope, stored(value, kv_scale, kv_cache, LIMIT), mask=rope < P)


def gather_latent_cache(
    kv_cache: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    kv_last_page_lens: Tensor,
    cu_seqlens: Tensor,
    seq_starts: Tensor | None,
    num_tokens: int,
    kv_scale: Tensor | None,
    dtype: torch.dtype | None,
) -> Tensor:
    """Cached rows of each request, one after another. See :func:`mla_ops.gather_latent_cache`."""
    arch_of(kv_cache)
    rows = kv_cache.new_empty(num_tokens, kv_cache.shape[2], dtype=dtype or kv_cache.dtype)
    gather_launch(kv_cache, kv_indptr, kv_indices, kv_last_page_lens, cu_seqlens, seq_starts, kv_scale, rows).run()
    return rows


def gather_launch(
    kv_cache: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    kv_last_page_lens: Tensor,
    cu_seqlens: Tensor,
    seq_starts: Tensor | None,
    kv_scale: Tensor | None,
    rows: Tensor,
) -> Launch:
    """The launch that gathers into ``rows`` [S, D]."""
    args = {
        "kv_cache": kv_cache,
        "kv_indptr": kv_indptr,
        "kv_indices": kv_indices,
        "kv_last_page_lens": kv_last_page_lens,
        "cu_seqlens": cu_seqlens,
        "seq_starts": seq_starts,
        "kv_scale": kv_scale,
        "rows": rows,
        "num_tokens": rows.shape[0],
        "num_requests": kv_last_page_lens.shape[0],
        "page_size": kv_cache.shape[1],
        "stride_page": kv_cache.stride(0),
        "stride_row": kv_cache.stride(1),
        "D": rows.shape[1],
        "BLOCK_D": triton.next_power_of_2(rows.shape[1]),
        "TOKENS": _TOKENS,
        "CHUNK": _CHUNK,
    }
    return Launch(gather_kernel, (triton.cdiv(rows.shape[0], _TOKENS),), args, {"num_warps": 4})


@triton.jit(do_not_specialize=["num_tokens", "num_requests", "page_size"])
def gather_kernel(
    kv_cache, kv_indptr, kv_indices, kv_last_page_lens, cu_seqlens, seq_starts, kv_scale, rows,
    num_tokens, num_requests, page_size, stride_page, stride_row,
    D: tl.constexpr, BLOCK_D: tl.constexpr, TOKENS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    # the request of a token is the number of requests that end at or before it
    request = tl.zeros([TOKENS], tl.int32)
    for first in range(0, num_requests, CHUNK):
        index = first + tl.arange(0, CHUNK)
        end = tl.load(cu_seqlens + 1 + index, mask=index < num_requests, other=2147483647)
        request += tl.sum((end[None, :] <= token[:, None]).to(tl.int32), 1)
    live = (request < num_requests) & (token < num_tokens) & (token >= tl.load(cu_seqlens))
    position = token - tl.load(cu_seqlens + request, mask=live, other=0)
    if seq_starts is not None:
        position += tl.load(seq_starts + request, mask=live, other=0)
    first_page = tl.load(kv_indptr + request, mask=live, other=0)
    num_pages = tl.load(kv_indptr + request + 1, mask=live, other=0) - first_page
    keys = (num_pages - 1) * page_size + tl.load(kv_last_page_lens + request, mask=live, other=0)
    live = live & (position >= 0) & (position < tl.where(num_pages > 0, keys, 0))
    page = tl.load(kv_indices + first_page + position // page_size, mask=live, other=0).to(tl.int64)
    column = tl.arange(0, BLOCK_D)
    source = kv_cache + page * stride_page + position % page_size * stride_row
    value = tl.load(source[:, None] + column[None, :], mask=live[:, None] & (column < D)[None, :], other=0.0)
    if kv_scale is not None:
        value = tl.where(live[:, None], value.to(tl.float32) * tl.load(kv_scale), 0.0)
    target = rows + token.to(tl.int64)[:, None] * D + column[None, :]
    tl.store(target, value.to(rows.dtype.element_ty), mask=(token < num_tokens)[:, None] & (column < D)[None, :])
