# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""The decode kernel for 64-row tiles on Hopper, in Gluon. Same arguments, meaning and plan as ``decode_kernel``.

Triton gives a product whose result feeds another product the layout [warps, 1]. Over 64 rows that is half of the
warps: two warpgroups then compute the same scores twice. Here the warpgroups share the columns of both products, and
the products of a block with V run on under the products of the next block with Q.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

__all__ = ["decode_hopper_kernel"]

LN_2: gl.constexpr = gl.constexpr(0.6931471805599453)

# Triton 3.9 renamed both.
_copy_async = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
_barrier = getattr(gl, "barrier", None) or gl.thread_barrier


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _request_lengths(qo_indptr, kv_indptr, kv_last_page_lens, request, valid, PAGE_SIZE: gl.constexpr):
    queries = gl.load(qo_indptr + request + 1, mask=valid, other=0) - gl.load(qo_indptr + request, mask=valid, other=0)
    pages = gl.load(kv_indptr + request + 1, mask=valid, other=0) - gl.load(kv_indptr + request, mask=valid, other=0)
    tail = gl.load(kv_last_page_lens + request, mask=valid, other=0)
    return queries, gl.where(pages > 0, (pages - 1) * PAGE_SIZE + tail, 0)


@gluon.jit
def _tile_blocks(
    qo_indptr, kv_indptr, kv_last_page_lens, first, num_requests, first_row, num_heads, max_seqlen_q,
    PAGE_SIZE: gl.constexpr, BLOCK_N: gl.constexpr, CHUNK: gl.constexpr,
):  # fmt: skip
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    request = first + gl.arange(0, CHUNK, layout)
    queries, keys = _request_lengths(
        qo_indptr, kv_indptr, kv_last_page_lens, request, request < num_requests, PAGE_SIZE
    )
    rows = gl.minimum(queries, max_seqlen_q) * num_heads
    return gl.where(first_row < rows, (keys + BLOCK_N - 1) // BLOCK_N, 0)


@gluon.jit
def _locate(
    qo_indptr, kv_indptr, kv_last_page_lens, position, num_requests, first_row, num_heads, max_seqlen_q,
    PAGE_SIZE: gl.constexpr, BLOCK_N: gl.constexpr, CHUNK: gl.constexpr,
):  # fmt: skip
    """The request that has the block at ``position`` of the line, and the position of its first block."""
    request = 0
    before = 0
    seen = 0
    for first in range(0, num_requests, CHUNK):
        blocks = _tile_blocks(
            qo_indptr, kv_indptr, kv_last_page_lens, first, num_requests, first_row, num_heads, max_seqlen_q,
            PAGE_SIZE, BLOCK_N, CHUNK,
        )  # fmt: skip
        behind = seen + gl.associative_scan(blocks, 0, _add) <= position
        request += gl.sum(behind.to(gl.int32), 0)
        before += gl.sum(gl.where(behind, blocks, 0), 0)
        seen += gl.sum(blocks, 0)
    return request, before


@gluon.jit
def _rows_of_block(
    kv_cache, table, block, stop, stride_page, stride_row, PAGE_SIZE: gl.constexpr, BLOCK_N: gl.constexpr,
    layout: gl.constexpr,
):  # fmt: skip
    """Addresses of a block's latent rows, and which of them are there: keys before ``stop``."""
    key = block * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(1, layout))
    live = key < stop
    page = gl.load(table + key // PAGE_SIZE, mask=live, other=0).to(gl.int64)
    return kv_cache + page * stride_page + (key % PAGE_SIZE) * stride_row, live


@gluon.jit
def _start_copy(c, r, rows, live, R: gl.constexpr, P: gl.constexpr, layout: gl.constexpr):
    """Start to copy rows into shared memory, zeros for those that are not there.

    An unused slot may hold NaN, which a weight of 0 would not stop: it is never read.
    """
    latent = gl.arange(0, R, gl.SliceLayout(0, layout))
    _copy_async(c, rows[:, None] + latent[None, :], mask=live[:, None])
    if P > 0:
        rope = R + gl.arange(0, P, gl.SliceLayout(0, layout))
        _copy_async(r, rows[:, None] + rope[None, :], mask=live[:, None])
    async_copy.commit_group()


@gluon.jit
def _weigh(scores, key, visible, m, l, qk_scale):
    """Online softmax: the weights of a block, the factor of what was summed before, the new maximum and sum."""
    scores = gl.where(key[None, :] < visible[:, None], scores, -float("inf"))
    m_new = gl.maximum(m, gl.max(scores, 1) * qk_scale)
    # a row that sees no key yet has -inf here, and -inf - -inf is NaN
    shift = gl.where(m_new == -float("inf"), 0.0, m_new)
    p = gl.exp2(scores * qk_scale - shift[:, None])
    alpha = gl.exp2(m - shift)
    return p, alpha, m_new, l * alpha + gl.sum(p, 1)


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
    tile = gl.program_id(0)
    program = gl.program_id(1)
    programs = gl.num_programs(1)
    first_row = tile * BLOCK_M
    dtype: gl.constexpr = kv_cache.dtype.element_ty
    warps: gl.constexpr = gl.num_warps() // 4
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, warps], [16, BLOCK_N // warps, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, warps], [16, min(R // warps, 256), 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    kv_layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    io_layout: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [gl.num_warps(), 1], [1, 0])
    shared: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    rope_shared: gl.constexpr = gl.NVMMASharedLayout(min(128, P * 2) if P > 0 else 128, 16, 2)
    s_rows: gl.constexpr = gl.SliceLayout(1, s_layout)
    o_rows: gl.constexpr = gl.SliceLayout(1, o_layout)
    io_rows: gl.constexpr = gl.SliceLayout(1, io_layout)

    total = 0
    for first in range(0, num_requests, CHUNK):
        total += gl.sum(
            _tile_blocks(qo_indptr, kv_indptr, kv_last_page_lens, first, num_requests, first_row, num_heads,
                         max_seqlen_q, PAGE_SIZE, BLOCK_N, CHUNK), 0
        )  # fmt: skip
    share = total // programs
    larger = total % programs
    position = program * share + gl.minimum(program, larger)
    end = position + share + (program < larger).to(gl.int32)

    qk_scale = softmax_scale_log2
    v_scale = 1.0
    if kv_scale is not None:
        v_scale = gl.load(kv_scale)
        qk_scale *= v_scale

    q_c = gl.allocate_shared_memory(dtype, [BLOCK_M, R], shared)
    q_r = gl.allocate_shared_memory(dtype, [BLOCK_M, P if P > 0 else 64], rope_shared)
    kv_c = gl.allocate_shared_memory(dtype, [2, BLOCK_N, R], shared)
    kv_r = gl.allocate_shared_memory(dtype, [2, BLOCK_N, P if P > 0 else 64], rope_shared)

    while position < end:
        request, before = _locate(
            qo_indptr, kv_indptr, kv_last_page_lens, position, num_requests, first_row, num_heads, max_seqlen_q,
            PAGE_SIZE, BLOCK_N, CHUNK,
        )  # fmt: skip
        queries, keys = _request_lengths(qo_indptr, kv_indptr, kv_last_page_lens, request, True, PAGE_SIZE)
        num_blocks = (keys + BLOCK_N - 1) // BLOCK_N
        low = position - before
        high = gl.minimum(num_blocks, end - before)
        first_token = gl.load(qo_indptr + request)
        rows = gl.minimum(queries, max_seqlen_q) * num_heads
        table = kv_indices + gl.load(kv_indptr + request)
        stop = gl.minimum(keys, high * BLOCK_N)
        for ahead in gl.static_range(2):
            address, there = _rows_of_block(
                kv_cache, table, low + ahead, stop, stride_page, stride_row, PAGE_SIZE, BLOCK_N, kv_layout
            )
            _start_copy(kv_c.index(ahead), kv_r.index(ahead), address, there, R, P, kv_layout)

        row = first_row + gl.arange(0, BLOCK_M, io_rows)
        q_row = q + (first_token + row // num_heads).to(gl.int64) * stride_token + (row % num_heads) * stride_head
        live = (row < rows)[:, None]
        q_c.store(
            gl.load(q_row[:, None] + gl.arange(0, R, gl.SliceLayout(0, io_layout))[None, :], mask=live, other=0.0)
        )
        if P > 0:
            rope = R + gl.arange(0, P, gl.SliceLayout(0, io_layout))
            q_r.store(gl.load(q_row[:, None] + rope[None, :], mask=live, other=0.0))

        visible = gl.minimum(keys - queries + 1 + (first_row + gl.arange(0, BLOCK_M, s_rows)) // num_heads, keys)
        m = gl.full([BLOCK_M], -float("inf"), gl.float32, s_rows)
        l = gl.zeros([BLOCK_M], gl.float32, s_rows)
        values = gl.zeros([BLOCK_M, R], gl.float32, o_layout)
        async_copy.wait_group(1)
        fence_async_shared()
        _barrier()
        scores = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, s_layout)
        scores = warpgroup_mma(q_c, kv_c.index(0).permute((1, 0)), scores, use_acc=False, is_async=True)
        if P > 0:
            scores = warpgroup_mma(q_r, kv_r.index(0).permute((1, 0)), scores, is_async=True)
        logits = warpgroup_mma_wait(0, deps=[scores])
        for block in range(low, high - 1):
            place = (block - low) % 2
            key = block * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(0, s_layout))
            p, alpha, m, l = _weigh(logits, key, visible, m, l, qk_scale)
            values = values * gl.convert_layout(alpha, o_rows)[:, None]
            p = gl.convert_layout(p.to(dtype), p_layout)
            acc = warpgroup_mma(p, kv_c.index(place), values, is_async=True)
            async_copy.wait_group(0)
            fence_async_shared()
            _barrier()
            scores = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, s_layout)
            scores = warpgroup_mma(q_c, kv_c.index(1 - place).permute((1, 0)), scores, use_acc=False, is_async=True)
            if P > 0:
                scores = warpgroup_mma(q_r, kv_r.index(1 - place).permute((1, 0)), scores, is_async=True)
            # The product with V is done, the one or two with Q may go on: this block's buffer is free.
            values = warpgroup_mma_wait(2 if P > 0 else 1, deps=[acc])
            _barrier()
            address, there = _rows_of_block(
                kv_cache, table, block + 2, stop, stride_page, stride_row, PAGE_SIZE, BLOCK_N, kv_layout
            )
            _start_copy(kv_c.index(place), kv_r.index(place), address, there, R, P, kv_layout)
            logits = warpgroup_mma_wait(0, deps=[scores])
        key = (high - 1) * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(0, s_layout))
        p, alpha, m, l = _weigh(logits, key, visible, m, l, qk_scale)
        values = values * gl.convert_layout(alpha, o_rows)[:, None]
        values = warpgroup_mma(gl.convert_layout(p.to(dtype), p_layout), kv_c.index((high - 1 - low) % 2), values)

        l = gl.where(l == 0.0, 1.0, l)  # of a row that sees no key: acc is 0 and m -inf
        values = values * gl.convert_layout(v_scale / l, o_rows)[:, None]
        log_sum = m + gl.log2(l)
        o_row = gl.arange(0, BLOCK_M, o_rows)
        latent = gl.arange(0, R, gl.SliceLayout(0, o_layout))
        s_row = gl.arange(0, BLOCK_M, s_rows)
        if (low == 0) & (high == num_blocks):
            base = first_token.to(gl.int64) * num_heads + first_row
            o_live = first_row + o_row < rows
            cells = out + (base + o_row)[:, None] * R + latent[None, :]
            gl.store(cells, values.to(dtype), mask=o_live[:, None])
            gl.store(lse + base + s_row, log_sum * LN_2, mask=first_row + s_row < rows)
        else:
            base = ((tile * programs + program) * 2 + (low == 0).to(gl.int32)).to(gl.int64) * BLOCK_M
            gl.store(part_out + (base + o_row)[:, None] * R + latent[None, :], values)
            gl.store(part_lse + base + s_row, log_sum)
        if low == 0:
            final = before + num_blocks - 1
            of_larger = larger * (share + 1)
            last = gl.where(
                final < of_larger, final // (share + 1), larger + (final - of_larger) // gl.maximum(share, 1)
            )
            span = spans + (tile * num_requests + request) * 2
            gl.store(span, program)
            gl.store(span + 1, last)
        position = before + high
