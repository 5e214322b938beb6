"""Test helpers for the ops: inputs that punish a careless kernel, one tolerance, and a check of plan values.

Letters as in :mod:`mla_ops.functional`. The factories draw from ``generator``, on its device (torch's default one of
the CPU where ``None``), and move the result to ``device``: one seed of a CPU generator gives the same inputs
everywhere, and a generator of a GPU makes large inputs fast.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from mla_ops.plan import DecodeMetadata, PrefillPlan

__all__ = [
    "DecodeInputs",
    "PageOrder",
    "PrefillInputs",
    "assert_matches",
    "check_plan_values",
    "make_decode_inputs",
    "make_prefill_inputs",
]

PageOrder = Literal["sequential", "shuffled", "interleaved", "shared"]
"""How requests own pages: in order, at random, page by page in turn, or with one prefix shared by all."""

_UNUSED_INDEX = 2**31 - 1
_SPARE = 3


def assert_matches(actual: Tensor, exact: Tensor, *, low_precision: Tensor | None = None, factor: float = 4.0) -> None:
    """Assert that ``actual`` is as good as its precision allows.

    The budgets, relative L2 and largest absolute error, are ``factor`` times the errors of ``low_precision`` against
    ``exact``; an error smaller than one rounding of ``exact`` to actual's dtype counts as that rounding. Infinities
    (the lse of a row without keys) must be the same in the same places, and NaN never passes.

    Args:
        actual: what is tested.
        exact: the same shape, in float64.
        low_precision: what a plain implementation in actual's precision gives; ``exact``, rounded, where ``None``.
        factor: how many times the error of ``low_precision`` is allowed.

    Raises:
        AssertionError: names the worst index, the errors and their budgets.
    """
    if actual.shape != exact.shape:
        raise AssertionError(f"shapes differ: got {tuple(actual.shape)}, expected {tuple(exact.shape)}")
    rounding = torch.finfo(actual.dtype).eps / 2
    got, want = (x.detach().to("cpu", torch.float64) for x in (actual, exact))
    low = want if low_precision is None else low_precision.detach().to("cpu", torch.float64)
    for name, x in (("actual", got), ("exact", want), ("low_precision", low)):
        _fail_at(x.isnan(), f"{name} is NaN")
    _fail_at((got.isinf() | want.isinf()) & (got != want), "infinities differ", got, want)
    if not want.numel():
        return
    finite = want.isfinite()
    got, want, low = (x.where(finite & x.isfinite(), 0.0) for x in (got, want, low))
    norm, largest = _norm(want), float(want.abs().max())
    l2_budget = factor * max(_norm(low - want), rounding * norm)
    max_budget = factor * max(float((low - want).abs().max()), rounding * largest)
    l2, worst = _norm(got - want), float((got - want).abs().max())
    if l2 > l2_budget or worst > max_budget:
        index = _first((got - want).abs() == worst)
        scale = norm or 1.0
        raise AssertionError(
            f"worst at {index}: got {float(got[index])!r}, expected {float(want[index])!r}; "
            f"max abs error {worst:.3e} (budget {max_budget:.3e}), "
            f"relative L2 error {l2 / scale:.3e} (budget {l2_budget / scale:.3e}), factor {factor}"
        )


def _norm(x: Tensor) -> float:
    return float(torch.linalg.vector_norm(x))


def _first(mask: Tensor) -> tuple[int, ...]:
    return tuple(mask.nonzero()[0].tolist())


def _fail_at(mask: Tensor, what: str, got: Tensor | None = None, want: Tensor | None = None) -> None:
    if not bool(mask.any()):
        return
    index = _first(mask)
    values = "" if got is None or want is None else f": got {float(got[index])}, expected {float(want[index])}"
    raise AssertionError(f"{what} at {index}{values} ({int(mask.sum())} of {mask.numel()} elements)")


class DecodeInputs(NamedTuple):
    """Arguments of :func:`mla_ops.mla_decode`, and what an independent check of it needs.

    Attributes:
        kv_lens: rows of each request; not an argument of the op.
    """

    q: Tensor
    kv_cache: Tensor
    qo_indptr: Tensor
    kv_indptr: Tensor
    kv_indices: Tensor
    kv_last_page_lens: Tensor
    softmax_scale: float
    max_seqlen_q: int
    q_scale: Tensor | None
    kv_scale: Tensor | None
    kv_lora_rank: int
    kv_lens: tuple[int, ...]

    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of :func:`mla_ops.mla_decode`."""
        arguments = self._asdict()
        del arguments["kv_lens"]
        return arguments

    def latent_rows(self, request: int) -> Tensor:
        """``[kv_len, D]`` float64, a request's cached rows without the scale of an fp8 cache. Reads the device."""
        page_size, length = self.kv_cache.shape[1], self.kv_lens[request]
        first, last = self.kv_indptr[request : request + 2].tolist()
        rows = self.kv_cache[self.kv_indices[first:last].long()].flatten(0, 1)[:length]
        assert last - first == -(-length // page_size)
        return rows.double() * (1.0 if self.kv_scale is None else self.kv_scale.double())


def make_decode_inputs(
    kv_lens: Sequence[int],
    *,
    num_heads: int = 4,
    kv_lora_rank: int = 32,
    qk_rope_head_dim: int = 16,
    query_lens: int | Sequence[int] = 1,
    page_size: int = 4,
    pages: PageOrder = "shuffled",
    dtype: torch.dtype = torch.float32,
    kv_dtype: torch.dtype | None = None,
    softmax_scale: float | None = None,
    poison: bool = True,
    device: torch.device | str = "cpu",
    generator: torch.Generator | None = None,
) -> DecodeInputs:
    """Paged decode inputs with ragged lengths, spare pages, spare index entries and spare query rows.

    Args:
        kv_lens: rows of each request, 0 for one without keys.
        num_heads: H.
        kv_lora_rank: R.
        qk_rope_head_dim: P, 0 for none.
        query_lens: query rows of each request, one number for all or one for each.
        page_size: rows per page.
        pages: who owns which page.
        dtype: of q; an fp8 dtype brings a ``q_scale``.
        kv_dtype: of the cache, q's where ``None``; an fp8 dtype brings a ``kv_scale``.
        softmax_scale: that of DeepSeek's 192-wide heads where ``None``.
        poison: NaN in every slot, page and query row that no request owns, and 2^31 - 1 in every unused entry of
            ``kv_indices``; else 0.
        device: of the result.
        generator: of the numbers.

    Raises:
        ValueError: ``query_lens`` has not one number per request.
    """
    query_lens = [query_lens] * len(kv_lens) if isinstance(query_lens, int) else list(query_lens)
    if len(query_lens) != len(kv_lens):
        raise ValueError(f"query_lens must have one number per request ({len(kv_lens)}), got {len(query_lens)}")
    kv_dtype = dtype if kv_dtype is None else kv_dtype
    counts = [-(-length // page_size) for length in kv_lens]
    owned, num_pages = _page_ids(kv_lens, page_size, pages, generator)
    latent_dim = kv_lora_rank + qk_rope_head_dim
    drawn: dict[str, Any] = {"dtype": torch.float64, "device": _device_of(generator)}
    cache = torch.full((num_pages * page_size, latent_dim), math.nan if poison else 0.0, **drawn)
    for length, ids in zip(kv_lens, owned, strict=True):
        slots = (torch.tensor(ids, dtype=torch.int64)[:, None] * page_size + torch.arange(page_size)).flatten()[:length]
        cache[slots.to(cache.device)] = torch.randn(length, latent_dim, generator=generator, **drawn)
    tokens = sum(query_lens)
    q = torch.full((tokens + _SPARE, num_heads, latent_dim), math.nan if poison else 0.0, **drawn)
    q[:tokens] = torch.randn(tokens, num_heads, latent_dim, generator=generator, **drawn)
    q, q_scale = _quantised(q, dtype)
    cache, kv_scale = _quantised(cache, kv_dtype)
    tail = [_UNUSED_INDEX if poison else 0] * _SPARE
    return DecodeInputs(
        q=q.to(device),
        kv_cache=cache.view(num_pages, page_size, latent_dim).to(device),
        qo_indptr=_indptr(query_lens).to(device),
        kv_indptr=_indptr(counts).to(device),
        kv_indices=torch.tensor([*(i for ids in owned for i in ids), *tail], dtype=torch.int32).to(device),
        kv_last_page_lens=torch.tensor(
            [(length - 1) % page_size + 1 if length else 0 for length in kv_lens], dtype=torch.int32
        ).to(device),
        softmax_scale=192**-0.5 if softmax_scale is None else softmax_scale,
        max_seqlen_q=max([1, *query_lens]),
        q_scale=None if q_scale is None else q_scale.to(device),
        kv_scale=None if kv_scale is None else kv_scale.to(device),
        kv_lora_rank=kv_lora_rank,
        kv_lens=tuple(kv_lens),
    )


def _page_ids(
    kv_lens: Sequence[int], page_size: int, order: PageOrder, generator: torch.Generator | None
) -> tuple[list[list[int]], int]:
    """Page ids of each request, and how many pages there are, some of them no one's."""
    counts = [-(-length // page_size) for length in kv_lens]
    total = sum(counts) + _SPARE
    if order == "interleaved":
        turns = sorted((turn, request) for request, count in enumerate(counts) for turn in range(count))
        owned: list[list[int]] = [[] for _ in counts]
        for page, (_, request) in enumerate(turns):
            owned[request].append(page)
        return owned, total
    shuffled = torch.randperm(total, generator=generator, device=_device_of(generator))
    ids = list(range(total)) if order == "sequential" else shuffled.tolist()
    starts = _indptr(counts).tolist()
    owned = [ids[starts[b] : starts[b + 1]] for b in range(len(counts))]
    if order == "shared":
        whole = [length // page_size for length in kv_lens]  # a page that is being filled has one owner
        prefix = owned[whole.index(max(whole))] if whole else []
        owned = [[*prefix[:full], *mine[full:]] for full, mine in zip(whole, owned, strict=True)]
    return owned, total


def _quantised(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    if dtype.itemsize > 1:
        return x.to(dtype), None
    scale = torch.tensor(
        [0.037], dtype=torch.float32, device=x.device
    )  # far from 1 and from a power of 2: leaving it out must show
    return (x / scale.double()).to(dtype), scale


def _device_of(generator: torch.Generator | None) -> torch.device:
    return torch.device("cpu") if generator is None else generator.device


def _indptr(lengths: Sequence[int]) -> Tensor:
    return torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0).int()


class PrefillInputs(NamedTuple):
    """Arguments of :func:`mla_ops.mla_prefill`, but ``causal`` and ``backend``."""

    q: Tensor
    k: Tensor
    v: Tensor
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int
    softmax_scale: float


def make_prefill_inputs(
    query_lens: Sequence[int],
    key_lens: Sequence[int] | None = None,
    *,
    num_heads: int = 4,
    qk_head_dim: int = 24,
    v_head_dim: int = 16,
    dtype: torch.dtype = torch.float32,
    poison: bool = True,
    device: torch.device | str = "cpu",
    generator: torch.Generator | None = None,
) -> PrefillInputs:
    """Ragged prefill inputs, with spare rows after the last request in q, k and v.

    Args:
        query_lens: query rows of each request, 0 included.
        key_lens: key rows of each request; ``query_lens`` where ``None``.
        num_heads: H.
        qk_head_dim: N + P.
        v_head_dim: V.
        dtype: of q, k and v.
        poison: NaN in the spare rows; else 0.
        device: of the result.
        generator: of the numbers.

    Raises:
        ValueError: ``key_lens`` has not one number per request.
    """
    key_lens = query_lens if key_lens is None else key_lens
    if len(query_lens) != len(key_lens):
        raise ValueError(f"key_lens must have one number per request ({len(query_lens)}), got {len(key_lens)}")

    def rows(tokens: int, width: int) -> Tensor:
        drawn: dict[str, Any] = {"dtype": torch.float64, "device": _device_of(generator)}
        x = torch.full((tokens + _SPARE, num_heads, width), math.nan if poison else 0.0, **drawn)
        x[:tokens] = torch.randn(tokens, num_heads, width, generator=generator, **drawn)
        return x.to(device, dtype)

    return PrefillInputs(
        q=rows(sum(query_lens), qk_head_dim),
        k=rows(sum(key_lens), qk_head_dim),
        v=rows(sum(key_lens), v_head_dim),
        cu_seqlens_q=_indptr(query_lens).to(device),
        cu_seqlens_k=_indptr(key_lens).to(device),
        max_seqlen_q=max(query_lens, default=0),
        max_seqlen_k=max(key_lens, default=0),
        softmax_scale=1.0 / math.sqrt(qk_head_dim),
    )


def check_plan_values(
    metadata: DecodeMetadata | PrefillPlan | DecodeInputs | Mapping[str, Any], *, num_pages: int, page_size: int
) -> None:
    """Read the values of a plan and refuse those that would make a kernel read or write the wrong memory.

    The ops check shapes only, for reading a value waits for the device: call this while debugging.

    Args:
        metadata: a plan's metadata, or a mapping with any of its names (``qo_indptr`` or ``cu_seqlens_q`` with
            ``max_seqlen_q``; ``kv_indptr``, ``kv_indices`` and ``kv_last_page_lens`` together; ``slot_mapping``;
            ``seq_lens``).
        num_pages: pages of the cache.
        page_size: rows per page of the cache.

    Raises:
        ValueError: names the tensor, the index and the value.
    """
    fields: Mapping[str, Any] = metadata if isinstance(metadata, Mapping) else metadata._asdict()
    values = {name: x.tolist() for name, x in fields.items() if isinstance(x, Tensor) and name in _CHECKED}
    for name in ("qo_indptr", "cu_seqlens_q"):
        if name in values:
            _check_indptr(name, values[name])
            for b, rows in enumerate(_differences(values[name])):
                if rows > fields["max_seqlen_q"]:
                    raise ValueError(
                        f"{name} gives request {b} {rows} rows, over max_seqlen_q={fields['max_seqlen_q']}"
                    )
    if "kv_indptr" in values:
        _check_pages(values, num_pages, page_size)
    for b, length in enumerate(values.get("seq_lens", ())):
        if not 0 <= length <= num_pages * page_size:
            raise ValueError(f"seq_lens[{b}] must be in 0..{num_pages * page_size} (rows of the cache), got {length}")
    seen: dict[int, int] = {}
    for row, slot in enumerate(values.get("slot_mapping", ())):
        if slot == -1:
            continue
        if not 0 <= slot < num_pages * page_size:
            raise ValueError(f"slot_mapping[{row}] must be -1 or in 0..{num_pages * page_size - 1}, got {slot}")
        if slot in seen:
            raise ValueError(f"slot_mapping[{row}] must not repeat slot {slot} of slot_mapping[{seen[slot]}]")
        seen[slot] = row


_CHECKED = frozenset(
    {"qo_indptr", "cu_seqlens_q", "kv_indptr", "kv_indices", "kv_last_page_lens", "seq_lens", "slot_mapping"}
)


def _differences(indptr: list[int]) -> list[int]:
    return [high - low for low, high in itertools.pairwise(indptr)]


def _check_indptr(name: str, indptr: list[int]) -> None:
    if indptr and indptr[0] != 0:
        raise ValueError(f"{name}[0] must be 0, got {indptr[0]}")
    for b, step in enumerate(_differences(indptr)):
        if step < 0:
            raise ValueError(f"{name} must not decrease, got {name}[{b + 1}]={indptr[b + 1]} after {indptr[b]}")


def _check_pages(values: Mapping[str, list[int]], num_pages: int, page_size: int) -> None:
    indptr, indices, last = (values[name] for name in ("kv_indptr", "kv_indices", "kv_last_page_lens"))
    _check_indptr("kv_indptr", indptr)
    if indptr and indptr[-1] > len(indices):
        raise ValueError(f"kv_indptr[-1] must be at most {len(indices)} (entries of kv_indices), got {indptr[-1]}")
    for entry, page in enumerate(indices[: indptr[-1] if indptr else 0]):
        if not 0 <= page < num_pages:
            raise ValueError(f"kv_indices[{entry}] must be in 0..{num_pages - 1} (pages of the cache), got {page}")
    for b, (pages, rows) in enumerate(zip(_differences(indptr), last, strict=True)):
        if pages and not 1 <= rows <= page_size:
            raise ValueError(f"kv_last_page_lens[{b}] must be in 1..{page_size} (page_size), got {rows}")
        if not pages and rows:
            raise ValueError(f"kv_last_page_lens[{b}] must be 0 for a request without pages, got {rows}")
