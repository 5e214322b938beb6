"""FlashMLA's Hopper kernel (the ``sgl-flash-mla`` wheel) for decode; the other ops are what auto chooses without it.

FlashMLA reads a block table and a schedule, the shares of the multiprocessors. A :class:`DecodeState` of the plan
holds both and rewrites them in ``DecodePlan.update``; a call without one makes its own, at the cost of some launches.

Letters: T query tokens, B requests, Q query tokens of a request, H heads, R kv_lora_rank, D latent_dim.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from mla_ops.backends.select import select
from mla_ops.config import MLAConfig
from mla_ops.errors import BackendUnavailableError

__all__ = [
    "PAGE_SIZE",
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


def _block_table(
    kv_indptr: Tensor, kv_indices: Tensor, kv_last_page_lens: Tensor, page_of: Tensor
) -> tuple[Tensor, Tensor]:
    """Page lists as ``[B, len(page_of)]`` pages, 0 where there is none, and ``[B]`` lengths."""
    num_pages = kv_indptr[1:] - kv_indptr[:-1]
    lens = ((num_pages - 1) * PAGE_SIZE + kv_last_page_lens).masked_fill(num_pages <= 0, 0)
    entry = (kv_indptr[:-1, None] + page_of).clamp_(max=kv_indices.shape[0] - 1)
    # FlashMLA loads the first page of a request without keys too: 0 is one that exists.
    return kv_indices[entry].masked_fill(page_of >= num_pages[:, None], 0), lens


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
    reason = refusal(
        q.device, q.dtype, widths=(q.shape[2], kv_lora_rank), page_size=kv_cache.shape[1], kv_dtype=kv_cache.dtype
    )
    if reason is not None:
        raise BackendUnavailableError("flash_mla", reason, _REMEDY)
    tokens, heads, latent_dim = q.shape
    requests = kv_last_page_lens.shape[0]
    if backend_state:
        if tokens != requests * max_seqlen_q or backend_state[0].shape[0] != requests:
            raise ValueError(
                f"backend_state must be of plan.at({requests}) and q have {requests * max_seqlen_q} rows, got one of "
                f"{backend_state[0].shape[0]} requests and q {tuple(q.shape)}"
            )
        out, lse = _attend(q.reshape(requests, max_seqlen_q, heads, latent_dim), kv_cache, backend_state, softmax_scale)
        return out.flatten(0, 1), lse.flatten(0, 1)
    # The last query of a request is the last row of its share of Q; a row of no request is row T, dropped again.
    rows = qo_indptr[1:, None].long() + torch.arange(-max_seqlen_q, 0, device=q.device)
    rows = rows.masked_fill(rows < qo_indptr[:-1, None], tokens)
    page_of = torch.arange(kv_indices.shape[0], dtype=torch.int32, device=q.device)
    state = _block_table(kv_indptr, kv_indices, kv_last_page_lens, page_of)
    padded = torch.cat([q, q.new_zeros(1, heads, latent_dim)])[rows]
    parts = _attend(padded, kv_cache, state, softmax_scale)
    out = q.new_zeros(tokens + 1, heads, kv_lora_rank).index_put_((rows,), parts[0])
    lse = parts[1].new_full((tokens + 1, heads), -torch.inf).index_put_((rows,), parts[1])
    return out[:tokens], lse[:tokens]


def _attend(q: Tensor, kv_cache: Tensor, state: Sequence[Tensor], softmax_scale: float) -> tuple[Tensor, Tensor]:
    """q ``[B, Q, H, D]`` to ``[B, Q, H, R]`` and ``[B, Q, H]``."""
    schedule, _ = _module().get_mla_metadata()
    if len(state) > 2:
        schedule.tile_scheduler_metadata, schedule.num_splits = state[2:]
    out, lse = _module().flash_mla_with_kvcache(
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
    # A row that sees no key comes back as 0 with +inf.
    return out, lse.nan_to_num(nan=torch.nan, posinf=-torch.inf, neginf=-torch.inf).transpose(1, 2)


@functools.cache
def _others(device: torch.device, dtype: torch.dtype) -> str:
    return select(None, device, dtype).name


def _delegate(op: str, like: Tensor, *arguments: Any) -> Any:
    from mla_ops.ops import backend_kernel  # here: mla_ops.ops imports backends

    return backend_kernel(op, _others(like.device, like.dtype))(*arguments)


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
