# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""Products of few rows with large weights: what a decode step of few requests spends its time on.

Such a product is a read of its weights. A program has a few rows of a weight and all of the sum.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mla_ops.backends.triton.configs import LinearConfig, linear_configs, pdl_options
from mla_ops.backends.triton.launch import BoundOp, Launch, arch_of
from mla_ops.backends.triton.rows import fetch, wait_for_inputs

__all__ = ["BoundLinear", "choose_linear", "linear", "linear_launch"]


def linear(x: Tensor, weight: Tensor, second: Tensor | None, residual: Tensor | None) -> Tensor:
    """Products with one weight or two, side by side, added to a residual. See :func:`mla_ops.linear`."""
    return BoundLinear()(x, weight, second, residual)


class BoundLinear:
    """:func:`linear` for calls of one signature: our kernel or torch's product, as the first of them decides."""

    def __init__(self) -> None:
        self._product: Callable[..., Tensor] | None = None

    def __call__(self, x: Tensor, weight: Tensor, second: Tensor | None, residual: Tensor | None) -> Tensor:
        if self._product is None:
            self._product = _bind_product(x, weight, second, residual)
        return self._product(x, weight, second, residual)


def _bind_product(x: Tensor, weight: Tensor, second: Tensor | None, residual: Tensor | None) -> Callable[..., Tensor]:
    arch, columns = arch_of(x), weight.shape[0] + (0 if second is None else second.shape[0])
    config = choose_linear(linear_configs(arch, x.dtype), x.shape[0], columns, x.shape[1])
    inputs = (x, weight, second, residual)
    if config is None or not all(tensor is None or tensor.is_contiguous() for tensor in inputs):
        return _torch_product
    # With one weight the kernel's second pointer is null, and is not followed
    return BoundOp(partial(_prepare_linear, config, arch), "x", "first", "second", "residual", "out")


def _prepare_linear(
    config: LinearConfig, arch: str, x: Tensor, weight: Tensor, second: Tensor | None, residual: Tensor | None
) -> tuple[Launch, tuple[Tensor]]:
    weights = [weight] if second is None else [weight, second]
    out = x.new_empty(x.shape[0], sum(tensor.shape[0] for tensor in weights))
    return linear_launch(x, weights, residual, out, config, arch), (out,)


def _torch_product(x: Tensor, weight: Tensor, second: Tensor | None, residual: Tensor | None) -> Tensor:
    if second is not None and not _follows(second, weight):
        sizes = (weight.shape[0], second.shape[0])
        out = x.new_empty(x.shape[0], sum(sizes))
        addends = (None, None) if residual is None else residual.split(sizes, dim=1)
        for part, one, addend in zip(out.split(sizes, dim=1), (weight, second), addends, strict=True):
            _multiply(x, one, addend, part)
        return out
    if second is not None:
        weight = weight.as_strided((weight.shape[0] + second.shape[0], x.shape[1]), weight.stride())
    return _multiply(x, weight, residual, x.new_empty(x.shape[0], weight.shape[0]))


def _multiply(x: Tensor, weight: Tensor, addend: Tensor | None, out: Tensor) -> Tensor:
    # Into ``out``, for autocast would give a product without one another dtype
    if addend is None:
        return torch.mm(x, weight.t(), out=out)
    return torch.addmm(addend, x, weight.t(), out=out)


def _follows(second: Tensor, first: Tensor) -> bool:
    """Whether the rows of a weight come behind another's in one storage, so that both are one weight."""
    return (
        second.data_ptr() == first.data_ptr() + first.nbytes
        and first.is_contiguous()
        and second.is_contiguous()
        and second.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
    )


def choose_linear(configs: Sequence[LinearConfig], rows: int, columns: int, width: int) -> LinearConfig | None:
    """The first config that serves ``rows`` of ``width`` and weights of ``columns`` rows in all, if any does."""
    for config in configs:
        if rows <= config.most_rows and columns >= config.least_n and width % config.block_k == 0:
            return config
    return None


