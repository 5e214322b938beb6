"""Plans: the metadata tensors that one step reads.

A :class:`DecodePlan` owns static buffers and rewrites them in place, on the device, so that eager, capture and
replay all see what the same writer wrote. A :class:`PrefillPlan` is made anew for each prefill from host lengths.

Letters: B requests, Q query_len, T = B * Q query tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from mla_ops.backends.select import Choice, select
from mla_ops.config import MLAConfig
from mla_ops.errors import PlanError
from mla_ops.prefill_plan import PrefillChunk, PrefillPlan

__all__ = [
    "PADDING_RULES",
    "DecodeMetadata",
    "DecodePlan",
    "DecodeState",
    "PaddingRule",
    "PrefillChunk",
    "PrefillPlan",
]

# Backends that plan buffers of their own.
_STATEFUL = {name: f"mla_ops.backends.{name}" for name in ("aiter", "flash_mla")}
_CANARY = -0x5EED5EED
_CANARY_WIDTH = 32


@dataclass(frozen=True)
class PaddingRule:
    """What the metadata says of a request that is not there.

    Attributes:
        kv_len: rows that it seems to have.
        page: the page that they are in, where ``kv_len`` is not 0.
        slot: where its new row goes; -1 is written nowhere.
    """

    kv_len: int
    page: int
    slot: int


PADDING_RULES = dict.fromkeys(("aiter", "flash_mla", "reference", "triton"), PaddingRule(kv_len=0, page=0, slot=-1))
"""Padding rule by backend. Output rows of a padded request are 0 under each of them."""


class DecodeState(Protocol):
    """What a backend plans beside the page lists: static buffers of its own, made by its ``make_decode_state``.

    Attributes:
        block_table: ``[max_batch_size, max_pages]`` int32 that the plan writes with its lists, 0 where a request has
            no page; None where the backend reads no table.
    """

    block_table: Tensor | None

    def update(self, kv_indptr: Tensor, kv_indices: Tensor, kv_last_page_lens: Tensor) -> None:
        """Rewrite them for the plan's page lists: in place, on the current stream, without a synchronisation."""

    def num_kv_splits(self, batch_size: int) -> int:
        """Splits of a step of ``batch_size`` requests."""

    def at(self, batch_size: int) -> tuple[Tensor, ...]:
        """The ``backend_state`` of the first ``batch_size`` requests: the same tensors at every call."""


class DecodeMetadata(NamedTuple):
    """Views of a plan's buffers for one batch size.

    Attributes:
        qo_indptr: ``[B + 1]`` int32.
        kv_indptr: ``[B + 1]`` int32.
        kv_indices: ``[B * max_pages]`` int32; what is after ``kv_indptr[-1]`` is the padding rule's page.
        kv_last_page_lens: ``[B]`` int32.
        slot_mapping: ``[T]`` int64, where each new row goes.
        positions: ``[T]`` int64, of each new row; 0 for a padded one.
        seq_lens: ``[B]`` int32, rows of each request, the new ones included; 0 for a padded one.
        backend_state: what the backend asks for.
        max_seqlen_q: Q.
        num_kv_splits: 0 for the backend's choice.
        backend: name; ``"auto"`` may have another one for few requests than for many.
        page_size: rows per page of the cache.
    """

    qo_indptr: Tensor
    kv_indptr: Tensor
    kv_indices: Tensor
    kv_last_page_lens: Tensor
    slot_mapping: Tensor
    positions: Tensor
    seq_lens: Tensor
    backend_state: tuple[Tensor, ...]
    max_seqlen_q: int
    num_kv_splits: int
    backend: str
    page_size: int


