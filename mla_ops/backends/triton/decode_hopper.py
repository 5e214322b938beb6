# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""The decode kernel for 64-row tiles on Hopper, in Gluon. Same arguments, meaning and plan as ``decode_kernel``.

The 64 x R sums fill half of the register file, so two tiles cannot take turns on the tensor cores. Instead two
warpgroups have a half of the columns each and take turns with the blocks: warpgroup 0 scores and weighs the even
blocks of a request, warpgroup 1 the odd ones, and each adds every block's weights times its half of V. One is in its
softmax while the other multiplies. Weights, running maximum and sum of a block go over through shared memory. A third
warpgroup does nothing but copy: halves of blocks, each as soon as its place is free.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents

from mla_ops.backends.triton.decode_copy import make_bars, make_tiles, produce
from mla_ops.backends.triton.decode_walk import make_scales, my_share, note_span, segment, store_part
from mla_ops.backends.triton.hopper import signal, weigh, zero

__all__ = ["decode_hopper_kernel"]


@gluon.jit
def _scores(
    q_tile, kv_tile, bars, phase, P: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, PLACE: gl.constexpr,
    layout: gl.constexpr,
):  # fmt: skip
    """Q K of the block in PLACE, each half as it arrives."""
    q_c, q_r = q_tile
    kv_near, kv_far, kv_r = kv_tile
    place = PLACE + zero()
    scores = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, layout)
    mbarrier.wait(bars[0].index(PLACE), phase)
    fence_async_shared()
    keys = kv_near.index(place).permute((1, 0))
    scores = warpgroup_mma(q_c.index(place), keys, scores, use_acc=False, is_async=True)
    mbarrier.wait(bars[1].index(PLACE), phase)
    fence_async_shared()
    scores = warpgroup_mma(q_c.index(1 - place), kv_far.index(place).permute((1, 0)), scores, is_async=True)
    if P > 0:
        scores = warpgroup_mma(q_r, kv_r.index(place).permute((1, 0)), scores, is_async=True)
    return warpgroup_mma_wait(0, deps=[scores])


@gluon.jit
def _hand_over(p, m, l, exchange, PLACE: gl.constexpr):
    """Give the other warpgroup a block's weights, and the maximum and the sum up to it."""
    weights, maxima, sums, ready = exchange
    weights.index(PLACE).store(p)
    maxima.index(PLACE).store(m)
    sums.index(PLACE).store(l)
    fence_async_shared()
    signal(ready.index(PLACE))


@gluon.jit
def _add_other(m, values, exchange, phase, other_values, free, PLACE: gl.constexpr, layout: gl.constexpr):
    """Add the values of the block in PLACE by the other warpgroup's weights; the maximum and the sum up to it."""
    weights, maxima, sums, ready = exchange
    mbarrier.wait(ready.index(PLACE), phase)
    m_new = maxima.index(PLACE).load(layout)
    l = sums.index(PLACE).load(layout)
    shift = gl.where(m_new == -float("inf"), 0.0, m_new)
    values = values * gl.convert_layout(gl.exp2(m - shift), gl.SliceLayout(1, values.type.layout))[:, None]
    values = warpgroup_mma(weights.index(PLACE), other_values, values)
    signal(free.index(PLACE))
    return m_new, l, values


