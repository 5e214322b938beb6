# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, attr-defined"
"""Ragged queries and page lists to the padded queries and block table that another's kernel reads, and back."""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from mla_ops.backends.triton.launch import Launch, RepeatedLaunch

__all__ = ["Ragged", "pad_launch", "unpad_launch"]

_PAD_NAMES = ("q", "qo_indptr", "kv_indptr", "kv_indices", "kv_last_page_lens", "padded", "table", "lens")
_UNPAD_NAMES = ("parts", "part_lse", "qo_indptr", "out", "lse")
_HEADS = 16
_CHUNK = 256


def pad_launch(
    q: Tensor,
    qo_indptr: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    kv_last_page_lens: Tensor,
    padded: Tensor,
    table: Tensor,
    lens: Tensor,
    page_size: int,
) -> Launch:
    """The launch that writes ``padded`` [B, Q, H, D], ``table`` [B, width] and ``lens`` [B], all contiguous.

    The last query of a request becomes its last one of Q, those that it has not are 0; a table is filled up with 0.
    """
    requests, query_len, heads, width = padded.shape
    args = {
        "q": q,
        "qo_indptr": qo_indptr,
        "kv_indptr": kv_indptr,
        "kv_indices": kv_indices,
        "kv_last_page_lens": kv_last_page_lens,
        "padded": padded,
        "table": table,
        "lens": lens,
        "num_heads": heads,
        "width": table.shape[1],
        "page_size": page_size,
        "stride_token": q.stride(0),
        "stride_head": q.stride(1),
        "D": width,
        "BLOCK_D": triton.next_power_of_2(width),
        "HEADS": _HEADS,
        "CHUNK": _CHUNK,
    }
    return Launch(pad_kernel, (requests, query_len, triton.cdiv(heads, _HEADS)), args, {"num_warps": 4})


def unpad_launch(parts: Tensor, part_lse: Tensor, qo_indptr: Tensor, out: Tensor, lse: Tensor) -> Launch:
    """The launch that takes contiguous [B, Q, H, R] and [B, H, Q] to contiguous ``out`` [T, H, R] and ``lse`` [T, H].

    A row that belongs to no request is 0 with lse -inf, as is one that saw no key and has lse +inf here.
    """
    tokens, heads, rank = out.shape
    args = {
        "parts": parts,
        "part_lse": part_lse,
        "qo_indptr": qo_indptr,
        "out": out,
        "lse": lse,
        "num_requests": parts.shape[0],
        "query_len": parts.shape[1],
        "stride_request": part_lse.stride(0),
        "stride_head": part_lse.stride(1),
        "stride_query": part_lse.stride(2),
        "num_heads": heads,
        "R": rank,
        "BLOCK_R": triton.next_power_of_2(rank),
        "HEADS": _HEADS,
        "CHUNK": _CHUNK,
    }
    return Launch(unpad_kernel, (tokens, triton.cdiv(heads, _HEADS)), args, {"num_warps": 4})


