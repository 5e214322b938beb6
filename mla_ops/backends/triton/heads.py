# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""The products before and after absorbed attention, a weight per head: into it with W_UK, out of it with W_UV."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mla_ops.backends.triton.configs import ABSORB, EXPAND, HeadConfig, head_configs, pdl_options
from mla_ops.backends.triton.launch import BoundOp, Launch, arch_of, refuse
from mla_ops.backends.triton.rows import fetch, load_pairs, rotated, store_pairs, wait_for_inputs

__all__ = ["absorb_launch", "absorb_query", "bind_absorb", "bind_expand", "expand_launch", "expand_values"]


def absorb_query(
    q: Tensor,
    w_uk: Tensor,
    positions: Tensor,
    inv_freq: Tensor,
    rope_scale: float,
    interleave: bool,
    scaling_beta: float,
    scaling_window: int,
) -> Tensor:
    """Queries in absorbed form. See :func:`mla_ops.absorb_query`."""
    result: Tensor = bind_absorb()(
        q, w_uk, positions, inv_freq, rope_scale, interleave, scaling_beta, scaling_window
    )  # fmt: skip
    return result


def bind_absorb() -> BoundOp:
    """:func:`absorb_query` for calls of one signature."""
    return BoundOp(
        _prepare_absorb, "q", "w_uk", "positions", "inv_freq", "rope_scale", "interleave", "scaling_beta",
        "scaling_window", "out",
    )  # fmt: skip


def _prepare_absorb(*inputs: Any) -> tuple[Launch, tuple[Tensor]]:
    q, w_uk, _, inv_freq = inputs[:4]
    _require_supported(q)
    heads, _, rank = w_uk.shape
    out = q.new_empty(q.shape[0], heads, rank + 2 * inv_freq.shape[0])
    arch = arch_of(q)
    config = _config(head_configs(ABSORB, arch, q.dtype), q.shape[0])
    return absorb_launch(*(*inputs, out, config, arch)), (out,)


def absorb_launch(
    q: Tensor,
    w_uk: Tensor,
    positions: Tensor,
    inv_freq: Tensor,
    rope_scale: float,
    interleave: bool,
    scaling_beta: float,
    scaling_window: int,
    out: Tensor,
    config: HeadConfig,
    arch: str,
) -> Launch:
    """The launch into ``out`` [T, H, R + P]: for each head and tile of tokens its columns, and the rotation."""
    heads, nope, rank = w_uk.shape
    pairs = inv_freq.shape[0]
    columns = _block(rank, config.block_n)
    args: dict[str, Any] = {
        "q": q,
        "w_uk": w_uk,
        "positions": positions,
        "inv_freq": inv_freq,
        "out": out,
        "num_tokens": q.shape[0],
        "rope_scale": float(rope_scale),
        "scaling_beta": float(scaling_beta),
        "scaling_window": scaling_window,
        "stride_token": q.stride(0),
        "stride_head": q.stride(1),
        "stride_w_head": w_uk.stride(0),
        "stride_w_row": w_uk.stride(1),
        "H": heads,
        "N": nope,
        "R": rank,
        "PAIRS": pairs,
        "INTERLEAVE": interleave,
        "SCALED": scaling_beta != 0.0,
        "BLOCK_T": config.block_t,
        "BLOCK_R": columns,
        "BLOCK_N": _block(nope, config.block_k),
        "BLOCK_PAIRS": triton.next_power_of_2(max(pairs, 1)),
        "PRECISION": "ieee",
        "PDL": bool(pdl := pdl_options(arch)),
    }
    grid = (triton.cdiv(q.shape[0], config.block_t), triton.cdiv(rank, columns) + (1 if pairs else 0), heads)
    return Launch(absorb_kernel, grid, args, {**_options(config), **pdl})