def linear_launch(
    x: Tensor, weights: Sequence[Tensor], residual: Tensor | None, out: Tensor, config: LinearConfig, arch: str
) -> Launch:
    """The launch into ``out`` [T, N]; a program is of one weight."""
    sizes = [weight.shape[0] for weight in weights]
    args: dict[str, Any] = {
        "x": x,
        "first": weights[0],
        "second": weights[-1],
        "residual": residual,
        "out": out,
        "num_tokens": x.shape[0],
        "K": x.shape[1],
        "N": sizes[0],
        "SECOND": sum(sizes) - sizes[0],
        "BLOCK_T": config.most_rows,
        "BLOCK_N": config.block_n,
        "BLOCK_K": config.block_k if config.most_rows == 1 else config.block_k // config.num_warps,
        "WARPS": config.num_warps,
        "STAGES": config.num_stages,
        "LINES": config.fetched // 64,
        "PRECISION": "ieee",
        "PDL": bool(pdl := pdl_options(arch)),
    }
    grid = (sum(triton.cdiv(size, config.block_n) for size in sizes),)
    return Launch(linear_kernel, grid, args, {"num_warps": config.num_warps, **pdl})


@triton.jit(do_not_specialize=["num_tokens"])
def linear_kernel(
    x, first, second, residual, out, num_tokens, K: tl.constexpr, N: tl.constexpr, SECOND: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, WARPS: tl.constexpr, STAGES: tl.constexpr,
    LINES: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    is_second = tile >= tl.cdiv(N, BLOCK_N)
    row = tl.where(is_second, tile - tl.cdiv(N, BLOCK_N), tile) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = row < tl.where(is_second, SECOND, N)
    weight = tl.where(is_second, second, first) + tl.where(inside, row, 0).to(tl.int64)[:, None] * K
    if PDL:
        if LINES > 0:
            fetch(weight + tl.arange(0, LINES)[None, :] * 64, inside[:, None])
        wait_for_inputs(True)
    column = tl.where(is_second, N, 0) + row
    if BLOCK_T == 1:
        sums = _row_product(x, weight, K, BLOCK_N, BLOCK_K, STAGES)
        cell, mask = column, inside
    else:
        sums = _rows_product(x, weight, num_tokens, K, BLOCK_T, BLOCK_N, BLOCK_K, WARPS, STAGES, PRECISION)
        token = tl.arange(0, BLOCK_T)[None, :]
        cell, mask = token * (N + SECOND) + column[:, None], (token < num_tokens) & inside[:, None]
    if residual is not None:
        sums += tl.load(residual + cell, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + cell, sums.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _row_product(x, weight, K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr):
    """[BLOCK_N] products with one row, without the tensor cores: each lane keeps its own sums to the end."""
    k = tl.arange(0, BLOCK_K)
    sums = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    for done in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        block = tl.load(weight + done + k[None, :]).to(tl.float32)
        sums += block * tl.load(x + done + k).to(tl.float32)[None, :]
    return tl.sum(sums, 1)


@triton.jit
def _rows_product(
    x, weight, num_tokens, K: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    WARPS: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """[BLOCK_N, BLOCK_T] products with several rows: each warp has its own part of the sum."""
    k = (tl.arange(0, WARPS) * BLOCK_K)[:, None] + tl.arange(0, BLOCK_K)[None, :]
    token = tl.arange(0, BLOCK_T)[None, None, :]
    sums = tl.zeros([WARPS, BLOCK_N, BLOCK_T], tl.float32)
    for done in tl.range(0, K, WARPS * BLOCK_K, num_stages=STAGES):
        block = tl.load(weight[None, :, :] + done + k[:, None, :])
        rows = tl.load(x + token * K + done + k[:, :, None], mask=token < num_tokens, other=0.0)
        sums = tl.dot(block, rows, sums, input_precision=PRECISION)
    return tl.sum(sums, 0)
