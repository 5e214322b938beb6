# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""The decode kernel for narrow tiles on Hopper, in Gluon. Same arguments, meaning and plan as ``decode_kernel``.

Both products are turned round: keys and latent columns are the rows of the matrix instruction, query rows its
columns. So a tile of 16 rows uses whole 64-row instructions that take both operands from shared memory, and the
registers hold little but the sums: nothing stands in the way of two blocks in flight.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from mla_ops.backends.triton.decode_hopper import (
    LN_2,
    _barrier,
    _locate,
    _request_lengths,
    _rows_of_block,
    _start_copy,
    _tile_blocks,
)

__all__ = ["decode_hopper_narrow_kernel"]


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
    tile = gl.program_id(0)
    program = gl.program_id(1)
    programs = gl.num_programs(1)
    first_row = tile * BLOCK_M
    dtype: gl.constexpr = kv_cache.dtype.element_ty
    groups: gl.constexpr = gl.num_warps() // 4
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, groups], [16, BLOCK_M // groups, 16])
    kv_layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    io_layout: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [gl.num_warps(), 1], [1, 0])
    shared: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    rope_shared: gl.constexpr = gl.NVMMASharedLayout(min(128, P * 2) if P > 0 else 128, 16, 2)
    columns: gl.constexpr = gl.SliceLayout(0, s_layout)
    keys_of: gl.constexpr = gl.SliceLayout(1, s_layout)
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
    weights = gl.allocate_shared_memory(dtype, [BLOCK_N, BLOCK_M], gl.NVMMASharedLayout(min(BLOCK_M * 2, 128), 16, 2))

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

        visible = gl.minimum(keys - queries + 1 + (first_row + gl.arange(0, BLOCK_M, columns)) // num_heads, keys)
        m = gl.full([BLOCK_M], -float("inf"), gl.float32, columns)
        sums = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, s_layout)
        values = gl.zeros([R, BLOCK_M], gl.float32, s_layout)
        for block in range(low, high):
            place = (block - low) % 2
            async_copy.wait_group(1)
            fence_async_shared()
            _barrier()
            scores = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, s_layout)
            scores = warpgroup_mma(kv_c.index(place), q_c.permute((1, 0)), scores, use_acc=False, is_async=True)
            if P > 0:
                scores = warpgroup_mma(kv_r.index(place), q_r.permute((1, 0)), scores, is_async=True)
            address, there = _rows_of_block(
                kv_cache, table, block + 2, stop, stride_page, stride_row, PAGE_SIZE, BLOCK_N, kv_layout
            )
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
            sums = sums * alpha[None, :] + p
            values = values * alpha[None, :]
            fence_async_shared()
            _barrier()
            values = warpgroup_mma(kv_c.index(place).permute((1, 0)), weights, values)
            _barrier()
            _start_copy(kv_c.index(place), kv_r.index(place), address, there, R, P, kv_layout)
        async_copy.wait_group(0)

        l = gl.sum(sums, 0)
        l = gl.where(l == 0.0, 1.0, l)  # of a row that sees no key: values are 0 and m -inf
        values = values * (v_scale / l)[None, :]
        log_sum = m + gl.log2(l)
        column = gl.arange(0, BLOCK_M, columns)
        latent = gl.arange(0, R, keys_of)
        if (low == 0) & (high == num_blocks):
            target = first_token.to(gl.int64) * num_heads + first_row + column
            in_request = first_row + column < rows
            gl.store(out + target[None, :] * R + latent[:, None], values.to(dtype), mask=in_request[None, :])
            gl.store(lse + target, log_sum * LN_2, mask=in_request)
        else:
            target = ((tile * programs + program) * 2 + (low == 0).to(gl.int32)).to(gl.int64) * BLOCK_M + column
            gl.store(part_out + target[None, :] * R + latent[:, None], values)
            gl.store(part_lse + target, log_sum)
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
