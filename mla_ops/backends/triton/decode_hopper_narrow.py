# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""The decode kernel for narrow tiles on Hopper, in Gluon. Same arguments, meaning and plan as ``decode_kernel``.

Both products are turned round: keys and latent columns are the rows of the matrix instruction, query rows its
columns. So a tile of 16 rows uses whole 64-row instructions that take both operands from shared memory, and the
registers hold little but the sums. A warpgroup of its own copies, over the borders of requests.
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
from mla_ops.backends.triton.hopper import barrier, signal

__all__ = ["decode_hopper_narrow_kernel"]


@gluon.jit
def _consume(
    plan, walk, results, scales, q_tile, kv_tile, weights, bars,
    R: gl.constexpr, P: gl.constexpr, PAGE_SIZE: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    CHUNK: gl.constexpr,
):  # fmt: skip
    position = walk[0]
    qk_scale, v_scale = scales
    q_c, q_r = q_tile
    kv_near, kv_far, kv_r = kv_tile
    full_near, full_far, free_near, free_far, q_full, q_free = bars
    HALF: gl.constexpr = R // 2
    dtype: gl.constexpr = kv_near.dtype
    groups: gl.constexpr = gl.num_warps() // 4
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, groups], [16, BLOCK_M // groups, 16])
    columns: gl.constexpr = gl.SliceLayout(0, layout)
    keys_of: gl.constexpr = gl.SliceLayout(1, layout)
    q_phase = 0
    phases = 0  # a bit for each place
    while position < walk[1]:
        part = segment(plan, walk, position, PAGE_SIZE, BLOCK_N, CHUNK)
        request, before, queries, keys, low, high, position = part
        column = gl.arange(0, BLOCK_M, columns)
        visible = gl.minimum(keys - queries + 1 + (plan[4] + column) // plan[5], keys)
        m = gl.full([BLOCK_M], -float("inf"), gl.float32, columns)
        sums = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, layout)
        left = gl.zeros([HALF, BLOCK_M], gl.float32, layout)
        right = gl.zeros([HALF, BLOCK_M], gl.float32, layout)
        mbarrier.wait(q_full, q_phase)
        q_phase ^= 1
        for block in range(low, high):
            place = (block - low) % 2
            phase = (phases >> place) & 1
            phases ^= 1 << place
            c_near = kv_near.index(place)
            c_far = kv_far.index(place)
            scores = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, layout)
            mbarrier.wait(full_near.index(place), phase)
            fence_async_shared()
            scores = warpgroup_mma(c_near, q_c.index(0).permute((1, 0)), scores, use_acc=False, is_async=True)
            mbarrier.wait(full_far.index(place), phase)
            fence_async_shared()
            scores = warpgroup_mma(c_far, q_c.index(1).permute((1, 0)), scores, is_async=True)
            if P > 0:
                scores = warpgroup_mma(kv_r.index(place), q_r.permute((1, 0)), scores, is_async=True)
            logits = warpgroup_mma_wait(0, deps=[scores])
            key = block * BLOCK_N + gl.arange(0, BLOCK_N, keys_of)
            logits = gl.where(key[:, None] < visible[None, :], logits, -float("inf"))
            m_new = gl.maximum(m, gl.max(logits, 0) * qk_scale)
            # a row that sees no key yet has -inf here, and -inf - -inf is NaN
            shift = gl.where(m_new == -float("inf"), 0.0, m_new)
            p = gl.exp2(logits * qk_scale - shift[None, :])
            alpha = gl.exp2(m - shift)
            m = m_new
            weights.store(p.to(dtype))
            fence_async_shared()
            sums = sums * alpha[None, :] + p
            left = left * alpha[None, :]
            right = right * alpha[None, :]
            barrier()
            left_sums = warpgroup_mma(c_near.permute((1, 0)), weights, left, is_async=True)
            right_sums = warpgroup_mma(c_far.permute((1, 0)), weights, right, is_async=True)
            left = warpgroup_mma_wait(1, deps=[left_sums])
            signal(free_near.index(place))
            right = warpgroup_mma_wait(0, deps=[right_sums])
            signal(free_far.index(place))
        signal(q_free)

        l = gl.sum(sums, 0)
        l = gl.where(l == 0.0, 1.0, l)  # of a row that sees no key: values are 0 and m -inf
        factor = (v_scale / l)[None, :]
        tiles = (left * factor, right * factor)
        store_part(plan, results, part, tiles, m + gl.log2(l), R, BLOCK_M, BLOCK_N, 0, 1)
        if low == 0:
            note_span(results[4], plan, walk, request, before, keys, BLOCK_N)


@gluon.jit(do_not_specialize=["softmax_scale_log2", "num_requests", "num_heads", "max_seqlen_q"])
def decode_hopper_narrow_kernel(
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
    weights = gl.allocate_shared_memory(dtype, [BLOCK_N, BLOCK_M], gl.NVMMASharedLayout(min(BLOCK_M * 2, 128), 16, 2))
    same: gl.constexpr = kv_cache.dtype.element_ty == dtype
    staged = ()
    if not same:
        width: gl.constexpr = min(64, R // 2)
        pieces: gl.constexpr = 2 * (R // 2 // width) + (1 if P > 0 else 0)
        staged = gl.allocate_shared_memory(gl.int32, [pieces, BLOCK_N, 16], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    bars = make_bars(128 if same else 1, 1)
    results = (out, lse, part_out, part_lse, spans)
    strides = (stride_token, stride_head, stride_page, stride_row)
    gl.warp_specialize(
        [
            (_consume, (plan, walk, results, scales, q_tile, kv_tile, weights, bars,
                        R, P, PAGE_SIZE, BLOCK_M, BLOCK_N, CHUNK)),
            (produce, (plan, walk, q, kv_cache, kv_indices, strides, q_tile, kv_tile, staged, bars,
                       R, P, PAGE_SIZE, BLOCK_M, BLOCK_N, CHUNK, False, not same)),
        ],
        [4],
        [104],
    )  # fmt: skip
