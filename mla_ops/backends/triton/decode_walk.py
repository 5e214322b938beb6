# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""A program's walk over its share of the line of blocks, for the Hopper decode kernels, in Gluon.

``plan`` is (qo_indptr, kv_indptr, kv_last_page_lens, num_requests, first_row, num_heads, max_seqlen_q), ``walk`` what
``my_share`` returns and ``part`` what ``segment`` returns.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from mla_ops.backends.triton.hopper import LN_2

__all__ = ["make_scales", "my_share", "note_span", "segment", "store_part"]


@gluon.jit
def make_scales(softmax_scale_log2, kv_scale):
    """The factors of Q K and of the values: an fp8 cache's scale, or None, is in both."""
    qk_scale = softmax_scale_log2
    v_scale = 1.0
    if kv_scale is not None:
        v_scale = gl.load(kv_scale)
        qk_scale *= v_scale
    return qk_scale, v_scale


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _request_lengths(plan, request, valid, PAGE_SIZE: gl.constexpr):
    qo_indptr, kv_indptr, kv_last_page_lens = plan[0], plan[1], plan[2]
    queries = gl.load(qo_indptr + request + 1, mask=valid, other=0) - gl.load(qo_indptr + request, mask=valid, other=0)
    pages = gl.load(kv_indptr + request + 1, mask=valid, other=0) - gl.load(kv_indptr + request, mask=valid, other=0)
    tail = gl.load(kv_last_page_lens + request, mask=valid, other=0)
    return queries, gl.where(pages > 0, (pages - 1) * PAGE_SIZE + tail, 0)


