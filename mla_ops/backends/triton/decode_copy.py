# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, assignment, misc"
"""The warpgroup of the Hopper decode kernels that copies while others compute, in Gluon."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from mla_ops.backends.triton.decode_walk import segment
from mla_ops.backends.triton.hopper import copy_async, reinterpret, signal

__all__ = ["make_bars", "make_tiles", "produce"]


@gluon.jit
def make_tiles(dtype: gl.constexpr, R: gl.constexpr, P: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr):
    """Shared memory of q: both halves of its latent columns, its rope columns; and of two blocks: near, far, rope."""
    HALF: gl.constexpr = R // 2
    ROPE: gl.constexpr = P if P > 0 else 16
    half: gl.constexpr = gl.NVMMASharedLayout(min(128, HALF * 2), 16, 2)
    rope: gl.constexpr = gl.NVMMASharedLayout(min(128, ROPE * 2), 16, 2)
    q_c = gl.allocate_shared_memory(dtype, [2, BLOCK_M, HALF], half)
    q_r = gl.allocate_shared_memory(dtype, [BLOCK_M, ROPE], rope)
    kv_near = gl.allocate_shared_memory(dtype, [2, BLOCK_N, HALF], half)
    kv_far = gl.allocate_shared_memory(dtype, [2, BLOCK_N, HALF], half)
    kv_r = gl.allocate_shared_memory(dtype, [2, BLOCK_N, ROPE], rope)
    return (q_c, q_r), (kv_near, kv_far, kv_r)


@gluon.jit
def make_bars(writers: gl.constexpr, q_readers: gl.constexpr):
    """Barriers of copies: halves of blocks near, far that are there, that are free, q that is there, that is free.

    ``writers`` arrive at the former two: each of 128 threads when its copies are there, or one when all have stored.
    """
    full_near = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    full_far = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    free_near = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    free_far = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    q_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    q_free = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for place in gl.static_range(2):
        mbarrier.init(full_near.index(place), count=writers)
        mbarrier.init(full_far.index(place), count=writers)
        mbarrier.init(free_near.index(place), count=1)
        mbarrier.init(free_far.index(place), count=1)
    mbarrier.init(q_full, count=128)
    mbarrier.init(q_free, count=q_readers)
    return full_near, full_far, free_near, free_far, q_full, q_free


@gluon.jit
def _rows_of_block(rows_of, block, PAGE_SIZE: gl.constexpr, BLOCK_N: gl.constexpr, layout: gl.constexpr):
    """Addresses of a block's latent rows, and which of them are there: keys before ``stop``.

    An unused slot may hold NaN, which a weight of 0 would not stop: it is never read.
    """
    kv_cache, table, stop, stride_page, stride_row = rows_of
    key = block * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(1, layout))
    live = key < stop
    page = gl.load(table + key // PAGE_SIZE, mask=live, other=0).to(gl.int64)
    return kv_cache + page * stride_page + (key % PAGE_SIZE) * stride_row, live


@gluon.jit
def _copy_blocks(
    rows_of, low, high, kv_tile, bars, phases,
    R: gl.constexpr, P: gl.constexpr, PAGE_SIZE: gl.constexpr, BLOCK_N: gl.constexpr, CROSSED: gl.constexpr,
):  # fmt: skip
    """Copy blocks low..high of a request as they are."""
    kv_near, kv_far, kv_r = kv_tile
    full_near, full_far, free_near, free_far = bars[0], bars[1], bars[2], bars[3]
    HALF: gl.constexpr = R // 2
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    latent = gl.arange(0, HALF, gl.SliceLayout(0, layout))[None, :]
    address, live = _rows_of_block(rows_of, low, PAGE_SIZE, BLOCK_N, layout)
    for block in range(low, high):
        place = (block - low) % 2
        phase = (phases >> place) & 1
        phases ^= 1 << place
        near = 0
        if CROSSED:
            near = place
        mbarrier.wait(free_near.index(place), phase)
        copy_async(kv_near.index(place), address[:, None] + near * HALF + latent, mask=live[:, None])
        async_copy.mbarrier_arrive(full_near.index(place), increment_count=False)
        mbarrier.wait(free_far.index(place), phase)
        copy_async(kv_far.index(place), address[:, None] + (1 - near) * HALF + latent, mask=live[:, None])
        if P > 0:
            rope = R + gl.arange(0, P, gl.SliceLayout(0, layout))[None, :]
            copy_async(kv_r.index(place), address[:, None] + rope, mask=live[:, None])
        async_copy.mbarrier_arrive(full_far.index(place), increment_count=False)
        address, live = _rows_of_block(rows_of, block + 1, PAGE_SIZE, BLOCK_N, layout)
    return phases


# Four fp8 in a word to four of 16 bits in two. To bf16 by way of fp32: the direct step is slow, one at a time.
_TO_HALF: gl.constexpr = gl.constexpr("""{
    .reg .b16 low, high;
    mov.b32 {low, high}, $2;
    cvt.rn.f16x2.e4m3x2 $0, low;
    cvt.rn.f16x2.e4m3x2 $1, high;
}""")
_TO_BFLOAT: gl.constexpr = gl.constexpr("""{
    .reg .b16 low, high, a, b;
    .reg .b32 pair, x, y;
    mov.b32 {low, high}, $2;
    cvt.rn.f16x2.e4m3x2 pair, low;
    mov.b32 {a, b}, pair;
    cvt.f32.f16 x, a;
    cvt.f32.f16 y, b;
    cvt.rn.bf16x2.f32 $0, y, x;
    cvt.rn.f16x2.e4m3x2 pair, high;
    mov.b32 {a, b}, pair;
    cvt.f32.f16 x, a;
    cvt.f32.f16 y, b;
    cvt.rn.bf16x2.f32 $1, y, x;
}""")


@gluon.jit
def _piece(address, near, PIECE: gl.constexpr, R: gl.constexpr, P: gl.constexpr, layout: gl.constexpr):
    """Addresses of 64 columns or less of a block, four in a word: of the near half, the far half, the rope columns."""
    WIDTH: gl.constexpr = min(64, R // 2)
    OF_HALF: gl.constexpr = R // 2 // WIDTH
    if PIECE < OF_HALF:
        first = near * (R // 2) + PIECE * WIDTH
    elif PIECE < 2 * OF_HALF:
        first = (1 - near) * (R // 2) + (PIECE - OF_HALF) * WIDTH
    else:
        first = R
    WORDS: gl.constexpr = (WIDTH if PIECE < 2 * OF_HALF else P) // 4
    words = (address + first).to(gl.pointer_type(gl.int32), bitcast=True)
    return words[:, None] + gl.arange(0, WORDS, gl.SliceLayout(0, layout))[None, :]


@gluon.jit
def _store_piece(target, words, FIRST: gl.constexpr, asm: gl.constexpr):
    """Four columns in a word to the tile's dtype, into ``target`` from column FIRST on."""
    low, high = gl.inline_asm_elementwise(asm, "=r,=r,r", [words], dtype=(gl.int32, gl.int32), is_pure=True, pack=1)
    ROWS: gl.constexpr = words.shape[0]
    WIDTH: gl.constexpr = words.shape[1] * 2
    COLUMNS: gl.constexpr = target.shape[1] // 2
    pairs = gl.reshape(gl.join(low, high), [ROWS, WIDTH])
    shared: gl.constexpr = gl.NVMMASharedLayout(target.layout.swizzle_byte_width, 32, 2)
    as_words = reinterpret(target, gl.int32, [ROWS, COLUMNS], shared)
    as_words.slice(FIRST // 2, WIDTH, dim=1).store(pairs)


@gluon.jit
def _stage(staged, cells, live, PIECE: gl.constexpr):
    copy_async(staged.index(PIECE).slice(0, cells.shape[1], dim=1), cells, mask=live[:, None])
    async_copy.commit_group()


@gluon.jit
def _convert_blocks(
    rows_of, low, high, kv_tile, bars, phases, staged,
    R: gl.constexpr, P: gl.constexpr, PAGE_SIZE: gl.constexpr, BLOCK_N: gl.constexpr, CROSSED: gl.constexpr,
    STAGED: gl.constexpr,
):  # fmt: skip
    """Bring blocks low..high of an fp8 cache to the tile's dtype on the way, a piece at a time.

    What is under way goes to ``staged`` [pieces of a block, BLOCK_N, 16] words of shared memory, or, without
    STAGED, is four pieces in registers.
    """
    kv_near, kv_far, kv_r = kv_tile
    full_near, full_far, free_near, free_far = bars[0], bars[1], bars[2], bars[3]
    WIDTH: gl.constexpr = min(64, R // 2)
    OF_HALF: gl.constexpr = R // 2 // WIDTH
    PIECES: gl.constexpr = 2 * OF_HALF + (1 if P > 0 else 0)
    AHEAD: gl.constexpr = PIECES if STAGED else min(4, PIECES)
    asm: gl.constexpr = _TO_BFLOAT if kv_near.dtype == gl.bfloat16 else _TO_HALF
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [8, 4], [gl.num_warps(), 1], [1, 0])
    address, live = _rows_of_block(rows_of, low, PAGE_SIZE, BLOCK_N, layout)
    under_way = ()
    for piece in gl.static_range(AHEAD):
        first_cells = _piece(address, 0, piece, R, P, layout)
        if STAGED:
            _stage(staged, first_cells, live, piece)
        else:
            under_way = under_way + (gl.load(first_cells, mask=live[:, None], other=0),)  # noqa: RUF005
    for block in range(low, high):
        place = (block - low) % 2
        phase = (phases >> place) & 1
        phases ^= 1 << place
        near = 0
        near_next = 0
        if CROSSED:
            near = place
            near_next = 1 - place
        address_next, live_next = _rows_of_block(rows_of, block + 1, PAGE_SIZE, BLOCK_N, layout)
        for piece in gl.static_range(PIECES):
            if piece == 0:
                mbarrier.wait(free_near.index(place), phase)
            if piece == OF_HALF:
                fence_async_shared()
                signal(full_near.index(place))
                mbarrier.wait(free_far.index(place), phase)
            if STAGED:
                async_copy.wait_group(AHEAD - 1)
                words = staged.index(piece).slice(0, WIDTH // 4 if piece < 2 * OF_HALF else P // 4, dim=1).load(layout)
            else:
                words = under_way[0]
            if piece < OF_HALF:
                _store_piece(kv_near.index(place), words, piece * WIDTH, asm)
            elif piece < 2 * OF_HALF:
                _store_piece(kv_far.index(place), words, (piece - OF_HALF) * WIDTH, asm)
            else:
                _store_piece(kv_r.index(place), words, 0, asm)
            if piece + AHEAD < PIECES:
                cells = _piece(address, near, piece + AHEAD, R, P, layout)
                there = live
            else:
                cells = _piece(address_next, near_next, piece + AHEAD - PIECES, R, P, layout)
                there = live_next
            if STAGED:
                _stage(staged, cells, there, piece)
            else:
                under_way = under_way[1:] + (gl.load(cells, mask=there[:, None], other=0),)  # noqa: RUF005
        fence_async_shared()
        signal(full_far.index(place))
        address = address_next
        live = live_next
    if STAGED:
        async_copy.wait_group(0)
    return phases


@gluon.jit
def produce(
    plan, walk, q, kv_cache, kv_indices, strides, q_tile, kv_tile, staged, bars,
    R: gl.constexpr, P: gl.constexpr, PAGE_SIZE: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    CHUNK: gl.constexpr, CROSSED: gl.constexpr, STAGED: gl.constexpr,
):  # fmt: skip
    """Copy the tile of q of each request, and the blocks of its keys into two places in turn.

    Two halves of R / 2 columns of a block come one after another. The near half is the left one; with CROSSED it is
    the right one in place 1. The rope columns come with the far half.
    """
    position = walk[0]
    stride_token, stride_head, stride_page, stride_row = strides
    q_c, q_r = q_tile
    q_full, q_free = bars[4], bars[5]
    HALF: gl.constexpr = R // 2
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    latent = gl.arange(0, HALF, gl.SliceLayout(0, layout))[None, :]
    row = plan[4] + gl.arange(0, BLOCK_M, gl.SliceLayout(1, layout))
    q_phase = 1
    phases = 3  # a bit for each place; the first round finds them free
    while position < walk[1]:
        request, _before, queries, keys, low, high, position = segment(plan, walk, position, PAGE_SIZE, BLOCK_N, CHUNK)
        token = gl.load(plan[0] + request) + row // plan[5]
        q_row = q + token.to(gl.int64) * stride_token + (row % plan[5]) * stride_head
        in_request = (row < gl.minimum(queries, plan[6]) * plan[5])[:, None]
        mbarrier.wait(q_free, q_phase)
        q_phase ^= 1
        copy_async(q_c.index(0), q_row[:, None] + latent, mask=in_request)
        copy_async(q_c.index(1), q_row[:, None] + HALF + latent, mask=in_request)
        if P > 0:
            rope = R + gl.arange(0, P, gl.SliceLayout(0, layout))[None, :]
            copy_async(q_r, q_row[:, None] + rope, mask=in_request)
        async_copy.mbarrier_arrive(q_full, increment_count=False)

        stop = gl.minimum(keys, high * BLOCK_N)
        rows_of = (kv_cache, kv_indices + gl.load(plan[1] + request), stop, stride_page, stride_row)
        if kv_cache.dtype.element_ty == q.dtype.element_ty:
            phases = _copy_blocks(rows_of, low, high, kv_tile, bars, phases, R, P, PAGE_SIZE, BLOCK_N, CROSSED)
        else:
            phases = _convert_blocks(
                rows_of, low, high, kv_tile, bars, phases, staged, R, P, PAGE_SIZE, BLOCK_N, CROSSED, STAGED
            )
