# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""What is done to each token's row on the way into attention: norm, rotation, cache write."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mla_ops.backends.triton.cache import stored
from mla_ops.backends.triton.configs import pdl_options
from mla_ops.backends.triton.launch import BoundOp, Launch, arch_of, refuse
from mla_ops.validation import FLOAT8_DTYPES

__all__ = [
    "bind_front",
    "bind_norm",
    "fetch",
    "load_pairs",
    "norm_rope_write",
    "norm_rope_write_launch",
    "rms_norm",
    "rms_norm_launch",
    "rotated",
    "store_pairs",
    "wait_for_inputs",
]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm of rows. See :func:`mla_ops.rms_norm`."""
    result: Tensor = bind_norm()(x, weight, eps)
    return result


def bind_norm() -> BoundOp:
    """:func:`rms_norm` for calls of one signature."""
    return BoundOp(_prepare_norm, "x", "weight", "eps", "out")


def _prepare_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Launch, tuple[Tensor]]:
    _require_supported(x)
    out = x.new_empty(x.shape)
    return rms_norm_launch(x, weight, eps, out, arch_of(x)), (out,)


def rms_norm_launch(x: Tensor, weight: Tensor, eps: float, out: Tensor, arch: str) -> Launch:
    """The launch of a norm: one program a row."""
    width = x.shape[1]
    block = triton.next_power_of_2(width)
    args = {
        "x": x,
        "weight": weight,
        "out": out,
        "eps": float(eps),
        "stride_x": x.stride(0),
        "W": width,
        "BLOCK": block,
        "PDL": bool(pdl := pdl_options(arch)),
    }
    return Launch(rms_norm_kernel, (x.shape[0],), args, {"num_warps": _warps(block), **pdl})


def _warps(block: int) -> int:
    """So many that a lane has eight elements, or sixteen of a row above 4096."""
    return max(1, min(16, block // 256))


@triton.jit
def rms_norm_kernel(x, weight, out, eps, stride_x, W: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        wait_for_inputs(True)
    row = tl.program_id(0).to(tl.int64)
    _store_normed(x + row * stride_x, weight, out + row * W, eps, W, BLOCK)


@triton.jit
def _normed(value, gain, eps, W: tl.constexpr):
    """float32; value is 0 outside the row."""
    value = value.to(tl.float32)
    return value * tl.rsqrt(tl.sum(value * value, 0) / W + eps) * gain.to(tl.float32)


@triton.jit
def _store_normed(source, weight, target, eps, W: tl.constexpr, BLOCK: tl.constexpr):
    """Norm a row into ``target``; the normed values, rounded as they are stored."""
    column = tl.arange(0, BLOCK)
    value = tl.load(source + column, mask=column < W, other=0.0)
    gain = tl.load(weight + column, mask=column < W, other=0.0)
    normed = _normed(value, gain, eps, W).to(target.dtype.element_ty)
    tl.store(target + column, normed, mask=column < W)
    return normed


def norm_rope_write(
    q_a: Tensor,
    latent: Tensor,
    q_weight: Tensor,
    kv_weight: Tensor,
    positions: Tensor,
    inv_freq: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    eps: float,
    rope_scale: float,
    interleave: bool,
    kv_scale: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Norm and rotate the rows of the two down-projections, and write the latent ones to the cache. See
    :func:`mla_ops.norm_rope_write`."""
    result: tuple[Tensor, Tensor] = bind_front()(
        q_a, latent, q_weight, kv_weight, positions, inv_freq, kv_cache, slot_mapping, eps, rope_scale, interleave,
        kv_scale,
    )  # fmt: skip
    return result


def bind_front() -> BoundOp:
    """:func:`norm_rope_write` for calls of one signature."""
    return BoundOp(
        _prepare_front, "q_a", "latent", "q_weight", "kv_weight", "positions", "inv_freq", "kv_cache", "slot_mapping",
        "eps", "rope_scale", "interleave", "kv_scale", "q_out", "row",
    )  # fmt: skip


def _prepare_front(*inputs: Any) -> tuple[Launch, tuple[Tensor, Tensor]]:
    q_a, latent = inputs[:2]
    _require_supported(latent)
    results = q_a.new_empty(q_a.shape), latent.new_empty(latent.shape)
    return norm_rope_write_launch(*(*inputs, *results, arch_of(latent))), results


