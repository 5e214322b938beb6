# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""The prefill kernel on Hopper, in Gluon. Same meaning as ``prefill_kernel``.

Two warpgroups have 64 query rows each and read the same blocks of keys, which a third one copies, from the last block
to the first. The softmax of a block runs while the tensor cores multiply the weights of the block before with V, and
while the other warpgroup multiplies.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from mla_ops.backends.triton.hopper import LN_2, copy_async, signal, weigh

__all__ = ["prefill_hopper_kernel"]


@gluon.jit
def _copy_rows(target, base, row, live, stride, FIRST: gl.constexpr, WIDTH: gl.constexpr, layout: gl.constexpr):
    column = FIRST + gl.arange(0, WIDTH, gl.SliceLayout(0, layout))
    copy_async(target, base + (row.to(gl.int64) * stride)[:, None] + column[None, :], mask=live[:, None])


@gluon.jit
def _produce(
    tile, q_head, k_head, v_head, stride_q, stride_k, stride_v, q_tile, k_tile, v_tile, bars,
    WIDE: gl.constexpr, NARROW: gl.constexpr, V: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
):  # fmt: skip
    first_row, queries, keys, blocks = tile[0], tile[1], tile[2], tile[5]
    q_full, k_full, k_free, v_full, v_free = bars
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    rows_layout: gl.constexpr = gl.SliceLayout(1, layout)
    for half in gl.static_range(2):
        row = first_row + half * (BLOCK_M // 2) + gl.arange(0, BLOCK_M // 2, rows_layout)
        live = (row < queries) & (blocks > 0)
        _copy_rows(q_tile[0].index(half), q_head, row, live, stride_q, 0, WIDE, layout)
        if NARROW > 0:
            _copy_rows(q_tile[1].index(half), q_head, row, live, stride_q, WIDE, NARROW, layout)
    async_copy.mbarrier_arrive(q_full, increment_count=False)
    for count in range(blocks):
        place = count % 2
        phase = (count // 2 + 1) % 2
        key = (blocks - 1 - count) * BLOCK_N + gl.arange(0, BLOCK_N, rows_layout)
        # What lies behind the last key belongs to another request and may be NaN: it is never read.
        there = key < keys
        mbarrier.wait(k_free.index(place), phase)
        _copy_rows(k_tile[0].index(place), k_head, key, there, stride_k, 0, WIDE, layout)
        if NARROW > 0:
            _copy_rows(k_tile[1].index(place), k_head, key, there, stride_k, WIDE, NARROW, layout)
        async_copy.mbarrier_arrive(k_full.index(place), increment_count=False)
        mbarrier.wait(v_free.index(place), phase)
        _copy_rows(v_tile.index(place), v_head, key, there, stride_v, 0, V, layout)
        async_copy.mbarrier_arrive(v_full.index(place), increment_count=False)


@gluon.jit
def _start_scores(q_tile, k_tile, k_full, count, NARROW: gl.constexpr, MINE: gl.constexpr, scores):
    place = count % 2
    mbarrier.wait(k_full.index(place), (count // 2) % 2)
    fence_async_shared()
    keys = k_tile[0].index(place).permute((1, 0))
    scores = warpgroup_mma(q_tile[0].index(MINE), keys, scores, use_acc=False, is_async=True)
    if NARROW > 0:
        keys = k_tile[1].index(place).permute((1, 0))
        scores = warpgroup_mma(q_tile[1].index(MINE), keys, scores, is_async=True)
    return scores


@gluon.jit
def _blocks(
    q_tile, k_tile, v_tile, bars, high, low, last, visible, qk_scale, m, l, p, values, zeros, column,
    NARROW: gl.constexpr, BLOCK_N: gl.constexpr, MINE: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """Score and weigh blocks high - 1 down to low of ``last`` + 1; each time the weights of the one before are used."""
    k_full, k_free, v_full, v_free = bars[1], bars[2], bars[3], bars[4]
    dtype: gl.constexpr = v_tile.dtype
    p_layout: gl.constexpr = p.type.layout
    o_rows: gl.constexpr = gl.SliceLayout(1, values.type.layout)
    for block in range(high - 1, low - 1, -1):
        count = last - block
        scores = _start_scores(q_tile, k_tile, k_full, count, NARROW, MINE, zeros)
        before = (count - 1) % 2
        mbarrier.wait(v_full.index(before), ((count - 1) // 2) % 2)
        fence_async_shared()
        sums = warpgroup_mma(p, v_tile.index(before), values, is_async=True)
        logits = warpgroup_mma_wait(1, deps=[scores])
        signal(k_free.index(count % 2))
        weights, alpha, m, l = weigh(logits, block * BLOCK_N + column, visible, m, l, qk_scale, MASKED)
        values = warpgroup_mma_wait(0, deps=[sums])
        signal(v_free.index(before))
        p = gl.convert_layout(weights.to(dtype), p_layout)
        values = values * gl.convert_layout(alpha, o_rows)[:, None]
    return m, l, p, values


@gluon.jit
def _consume(
    tile, head, first_q, out, lse, num_heads, qk_scale, q_tile, k_tile, v_tile, bars,
    NARROW: gl.constexpr, V: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, CAUSAL: gl.constexpr,
    MINE: gl.constexpr,
):  # fmt: skip
    first_row, queries, keys, shift, whole, blocks = tile
    q_full, k_full, k_free, v_full = bars[0], bars[1], bars[2], bars[3]
    ROWS: gl.constexpr = BLOCK_M // 2
    dtype: gl.constexpr = v_tile.dtype
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, V, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    s_rows: gl.constexpr = gl.SliceLayout(1, s_layout)
    o_rows: gl.constexpr = gl.SliceLayout(1, o_layout)
    column = gl.arange(0, BLOCK_N, gl.SliceLayout(0, s_layout))
    zeros = gl.zeros([ROWS, BLOCK_N], gl.float32, s_layout)
    row = first_row + MINE * ROWS + gl.arange(0, ROWS, s_rows)
    m = gl.full([ROWS], -float("inf"), gl.float32, s_rows)
    l = gl.zeros([ROWS], gl.float32, s_rows)
    values = gl.zeros([ROWS, V], gl.float32, o_layout)
    if blocks > 0:
        visible = gl.zeros([ROWS], gl.int32, s_rows) + keys
        if CAUSAL:
            visible = gl.minimum(row + shift + 1, keys)
        last = blocks - 1
        mbarrier.wait(q_full, 0)
        scores = _start_scores(q_tile, k_tile, k_full, 0, NARROW, MINE, zeros)
        logits = warpgroup_mma_wait(0, deps=[scores])
        signal(k_free.index(0))
        weights, _alpha, m, l = weigh(logits, last * BLOCK_N + column, visible, m, l, qk_scale, True)
        p = gl.convert_layout(weights.to(dtype), p_layout)
        masked = gl.minimum(whole, last)
        m, l, p, values = _blocks(
            q_tile, k_tile, v_tile, bars, last, masked, last, visible, qk_scale, m, l, p, values, zeros, column,
            NARROW, BLOCK_N, MINE, True,
        )  # fmt: skip
        m, l, p, values = _blocks(
            q_tile, k_tile, v_tile, bars, masked, 0, last, visible, qk_scale, m, l, p, values, zeros, column,
            NARROW, BLOCK_N, MINE, False,
        )  # fmt: skip
        mbarrier.wait(v_full.index(last % 2), (last // 2) % 2)
        fence_async_shared()
        values = warpgroup_mma(p, v_tile.index(last % 2), values)
    l = gl.where(l == 0.0, 1.0, l)  # of a row that sees no key: values are 0 and m -inf
    values = values * gl.convert_layout(1.0 / l, o_rows)[:, None]
    o_row = first_row + MINE * ROWS + gl.arange(0, ROWS, o_rows)
    target = (first_q + o_row).to(gl.int64) * num_heads + head
    cells = out + target[:, None] * V + gl.arange(0, V, gl.SliceLayout(0, o_layout))[None, :]
    gl.store(cells, values.to(out.dtype.element_ty), mask=(o_row < queries)[:, None])
    in_lse = lse + (first_q + row).to(gl.int64) * num_heads + head
    gl.store(in_lse, (m + gl.log2(l)) * LN_2, mask=row < queries)


@gluon.jit
def _clear_rows(out, lse, low, high, head, num_heads, V: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    for start in range(low, high, 16):
        token = start + gl.arange(0, 16, gl.SliceLayout(1, layout))
        target = token.to(gl.int64) * num_heads + head
        cells = out + target[:, None] * V + gl.arange(0, V, gl.SliceLayout(0, layout))[None, :]
        gl.store(cells, gl.zeros([16, V], out.dtype.element_ty, layout), mask=(token < high)[:, None])
        gl.store(lse + target, gl.full([16], -float("inf"), gl.float32, token.type.layout), mask=token < high)


@gluon.jit(
    do_not_specialize=[
        "softmax_scale_log2", "num_tokens", "num_requests", "num_heads", "max_seqlen_q", "max_seqlen_k",
    ]
)  # fmt: skip
def prefill_hopper_kernel(
    q, k, v, cu_seqlens_q, cu_seqlens_k, out, lse,
    softmax_scale_log2, num_tokens, num_requests, num_heads, max_seqlen_q, max_seqlen_k,
    stride_q, stride_q_head, stride_k, stride_k_head, stride_v, stride_v_head,
    WIDE: gl.constexpr, NARROW: gl.constexpr, V: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    CAUSAL: gl.constexpr, PRECISION: gl.constexpr,
):  # fmt: skip
    """One block of query rows of one head of one request. Grid and clearing as in ``prefill_kernel``."""
    dtype: gl.constexpr = q.dtype.element_ty
    block = gl.program_id(0)
    head = gl.program_id(1)
    request = gl.program_id(2)
    first_q = gl.load(cu_seqlens_q + request)
    first_k = gl.load(cu_seqlens_k + request)
    all_queries = gl.load(cu_seqlens_q + request + 1) - first_q
    all_keys = gl.load(cu_seqlens_k + request + 1) - first_k
    queries = gl.minimum(all_queries, max_seqlen_q)
    keys = gl.minimum(all_keys, max_seqlen_k)
    if block == 0:
        _clear_rows(out, lse, first_q + queries, first_q + all_queries, head, num_heads, V)
        if request == 0:
            _clear_rows(out, lse, 0, gl.load(cu_seqlens_q), head, num_heads, V)
            _clear_rows(out, lse, gl.load(cu_seqlens_q + num_requests), num_tokens, head, num_heads, V)
    # The longest rows of a causal block first, so that the short ones fill the end.
    first_row = (gl.cdiv(queries, BLOCK_M) - 1 - block) * BLOCK_M
    shift = all_keys - all_queries  # the last query sees the last key
    end = keys
    whole = keys // BLOCK_N  # blocks that every row sees whole
    if CAUSAL:
        end = gl.minimum(gl.maximum(first_row + BLOCK_M + shift, 0), keys)
        whole = gl.minimum(gl.maximum(first_row + shift + 1, 0), keys) // BLOCK_N
    if first_row < 0:  # nothing to do, which all warpgroups must find
        first_row = 0
        queries = 0
        end = 0
    tile = (first_row, queries, keys, shift, whole, gl.cdiv(end, BLOCK_N))

    ROWS: gl.constexpr = BLOCK_M // 2
    narrow_width: gl.constexpr = NARROW if NARROW > 0 else 16
    wide_shared: gl.constexpr = gl.NVMMASharedLayout(min(128, WIDE * 2), 16, 2)
    narrow_shared: gl.constexpr = gl.NVMMASharedLayout(min(128, narrow_width * 2), 16, 2)
    v_shared: gl.constexpr = gl.NVMMASharedLayout(min(128, V * 2), 16, 2)
    q_tile = (
        gl.allocate_shared_memory(dtype, [2, ROWS, WIDE], wide_shared),
        gl.allocate_shared_memory(dtype, [2, ROWS, narrow_width], narrow_shared),
    )
    k_tile = (
        gl.allocate_shared_memory(dtype, [2, BLOCK_N, WIDE], wide_shared),
        gl.allocate_shared_memory(dtype, [2, BLOCK_N, narrow_width], narrow_shared),
    )
    v_tile = gl.allocate_shared_memory(dtype, [2, BLOCK_N, V], v_shared)
    q_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    k_free = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    v_free = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    # Each of the 128 copying threads arrives when its copies are there, and each warpgroup that reads once.
    mbarrier.init(q_full, count=128)
    for place in gl.static_range(2):
        mbarrier.init(k_full.index(place), count=128)
        mbarrier.init(k_free.index(place), count=2)
        mbarrier.init(v_full.index(place), count=128)
        mbarrier.init(v_free.index(place), count=2)
    bars = (q_full, k_full, k_free, v_full, v_free)
    q_head = q + first_q.to(gl.int64) * stride_q + head * stride_q_head
    k_head = k + first_k.to(gl.int64) * stride_k + head * stride_k_head
    v_head = v + first_k.to(gl.int64) * stride_v + head * stride_v_head
    gl.warp_specialize(
        [
            (_consume, (tile, head, first_q, out, lse, num_heads, softmax_scale_log2, q_tile, k_tile, v_tile, bars,
                        NARROW, V, BLOCK_M, BLOCK_N, CAUSAL, 0)),
            (_consume, (tile, head, first_q, out, lse, num_heads, softmax_scale_log2, q_tile, k_tile, v_tile, bars,
                        NARROW, V, BLOCK_M, BLOCK_N, CAUSAL, 1)),
            (_produce, (tile, q_head, k_head, v_head, stride_q, stride_k, stride_v, q_tile, k_tile, v_tile, bars,
                        WIDE, NARROW, V, BLOCK_M, BLOCK_N)),
        ],
        [4, 4],
        [224, 56],
    )  # fmt: skip
