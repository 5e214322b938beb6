"""Inputs for the kernels' tests, hostile where nothing may be read, and their comparison with the reference."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mla_ops import ops  # noqa: F401  (registers the ops)

HUGE = 2**31 - 1
SCALE = 0.09


@dataclass
class Paged:
    """Arguments of a decode: NaN in every unused slot and page, huge numbers in unused index entries."""

    q: Tensor
    kv_cache: Tensor
    qo_indptr: Tensor
    kv_indptr: Tensor
    kv_indices: Tensor
    kv_last_page_lens: Tensor
    max_seqlen_q: int
    rank: int
    kv_scale: Tensor | None = None

    def decode(self, backend: str, num_kv_splits: int = 0) -> tuple[Tensor, Tensor]:
        """Out and lse by a backend."""
        return torch.ops.mla_ops.mla_decode(
            self.q, self.kv_cache, self.qo_indptr, self.kv_indptr, self.kv_indices, self.kv_last_page_lens, [],
            self.max_seqlen_q, num_kv_splits, SCALE, None, self.kv_scale, backend, self.rank,
        )  # fmt: skip

    def exact(self) -> Paged:
        """The same in float64, dequantised, with index entries that the reference may look at."""
        cache = self.kv_cache.double() * (1.0 if self.kv_scale is None else self.kv_scale.double())
        indices = self.kv_indices.clamp(max=len(self.kv_cache) - 1)
        return Paged(
            self.q.double(), cache, self.qo_indptr, self.kv_indptr, indices, self.kv_last_page_lens, self.max_seqlen_q,
            self.rank,
        )  # fmt: skip

    def lower(self) -> Paged:
        """The same with index entries that the reference may look at."""
        exact = self.exact()
        exact.q, exact.kv_cache, exact.kv_scale = self.q, self.kv_cache, self.kv_scale
        return exact


def paged(
    lens: list[int],
    heads: int,
    page_size: int,
    rank: int,
    rope: int,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    query_lens: list[int] | None = None,
    stray_rows: int = 2,
    fp8: bool = False,
) -> Paged:
    """Shuffled pages for requests of ``lens`` keys, and ``stray_rows`` rows of no request behind the last."""
    query_lens = query_lens or [1] * len(lens)
    pages = [-(-length // page_size) for length in lens]
    total = sum(pages)
    cache = torch.full((total + 3, page_size, rank + rope), torch.nan)
    indices = torch.randperm(total + 3)[:total].to(torch.int32)
    kv_indptr = torch.tensor([0, *pages]).cumsum(0).to(torch.int32)
    for first, length in zip(kv_indptr.tolist(), lens, strict=False):
        position = torch.arange(length)
        page = indices[first + position // page_size].long()
        cache[page, position % page_size] = torch.randn(length, rank + rope)
    scale = None
    if fp8:
        scale = torch.full((1,), 0.02)
        cache = (cache / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    else:
        cache = cache.to(dtype)
    return Paged(
        q=torch.randn(sum(query_lens) + stray_rows, heads, rank + rope).to(device, dtype),
        kv_cache=cache.to(device),
        qo_indptr=torch.tensor([0, *query_lens]).cumsum(0).to(device, torch.int32),
        kv_indptr=kv_indptr.to(device),
        kv_indices=torch.cat([indices, torch.full((5,), HUGE, dtype=torch.int32)]).to(device),
        kv_last_page_lens=torch.tensor([(n - 1) % page_size + 1 if n else 0 for n in lens]).to(device, torch.int32),
        max_seqlen_q=max(query_lens),
        rank=rank,
        kv_scale=None if scale is None else scale.to(device),
    )


def assert_close_to_reference(actual: Tensor, exact: Tensor, reference: Tensor, factor: float = 3.0) -> None:
    """``actual`` errs against float64 by at most ``factor`` times what the reference in the same dtype errs.

    Rows that must be zero or -inf must be so exactly, and so much of float32's rounding as any order of summation
    brings is always allowed.
    """
    assert actual.shape == exact.shape
    finite = exact.isfinite()
    assert torch.equal(actual[~finite].double(), exact[~finite])
    assert torch.equal(actual[exact == 0], torch.zeros_like(actual[exact == 0]))
    allowed = factor * (reference.double() - exact)[finite].norm() + 1e-5 * exact[finite].norm()
    error = (actual.double() - exact)[finite].norm()
    assert error <= allowed, f"error {error:.3e}, allowed {allowed:.3e}"


def check_decode(case: Paged, num_kv_splits: int = 0) -> None:
    """Decode by the kernels against the reference."""
    out, lse = case.decode("triton", num_kv_splits)
    exact_out, exact_lse = case.exact().decode("reference")
    low_out, low_lse = case.lower().decode("reference")
    assert_close_to_reference(out, exact_out, low_out)
    assert_close_to_reference(lse, exact_lse.double(), low_lse)


def indptr_of(lens: list[int], device: torch.device) -> Tensor:
    """Where each of requests of ``lens`` rows begins, and the end."""
    return torch.tensor([0, *lens]).cumsum(0).to(device, torch.int32)


def check_prefill(
    q_lens: list[int], k_lens: list[int], width: int, v_width: int, causal: bool, device: torch.device,
    dtype: torch.dtype = torch.float32, heads: int = 2,
) -> None:  # fmt: skip
    """Prefill by the kernels against the reference; rows behind the last request, and NaN there in k and v."""
    q = torch.randn(sum(q_lens) + 3, heads, width).to(device, dtype)
    k = torch.randn(sum(k_lens) + 2, heads, width).to(device, dtype)
    kv = torch.randn(sum(k_lens) + 2, heads, 2 * v_width).to(device, dtype)
    v = kv[..., v_width:]  # as kv_b_proj gives it
    k[sum(k_lens) :] = torch.nan
    v[sum(k_lens) :] = torch.nan
    rest = (indptr_of(q_lens, device), indptr_of(k_lens, device), max(q_lens), max(k_lens), SCALE, causal)
    out, lse = torch.ops.mla_ops.mla_prefill(q, k, v, *rest, "triton")
    exact = torch.ops.mla_ops.mla_prefill(q.double(), k.double(), v.double(), *rest, "reference")
    low = torch.ops.mla_ops.mla_prefill(q, k, v, *rest, "reference")
    assert_close_to_reference(out, exact[0], low[0])
    assert_close_to_reference(lse, exact[1].double(), low[1])
