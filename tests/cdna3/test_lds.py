"""LDS reads and writes of every width, the lane crossbar, and the transposing reads of gfx950."""

import numpy as np
import pytest

from .assemble import run_wave
from .errors import MemoryFault
from .machine import bits_to_lanes
from .samples import assert_same, samples

LANES = np.arange(64)


def filled(rng, size: int) -> np.ndarray:
    return rng.integers(0, 256, size, np.uint8)


@pytest.mark.parametrize("bits", [32, 64, 96, 128])
def test_whole_reads_and_writes(bits, rng):
    dwords = bits // 32
    lds = filled(rng, 64 * 16 + 64)
    before = lds.copy()
    order = rng.permutation(64)
    span = f"v[4:{3 + dwords}]" if dwords > 1 else "v4"
    wave = run_wave(f"ds_read_b{bits} {span}, v0 offset:32", {"v0": (16 * order).astype(np.uint32)}, lds=lds)
    rows = before[32 : 32 + 1024].view(np.uint32).reshape(64, 4)[order, :dwords]
    np.testing.assert_array_equal(wave.vector[4 : 4 + dwords], rows.T)
    values = rng.integers(0, 1 << 32, (dwords, 64), np.uint32)
    mask = int(rng.integers(0, 1 << 63))
    registers = {"v0": (16 * order).astype(np.uint32)} | {f"v{4 + i}": row for i, row in enumerate(values)}
    run_wave(f"ds_write_b{bits} v0, {span} offset:64", registers, lds=lds, exec_mask=mask)
    expected = before.copy()
    table = expected[64:].view(np.uint32).reshape(64, 4)
    table[order[bits_to_lanes(mask)], :dwords] = values.T[bits_to_lanes(mask)]
    np.testing.assert_array_equal(lds, expected)


@pytest.mark.parametrize(("suffix", "step"), [("", 1), ("st64", 64)])
@pytest.mark.parametrize("bits", [32, 64])
def test_two_address_forms(bits, suffix, step, rng):
    dwords, size = bits // 32, bits // 8
    lds = filled(rng, 8 * 64 * size + 64 * size)
    before = lds.copy()
    start = (LANES * size).astype(np.uint32)
    span = f"v[4:{3 + 2 * dwords}]"
    wave = run_wave(f"ds_read2{suffix}_b{bits} {span}, v0 offset0:1 offset1:3", {"v0": start}, lds=lds)
    for part, offset in enumerate((1, 3)):
        at = start[:, None] + offset * step * size + np.arange(size)
        np.testing.assert_array_equal(
            wave.vector[4 + part * dwords :][:dwords], np.ascontiguousarray(before[at]).view(np.uint32).T
        )
    first, second = (rng.integers(0, 1 << 32, (dwords, 64), np.uint32) for _ in range(2))
    registers = {"v0": start[:1].repeat(64)}
    registers |= {f"v{4 + i}": row for i, row in enumerate(first)} | {f"v{8 + i}": row for i, row in enumerate(second)}
    one, two = ("v4", "v8") if dwords == 1 else ("v[4:5]", "v[8:9]")
    run_wave(f"ds_write2{suffix}_b{bits} v0, {one}, {two} offset0:2 offset1:5", registers, lds=lds, exec_mask=1)
    for values, offset in ((first, 2), (second, 5)):
        np.testing.assert_array_equal(lds[offset * step * size :][:size].view(np.uint32), values[:, 0])


def test_narrow_reads_and_writes(rng):
    lds = filled(rng, 256)
    old = samples("u32", rng)
    address = LANES.astype(np.uint32)
    registers = {"v0": address, "v1": address * np.uint32(2), "v6": old, "v7": old}
    text = """
    ds_read_u8 v2, v0 offset:3
    ds_read_i8 v3, v0
    ds_read_u16 v4, v1 offset:2
    ds_read_i16 v5, v1
    ds_read_u16_d16 v6, v1
    ds_read_u16_d16_hi v7, v1"""
    wave = run_wave(text, registers, lds=lds)
    shorts = lds.view(np.uint16)
    assert_same(wave.vector[2], lds[3:67].astype(np.uint32))
    assert_same(wave.vector[3], lds[:64].view(np.int8).astype(np.int32).view(np.uint32))
    assert_same(wave.vector[4], shorts[1:65].astype(np.uint32))
    assert_same(wave.vector[5], shorts[:64].view(np.int16).astype(np.int32).view(np.uint32))
    assert_same(wave.vector[6], old & np.uint32(0xFFFF0000) | shorts[:64])
    assert_same(wave.vector[7], old & np.uint32(0xFFFF) | shorts[:64].astype(np.uint32) << np.uint32(16))
    run_wave("ds_write_b8 v0, v6\nds_write_b16 v1, v6 offset:64", registers, lds=lds)
    assert_same(lds[64:192].view(np.uint16), old.astype(np.uint16))
    assert_same(lds[:64], old.astype(np.uint8))
    run_wave("ds_write_b16_d16_hi v1, v6", registers, lds=lds)
    assert_same(lds[:128].view(np.uint16), (old >> np.uint32(16)).astype(np.uint16))