@gluon.jit
def _tile_blocks(plan, first, PAGE_SIZE: gl.constexpr, BLOCK_N: gl.constexpr, CHUNK: gl.constexpr):
    """[CHUNK] blocks that requests first.. have in the program's tile."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    request = first + gl.arange(0, CHUNK, layout)
    queries, keys = _request_lengths(plan, request, request < plan[3], PAGE_SIZE)
    rows = gl.minimum(queries, plan[6]) * plan[5]
    return gl.where(plan[4] < rows, (keys + BLOCK_N - 1) // BLOCK_N, 0)


@gluon.jit
def my_share(plan, PAGE_SIZE: gl.constexpr, BLOCK_N: gl.constexpr, CHUNK: gl.constexpr):
    """This program's share of the line: its first block and its end, blocks of a share, how many shares have one more,
    and ``place``, 0 or the blocks that each request takes in the line.

    Equal shares begin and end anywhere in a request. Where requests are about equally long, shares of whole requests or
    of equal parts of one are hardly larger, and there is less to merge and no second start: then each request has the
    place of the longest one.
    """
    total = 0
    longest = 0
    shortest = 1
    for first in range(0, plan[3], CHUNK):
        blocks = _tile_blocks(plan, first, PAGE_SIZE, BLOCK_N, CHUNK)
        absent = first + gl.arange(0, CHUNK, blocks.type.layout) >= plan[3]
        total += gl.sum(blocks, 0)
        longest = gl.maximum(longest, gl.max(blocks, 0))
        shortest = gl.minimum(shortest, gl.min(gl.where(absent, 1, blocks), 0))
    program = gl.program_id(1)
    programs = gl.num_programs(1)
    parts = programs // plan[3]
    even = gl.where(parts > 1, gl.cdiv(longest, gl.maximum(parts, 1)), gl.cdiv(plan[3], programs) * longest)
    if (shortest > 0) & (even * programs <= total + total // 16):
        place = gl.where(parts > 1, even * parts, longest)
        position = program * even
        end = gl.minimum(position + even, plan[3] * place)
        if (parts > 1) & (position < end):
            _, keys = _request_lengths(plan, position // place, True, PAGE_SIZE)
            end = gl.minimum(end, position // place * place + gl.cdiv(keys, BLOCK_N))
        share = even
        larger = 0
    else:
        place = 0
        share = total // programs
        larger = total % programs
        position = program * share + gl.minimum(program, larger)
        end = position + share + (program < larger).to(gl.int32)
    return position, end, share, larger, place


@gluon.jit
def segment(plan, walk, position, PAGE_SIZE: gl.constexpr, BLOCK_N: gl.constexpr, CHUNK: gl.constexpr):
    """What the share has from ``position`` on of one request: it, the position of its first block, its queries and
    keys, the first block and the end of those that are in the share, and the position of what comes next."""
    end, place = walk[1], walk[4]
    request = 0
    before = 0
    if place > 0:
        request = position // place
        before = request * place
    else:
        seen = 0
        for first in range(0, plan[3], CHUNK):
            blocks = _tile_blocks(plan, first, PAGE_SIZE, BLOCK_N, CHUNK)
            behind = seen + gl.associative_scan(blocks, 0, _add) <= position
            request += gl.sum(behind.to(gl.int32), 0)
            before += gl.sum(gl.where(behind, blocks, 0), 0)
            seen += gl.sum(blocks, 0)
    queries, keys = _request_lengths(plan, request, True, PAGE_SIZE)
    high = gl.minimum(gl.cdiv(keys, BLOCK_N), end - before)
    return request, before, queries, keys, position - before, high, before + gl.maximum(high, place)


@gluon.jit
def note_span(spans, plan, walk, request, before, keys, BLOCK_N: gl.constexpr):
    """Note the first and the last program of a request, in the program that has its first block."""
    share, larger = walk[2], walk[3]
    final = before + gl.cdiv(keys, BLOCK_N) - 1
    of_larger = larger * (share + 1)
    last = gl.where(final < of_larger, final // (share + 1), larger + (final - of_larger) // gl.maximum(share, 1))
    span = spans + (gl.program_id(0) * plan[3] + request) * 2
    gl.store(span, gl.program_id(1))
    gl.store(span + 1, last)


@gluon.jit
def store_part(
    plan, results, part, tiles, log_sum,
    R: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, FIRST: gl.constexpr, AXIS: gl.constexpr,
):  # fmt: skip
    """Store what the share has of a request: as the result if that is all of it, and else as a part to be merged.

    ``tiles`` have the latent columns from FIRST on, one tile behind the other, and the query rows along AXIS. Whoever
    has column 0 stores ``log_sum``, to base 2, too.
    """
    out, lse, part_out, part_lse = results[0], results[1], results[2], results[3]
    request, queries, keys, low, high = part[0], part[2], part[3], part[4], part[5]
    layout: gl.constexpr = tiles[0].type.layout
    WIDTH: gl.constexpr = tiles[0].shape[1 - AXIS]
    row = gl.arange(0, BLOCK_M, gl.SliceLayout(1 - AXIS, layout))
    in_tile = gl.arange(0, BLOCK_M, log_sum.type.layout)
    latent = gl.expand_dims(FIRST + gl.arange(0, WIDTH, gl.SliceLayout(AXIS, layout)), AXIS)
    if (low == 0) & (high * BLOCK_N >= keys):
        rows = gl.minimum(queries, plan[6]) * plan[5]
        base = gl.load(plan[0] + request).to(gl.int64) * plan[5] + plan[4]
        cells = out + gl.expand_dims(base + row, 1 - AXIS) * R + latent
        in_request = gl.expand_dims(plan[4] + row < rows, 1 - AXIS)
        for index in gl.static_range(len(tiles)):
            gl.store(cells + index * WIDTH, tiles[index].to(out.dtype.element_ty), mask=in_request)
        if FIRST == 0:
            gl.store(lse + (base + in_tile), log_sum * LN_2, mask=plan[4] + in_tile < rows)
    else:
        place = (gl.program_id(0) * gl.num_programs(1) + gl.program_id(1)) * 2 + (low == 0).to(gl.int32)
        base = place.to(gl.int64) * BLOCK_M
        parts = part_out + gl.expand_dims(base + row, 1 - AXIS) * R + latent
        for index in gl.static_range(len(tiles)):
            gl.store(parts + index * WIDTH, tiles[index])
        if FIRST == 0:
            gl.store(part_lse + (base + in_tile), log_sum)