def norm_rope_write_launch(
    q_a: Tensor,
    latent: Tensor,
    q_weight: Tensor,
    kv_weight: Tensor,
    positions: Tensor,
    inv_freq: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    eps: float,
    rope_scale: float,
    interleave: bool,
    kv_scale: Tensor | None,
    q_out: Tensor,
    row: Tensor,
    arch: str,
) -> Launch:
    """The launch into ``q_out`` [T, Q], ``row`` [T, D] and the cache: two programs a token, one where Q is 0."""
    num_pages, page_size, latent_dim = kv_cache.shape
    tokens, width = q_a.shape
    pairs = inv_freq.shape[0]
    rank = latent_dim - 2 * pairs
    block = triton.next_power_of_2(max(width, rank))
    args: dict[str, Any] = {
        "q_a": q_a,
        "latent": latent,
        "q_weight": q_weight,
        "kv_weight": kv_weight,
        "positions": positions,
        "inv_freq": inv_freq,
        "kv_cache": kv_cache,
        "slot_mapping": slot_mapping,
        "kv_scale": kv_scale if kv_cache.dtype in FLOAT8_DTYPES else None,
        "q_out": q_out,
        "row": row,
        "eps": float(eps),
        "rope_scale": float(rope_scale),
        "num_slots": num_pages * page_size,
        "page_size": max(page_size, 1),
        "stride_q": q_a.stride(0),
        "stride_latent": latent.stride(0),
        "stride_page": kv_cache.stride(0),
        "stride_row": kv_cache.stride(1),
        "Q": width,
        "R": rank,
        "PAIRS": pairs,
        "INTERLEAVE": interleave,
        "BLOCK_Q": triton.next_power_of_2(max(width, 1)),
        "BLOCK_R": triton.next_power_of_2(rank),
        "BLOCK_PAIRS": triton.next_power_of_2(max(pairs, 1)),
        "LIMIT": torch.finfo(kv_cache.dtype).max,
        "PDL": bool(pdl := pdl_options(arch)),
    }
    grid = (tokens, 2 if width else 1)
    return Launch(norm_rope_write_kernel, grid, args, {"num_warps": _warps(block), **pdl})


