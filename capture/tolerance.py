"""How far two results of the same mathematics may be apart.

A replay is compared with eager at another number of rows, for which BLAS may choose another kernel: the
same sums in another order. The bound is a small multiple of the output dtype's own rounding step, row by
row, so that one wrong row among many right ones shows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

__all__ = ["Distance", "as_integers", "changed_bits", "differing", "distance", "same_bits", "within_rounding"]

_Name = TypeVar("_Name")

# Allowed relative L2 error of a row, in rounding steps of its dtype.
_NARROW_STEPS = 8  # 16 bits and fewer: sums run in fp32, what differs is the rounding of each layer's result
_WIDE_STEPS = 100  # fp32 and fp64: the sums themselves run in the dtype, and long ones drift
_LARGEST = 0.1  # fp8: 8 of its steps would pass anything
_MAX_ABS_FACTOR = 4  # one element may be this much further off, measured by the row's largest


@dataclass(frozen=True, slots=True)
class Distance:
    """How far a result is from what it should be.

    Attributes:
        ok: every row is within the bound, and nothing is NaN.
        error: of the worst row, the relative L2 error, or a quarter of the largest absolute error relative to
            the row's largest element where that is more; infinite for a NaN or an infinity in one only.
        row: the worst row along the batch dimension.
        reason: what is wrong with it, empty if ok.
    """

    ok: bool
    error: float
    row: int
    reason: str


def distance(actual: Tensor, expected: Tensor, dim: int | None = 0) -> Distance:
    """Compare row by row along ``dim`` (None: all one row).

    A row passes if ``||a - e|| <= t ||e||`` and ``max |a - e| <= 4 t max |e|`` with ``t = 8 eps(dtype)``
    for 16 bits and fewer, at most 0.1, and ``100 eps(dtype)`` for fp32 and fp64. Equal infinities are
    equal; NaN never passes, not even against NaN. Complex numbers are compared as their two parts. Dtypes that are
    neither must be equal.
    """
    if actual.shape != expected.shape or actual.dtype is not expected.dtype:
        reason = f"{tuple(actual.shape)} {actual.dtype}, expected {tuple(expected.shape)} {expected.dtype}"
        return Distance(False, float("inf"), 0, reason)
    if actual.numel() == 0:
        return Distance(True, 0.0, 0, "")
    if actual.dtype.is_complex:
        actual, expected = (torch.view_as_real(t.resolve_conj()) for t in (actual, expected))
    a, e = (_rows(t, dim) for t in (actual, expected))
    if not actual.dtype.is_floating_point:
        wrong = (a != e).any(1)
        if not wrong.any():
            return Distance(True, 0.0, 0, "")
        return Distance(False, float("inf"), int(wrong.int().argmax()), "values differ")
    limit = _limit(actual.dtype)
    a, e = _widened(a), _widened(e)
    nan = (a.isnan() | e.isnan()).any(1)
    infinite = ((a.isinf() | e.isinf()) & (a != e)).any(1)
    finite = a.isfinite() & e.isfinite()
    e = e.where(finite, 0)
    difference = (a.where(finite, 0) - e).abs()
    floor = torch.finfo(actual.dtype).tiny
    l2 = difference.norm(dim=1) / e.norm(dim=1).clamp_min(floor)
    peak = difference.amax(1) / e.abs().amax(1).clamp_min(floor)
    score = torch.maximum(l2, peak / _MAX_ABS_FACTOR).masked_fill(nan | infinite, float("inf"))
    row = int(score.argmax())
    error = float(score[row])
    if error <= limit:
        return Distance(True, error, row, "")
    if nan[row]:
        return Distance(False, error, row, "NaN")
    if infinite[row]:
        return Distance(False, error, row, "infinite in one only")
    return Distance(False, error, row, f"relative error {error:.2e}, allowed {limit:.2e}")


def within_rounding(actual: Tensor, expected: Tensor) -> Tensor:
    """``[n]`` bool: elements ``[n]`` as close as rounding leaves them; integers: equal.

    An element passes within the bound that :func:`distance` sets to one element, times the root mean square of
    ``expected``: its error comes from sums over the row, so it does not shrink with the element.
    """
    if not actual.dtype.is_floating_point:
        return actual == expected
    a, e = _widened(actual), _widened(expected)
    values = e[e.isfinite()]
    rms = values.square().mean().sqrt() if values.numel() else values.new_zeros(())
    return (a - e).abs() <= _MAX_ABS_FACTOR * _limit(actual.dtype) * rms


def changed_bits(after: Tensor, before: Tensor) -> Tensor:
    """``[numel]`` bool, in row-major order: which elements differ in any bit."""
    differ = _bits(after) != _bits(before)
    return differ if differ.dim() == 1 else differ.any(1)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Bitwise equal: a NaN equals the same NaN, and 0 differs from -0."""
    return a.shape == b.shape and a.dtype is b.dtype and torch.equal(_bits(a), _bits(b))


def differing(actual: Mapping[_Name, Tensor], expected: Mapping[_Name, Tensor]) -> list[_Name]:
    """The names whose tensors differ in any bit; waits for the device once, however many there are.

    Args:
        expected: for each name of ``actual`` a tensor of the same shape and dtype.
    """
    if not actual:
        return []
    flags = [changed_bits(tensor, expected[name]).any() for name, tensor in actual.items()]
    found = torch.stack([flag.to(flags[0].device) for flag in flags]).tolist()
    return [name for name, differs in zip(actual, found, strict=True) if differs]


def _limit(dtype: torch.dtype) -> float:
    steps = _NARROW_STEPS if dtype.itemsize <= 2 else _WIDE_STEPS
    return min(steps * torch.finfo(dtype).eps, _LARGEST)


def _widened(tensor: Tensor) -> Tensor:
    """In a dtype whose own rounding does not show."""
    return tensor.to(torch.float32 if tensor.dtype.itemsize <= 2 else torch.float64)


def as_integers(tensor: Tensor) -> Tensor:
    """A view of the same memory with its bits as integers; 16-byte elements are two along a further dimension."""
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}.get(tensor.element_size())
    if integer is None:
        return torch.view_as_real(tensor.detach()).view(torch.int64)
    return tensor.detach().view(integer)


def _bits(tensor: Tensor) -> Tensor:
    return as_integers(tensor.detach().contiguous().view(-1))


def _rows(tensor: Tensor, dim: int | None) -> Tensor:
    if dim is None:
        return tensor.reshape(1, -1)
    return tensor.movedim(dim, 0).reshape(tensor.shape[dim], -1)
