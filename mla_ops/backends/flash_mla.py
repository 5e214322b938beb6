"""FlashMLA's Hopper kernel (the ``sgl-flash-mla`` wheel) for decode; the other ops are what auto chooses without it.

FlashMLA reads a block table and a schedule, the shares of the multiprocessors. A :class:`DecodeState` of the plan
holds both and rewrites them in ``DecodePlan.update``; a call without one makes its own, at the cost of some launches.

Letters: T query tokens, B requests, Q query tokens of a request, H heads, R kv_lora_rank, D latent_dim.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from mla_ops.backends.kernels import backend_kernel, bound_kernel
from mla_ops.backends.select import select
from mla_ops.config import MLAConfig
from mla_ops.errors import BackendUnavailableError

__all__ = [
    "BOUND",
    "PAGE_SIZE",
    "BoundDecode",
    "DecodeState",
    "gather_latent_cache",
    "make_decode_state",
    "merge_attn_states",
    "mla_decode",
    "mla_prefill",
    "refusal",
    "write_latent_cache",
]

PAGE_SIZE = 64
_WIDTHS = (576, 512)  # latent_dim, kv_lora_rank
_DTYPES = (torch.bfloat16, torch.float16)
_REMEDY = 'use backend="triton"'


def refusal(
    device: torch.device,
    dtype: torch.dtype,
    *,
    widths: tuple[int, int] | None = None,
    page_size: int | None = None,
    kv_dtype: torch.dtype | None = None,
) -> str | None:
    """Why FlashMLA cannot serve a decode, or None.

    Args:
        device: where the tensors are.
        dtype: of the queries.
        widths: ``(latent_dim, kv_lora_rank)``; not checked where None, as the next two.
        page_size: rows per page.
        kv_dtype: of the cache.
    """
    if device.type != "cuda" or torch.version.hip is not None:
        return "it runs on NVIDIA GPUs only"
    if importlib.util.find_spec("flash_mla") is None:
        return "flash_mla is not installed (pip install sgl-flash-mla)"
    if not torch.cuda.is_available() or torch.cuda.get_device_capability(device) != (9, 0):
        return "its dense decode kernel is for sm_90 (H100, H200)"
    if dtype not in _DTYPES:
        return f"its queries are bfloat16 or float16, not {dtype}"
    if kv_dtype not in (None, dtype):
        return f"its cache has the queries' dtype {dtype}, not {kv_dtype}"
    if page_size not in (None, PAGE_SIZE):
        return f"its pages have {PAGE_SIZE} rows, not {page_size}"
    if widths not in (None, _WIDTHS):
        return f"its latent rows are 512 | 64 wide, not {widths[1]} | {widths[0] - widths[1]}"
    return _import_error()


@functools.cache
def _import_error() -> str | None:
    try:
        legacy: bool = importlib.import_module("flash_mla").has_legacy()
    except Exception as error:  # a wheel for another torch or CUDA fails in many ways
        return f"importing flash_mla failed: {type(error).__name__}: {error}"
    return None if legacy else "this build of flash_mla has no sm_90 kernels"


@functools.cache
def _module() -> ModuleType:
    return importlib.import_module("flash_mla")


class DecodeState:
    """The block table, lengths and schedule of a decode plan.

    A schedule belongs to a number of requests: :meth:`at` makes it, once after each :meth:`update`.
    ``DecodePlan.update`` asks for that of its requests; for another number call ``plan.at`` after the update, as
    the module does.

    Args:
        seq_lens: ``[max_batch_size]`` int32, the plan's, rewritten before each update.
        max_pages: most pages of a request.
        rows: query tokens of a request times heads.

    Attributes:
        block_table: written by the plan. FlashMLA loads the first page of a request without keys too: it is 0, one
            that exists.
    """

    def __init__(self, *, seq_lens: Tensor, max_pages: int, rows: int) -> None:
        self.block_table = seq_lens.new_zeros(seq_lens.shape[0], max_pages)
        self._rows = rows
        self._lens = seq_lens
        self._schedules: dict[int, tuple[Tensor, Tensor]] = {}
        self._fresh: set[int] = set()

    def update(self, kv_indptr: Tensor, kv_indices: Tensor, kv_last_page_lens: Tensor) -> None:
        """The schedules are those of other lengths now."""
        self._fresh.clear()

    def num_kv_splits(self, batch_size: int) -> int:
        """0: FlashMLA's schedule says."""
        return 0

    def at(self, batch_size: int) -> tuple[Tensor, ...]:
        """Table ``[B, max_pages]``, lengths ``[B]`` and the schedule's two tensors: the same ones at every call."""
        if batch_size not in self._fresh:
            self._schedule(batch_size)
        return (self.block_table[:batch_size], self._lens[:batch_size], *self._schedules[batch_size])

    def _schedule(self, batch_size: int) -> None:
        parts, splits = _module().get_mla_decoding_metadata(self._lens[:batch_size], self._rows, 1, use_legacy=True)
        static = self._schedules.setdefault(batch_size, (parts, splits))
        if static[0] is not parts:
            torch._foreach_copy_(static, (parts, splits))
        self._fresh.add(batch_size)


