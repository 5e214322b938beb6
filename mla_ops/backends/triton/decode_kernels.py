# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, attr-defined"
"""Kernels of :mod:`mla_ops.backends.triton.decode`.

A *tile* is BLOCK_M of a request's rows, a row being a (query, head) pair: row = query * H + head. A *block* is
BLOCK_N of a request's keys. For each tile number, all blocks of all requests lie in one line, request after request,
and the programs of that tile number take equal shares of the line. So a program works on the end of one request, on
whole ones, and on the beginning of another; the plan is arithmetic over the lengths on the device, done by each
program for itself, and nothing about it is known on the host.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

__all__ = ["decode_kernel", "merge_kernel"]

LN_2: tl.constexpr = tl.constexpr(0.6931471805599453)


@triton.jit
def _request_lengths(qo_indptr, kv_indptr, kv_last_page_lens, request, valid, PAGE_SIZE: tl.constexpr):
    """Query tokens and keys of requests; zeros where not ``valid``."""
    queries = tl.load(qo_indptr + request + 1, mask=valid, other=0) - tl.load(qo_indptr + request, mask=valid, other=0)
    pages = tl.load(kv_indptr + request + 1, mask=valid, other=0) - tl.load(kv_indptr + request, mask=valid, other=0)
    tail = tl.load(kv_last_page_lens + request, mask=valid, other=0)
    return queries, tl.where(pages > 0, (pages - 1) * PAGE_SIZE + tail, 0)


@triton.jit
def _tile_blocks(
    qo_indptr, kv_indptr, kv_last_page_lens, first, num_requests, first_row, num_heads, max_seqlen_q,
    PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """[CHUNK] blocks that requests first.. have in the tile that begins at first_row."""
    request = first + tl.arange(0, CHUNK)
    queries, keys = _request_lengths(
        qo_indptr, kv_indptr, kv_last_page_lens, request, request < num_requests, PAGE_SIZE
    )
    rows = tl.minimum(queries, max_seqlen_q) * num_heads
    return tl.where(first_row < rows, (keys + BLOCK_N - 1) // BLOCK_N, 0)


@triton.jit
def _attend(
    q_c, q_r, m, l, acc, kv_cache, table, low, high, keys, visible, qk_scale, stride_page, stride_row,
    R: tl.constexpr, P: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Online softmax of one tile over blocks low..high of a request."""
    offset = tl.arange(0, BLOCK_N)
    latent = tl.arange(0, R)
    BLOCKS_OF_PAGE: tl.constexpr = PAGE_SIZE // BLOCK_N
    IN_ONE_PAGE: tl.constexpr = PAGE_SIZE % BLOCK_N == 0
    page = 0
    if IN_ONE_PAGE:
        page = tl.load(table + low // BLOCKS_OF_PAGE, mask=low < high, other=0)
    for block in range(low, high):
        key = block * BLOCK_N + offset
        live = key < keys
        if IN_ONE_PAGE:
            row = page.to(tl.int64) * stride_page + ((block % BLOCKS_OF_PAGE) * BLOCK_N + offset) * stride_row
            # one block ahead: the address of a tile must not wait for the table
            page = tl.load(table + (block + 1) // BLOCKS_OF_PAGE, mask=block + 1 < high, other=0)
        else:
            pages = tl.load(table + key // PAGE_SIZE, mask=live, other=0)
            row = pages.to(tl.int64) * stride_page + (key % PAGE_SIZE) * stride_row
        rows = kv_cache + row[:, None]
        # An unused slot may hold NaN, which a weight of 0 would not stop: it is never loaded.
        c = tl.load(rows + latent[None, :], mask=live[:, None], other=0.0).to(q_c.dtype)
        scores = tl.dot(q_c, tl.trans(c), input_precision=PRECISION)
        if P > 0:
            rope = R + tl.arange(0, P)
            r = tl.load(rows + rope[None, :], mask=live[:, None], other=0.0).to(q_c.dtype)
            scores = tl.dot(q_r, tl.trans(r), scores, input_precision=PRECISION)
        scores = tl.where(key[None, :] < visible[:, None], scores, -float("inf"))
        m_new = tl.maximum(m, tl.max(scores, 1) * qk_scale)
        # a row that sees no key yet has -inf here, and -inf - -inf is NaN
        shift = tl.where(m_new == -float("inf"), 0.0, m_new)
        p = tl.exp2(scores * qk_scale - shift[:, None])
        alpha = tl.exp2(m - shift)
        l = l * alpha + tl.sum(p, 1)
        acc = acc * alpha[:, None]
        acc = tl.dot(p.to(c.dtype), c, acc, input_precision=PRECISION)
        m = m_new
    return m, l, acc


@triton.jit(do_not_specialize=["softmax_scale_log2", "num_requests", "num_heads", "max_seqlen_q"])
def decode_kernel(
    q, kv_cache, qo_indptr, kv_indptr, kv_indices, kv_last_page_lens, q_scale, kv_scale,
    out, lse, part_out, part_lse, spans,
    softmax_scale_log2, num_requests, num_heads, max_seqlen_q,
    stride_token, stride_head, stride_page, stride_row,
    R: tl.constexpr, P: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    CHUNK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One share of one tile number's line of blocks.

    Grid (tiles of a request, programs of a tile number): neighbours in launch order read the same keys.
    A request that lies whole in the share goes to ``out [T, H, R]`` and ``lse [T, H]``. Of a request that does not,
    the part goes to ``part_out [tiles, programs, 2, BLOCK_M, R]`` and ``part_lse [tiles, programs, 2, BLOCK_M]``
    (base 2): place 1 where its first block is in this share, place 0 where it began earlier. The program that has a
    request's first block notes in ``spans [tiles, B, 2]`` which programs have its first and its last block.
    """
    tile = tl.program_id(0)
    program = tl.program_id(1)
    programs = tl.num_programs(1)
    first_row = tile * BLOCK_M

    total = 0
    for first in range(0, num_requests, CHUNK):
        total += tl.sum(
            _tile_blocks(qo_indptr, kv_indptr, kv_last_page_lens, first, num_requests, first_row, num_heads,
                         max_seqlen_q, PAGE_SIZE, BLOCK_N, CHUNK)
        )  # fmt: skip
    # the first `larger` programs have one block more
    share = total // programs
    larger = total % programs
    position = program * share + tl.minimum(program, larger)
    end = position + share + (program < larger).to(tl.int32)

    qk_scale = softmax_scale_log2
    if q_scale is not None:
        qk_scale *= tl.load(q_scale)
    v_scale = 1.0
    if kv_scale is not None:
        v_scale = tl.load(kv_scale)
        qk_scale *= v_scale

    row = first_row + tl.arange(0, BLOCK_M)
    query = row // num_heads
    head = row % num_heads
    latent = tl.arange(0, R)

    while position < end:
        # The request of this block is the number of requests that end at or before it.
        request = 0
        before = 0
        seen = 0
        for first in range(0, num_requests, CHUNK):
            blocks = _tile_blocks(
                qo_indptr, kv_indptr, kv_last_page_lens, first, num_requests, first_row, num_heads, max_seqlen_q,
                PAGE_SIZE, BLOCK_N, CHUNK,
            )  # fmt: skip
            behind = seen + tl.cumsum(blocks, 0) <= position
            request += tl.sum(behind.to(tl.int32))
            before += tl.sum(tl.where(behind, blocks, 0))
            seen += tl.sum(blocks)
        queries, keys = _request_lengths(qo_indptr, kv_indptr, kv_last_page_lens, request, True, PAGE_SIZE)
        num_blocks = (keys + BLOCK_N - 1) // BLOCK_N
        low = position - before
        high = tl.minimum(num_blocks, end - before)

        token = tl.load(qo_indptr + request) + query
        live = row < tl.minimum(queries, max_seqlen_q) * num_heads
        q_row = q + token.to(tl.int64) * stride_token + head * stride_head
        dtype: tl.constexpr = out.dtype.element_ty  # fp8 is for storage: products are of the output's dtype
        q_c = tl.load(q_row[:, None] + latent[None, :], mask=live[:, None], other=0.0).to(dtype)
        q_r = q_c
        if P > 0:
            q_r = tl.load(q_row[:, None] + R + tl.arange(0, P)[None, :], mask=live[:, None], other=0.0).to(dtype)

        # The last query sees the last key: query i of n sees the keys before keys - (n - 1 - i).
        visible = tl.minimum(keys - queries + 1 + query, keys)
        table = kv_indices + tl.load(kv_indptr + request)
        m = tl.full([BLOCK_M], -float("inf"), tl.float32)
        l = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, R], tl.float32)
        m, l, acc = _attend(
            q_c, q_r, m, l, acc, kv_cache, table, low, high, keys, visible, qk_scale, stride_page, stride_row,
            R, P, PAGE_SIZE, BLOCK_N, PRECISION,
        )  # fmt: skip

        l = tl.where(l == 0.0, 1.0, l)  # of a row that sees no key: acc is 0 and m -inf
        acc = acc * (v_scale / l)[:, None]
        log_sum = m + tl.log2(l)
        if (low == 0) & (high == num_blocks):
            target = token.to(tl.int64) * num_heads + head
            tl.store(out + target[:, None] * R + latent[None, :], acc.to(out.dtype.element_ty), mask=live[:, None])
            tl.store(lse + target, log_sum * LN_2, mask=live)
        else:
            place = ((tile * programs + program) * 2 + (low == 0).to(tl.int32)).to(tl.int64) * BLOCK_M
            target = place + tl.arange(0, BLOCK_M)
            tl.store(part_out + target[:, None] * R + latent[None, :], acc)
            tl.store(part_lse + target, log_sum)
        if low == 0:
            final = before + num_blocks - 1
            of_larger = larger * (share + 1)
            last = tl.where(
                final < of_larger, final // (share + 1), larger + (final - of_larger) // tl.maximum(share, 1)
            )
            span = spans + (tile * num_requests + request) * 2
            tl.store(span, program)
            tl.store(span + 1, last)
        position = before + high


@triton.jit
def _clear_row(
    out, lse, token, num_heads, first_head, first_column, R: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    head = first_head + tl.arange(0, ROWS)
    target = token.to(tl.int64) * num_heads + head
    cells = out + target[:, None] * R + first_column + tl.arange(0, COLUMNS)[None, :]
    tl.store(cells, tl.zeros([ROWS, COLUMNS], out.dtype.element_ty), mask=(head < num_heads)[:, None])
    tl.store(lse + target, tl.full([ROWS], -float("inf"), tl.float32), mask=head < num_heads)


@triton.jit(do_not_specialize=["programs", "num_tokens", "num_requests", "num_heads", "max_seqlen_q"])
def merge_kernel(
    qo_indptr, kv_indptr, kv_last_page_lens, out, lse, part_out, part_lse, spans,
    programs, num_tokens, num_requests, num_heads, max_seqlen_q,
    R: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, ROWS: tl.constexpr, PARTS: tl.constexpr,
    COLUMNS: tl.constexpr, CHUNK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Merge the parts of a request's rows, and write the rows that no key or no request has.

    Grid (row groups of a request, B, R / COLUMNS): groups of ROWS rows, PARTS parts at a time, either of them 1.
    With EARLY it may begin before the decode kernel ends.
    """
    group = tl.program_id(0)
    request = tl.program_id(1)
    first_row = group * ROWS
    first_column = tl.program_id(2) * COLUMNS
    queries, keys = _request_lengths(qo_indptr, kv_indptr, kv_last_page_lens, request, True, PAGE_SIZE)
    first_token = tl.load(qo_indptr + request)
    end_token = tl.load(qo_indptr + num_requests)
    head_tokens = tl.load(qo_indptr)
    if EARLY:
        # In every program, though some need nothing of the decode kernel: what comes next waits for the merge alone.
        gdc_wait()

    # Rows before the first request and behind the last one, dealt out over the requests' programs.
    if first_row < num_heads:
        for stray in range(request, head_tokens + num_tokens - end_token, num_requests):
            token = tl.where(stray < head_tokens, stray, stray - head_tokens + end_token)
            _clear_row(out, lse, token, num_heads, first_row, first_column, R, ROWS, COLUMNS)
        for token in range(first_token + max_seqlen_q, first_token + queries):
            _clear_row(out, lse, token, num_heads, first_row, first_column, R, ROWS, COLUMNS)

    row = first_row + tl.arange(0, ROWS)
    live = row < tl.minimum(queries, max_seqlen_q) * num_heads
    target = (first_token + row // num_heads).to(tl.int64) * num_heads + row % num_heads
    if first_row < tl.minimum(queries, max_seqlen_q) * num_heads:
        latent = first_column + tl.arange(0, COLUMNS)
        if keys == 0:
            cells = out + target[:, None] * R + latent[None, :]
            tl.store(cells, tl.zeros([ROWS, COLUMNS], out.dtype.element_ty), mask=live[:, None])
            tl.store(lse + target, tl.full([ROWS], -float("inf"), tl.float32), mask=live)
        else:
            tile = first_row // BLOCK_M
            span = spans + (tile * num_requests + request) * 2
            first = tl.load(span)
            last = tl.load(span + 1)
            if first != last:
                # Part of program p: place 1 in the first program of the span, else 0.
                in_tile = row - tile * BLOCK_M
                peaks = tl.full([ROWS, CHUNK], -float("inf"), tl.float32)
                for low in range(first, last + 1, CHUNK):
                    part = low + tl.arange(0, CHUNK)
                    place = ((tile * programs + part) * 2 + (part == first).to(tl.int32)) * BLOCK_M
                    value = tl.load(
                        part_lse + place[None, :] + in_tile[:, None], mask=(part <= last)[None, :], other=-float("inf")
                    )
                    peaks = tl.maximum(peaks, value)
                peak = tl.max(peaks, 1)
                shift = tl.where(peak == -float("inf"), 0.0, peak)
                # Either many parts of one row side by side, or many rows one part after another.
                total = tl.zeros([PARTS * ROWS], tl.float32)
                acc = tl.zeros([PARTS * ROWS, COLUMNS], tl.float32)
                for low in range(first, last + 1, PARTS):
                    part = low + tl.arange(0, PARTS)
                    place = ((tile * programs + part) * 2 + (part == first).to(tl.int32)) * BLOCK_M
                    cell = (place + in_tile).to(tl.int64)
                    there = part <= last
                    weight = tl.exp2(tl.load(part_lse + cell, mask=there, other=-float("inf")) - shift)
                    value = tl.load(part_out + cell[:, None] * R + latent[None, :], mask=there[:, None], other=0.0)
                    total += weight
                    acc += value * weight[:, None]
                if ROWS == 1:
                    total = tl.sum(total, 0, keep_dims=True)
                    acc = tl.sum(acc, 0, keep_dims=True)
                total = tl.where(total == 0.0, 1.0, total)
                acc = acc / total[:, None]
                cells = out + target[:, None] * R + latent[None, :]
                tl.store(cells, acc.to(out.dtype.element_ty), mask=live[:, None])
                tl.store(lse + target, (peak + tl.log2(total)) * LN_2, mask=live)
