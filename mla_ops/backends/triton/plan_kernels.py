# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""The page lists of a decode step, from its block table and lengths, in one launch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mla_ops.backends.triton.launch import Launch, RepeatedLaunch

__all__ = ["PlanWriter", "plan_launch", "plan_variants"]

_CHUNK = 1024


def plan_launch(
    block_table: Tensor,
    seq_lens: Tensor,
    buffers: Mapping[str, Tensor | None],
    *,
    page_size: int,
    query_len: int,
    padding: tuple[int, int, int],
) -> Launch:
    """The launch that writes a plan's buffers: what :meth:`mla_ops.DecodePlan.update` does.

    Args:
        block_table: ``[B, width]`` int32.
        seq_lens: ``[B]`` int32.
        buffers: kv_indptr ``[M + 1]``, kv_indices ``[M * max_pages]``, kv_last_page_lens ``[M]`` and lens ``[M]``
            int32, slot_mapping ``[M * Q]`` and positions ``[M * Q]`` int64, for at most M requests; table
            ``[M, max_pages]`` int32 or None.
        page_size: rows of a page.
        query_len: Q.
        padding: length, page and slot of a request that is not there.
    """
    lens, indices = buffers["lens"], buffers["kv_indices"]
    assert lens is not None
    assert indices is not None
    most = lens.shape[0]
    requests, width = block_table.shape
    args = {
        "block_table": block_table,
        "seq_lens": seq_lens,
        **buffers,
        "requests": requests if width else 0,
        "width": width,
        "stride_request": block_table.stride(0),
        "stride_page": block_table.stride(1),
        "stride_lens": seq_lens.stride(0),
        "most_requests": most,
        "max_pages": indices.shape[0] // most,
        "page_size": page_size,
        "query_len": query_len,
        **dict(zip(("PAD_LEN", "PAD_PAGE", "PAD_SLOT"), padding, strict=True)),
        "QUERIES": triton.next_power_of_2(query_len),
        "CHUNK": _CHUNK,
    }
    return Launch(plan_kernel, (most,), args, {"num_warps": 4})


def plan_variants(query_len: int) -> list[Launch]:
    """The kernels of a plan's update: with the block table of a backend that reads one, and without."""
    index, token = (
        torch.empty(16, dtype=torch.int32, device="meta"),
        torch.empty(16 * query_len, dtype=torch.int64, device="meta"),
    )
    table = torch.empty(16, 1, dtype=torch.int32, device="meta")
    buffers = {
        "kv_indptr": index,
        "kv_indices": index,
        "kv_last_page_lens": index,
        "lens": index,
        "slot_mapping": token,
        "positions": token,
    }
    return [
        plan_launch(table, index, {**buffers, "table": own}, page_size=64, query_len=query_len, padding=(0, 0, -1))
        for own in (None, table)
    ]


class PlanWriter:
    """:func:`plan_launch` into the same buffers at each step; a shape's first launch is bound for the next ones.

    Args:
        buffers: as :func:`plan_launch`.
        check: refuses a block table and lengths that do not fit the plan; asked once for each shape.
        options: of :func:`plan_launch`.
    """

    def __init__(
        self, buffers: Mapping[str, Tensor | None], check: Callable[[Tensor, Tensor], None], **options: Any
    ) -> None:
        self._buffers = buffers
        self._check = check
        self._options = options
        self._launches: dict[tuple[object, ...], RepeatedLaunch] = {}

    def __call__(self, block_table: Tensor, seq_lens: Tensor) -> None:
        """Write the buffers for ``[B, width]`` and ``[B]``."""
        key = tuple([(x.shape, x.stride(), x.dtype, x.device) for x in (block_table, seq_lens)])
        launch = self._launches.get(key)
        if launch is None:
            self._check(block_table, seq_lens)
            launch = self._launches[key] = RepeatedLaunch("block_table", "seq_lens", *self._buffers)
        launch(
            lambda: plan_launch(block_table, seq_lens, self._buffers, **self._options),
            *(block_table, seq_lens, *self._buffers.values()),
        )


@triton.jit
def _pages(lens, page_size, PAD_LEN: tl.constexpr):
    return (tl.maximum(lens, PAD_LEN) + page_size - 1) // page_size


@triton.jit(
    do_not_specialize=[
        "requests", "width", "stride_request", "stride_page", "stride_lens", "most_requests", "max_pages", "page_size",
        "query_len",
    ],
    do_not_specialize_on_alignment=["block_table", "seq_lens"],  # which are the caller's
)  # fmt: skip
def plan_kernel(
    block_table, seq_lens, kv_indptr, kv_indices, kv_last_page_lens, lens, slot_mapping, positions, table,
    requests, width, stride_request, stride_page, stride_lens, most_requests, max_pages, page_size, query_len,
    PAD_LEN: tl.constexpr, PAD_PAGE: tl.constexpr, PAD_SLOT: tl.constexpr, QUERIES: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """A program a request, of those that are there and of those that are not.

    Each sums the pages of all requests for itself: its own begin where those before it end. It writes its request's
    entries, and its share of what is after the last request's pages.
    """
    request = tl.program_id(0)
    room = width * page_size
    total = 0
    before = 0
    for first in range(0, most_requests, CHUNK):
        other = first + tl.arange(0, CHUNK)
        there = other < requests
        length = tl.load(seq_lens + other.to(tl.int64) * stride_lens, mask=there, other=0)
        length = tl.minimum(tl.maximum(length, 0), room)
        pages = tl.where(other < most_requests, _pages(length, page_size, PAD_LEN), 0)
        total += tl.sum(pages)
        before += tl.sum(tl.where(other < request, pages, 0))

    there = request < requests
    length = tl.load(seq_lens + request.to(tl.int64) * stride_lens, mask=there, other=0)
    length = tl.minimum(tl.maximum(length, 0), room)
    shown = tl.maximum(length, PAD_LEN)
    pages = _pages(length, page_size, PAD_LEN)
    if request == 0:
        tl.store(kv_indptr, 0)
    tl.store(kv_indptr + request + 1, before + pages)
    tl.store(kv_last_page_lens + request, tl.where(shown > 0, (shown - 1) % page_size + 1, 0))
    tl.store(lens + request, length)

    row = block_table + request.to(tl.int64) * stride_request
    own = tl.where(length > 0, pages, 0)
    share = request.to(tl.int64) * max_pages
    for first in range(0, max_pages, CHUNK):
        column = first + tl.arange(0, CHUNK)
        inside = column < max_pages
        listed = inside & (column < pages)
        source = row + tl.minimum(column, width - 1).to(tl.int64) * stride_page
        page = tl.load(source, mask=column < own, other=PAD_PAGE)
        tl.store(kv_indices + before + column, page, mask=listed)
        entry = share + column
        tl.store(kv_indices + entry, tl.full([CHUNK], PAD_PAGE, tl.int32), mask=inside & (entry >= total))
        if table is not None:
            tl.store(table + entry, tl.where(listed, page, PAD_PAGE), mask=inside)

    query = tl.arange(0, QUERIES)
    position = length - query_len + query
    written = (position >= 0) & (query < tl.where(length > 0, query_len, 0))
    token = request.to(tl.int64) * query_len + query
    tl.store(positions + token, tl.where(written, position, 0).to(tl.int64), mask=query < query_len)
    page = tl.load(row + (position // page_size).to(tl.int64) * stride_page, mask=written, other=0).to(tl.int64)
    slot = tl.where(written, page * page_size + position % page_size, PAD_SLOT)
    tl.store(slot_mapping + token, slot, mask=query < query_len)