def make_decode_state(
    config: MLAConfig, *, max_pages: int, query_len: int, seq_lens: Tensor, **_: object
) -> DecodeState:
    """The state of a decode plan, on ``seq_lens``' device."""
    return DecodeState(seq_lens=seq_lens, max_pages=max_pages, rows=query_len * config.num_heads)


def mla_decode(
    q: Tensor,
    kv_cache: Tensor,
    qo_indptr: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    kv_last_page_lens: Tensor,
    backend_state: Sequence[Tensor],
    max_seqlen_q: int,
    num_kv_splits: int,
    softmax_scale: float,
    q_scale: Tensor | None,
    kv_scale: Tensor | None,
    kv_lora_rank: int,
) -> tuple[Tensor, Tensor]:
    """Paged attention over latent rows. See :func:`mla_ops.mla_decode`; FlashMLA chooses the splits itself.

    Raises:
        BackendUnavailableError: FlashMLA does not serve these tensors.
        ValueError: ``backend_state`` is of another number of requests.
    """
    return BoundDecode()(
        q, kv_cache, qo_indptr, kv_indptr, kv_indices, kv_last_page_lens, backend_state, max_seqlen_q, num_kv_splits,
        softmax_scale, q_scale, kv_scale, kv_lora_rank,
    )  # fmt: skip


class BoundDecode:
    """:func:`mla_decode` for calls of one signature, of which the first is checked."""

    def __init__(self) -> None:
        self._served = False
        self._ragged: Any = None

    def __call__(
        self,
        q: Tensor,
        kv_cache: Tensor,
        qo_indptr: Tensor,
        kv_indptr: Tensor,
        kv_indices: Tensor,
        kv_last_page_lens: Tensor,
        backend_state: Sequence[Tensor],
        max_seqlen_q: int,
        num_kv_splits: int,
        softmax_scale: float,
        q_scale: Tensor | None,
        kv_scale: Tensor | None,
        kv_lora_rank: int,
    ) -> tuple[Tensor, Tensor]:
        if not self._served:
            widths = (q.shape[2], kv_lora_rank)
            reason = refusal(q.device, q.dtype, widths=widths, page_size=kv_cache.shape[1], kv_dtype=kv_cache.dtype)
            if reason is not None:
                raise BackendUnavailableError("flash_mla", reason, _REMEDY)
            self._served = True
            if q.is_cuda and importlib.util.find_spec("triton") is not None:
                from mla_ops.backends.triton.ragged import Ragged

                self._ragged = Ragged()
        tokens, heads, latent_dim = q.shape
        requests = kv_last_page_lens.shape[0]
        if not backend_state:
            lists = (qo_indptr, kv_indptr, kv_indices, kv_last_page_lens)
            if self._ragged is None:
                padded, *state = _pad(q, *lists, max_seqlen_q)
                return _unpad(*_attend(padded, kv_cache, state, softmax_scale), qo_indptr, tokens)
            padded, *state = self._ragged.pad(q, lists, max_seqlen_q, PAGE_SIZE)
            parts = _attend(padded, kv_cache, state, softmax_scale)
            result: tuple[Tensor, Tensor] = self._ragged.unpad(*parts, qo_indptr, tokens)
            return result
        if tokens != requests * max_seqlen_q or backend_state[0].shape[0] != requests:
            raise ValueError(
                f"backend_state must be of plan.at({requests}) and q have {requests * max_seqlen_q} rows, got one of "
                f"{backend_state[0].shape[0]} requests and q {tuple(q.shape)}"
            )
        padded = q.reshape(requests, max_seqlen_q, heads, latent_dim)
        out, lse = _attend(padded, kv_cache, backend_state, softmax_scale)
        lse = lse.transpose(1, 2).reshape(tokens, heads)
        # A row that sees no key comes back as 0 with +inf. The lse is FlashMLA's result, and ours to change.
        return out.view(tokens, heads, kv_lora_rank), lse.nan_to_num_(torch.nan, -torch.inf, -torch.inf)


