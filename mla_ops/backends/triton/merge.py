# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""Merge of two partial attentions."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mla_ops.backends.triton.launch import Launch, arch_of, refuse

__all__ = ["merge_attn_states", "merge_launch"]

_ROWS = 4


def merge_attn_states(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Exact merge of attention over two disjoint sets of keys. See :func:`mla_ops.merge_attn_states`."""
    if out_a.dtype == torch.float64:
        raise refuse("the kernels accumulate in float32 and the outputs are float64")
    arch_of(out_a)
    out = torch.empty(out_a.shape, dtype=out_a.dtype, device=out_a.device)
    lse = torch.empty(lse_a.shape, dtype=torch.float32, device=out_a.device)
    merge_launch(out_a, lse_a, out_b, lse_b, out, lse).run()
    return out, lse


def merge_launch(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor, out: Tensor, lse: Tensor) -> Launch:
    """The launch that merges into contiguous ``out`` [T, H, V] and ``lse`` [T, H]."""
    num_rows = lse.numel()
    args: dict[str, Any] = {
        "out_a": out_a.contiguous(),
        "lse_a": lse_a.contiguous(),
        "out_b": out_b.contiguous(),
        "lse_b": lse_b.contiguous(),
        "out": out,
        "lse": lse,
        "num_rows": num_rows,
        "V": out.shape[2],
        "BLOCK_V": triton.next_power_of_2(out.shape[2]),
        "ROWS": _ROWS,
    }
    return Launch(merge_states_kernel, (triton.cdiv(num_rows, _ROWS),), args, {"num_warps": 4})


@triton.jit
def _weighted(out, lse, total, cell, mask, row, live):
    """A side's output times its weight; 0 for a side without keys, whose output may be anything."""
    part = tl.load(lse + row, mask=live, other=-float("inf"))
    empty = part == -float("inf")
    value = tl.load(out + cell, mask=mask & (part != -float("inf"))[:, None], other=0.0).to(tl.float32)
    return value * tl.exp(part - tl.where(empty, 0.0, total))[:, None]


@triton.jit(do_not_specialize=["num_rows"])
def merge_states_kernel(
    out_a, lse_a, out_b, lse_b, out, lse, num_rows, V: tl.constexpr, BLOCK_V: tl.constexpr, ROWS: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK_V)
    live = row < num_rows
    a = tl.load(lse_a + row, mask=live, other=-float("inf"))
    b = tl.load(lse_b + row, mask=live, other=-float("inf"))
    high = tl.maximum(a, b)
    shift = tl.where(high == -float("inf"), 0.0, high)
    weights = tl.exp(a - shift) + tl.exp(b - shift)
    total = high + tl.log(tl.where(weights == 0.0, 1.0, weights))  # -inf where both are
    cell = row[:, None] * V + column[None, :]
    mask = live[:, None] & (column < V)[None, :]
    merged = _weighted(out_a, lse_a, total, cell, mask, row, live) + _weighted(
        out_b, lse_b, total, cell, mask, row, live
    )
    tl.store(out + cell, merged.to(out.dtype.element_ty), mask=mask)
    tl.store(lse + row, total, mask=live)