class Ragged:
    """Both ways for calls of one signature: what is compiled at the first is bound for the next."""

    def __init__(self) -> None:
        self._pad = -1, RepeatedLaunch(*_PAD_NAMES)
        self._unpad = RepeatedLaunch(*_UNPAD_NAMES)

    def pad(self, q: Tensor, lists: Sequence[Tensor], query_len: int, page_size: int) -> tuple[Tensor, Tensor, Tensor]:
        """What :func:`pad_launch` writes; ``lists`` are qo_indptr, kv_indptr, kv_indices and kv_last_page_lens."""
        requests, entries = lists[3].shape[0], lists[2].shape[0]
        padded = q.new_empty(requests, query_len, *q.shape[1:])
        table, lens = lists[2].new_empty(requests, entries), lists[2].new_empty(requests)
        bound_entries, launch = self._pad
        if entries != bound_entries:  # which a signature leaves open
            launch = RepeatedLaunch(*_PAD_NAMES)
            self._pad = entries, launch
        qo_indptr, kv_indptr, kv_indices, kv_last_page_lens = lists
        launch(
            lambda: pad_launch(
                q, qo_indptr, kv_indptr, kv_indices, kv_last_page_lens, padded, table, lens, page_size=page_size
            ),
            *(q, *lists, padded, table, lens),
        )  # fmt: skip
        return padded, table, lens

    def unpad(self, parts: Tensor, part_lse: Tensor, qo_indptr: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
        """Out and lse of :func:`unpad_launch`."""
        out, lse = parts.new_empty(tokens, *parts.shape[2:]), part_lse.new_empty(tokens, parts.shape[2])
        tensors = (parts, part_lse, qo_indptr, out, lse)
        self._unpad(lambda: unpad_launch(*tensors), *tensors)
        return out, lse


@triton.jit(do_not_specialize=["num_heads", "width", "page_size"])
def pad_kernel(
    q, qo_indptr, kv_indptr, kv_indices, kv_last_page_lens, padded, table, lens,
    num_heads, width, page_size, stride_token, stride_head,
    D: tl.constexpr, BLOCK_D: tl.constexpr, HEADS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0)
    query = tl.program_id(1)
    queries = tl.num_programs(1)
    head = tl.program_id(2) * HEADS + tl.arange(0, HEADS)
    latent = tl.arange(0, BLOCK_D)
    token = tl.load(qo_indptr + request + 1) - queries + query
    first_token = tl.load(qo_indptr + request)
    inside = (head < num_heads)[:, None] & (latent < D)[None, :]
    there = (head < tl.where(token >= first_token, num_heads, 0))[:, None] & (latent < D)[None, :]
    source = q + token.to(tl.int64) * stride_token + head[:, None] * stride_head + latent[None, :]
    value = tl.load(source, mask=there, other=0.0)
    row = ((request * queries + query).to(tl.int64) * num_heads + head) * D
    tl.store(padded + row[:, None] + latent[None, :], value, mask=inside)

    if query == 0:
        first_page = tl.load(kv_indptr + request)
        pages = tl.load(kv_indptr + request + 1) - first_page
        for first in range(tl.program_id(2) * CHUNK, width, tl.num_programs(2) * CHUNK):
            column = first + tl.arange(0, CHUNK)
            page = tl.load(kv_indices + first_page + column, mask=column < pages, other=0)
            tl.store(table + request.to(tl.int64) * width + column, page, mask=column < width)
        length = (pages - 1) * page_size + tl.load(kv_last_page_lens + request)
        if tl.program_id(2) == 0:
            tl.store(lens + request, tl.where(pages > 0, length, 0))


@triton.jit(
    do_not_specialize=[
        "num_requests", "query_len", "num_heads", "stride_request", "stride_head", "stride_query",
    ]
)  # fmt: skip
def unpad_kernel(
    parts, part_lse, qo_indptr, out, lse, num_requests, query_len, num_heads,
    stride_request, stride_head, stride_query,
    R: tl.constexpr, BLOCK_R: tl.constexpr, HEADS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    latent = tl.arange(0, BLOCK_R)
    # the request of a token is the number of requests that end at or before it
    request = 0
    for first in range(0, num_requests, CHUNK):
        index = first + tl.arange(0, CHUNK)
        end = tl.load(qo_indptr + 1 + index, mask=index < num_requests, other=2147483647)
        request += tl.sum((end <= token).to(tl.int32))
    last = tl.load(qo_indptr + tl.minimum(request, num_requests - 1) + 1)
    query = token - last + query_len
    first_token = tl.load(qo_indptr)
    # Rows that are in a request, before its last query_len or not, have a query; those in none get none
    query = tl.where((request < num_requests) & (token >= first_token), query, -1)
    live = head < tl.where(query >= 0, num_heads, 0)
    row = (request * query_len + query).to(tl.int64) * num_heads + head
    inside = (head < num_heads)[:, None] & (latent < R)[None, :]
    there = live[:, None] & (latent < R)[None, :]
    value = tl.load(parts + row[:, None] * R + latent[None, :], mask=there, other=0.0)
    target = token.to(tl.int64) * num_heads + head
    tl.store(out + target[:, None] * R + latent[None, :], value, mask=inside)
    source = part_lse + request.to(tl.int64) * stride_request + head * stride_head + query * stride_query
    value = tl.load(source, mask=live, other=-float("inf"))
    tl.store(lse + target, tl.where(value == float("inf"), -float("inf"), value), mask=head < num_heads)
