"""The plan of a prefill: made anew for each one, from lengths on the host.

Letters: B requests, T new tokens of all requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mla_ops.backends.select import select
from mla_ops.config import MLAConfig

__all__ = ["PrefillChunk", "PrefillPlan"]


class PrefillChunk(NamedTuple):
    """A share of every request's cached prefix.

    Attributes:
        cu_seqlens: ``[B + 1]`` int32, rows of each request in the chunk.
        seq_starts: ``[B]`` int32, first of them.
        num_tokens: rows of all requests.
        max_seqlen: most rows of a request.
    """

    cu_seqlens: Tensor
    seq_starts: Tensor
    num_tokens: int
    max_seqlen: int


class PrefillPlan(NamedTuple):
    """The metadata of one ragged prefill.

    Attributes:
        cu_seqlens_q: ``[B + 1]`` int32, new rows of each request.
        max_seqlen_q: most new rows of a request.
        slot_mapping: ``[T]`` int64, where each new row goes.
        positions: ``[T]`` int64, of each new row.
        kv_indptr: ``[B + 1]`` int32, entries of ``kv_indices`` of each request's cached prefix.
        kv_indices: int32 pages of the prefixes.
        kv_last_page_lens: ``[B]`` int32.
        chunks: the prefixes, cut so that each chunk has about ``chunk_tokens`` rows; empty without prefixes.
        backend: name.
        page_size: rows per page of the cache.
    """

    cu_seqlens_q: Tensor
    max_seqlen_q: int
    slot_mapping: Tensor
    positions: Tensor
    kv_indptr: Tensor
    kv_indices: Tensor
    kv_last_page_lens: Tensor
    chunks: tuple[PrefillChunk, ...]
    backend: str
    page_size: int

    @classmethod
    def make(
        cls,
        config: MLAConfig,
        *,
        query_lens: Sequence[int],
        block_table: Tensor,
        page_size: int,
        dtype: torch.dtype,
        prefix_lens: Sequence[int] | None = None,
        chunk_tokens: int = 65536,
        backend: str = "auto",
    ) -> PrefillPlan:
        """Plan a prefill of ``query_lens`` new tokens after ``prefix_lens`` cached ones.

        Args:
            config: dimensions.
            query_lens: B lengths on the host.
            block_table: ``[B, width]`` int32 page ids of each request; its device is the plan's.
            page_size: rows per page of the cache.
            dtype: of the queries.
            prefix_lens: B lengths on the host; no cached prefix where ``None``.
            chunk_tokens: rows of the prefixes that are expanded at a time, a page per request at least. The scratch
                is ``chunk_tokens * num_heads * (qk_head_dim + v_head_dim)`` elements.
            backend: ``"auto"`` or a name.

        Raises:
            ValueError: lengths that don't belong together, are negative, or have no pages in ``block_table``.
            TypeError: ``block_table`` is not int32.
        """
        prefix_lens = [0] * len(query_lens) if prefix_lens is None else list(prefix_lens)
        _check_prefill(query_lens, prefix_lens, block_table, page_size, chunk_tokens)
        device = block_table.device
        table = block_table.cpu()  # lengths and pages are the host's here: a prefill is planned, never captured
        positions = [torch.arange(start, start + n) for start, n in zip(prefix_lens, query_lens, strict=True)]
        slots = [table[b, p // page_size].long() * page_size + p % page_size for b, p in enumerate(positions)]
        pages = [-(-n // page_size) for n in prefix_lens]
        empty = torch.zeros(0, dtype=torch.int64)
        return cls(
            cu_seqlens_q=_cumulative(query_lens).to(device),
            max_seqlen_q=max(query_lens, default=0),
            slot_mapping=torch.cat([*slots, empty]).to(device),
            positions=torch.cat([*positions, empty]).to(device),
            kv_indptr=_cumulative(pages).to(device),
            kv_indices=torch.cat([*(table[b, :n] for b, n in enumerate(pages)), empty.int()]).to(device),
            kv_last_page_lens=torch.tensor([(n - 1) % page_size + 1 if n else 0 for n in prefix_lens]).int().to(device),
            chunks=_prefix_chunks(prefix_lens, page_size, chunk_tokens, device),
            backend=select(config, device, dtype, backend=backend, op="prefill").name,
            page_size=page_size,
        )


def _cumulative(lengths: Sequence[int]) -> Tensor:
    return torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0).int()


def _prefix_chunks(
    prefix_lens: Sequence[int], page_size: int, chunk_tokens: int, device: torch.device
) -> tuple[PrefillChunk, ...]:
    cached = sum(1 for n in prefix_lens if n)
    if not cached:
        return ()
    width = max(chunk_tokens // cached // page_size * page_size, page_size)
    chunks = []
    for start in range(0, max(prefix_lens), width):
        lengths = [max(0, min(n - start, width)) for n in prefix_lens]
        starts = torch.full((len(prefix_lens),), start, dtype=torch.int32, device=device)
        chunks.append(PrefillChunk(_cumulative(lengths).to(device), starts, sum(lengths), max(lengths)))
    return tuple(chunks)


def _check_prefill(
    query_lens: Sequence[int], prefix_lens: Sequence[int], block_table: Tensor, page_size: int, chunk_tokens: int
) -> None:
    if block_table.dtype != torch.int32:
        raise TypeError(f"block_table must be int32, got {block_table.dtype}; convert it with .to(torch.int32)")
    for name, value in (("page_size", page_size), ("chunk_tokens", chunk_tokens)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    if block_table.dim() != 2 or not len(query_lens) == len(prefix_lens) == block_table.shape[0]:
        raise ValueError(
            f"query_lens ({len(query_lens)}), prefix_lens ({len(prefix_lens)}) and block_table's rows "
            f"{tuple(block_table.shape)} must be of the same requests"
        )
    room = block_table.shape[1] * page_size
    for b, (new, cached) in enumerate(zip(query_lens, prefix_lens, strict=True)):
        if new < 0 or cached < 0:
            raise ValueError(f"lengths must not be negative, got query_lens[{b}]={new}, prefix_lens[{b}]={cached}")
        if new + cached > room:
            raise ValueError(f"request {b} has {new + cached} rows and block_table has pages for {room}")