def _pad(
    q: Tensor, qo_indptr: Tensor, kv_indptr: Tensor, kv_indices: Tensor, kv_last_page_lens: Tensor, query_len: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries ``[B, Q, H, D]``, block table ``[B, len(kv_indices)]`` and lengths ``[B]``.

    The last query of a request is its last of Q, those that it has not are 0, and so is what a table has no page for:
    FlashMLA loads the first page of a request without keys too.
    """
    entries = kv_indices.shape[0]
    num_pages = kv_indptr[1:] - kv_indptr[:-1]
    lens = ((num_pages - 1) * PAGE_SIZE + kv_last_page_lens).masked_fill(num_pages <= 0, 0)
    page_of = torch.arange(entries, dtype=torch.int32, device=q.device)
    entry = (kv_indptr[:-1, None] + page_of).clamp_(max=entries - 1)
    table = kv_indices[entry].masked_fill(page_of >= num_pages[:, None], 0)
    rows = _padded_rows(qo_indptr, query_len, len(q))
    return torch.cat([q, q.new_zeros(1, *q.shape[1:])])[rows], table, lens


def _unpad(parts: Tensor, part_lse: Tensor, qo_indptr: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    """``[B, Q, H, R]`` and ``[B, H, Q]`` to ``[T, H, R]`` and ``[T, H]``: 0 and -inf where no query or no key is."""
    _, query_len, heads, rank = parts.shape
    rows = _padded_rows(qo_indptr, query_len, tokens)
    out = parts.new_zeros(tokens + 1, heads, rank).index_put_((rows,), parts)
    part_lse = part_lse.transpose(1, 2).masked_fill(part_lse.transpose(1, 2) == torch.inf, -torch.inf)
    lse = part_lse.new_full((tokens + 1, heads), -torch.inf).index_put_((rows,), part_lse)
    return out[:tokens], lse[:tokens]


def _padded_rows(qo_indptr: Tensor, query_len: int, tokens: int) -> Tensor:
    """``[B, Q]`` query rows; ``tokens``, a row to drop, where there is none."""
    rows = qo_indptr[1:, None].long() + torch.arange(-query_len, 0, device=qo_indptr.device)
    return rows.masked_fill(rows < qo_indptr[:-1, None], tokens)


def _attend(q: Tensor, kv_cache: Tensor, state: Sequence[Tensor], softmax_scale: float) -> tuple[Tensor, Tensor]:
    """q ``[B, Q, H, D]`` to ``[B, Q, H, R]`` and ``[B, H, Q]``, of which a row without keys is 0 and +inf."""
    schedule, _ = _module().get_mla_metadata()
    if len(state) > 2:
        schedule.tile_scheduler_metadata, schedule.num_splits = state[2:]
    result: tuple[Tensor, Tensor] = _module().flash_mla_with_kvcache(
        q,
        kv_cache.unsqueeze(2),
        state[0],
        state[1],
        _WIDTHS[1],
        schedule,
        softmax_scale=softmax_scale,
        causal=q.shape[1] > 1,
        use_legacy=True,
    )
    return result


@functools.cache
def _others(device: torch.device, dtype: torch.dtype) -> str:
    return select(None, device, dtype).name


def _delegate(op: str, like: Tensor, *arguments: Any) -> Any:
    return backend_kernel(op, _others(like.device, like.dtype))(*arguments)


class _BoundDelegate:
    """What another backend has for the calls of one signature, found at the first."""

    def __init__(self, op: str) -> None:
        self._op = op
        self._kernel: Callable[..., Any] | None = None

    def __call__(self, like: Tensor, *arguments: Any) -> Any:
        if self._kernel is None:
            self._kernel = bound_kernel(self._op, _others(like.device, like.dtype))
        return self._kernel(like, *arguments)


BOUND: dict[str, Callable[[], Callable[..., Any]]] = {
    "mla_decode": BoundDecode,
    "write_latent_cache": functools.partial(_BoundDelegate, "write_latent_cache"),
}
"""See :data:`mla_ops.backends.triton.BOUND`."""


def mla_prefill(q: Tensor, *arguments: Any) -> Any:
    """Ragged attention by the backend that auto chooses otherwise. See :func:`mla_ops.mla_prefill`."""
    return _delegate("mla_prefill", q, q, *arguments)


def write_latent_cache(kv_c: Tensor, *arguments: Any) -> Any:
    """See :func:`mla_ops.write_latent_cache`."""
    return _delegate("write_latent_cache", kv_c, kv_c, *arguments)


def gather_latent_cache(kv_cache: Tensor, *arguments: Any) -> Any:
    """See :func:`mla_ops.gather_latent_cache`."""
    return _delegate("gather_latent_cache", kv_cache, kv_cache, *arguments)


def merge_attn_states(out_a: Tensor, *arguments: Any) -> Any:
    """See :func:`mla_ops.merge_attn_states`."""
    return _delegate("merge_attn_states", out_a, out_a, *arguments)