@triton.jit
def wait_for_inputs(LETS_NEXT_IN: tl.constexpr):
    """Wait until all that was launched before is done, on CUDA; then, if asked, let the next kernel come in early.

    Every path of a kernel that may come in early calls this: a kernel that ends without having waited can end before
    the one in front of it, and what comes next would wait for too little. FlashMLA's last kernel is of that kind, so
    nothing of ours comes in early right behind attention, and what attention reads, queries and cache, is written by
    kernels that let nothing in. Letting in comes after the wait: a kernel that comes in early finds all but the results
    of the one in front of it.
    """
    tl.extra.cuda.gdc_wait()
    if LETS_NEXT_IN:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def fetch(pointers, mask):
    """Bring the lines of memory at ``pointers`` to the L2 cache, on CUDA.

    For weights, before a kernel waits for the one in front of it: unlike a load, this may come before a write.
    """
    tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.b32 p, $2, 0; @p prefetch.global.L2 [$1]; mov.b32 $0, 0; }",
        "=r,l,r",
        [pointers.to(tl.int64), mask.to(tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _cos_sin(angle):
    """cos and sin of float32 radians to float32's precision, at any position.

    The angle is reduced in float64, to a quarter turn: the libraries' own reduction of large angles keeps a table on
    the stack. Then the polynomials of Cephes' sinf.c and cosf.c.
    """
    quarters = angle.to(tl.float64) * 0.63661977236758134308
    whole = tl.floor(quarters + 0.5)
    x = ((quarters - whole) * 1.57079632679489661923).to(tl.float32)
    quadrant = whole.to(tl.int32) & 3
    z = x * x
    sine = ((-1.9515295891e-4 * z + 8.3321608736e-3) * z - 1.6666654611e-1) * z * x + x
    cosine = ((2.443315711809948e-5 * z - 1.388731625493765e-3) * z + 4.166664568298827e-2) * z * z - 0.5 * z + 1.0
    swapped = (quadrant & 1) == 1
    cos, sin = tl.where(swapped, sine, cosine), tl.where(swapped, cosine, sine)
    return tl.where((quadrant == 1) | (quadrant == 2), -cos, cos), tl.where(quadrant >= 2, -sin, sin)


@triton.jit
def load_pairs(source, live, PAIRS: tl.constexpr, INTERLEAVE: tl.constexpr, BLOCK_PAIRS: tl.constexpr):
    """The two elements of each pair [T, BLOCK_PAIRS] from rows at ``source`` [T, 1]."""
    if INTERLEAVE:  # loaded as they lie: strided loads would be laid out with lanes along the tokens
        column = tl.arange(0, 2 * BLOCK_PAIRS)[None, :]
        both = tl.load(source + column, mask=live & (column < 2 * PAIRS), other=0.0)
        a, b = tl.split(tl.reshape(both, [source.shape[0], BLOCK_PAIRS, 2]))
    else:
        pair = tl.arange(0, BLOCK_PAIRS)[None, :]
        a = tl.load(source + pair, mask=live & (pair < PAIRS), other=0.0)
        b = tl.load(source + PAIRS + pair, mask=live & (pair < PAIRS), other=0.0)
    return a, b


@triton.jit
def store_pairs(target, a, b, live, PAIRS: tl.constexpr, INTERLEAVE: tl.constexpr, BLOCK_PAIRS: tl.constexpr):
    """Where :func:`load_pairs` takes them from."""
    if INTERLEAVE:
        column = tl.arange(0, 2 * BLOCK_PAIRS)[None, :]
        both = tl.reshape(tl.join(a, b), [target.shape[0], 2 * BLOCK_PAIRS])
        tl.store(target + column, both, mask=live & (column < 2 * PAIRS))
    else:
        pair = tl.arange(0, BLOCK_PAIRS)[None, :]
        tl.store(target + pair, a, mask=live & (pair < PAIRS))
        tl.store(target + PAIRS + pair, b, mask=live & (pair < PAIRS))


@triton.jit
def rotated(a, b, position, inv_freq, rope_scale, PAIRS: tl.constexpr, BLOCK_PAIRS: tl.constexpr):
    """Pairs [T, BLOCK_PAIRS] turned by positions [T], in float32."""
    pair = tl.arange(0, BLOCK_PAIRS)
    frequency = tl.load(inv_freq + pair, mask=pair < PAIRS, other=0.0)
    cos, sin = _cos_sin(position.to(tl.float32)[:, None] * frequency[None, :])
    a, b = a.to(tl.float32) * rope_scale, b.to(tl.float32) * rope_scale
    return a * cos - b * sin, b * cos + a * sin


@triton.jit(do_not_specialize=["num_slots", "page_size"])
def norm_rope_write_kernel(
    q_a, latent, q_weight, kv_weight, positions, inv_freq, kv_cache, slot_mapping, kv_scale, q_out, row,
    eps, rope_scale, num_slots, page_size, stride_q, stride_latent, stride_page, stride_row,
    Q: tl.constexpr, R: tl.constexpr, PAIRS: tl.constexpr, INTERLEAVE: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_PAIRS: tl.constexpr, LIMIT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        wait_for_inputs(False)
    token = tl.program_id(0).to(tl.int64)
    if tl.program_id(1) == 1:
        _store_normed(q_a + token * stride_q, q_weight, q_out + token * Q, eps, Q, BLOCK_Q)
    else:
        slot = tl.load(slot_mapping + token)
        writes = (slot >= 0) & (slot < num_slots)
        slot = tl.where(writes, slot, 0)
        target = kv_cache + slot // page_size * stride_page + slot % page_size * stride_row
        source = latent + token * stride_latent
        result = row + token * (R + 2 * PAIRS)
        normed = _store_normed(source, kv_weight, result, eps, R, BLOCK_R)
        column = tl.arange(0, BLOCK_R)
        kept = stored(normed, kv_scale, kv_cache, LIMIT)
        tl.store(target + column, kept, mask=column < tl.where(writes, R, 0))
        if PAIRS > 0:
            first = R + tl.arange(0, 1)[:, None]
            a, b = load_pairs(source + first, first > 0, PAIRS, INTERLEAVE, BLOCK_PAIRS)
            position = tl.load(positions + token + tl.arange(0, 1))
            a, b = rotated(a, b, position, inv_freq, rope_scale, PAIRS, BLOCK_PAIRS)
            a, b = a.to(row.dtype.element_ty), b.to(row.dtype.element_ty)
            store_pairs(result + first, a, b, first > 0, PAIRS, INTERLEAVE, BLOCK_PAIRS)
            a, b = stored(a, kv_scale, kv_cache, LIMIT), stored(b, kv_scale, kv_cache, LIMIT)
            store_pairs(target + first, a, b, first < tl.where(writes, R + 1, 0), PAIRS, INTERLEAVE, BLOCK_PAIRS)


def _require_supported(x: Tensor) -> None:
    if x.dtype == torch.float64:
        raise refuse("the kernels compute in float32 and the rows are float64")