@triton.jit(do_not_specialize=["num_tokens", "scaling_window"])
def absorb_kernel(
    q, w_uk, positions, inv_freq, out, num_tokens, rope_scale, scaling_beta, scaling_window,
    stride_token, stride_head, stride_w_head, stride_w_row,
    H: tl.constexpr, N: tl.constexpr, R: tl.constexpr, PAIRS: tl.constexpr, INTERLEAVE: tl.constexpr,
    SCALED: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    live = token < num_tokens
    token = token.to(tl.int64)
    first_column = tl.program_id(1) * BLOCK_R
    head = tl.program_id(2).to(tl.int64)
    source = q + token[:, None] * stride_token + head * stride_head
    target = out + (token[:, None] * H + head) * (R + 2 * PAIRS)
    if first_column < R:
        column = first_column + tl.arange(0, BLOCK_R)
        k = tl.arange(0, BLOCK_N)
        weights = w_uk + head * stride_w_head + k[:, None] * stride_w_row + column[None, :]
        if PDL:
            line = first_column + tl.arange(0, BLOCK_R // 64 if BLOCK_R >= 64 else 1) * 64
            fetch(w_uk + head * stride_w_head + k[:, None] * stride_w_row + line[None, :], (k < N)[:, None])
            wait_for_inputs(False)
        sums = tl.zeros([BLOCK_T, BLOCK_R], tl.float32)
        for done in tl.range(0, N, BLOCK_N):
            inside = k < N - done
            weight = tl.load(weights + done * stride_w_row, mask=inside[:, None] & (column < R)[None, :], other=0.0)
            rows = tl.load(source + done + k[None, :], mask=live[:, None] & inside[None, :], other=0.0)
            sums = tl.dot(rows, weight, sums, input_precision=PRECISION)
        if SCALED:
            position = tl.load(positions + token, mask=live, other=0)
            sums *= _query_scale(position, scaling_beta, scaling_window)[:, None]
        mask = live[:, None] & (column < R)[None, :]
        tl.store(target + column[None, :], sums.to(out.dtype.element_ty), mask=mask)
    else:
        if PDL:
            wait_for_inputs(False)
        a, b = load_pairs(source + N, live[:, None], PAIRS, INTERLEAVE, BLOCK_PAIRS)
        position = tl.load(positions + token, mask=live, other=0)
        a, b = rotated(a, b, position, inv_freq, rope_scale, PAIRS, BLOCK_PAIRS)
        if SCALED:
            scale = _query_scale(position, scaling_beta, scaling_window)[:, None]
            a, b = a * scale, b * scale
        a, b = a.to(out.dtype.element_ty), b.to(out.dtype.element_ty)
        store_pairs(target + R, a, b, live[:, None], PAIRS, INTERLEAVE, BLOCK_PAIRS)


@triton.jit
def _query_scale(position, scaling_beta, scaling_window):
    return 1.0 + scaling_beta * tl.log(1.0 + (position // scaling_window).to(tl.float32))


def expand_values(latent: Tensor, w_uv: Tensor) -> Tensor:
    """Values of attended latents. See :func:`mla_ops.expand_values`."""
    result: Tensor = bind_expand()(latent, w_uv)
    return result


def bind_expand() -> BoundOp:
    """:func:`expand_values` for calls of one signature."""
    return BoundOp(_prepare_expand, "latent", "w_uv", "out")


def _prepare_expand(latent: Tensor, w_uv: Tensor) -> tuple[Launch, tuple[Tensor]]:
    _require_supported(latent)
    out = latent.new_empty(latent.shape[0], w_uv.shape[0] * w_uv.shape[1])
    arch = arch_of(latent)
    config = _config(head_configs(EXPAND, arch, latent.dtype), latent.shape[0])
    return expand_launch(latent, w_uv, out, config, arch), (out,)


def expand_launch(latent: Tensor, w_uv: Tensor, out: Tensor, config: HeadConfig, arch: str) -> Launch:
    """The launch into ``out`` [T, H * V]; never an early one, for in front of it is attention, which may be foreign."""
    heads, width, rank = w_uv.shape
    columns = _block(width, config.block_n)
    args: dict[str, Any] = {
        "latent": latent,
        "w_uv": w_uv,
        "out": out,
        "num_tokens": latent.shape[0],
        "stride_token": latent.stride(0),
        "stride_head": latent.stride(1),
        "stride_w_head": w_uv.stride(0),
        "stride_w_row": w_uv.stride(1),
        "H": heads,
        "V": width,
        "R": rank,
        "BLOCK_T": config.block_t,
        "BLOCK_V": columns,
        "BLOCK_R": _block(rank, config.block_k),
        "PRECISION": "ieee",
        "LETS_NEXT_IN": bool(pdl_options(arch)),
    }
    grid = (triton.cdiv(latent.shape[0], config.block_t), triton.cdiv(width, columns), heads)
    return Launch(expand_kernel, grid, args, _options(config))


@triton.jit(do_not_specialize=["num_tokens"])
def expand_kernel(
    latent, w_uv, out, num_tokens, stride_token, stride_head, stride_w_head, stride_w_row,
    H: tl.constexpr, V: tl.constexpr, R: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK_R: tl.constexpr, PRECISION: tl.constexpr, LETS_NEXT_IN: tl.constexpr,
):  # fmt: skip
    if LETS_NEXT_IN:
        tl.extra.cuda.gdc_launch_dependents()
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    live = token < num_tokens
    token = token.to(tl.int64)
    column = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    head = tl.program_id(2).to(tl.int64)
    k = tl.arange(0, BLOCK_R)
    source = latent + token[:, None] * stride_token + head * stride_head
    weights = w_uv + head * stride_w_head + column[None, :] * stride_w_row + k[:, None]
    sums = tl.zeros([BLOCK_T, BLOCK_V], tl.float32)
    for done in tl.range(0, R, BLOCK_R):
        inside = k < R - done
        weight = tl.load(weights + done, mask=inside[:, None] & (column < V)[None, :], other=0.0)
        rows = tl.load(source + done + k[None, :], mask=live[:, None] & inside[None, :], other=0.0)
        sums = tl.dot(rows, weight, sums, input_precision=PRECISION)
    mask = live[:, None] & (column < V)[None, :]
    tl.store(out + (token[:, None] * H + head) * V + column[None, :], sums.to(out.dtype.element_ty), mask=mask)


def _block(width: int, most: int) -> int:
    """The largest power of two up to ``most`` that divides the width, or the least block that a product takes."""
    return max(16, min(most, width & -width))


def _config(configs: Sequence[HeadConfig], tokens: int) -> HeadConfig:
    return next((config for config in configs if config.block_t >= tokens), configs[-1])


def _options(config: HeadConfig) -> dict[str, Any]:
    return {"num_warps": config.num_warps, "num_stages": config.num_stages, **dict(config.extra)}


def _require_supported(x: Tensor) -> None:
    if x.dtype == torch.float64:
        raise refuse("the kernels accumulate in float32 and the rows are float64")