def test_accumulators_are_read_and_written(rng):
    lds = filled(rng, 1024)
    data = lds[:512].view(np.uint64).copy()
    wave = run_wave(
        "ds_read_b64 a[4:5], v0\nds_write_b64 v0, a[4:5] offset:512", {"v0": (8 * LANES).astype(np.uint32)}, lds=lds
    )
    assert_same(np.ascontiguousarray(wave.vector[260:262].T).view(np.uint64)[:, 0], data)
    assert_same(lds[512:].view(np.uint64), data)


def test_bpermute_pulls_and_permute_pushes(rng):
    data, order = samples("u32", rng), rng.permutation(64)
    registers = {"v0": (4 * order).astype(np.uint32), "v1": data}
    wave = run_wave("ds_bpermute_b32 v2, v0, v1\nds_permute_b32 v3, v0, v1", registers)
    assert_same(wave.vector[2], data[order])
    pushed = np.empty(64, np.uint32)
    pushed[order] = data
    assert_same(wave.vector[3], pushed)


def test_bpermute_reads_zero_from_a_lane_that_is_off(rng):
    wave = run_wave("ds_bpermute_b32 v2, v0, v1", {"v0": 4 * 9, "v1": samples("u32", rng)}, exec_mask=0xFF)
    assert (wave.vector[2, :8] == 0).all()


@pytest.mark.parametrize(
    ("pattern", "source"),
    [
        ("swizzle(QUAD_PERM,1,0,3,2)", LANES ^ 1),
        ("swizzle(SWAP,16)", LANES ^ 16),
        ("swizzle(REVERSE,8)", LANES ^ 7),
        ("swizzle(BROADCAST,4,2)", LANES & ~3 | 2),
    ],
)
def test_swizzle_patterns(pattern, source, rng):
    data = samples("u32", rng)
    assert_same(run_wave(f"ds_swizzle_b32 v1, v0 offset:{pattern}", {"v0": data}).vector[1], data[source])


@pytest.mark.parametrize("bits", [16, 8])
def test_transposing_read_of_a_tile(bits, rng):
    # 16 lanes read 16 rows of 64 bits; taken as a [16, n] matrix they receive its transpose, 64 bits a lane.
    n = 64 // bits
    lds = filled(rng, 512)
    wave = run_wave(f"ds_read_b64_tr_b{bits} v[2:3], v0", {"v0": (8 * LANES).astype(np.uint32)}, lds=lds, arch="gfx950")
    received = np.ascontiguousarray(wave.vector[2:4].T).view(f"u{bits // 8}")
    for group in range(4):
        rows = lds.view(f"u{bits // 8}")[group * 16 * n : (group + 1) * 16 * n].reshape(16, n)
        # Lane l holds every (16 / n)-th row's element l % n, starting at row l // n.
        expected = [[rows[16 // n * j + lane // n, lane % n] for j in range(n)] for lane in range(16)]
        np.testing.assert_array_equal(received[16 * group : 16 * group + 16], expected)


def test_accesses_outside_the_allocation_fault():
    lds = np.zeros(256, np.uint8)
    address = {"v0": (4 * LANES).astype(np.uint32)}
    run_wave("ds_read_b32 v1, v0", address, lds=lds)
    with pytest.raises(MemoryFault, match=r"ds_read_b32 .*: LDS bytes 4..259 of 256 allocated"):
        run_wave("ds_read_b32 v1, v0 offset:4", address, lds=lds)
    with pytest.raises(MemoryFault, match=r"ds_write_b64 .*: LDS bytes"):
        run_wave("ds_write_b64 v0, v[2:3]", address, lds=lds)


def test_late_operations_complete_in_order_at_their_wait():
    lds = np.full(256, 9, np.uint8)
    text = "ds_read_u8 v1, v0\nds_read_u8 v2, v0\ns_waitcnt lgkmcnt(1)\nv_mov_b32 v3, v1\nv_mov_b32 v4, v2"
    wave = run_wave(text, {"v0": 0, "v2": 0}, lds=lds, late=True)
    assert wave.vector[3:5, 0].tolist() == [9, 0]
    text = "ds_write_b8 v0, v1\nds_write_b8 v0, v1 offset:1\nv_mov_b32 v1, 0\n"
    for then, expected in (("", [9, 9]), ("s_waitcnt lgkmcnt(1)", [5, 9]), ("ds_read_u8 v2, v0 offset:9", [5, 5])):
        lds[:] = 9
        run_wave(text + then, {"v0": 0, "v1": 5}, lds=lds, late=True)
        assert lds[:2].tolist() == expected


def test_both_halves_of_a_register_may_be_in_flight():
    lds = np.arange(8, dtype=np.uint8)
    text = "ds_read_u16_d16 v1, v0\nds_read_u16_d16_hi v1, v0 offset:4\ns_waitcnt lgkmcnt(0)"
    assert run_wave(text, {"v0": 0}, lds=lds, late=True).vector[1, 0] == 0x05040100