@gluon.jit
def _consume(
    plan, walk, results, scales, q_tile, kv_tile, exchange, bars,
    R: gl.constexpr, P: gl.constexpr, PAGE_SIZE: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    CHUNK: gl.constexpr, MINE: gl.constexpr,
):  # fmt: skip
    """Score and weigh the blocks of place MINE, and sum all blocks' values in half MINE of the columns."""
    position = walk[0]
    qk_scale, v_scale = scales
    kv_near, kv_far = kv_tile[0], kv_tile[1]
    free_near, free_far, q_full, q_free = bars[2], bars[3], bars[4], bars[5]
    OTHER: gl.constexpr = 1 - MINE
    HALF: gl.constexpr = R // 2
    dtype: gl.constexpr = kv_near.dtype
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    s_rows: gl.constexpr = gl.SliceLayout(1, s_layout)
    o_rows: gl.constexpr = gl.SliceLayout(1, o_layout)
    my_values = kv_near.index(MINE)
    other_values = kv_far.index(OTHER)
    column = gl.arange(0, BLOCK_N, gl.SliceLayout(0, s_layout))
    row = plan[4] + gl.arange(0, BLOCK_M, s_rows)
    q_phase = 0
    my_phase = 0
    other_phase = 0
    while position < walk[1]:
        part = segment(plan, walk, position, PAGE_SIZE, BLOCK_N, CHUNK)
        request, before, queries, keys, low, high, position = part
        visible = gl.minimum(keys - queries + 1 + row // plan[5], keys)
        m = gl.full([BLOCK_M], -float("inf"), gl.float32, s_rows)
        l = gl.zeros([BLOCK_M], gl.float32, s_rows)
        values = gl.zeros([BLOCK_M, HALF], gl.float32, o_layout)
        mbarrier.wait(q_full, q_phase)
        q_phase ^= 1
        for block in range(low + MINE, high, 2):
            if block > low:
                m, l, values = _add_other(m, values, exchange, other_phase, other_values, free_far, OTHER, s_rows)
                other_phase ^= 1
            scores = _scores(q_tile, kv_tile, bars, my_phase, P, BLOCK_M, BLOCK_N, MINE, s_layout)
            my_phase ^= 1
            p, alpha, m, l = weigh(scores, block * BLOCK_N + column, visible, m, l, qk_scale, True)
            p = gl.convert_layout(p.to(dtype), p_layout)
            _hand_over(p, m, l, exchange, MINE)
            values = values * gl.convert_layout(alpha, o_rows)[:, None]
            values = warpgroup_mma(p, my_values, values)
            signal(free_near.index(MINE))
        signal(q_free)
        if (high - low) % 2 == MINE:  # the last block is the other warpgroup's
            m, l, values = _add_other(m, values, exchange, other_phase, other_values, free_far, OTHER, s_rows)
            other_phase ^= 1

        l = gl.where(l == 0.0, 1.0, l)  # of a row that sees no key: values are 0 and m -inf
        values = values * gl.convert_layout(v_scale / l, o_rows)[:, None]
        store_part(plan, results, part, (values,), m + gl.log2(l), R, BLOCK_M, BLOCK_N, MINE * HALF, 0)
        if (MINE == 0) & (low == 0):
            note_span(results[4], plan, walk, request, before, keys, BLOCK_N)


@gluon.jit(do_not_specialize=["softmax_scale_log2", "num_requests", "num_heads", "max_seqlen_q"])
def decode_hopper_kernel(
    q, kv_cache, qo_indptr, kv_indptr, kv_indices, kv_last_page_lens, q_scale, kv_scale,
    out, lse, part_out, part_lse, spans,
    softmax_scale_log2, num_requests, num_heads, max_seqlen_q,
    stride_token, stride_head, stride_page, stride_row,
    R: gl.constexpr, P: gl.constexpr, PAGE_SIZE: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    CHUNK: gl.constexpr, PRECISION: gl.constexpr,
):  # fmt: skip
    """One share of one tile number's line of blocks. See ``decode_kernel``."""
    gdc_launch_dependents()
    dtype: gl.constexpr = q.dtype.element_ty
    plan = (
        qo_indptr, kv_indptr, kv_last_page_lens, num_requests, gl.program_id(0) * BLOCK_M, num_heads, max_seqlen_q,
    )  # fmt: skip
    walk = my_share(plan, PAGE_SIZE, BLOCK_N, CHUNK)
    scales = make_scales(softmax_scale_log2, kv_scale)

    q_tile, kv_tile = make_tiles(dtype, R, P, BLOCK_M, BLOCK_N)
    # A block's weights take the place of its rope columns, which are done with when the scores are there.
    if P == BLOCK_N:
        weights = kv_tile[2]
    else:
        weights = gl.allocate_shared_memory(dtype, [2, BLOCK_M, BLOCK_N], gl.NVMMASharedLayout(128, 16, 2))
    maxima = gl.allocate_shared_memory(gl.float32, [2, BLOCK_M], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    sums = gl.allocate_shared_memory(gl.float32, [2, BLOCK_M], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for place in gl.static_range(2):
        mbarrier.init(ready.index(place), count=1)
    same: gl.constexpr = kv_cache.dtype.element_ty == dtype
    bars = make_bars(128 if same else 1, 2)
    results = (out, lse, part_out, part_lse, spans)
    exchange = (weights, maxima, sums, ready)
    strides = (stride_token, stride_head, stride_page, stride_row)
    gl.warp_specialize(
        [
            (_consume, (plan, walk, results, scales, q_tile, kv_tile, exchange, bars,
                        R, P, PAGE_SIZE, BLOCK_M, BLOCK_N, CHUNK, 0)),
            (_consume, (plan, walk, results, scales, q_tile, kv_tile, exchange, bars,
                        R, P, PAGE_SIZE, BLOCK_M, BLOCK_N, CHUNK, 1)),
            (produce, (plan, walk, q, kv_cache, kv_indices, strides, q_tile, kv_tile, (), bars,
                       R, P, PAGE_SIZE, BLOCK_M, BLOCK_N, CHUNK, True, False)),
        ],
        [4, 4],
        [224, 56] if same else [208, 88],
    )  # fmt: skip
