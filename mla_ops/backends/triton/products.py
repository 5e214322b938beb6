# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""Products of few rows with large weights: what a decode step of few requests spends its time on.

Such a product is a read of its weights. A program has a few rows of a weight and all of the sum; it brings the first
of its weights to the L2 cache while the kernel in front still runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mla_ops.backends.triton.configs import LinearConfig, linear_config, pdl_options
from mla_ops.backends.triton.launch import Launch, arch_of
from mla_ops.backends.triton.rows import fetch

__all__ = ["linear", "linear_launch"]


def linear(x: Tensor, weight: Tensor, second: Tensor | None) -> Tensor:
    """Products with one weight or two, side by side. See :func:`mla_ops.linear`."""
    weights = [weight] if second is None else [weight, second]
    out = x.new_empty(x.shape[0], sum(weight.shape[0] for weight in weights))
    arch = arch_of(x)
    config = linear_config(arch, x.dtype)
    if config is None or x.shape[0] > config.most_rows or not _dense(x, *weights):
        for weight, part in zip(weights, out.split([weight.shape[0] for weight in weights], dim=1), strict=True):
            torch.mm(x, weight.T, out=part)
    else:
        linear_launch(x, weights, out, config, arch).run()
    return out


def _dense(*tensors: Tensor) -> bool:
    """Whether rows follow one another, of a width that a block divides."""
    return all(x.is_contiguous() and x.shape[1] % 16 == 0 for x in tensors)


def linear_launch(x: Tensor, weights: Sequence[Tensor], out: Tensor, config: LinearConfig, arch: str) -> Launch:
    """The launch into ``out`` [T, N]; a program is of one weight."""
    sizes = [weight.shape[0] for weight in weights]
    tiles = [triton.cdiv(size, config.block_n) for size in sizes]
    width = x.shape[1]
    args: dict[str, Any] = {
        "x": x,
        "first": weights[0],
        "second": weights[-1],
        "out": out,
        "num_tokens": x.shape[0],
        "K": width,
        "N": sizes[0],
        "SECOND": sum(sizes) - sizes[0],
        "BLOCK_T": config.most_rows,
        "BLOCK_N": config.block_n,
        "BLOCK_K": max(16, min(config.block_k, width & -width)),
        "STAGES": config.num_stages,
        "LINES": min(config.fetched, width & -width) // 64,
        "PRECISION": "ieee",
        "PDL": bool(pdl := pdl_options(arch)),
    }
    return Launch(linear_kernel, (sum(tiles),), args, {"num_warps": config.num_warps, **dict(config.extra), **pdl})


@triton.jit(do_not_specialize=["num_tokens"])
def linear_kernel(
    x, first, second, out, num_tokens, K: tl.constexpr, N: tl.constexpr, SECOND: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr, LINES: tl.constexpr,
    PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    is_second = tile >= tl.cdiv(N, BLOCK_N)
    row = (tl.where(is_second, tile - tl.cdiv(N, BLOCK_N), tile) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    live_rows = row < tl.where(is_second, SECOND, N)
    weight = tl.where(is_second, second, first) + tl.where(live_rows, row, 0)[:, None] * K
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        if LINES > 0:
            fetch(weight + tl.arange(0, LINES)[None, :] * 64, live_rows[:, None])
        tl.extra.cuda.gdc_wait()
    token = tl.arange(0, BLOCK_T)
    k = tl.arange(0, BLOCK_K)
    live = (token < num_tokens)[None, :]
    sums = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
    for done in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        block = tl.load(weight + done + k[None, :])
        rows = tl.load(x + token[None, :] * K + done + k[:, None], mask=live, other=0.0)
        sums = tl.dot(block, rows, sums, input_precision=PRECISION)
    column = tl.where(is_second, N, 0) + row
    target = out + token[None, :] * (N + SECOND) + column[:, None]
    tl.store(target, sums.to(out.dtype.element_ty), mask=live & live_rows[:, None])