class DecodePlan:
    """The metadata of decode steps of up to ``max_batch_size`` requests.

    Args:
        config: dimensions.
        max_batch_size: most requests of a step.
        max_seq_len: most rows of a request, its new ones included.
        query_len: Q, new tokens per request: 1, or 1 + drafted ones.
        page_size: rows per page of the cache.
        device: of the buffers.
        dtype: of the queries.
        kv_dtype: of the cache; ``dtype`` where ``None``.
        backend: ``"auto"`` or a name.
        num_kv_splits: 0 for the backend's choice.
        debug: put a canary after each buffer, for :meth:`check_canaries`.

    Attributes:
        choice: the backend and the reason for it, and another one for small steps where that is faster.
        max_pages: columns of the widest block table, ``ceil(max_seq_len / page_size)``.

    Raises:
        ValueError: a size below 1; the message names it.
        BackendUnavailableError: as :func:`mla_ops.backends.select.select`.
    """

    def __init__(
        self,
        config: MLAConfig,
        *,
        max_batch_size: int,
        max_seq_len: int,
        query_len: int = 1,
        page_size: int,
        device: torch.device | str,
        dtype: torch.dtype,
        kv_dtype: torch.dtype | None = None,
        backend: str = "auto",
        num_kv_splits: int = 0,
        debug: bool = False,
    ) -> None:
        sizes = {
            "max_batch_size": max_batch_size,
            "max_seq_len": max_seq_len,
            "query_len": query_len,
            "page_size": page_size,
        }
        for name, value in sizes.items():
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if max_seq_len < query_len:
            raise ValueError(f"max_seq_len must be at least query_len={query_len}, got {max_seq_len}")
        self.max_batch_size = max_batch_size
        self.max_seq_len = max_seq_len
        self.query_len = query_len
        self.page_size = page_size
        self.num_kv_splits = num_kv_splits
        self._rows = query_len * config.num_heads
        self.device = torch.device(device)
        kv_dtype = kv_dtype or dtype
        self.choice: Choice = select(
            *(config, self.device, dtype),
            backend=backend,
            page_size=page_size,
            query_len=query_len,
            kv_dtype=kv_dtype,
        )
        self.padding = PADDING_RULES[self.choice.name]
        self.max_pages = -(-max_seq_len // page_size)
        self._guarded: dict[str, Tensor] = {}
        self._debug = debug
        batch, tokens, pages = max_batch_size, max_batch_size * query_len, max_batch_size * self.max_pages
        self._kv_indptr = self._buffer("kv_indptr", batch + 1)
        self._kv_indices = self._buffer("kv_indices", pages)
        self._kv_last_page_lens = self._buffer("kv_last_page_lens", batch)
        self._seq_lens = self._buffer("seq_lens", batch)
        self._slot_mapping = self._buffer("slot_mapping", tokens, torch.int64)
        self._positions = self._buffer("positions", tokens, torch.int64)
        # Constants of the plan: made once, for an arange per step would be a kernel per step.
        self._qo_indptr = torch.arange(batch + 1, dtype=torch.int32, device=self.device) * query_len
        self._entry = torch.arange(pages, dtype=torch.int32, device=self.device)
        self._query = torch.arange(query_len, dtype=torch.int32, device=self.device)
        self._page_of = torch.arange(self.max_pages, dtype=torch.int32, device=self.device)
        self._views: dict[int, DecodeMetadata] = {}
        self._state: DecodeState | None = None
        if self.choice.name in _STATEFUL:
            self._state = import_module(_STATEFUL[self.choice.name]).make_decode_state(
                config,
                max_batch_size=max_batch_size,
                max_pages=self.max_pages,
                page_size=page_size,
                query_len=query_len,
                dtype=dtype,
                kv_dtype=kv_dtype,
                num_kv_splits=num_kv_splits,
                qo_indptr=self._qo_indptr,
                seq_lens=self._seq_lens,
            )
        self._table = None if self._state is None else self._state.block_table
        self._write = self._writer()
        # By torch's ops: a warm-up makes plans before it has built or loaded any kernel
        self._write_lists(
            torch.zeros(0, self.max_pages, dtype=torch.int32, device=self.device),
            torch.zeros(0, dtype=torch.int32, device=self.device),
        )
        self._update_state()

    def _buffer(self, name: str, size: int, dtype: torch.dtype = torch.int32) -> Tensor:
        # After the buffer only: the views must start their storage, for a compiled graph guards on the offset.
        whole = torch.full((size + _CANARY_WIDTH * self._debug,), _CANARY, dtype=dtype, device=self.device)
        self._guarded[name] = whole[size:]
        return whole[:size]

    def update(self, block_table: Tensor, seq_lens: Tensor) -> None:
        """Describe the next step: the only writer of the buffers.

        In place, on the current stream, without a synchronisation, so it can be captured with the step. Requests
        from B up to ``max_batch_size`` are padded by :attr:`padding`.

        Args:
            block_table: ``[B, width]`` int32, page ids of each request, ``width <= max_pages``.
            seq_lens: ``[B]`` int32, rows of each request after this step's ``query_len`` new ones; 0 for a request
                that is not there. Values that ``block_table`` has no pages for are cut to what it has.

        Raises:
            ValueError, TypeError: a shape, dtype or device that does not fit the plan.
        """
        if self._write is None or torch.compiler.is_compiling():
            self._check_update(block_table, seq_lens)
            self._write_lists(block_table, seq_lens)
        else:
            self._write(block_table, seq_lens)
        self._update_state()
        if len(seq_lens) and (state := self._state_of(len(seq_lens))) is not None:
            state.at(len(seq_lens))

    def _update_state(self) -> None:
        if self._state is not None:
            self._state.update(self._kv_indptr, self._kv_indices, self._kv_last_page_lens)

    def _state_of(self, batch_size: int) -> DecodeState | None:
        """What the backend of a step of ``batch_size`` requests plans, if anything."""
        return self._state if self.choice.of(batch_size * self._rows) == self.choice.name else None

    def _writer(self) -> Callable[[Tensor, Tensor], None] | None:
        """The kernel that does in one launch what :meth:`_write_lists` does, where there is one."""
        if self.device.type != "cuda" or self.choice.name == "reference" or find_spec("triton") is None:
            return None
        from mla_ops.backends.triton.plan_kernels import PlanWriter  # here: it imports triton

        rule = self.padding
        return PlanWriter(
            {
                "kv_indptr": self._kv_indptr,
                "kv_indices": self._kv_indices,
                "kv_last_page_lens": self._kv_last_page_lens,
                "lens": self._seq_lens,
                "slot_mapping": self._slot_mapping,
                "positions": self._positions,
                "table": self._table,
            },
            self._check_update,
            page_size=self.page_size,
            query_len=self.query_len,
            padding=(rule.kv_len, rule.page, rule.slot),
        )

    @torch.no_grad()
    def _write_lists(self, block_table: Tensor, seq_lens: Tensor) -> None:
        batch, width = block_table.shape
        if batch and not width:
            batch = 0
        lens = self._seq_lens
        lens[:batch].copy_(seq_lens[:batch].clamp(0, width * self.page_size))
        lens[batch:].zero_()
        live = lens > 0
        kv_lens = lens.clamp(min=self.padding.kv_len)
        num_pages = (kv_lens + self.page_size - 1) // self.page_size
        self._kv_indptr[:1].zero_()
        torch.cumsum(num_pages, 0, dtype=torch.int32, out=self._kv_indptr[1:])
        self._kv_last_page_lens.copy_(torch.where(kv_lens > 0, (kv_lens - 1) % self.page_size + 1, 0))

        position = lens[:, None] - self.query_len + self._query  # [max_batch_size, Q]
        written = (position >= 0) & live[:, None]
        self._positions.copy_(position.where(written, 0).flatten())
        if not batch:
            self._kv_indices.fill_(self.padding.page)
            if self._table is not None:
                self._table.fill_(self.padding.page)
            self._slot_mapping.fill_(self.padding.slot)
            return
        request = torch.searchsorted(self._kv_indptr[1:], self._entry, right=True, out_int32=True)
        request.clamp_(max=batch - 1)
        column = (self._entry - self._kv_indptr[request]).clamp_(0, width - 1)
        listed = (self._entry < self._kv_indptr[batch]) & live[request]
        self._kv_indices.copy_(block_table[request, column].where(listed, self.padding.page))
        if self._table is not None:
            self._table.fill_(self.padding.page)
            listed = self._page_of[:width] < num_pages[:batch, None]
            self._table[:batch, :width].copy_(block_table.where(listed, self.padding.page))

        page = block_table.gather(1, (position[:batch] // self.page_size).clamp(0, width - 1).long())
        slot = page.long() * self.page_size + position[:batch] % self.page_size
        tokens = batch * self.query_len
        self._slot_mapping[:tokens].copy_(slot.where(written[:batch], self.padding.slot).flatten())
        self._slot_mapping[tokens:].fill_(self.padding.slot)

    def at(self, batch_size: int) -> DecodeMetadata:
        """The views of the first ``batch_size`` requests: the same tensors at every call.

        Call it after each :meth:`update`: some backends plan for a number of requests, and then bring that of another
        number than the update's up to date here, by a launch.

        Raises:
            ValueError: ``batch_size`` is not in ``1..max_batch_size``.
        """
        metadata, state = self._views.get(batch_size), self._state_of(batch_size)
        if metadata is not None:
            if state is not None:
                state.at(batch_size)
        else:
            if not 1 <= batch_size <= self.max_batch_size:
                raise ValueError(f"batch_size must be in 1..{self.max_batch_size} (the plan's), got {batch_size}")
            tokens = batch_size * self.query_len
            reference = (self._page_of,) if self.choice.name == "reference" else ()
            metadata = self._views[batch_size] = DecodeMetadata(
                qo_indptr=self._qo_indptr[: batch_size + 1],
                kv_indptr=self._kv_indptr[: batch_size + 1],
                kv_indices=self._kv_indices[: batch_size * self.max_pages],
                kv_last_page_lens=self._kv_last_page_lens[:batch_size],
                slot_mapping=self._slot_mapping[:tokens],
                positions=self._positions[:tokens],
                seq_lens=self._seq_lens[:batch_size],
                backend_state=reference if state is None else state.at(batch_size),
                max_seqlen_q=self.query_len,
                num_kv_splits=self.num_kv_splits if state is None else state.num_kv_splits(batch_size),
                backend=self.choice.of(batch_size * self._rows),
                page_size=self.page_size,
            )
        return metadata

    def check_canaries(self) -> None:
        """Look whether anything wrote past a buffer. Synchronises; for tests and debugging.

        Raises:
            PlanError: a canary has changed (names the buffer), or the plan was made without ``debug=True``.
        """
        if not self._debug:
            raise PlanError("this plan has no canaries; make it with debug=True")
        for name, canary in self._guarded.items():
            if not bool((canary == _CANARY).all()):
                raise PlanError(f"something wrote past the plan's buffer {name}; run the step under a memory checker")

    def _check_update(self, block_table: Tensor, seq_lens: Tensor) -> None:
        for name, tensor, rank in (("block_table", block_table, 2), ("seq_lens", seq_lens, 1)):
            if tensor.dim() != rank:
                raise ValueError(f"{name} must be {rank}-D, got shape {tuple(tensor.shape)}")
            if tensor.dtype != torch.int32:
                raise TypeError(f"{name} must be int32, got {tensor.dtype}; convert it with .to(torch.int32)")
            if tensor.device != self._seq_lens.device:
                raise ValueError(f"{name} must be on the plan's device {self._seq_lens.device}, got {tensor.device}")
        if block_table.shape[0] != seq_lens.shape[0]:
            raise ValueError(
                f"block_table must have a row per request ({seq_lens.shape[0]} in seq_lens), got {block_table.shape[0]}"
            )
        if seq_lens.shape[0] > self.max_batch_size:
            raise ValueError(f"at most max_batch_size={self.max_batch_size} requests fit the plan, got {len(seq_lens)}")
        if block_table.shape[1] > self.max_pages:
            raise ValueError(
                f"block_table must have at most max_pages={self.max_pages} columns, got {block_table.shape[1]}; "
                "cut it, or make the plan with a larger max_seq_len"
            )
