"""The static buffers that an AITER decode reads besides the op's own arguments.

AITER's decode kernels read pages of one row, so that a page list becomes a list of slots. They must not meet a
request without keys, and they take the split plan as a tensor. All of this is planned once per step, in place.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mla_ops.backends.aiter import calls
from mla_ops.backends.aiter.runtime import Runtime

__all__ = ["DecodeState", "TokenLists", "choose_splits", "expand_pages", "persistent_mode", "work_of"]

_MAX_SPLITS = 16
# AITER's own model of a split's cost, in keys (get_meta_param).
_SPLIT_OVERHEAD = 84.1
_LOGITS_BUDGET = 2 << 30


def persistent_mode() -> bool:
    """Whether the user asked for persistent decode: ``MLA_AITER_PERSISTENT=1``."""
    return os.environ.get("MLA_AITER_PERSISTENT", "0") == "1"


class TokenLists(NamedTuple):
    """Page lists of pages of one row.

    Attributes:
        kv_indptr: ``[B + 1]`` int32; a request without keys has one entry, for the kernel must find one.
        kv_indices: int32 slots; what is after ``kv_indptr[-1]`` is 0.
        kv_last_page_lens: ``[B]`` int32 ones.
        keyless: ``[T]`` bool, query rows that see no key or belong to no request.
    """

    kv_indptr: Tensor
    kv_indices: Tensor
    kv_last_page_lens: Tensor
    keyless: Tensor


def expand_pages(
    qo_indptr: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    kv_last_page_lens: Tensor,
    page_size: int,
    num_tokens: int,
    entries: Tensor,
) -> TokenLists:
    """Page lists to slot lists, on the device.

    Args:
        qo_indptr, kv_indptr, kv_indices, kv_last_page_lens: of :func:`mla_ops.mla_decode`.
        page_size: rows of a page.
        num_tokens: T.
        entries: ``arange`` int32, as long as the slot list shall be.
    """
    num_pages = kv_indptr[1:] - kv_indptr[:-1]
    kv_lens = torch.where(num_pages > 0, (num_pages - 1) * page_size + kv_last_page_lens, 0)
    token_indptr = torch.nn.functional.pad(kv_lens.clamp(min=1).cumsum(0, dtype=torch.int32), (1, 0))

    request = torch.searchsorted(token_indptr[1:], entries, right=True, out_int32=True).clamp_(max=len(kv_lens) - 1)
    position = entries - token_indptr[request]
    listed = (entries < token_indptr[-1]) & (position < kv_lens[request])
    entry = (kv_indptr[request] + position // page_size).where(listed, 0)
    slots = (kv_indices[entry] * page_size + position % page_size).where(listed, 0)

    token = torch.arange(num_tokens, dtype=torch.int32, device=qo_indptr.device)
    request = torch.searchsorted(qo_indptr[1:], token, right=True, out_int32=True).clamp_(max=len(kv_lens) - 1)
    # The last query sees the last key: query i of n sees keys before kv_len - (n - 1 - i).
    seen = kv_lens[request] - (qo_indptr[request + 1] - token) + 1
    keyless = (seen <= 0) | (token >= qo_indptr[-1])
    return TokenLists(token_indptr, slots, torch.ones_like(kv_last_page_lens), keyless)


def choose_splits(batch_size: int, max_seq_len: int, compute_units: int) -> int:
    """Shares of each request's keys, 2 to 16, by AITER's own model: full waves of workgroups, few short splits.

    ``max_seq_len`` and not the length of the step, for a captured graph keeps the number.
    """

    def value(splits: int) -> float:
        groups = batch_size * splits
        waves = -(-groups // compute_units) * compute_units
        return groups / waves * max_seq_len / (max_seq_len + _SPLIT_OVERHEAD * splits)

    return max(range(2, _MAX_SPLITS + 1), key=value)


class DecodeState:
    """What a :class:`mla_ops.DecodePlan` keeps for this backend.

    Args:
        runtime: the installed AITER.
        compute_units: of the device.
        max_batch_size, max_pages, page_size, query_len: of the plan.
        num_heads: that the kernel is called with.
        min_splits: fewest splits of that kernel.
        num_kv_splits: that the user asked for; 0 for our choice.
        q_dtype, kv_dtype: of the queries and the cache.
        qo_indptr: ``[max_batch_size + 1]`` int32, the plan's.
        persistent: plan the work on the device.

    Raises:
        ValueError: the slot list does not fit int32, or the scratch of persistent mode its budget.
    """

    block_table: Tensor | None = None  # the kernels read lists

    def __init__(
        self,
        runtime: Runtime,
        compute_units: int,
        *,
        max_batch_size: int,
        max_pages: int,
        page_size: int,
        query_len: int,
        num_heads: int,
        min_splits: int,
        num_kv_splits: int,
        q_dtype: torch.dtype,
        kv_dtype: torch.dtype,
        qo_indptr: Tensor,
        persistent: bool,
    ) -> None:
        self._tokens_per_request = max_pages * page_size
        entries = max_batch_size * self._tokens_per_request
        if entries >= 2**31:
            raise ValueError(
                f"max_batch_size * max_seq_len must be below 2**31 for AITER's int32 slots, got {entries}; "
                "make the plan smaller"
            )
        device = qo_indptr.device
        self._runtime, self._compute_units = runtime, compute_units
        self._page_size, self._query_len, self._num_heads = page_size, query_len, num_heads
        self._min_splits, self._num_kv_splits = min_splits, num_kv_splits
        self._dtypes = (q_dtype, kv_dtype)
        self._qo_indptr = qo_indptr
        self._entries = torch.arange(entries, dtype=torch.int32, device=device)
        self._tokens = TokenLists(
            torch.zeros(max_batch_size + 1, dtype=torch.int32, device=device),
            torch.zeros(entries, dtype=torch.int32, device=device),
            torch.ones(max_batch_size, dtype=torch.int32, device=device),
            torch.ones(max_batch_size * query_len, dtype=torch.bool, device=device),
        )
        # A row per number of splits: a captured graph keeps its row, and no batch size makes a tensor of its own.
        splits = torch.arange(max(_MAX_SPLITS, num_kv_splits) + 1, dtype=torch.int32, device=device)
        self._splits_indptr = splits[:, None] * torch.arange(max_batch_size + 1, dtype=torch.int32, device=device)
        self._persistent = persistent
        self._work: dict[int, list[Tensor]] = {}

    def update(self, kv_indptr: Tensor, kv_indices: Tensor, kv_last_page_lens: Tensor) -> None:
        """Describe the step of the plan's page lists, in place; capturable."""
        tokens = self._tokens
        made = expand_pages(
            *(self._qo_indptr, kv_indptr, kv_indices, kv_last_page_lens),
            *(self._page_size, tokens.keyless.shape[0], self._entries),
        )
        for ours, new in zip(tokens, made, strict=True):
            ours.copy_(new)
        for batch_size in self._work:
            self._plan_work(batch_size)

    def num_kv_splits(self, batch_size: int) -> int:
        """Splits of a step of ``batch_size`` requests."""
        wanted = self._num_kv_splits or choose_splits(batch_size, self._tokens_per_request, self._compute_units)
        return max(wanted, self._min_splits)

    def at(self, batch_size: int) -> tuple[Tensor, ...]:
        """``backend_state`` of the first ``batch_size`` requests: four of :class:`TokenLists`, the splits' indptr,
        and in persistent mode the six buffers of :func:`calls.metadata_call`.
        """
        tokens = self._tokens
        views = (
            tokens.kv_indptr[: batch_size + 1],
            tokens.kv_indices[: batch_size * self._tokens_per_request],
            tokens.kv_last_page_lens[:batch_size],
            tokens.keyless[: batch_size * self._query_len],
            self._splits_indptr[self.num_kv_splits(batch_size), : batch_size + 1],
        )
        if not self._persistent:
            return views
        if batch_size not in self._work:
            # Each batch size has buffers of exactly its sizes: the kernel's grid is read off their shapes.
            self._work[batch_size] = self._make_work(batch_size)
            self._plan_work(batch_size)
        return (*views, *self._work[batch_size])

    def _make_work(self, batch_size: int) -> list[Tensor]:
        shapes = self._runtime.metadata_buffers(batch_size, self._query_len, self._num_heads, *self._dtypes)
        scratch = shapes[-1][0][0] * self._query_len * self._num_heads * 512 * 4
        if scratch > _LOGITS_BUDGET:
            raise ValueError(
                f"AITER's persistent decode would take {scratch >> 20} MiB of scratch per call for batch size "
                f"{batch_size}, more than {_LOGITS_BUDGET >> 20} MiB; use smaller batches or unset MLA_AITER_PERSISTENT"
            )
        return [torch.zeros(shape, dtype=dtype, device=self._entries.device) for shape, dtype in shapes]

    def _plan_work(self, batch_size: int) -> None:
        tokens = self._tokens
        self._runtime.write_metadata(
            calls.metadata_call(
                self._runtime.installation.contract,
                self._qo_indptr[: batch_size + 1],
                tokens.kv_indptr[: batch_size + 1],
                tokens.kv_last_page_lens[:batch_size],
                self._num_heads,
                self._query_len,
                self._work[batch_size],
                *self._dtypes,
            )
        )


def work_of(backend_state: Sequence[Tensor]) -> Sequence[Tensor]:
    """The six buffers of persistent mode in a ``backend_state``; none where it is not persistent."""
    return backend_state[5:]
