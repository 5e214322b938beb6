"""Compares, carries, division, lane moves, DPP and SDWA."""

import math
import operator

import numpy as np
import pytest

from .assemble import run_wave
from .machine import EXEC, VCC, bits_to_lanes, lanes_to_bits
from .samples import assert_same, result, samples

M32 = (1 << 32) - 1
LANES = np.arange(64)
COMPARE = {
    "lt": operator.lt,
    "eq": operator.eq,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
}
UNORDERED = {
    "lg": lambda a, b: a < b or a > b,
    "o": lambda a, b: not (math.isnan(a) or math.isnan(b)),
    "u": lambda a, b: math.isnan(a) or math.isnan(b),
    "nlt": lambda a, b: not a < b,
    "nge": lambda a, b: not a >= b,
    "neq": operator.ne,
}


def mask_of(oracle, a: np.ndarray, b: np.ndarray) -> int:
    return sum(1 << lane for lane in range(64) if oracle(a[lane].item(), b[lane].item()))


@pytest.mark.parametrize("kind", ["u32", "i32", "f32", "u64", "i64", "u16", "i16", "f16"])
def test_compares_write_one_bit_a_lane(kind, rng):
    a, b = samples(kind, rng), samples(kind, rng)
    b[:8] = a[:8]
    wide = kind.endswith("64")
    registers = {"v[0:1]" if wide else "v0": raw(a), "v[2:3]" if wide else "v2": raw(b)}
    sources = "v[0:1], v[2:3]" if wide else "v0, v2"
    mask = int(rng.integers(0, 1 << 63))
    cases = COMPARE | (UNORDERED if kind[0] == "f" else {"ne": operator.ne})
    for name, oracle in cases.items():
        wave = run_wave(
            f"v_cmp_{name}_{kind} vcc, {sources}\nv_cmp_{name}_{kind} s[4:5], {sources}", registers, exec_mask=mask
        )
        assert wave.read64(VCC) == wave.read64(4) == mask_of(oracle, a, b) & mask, name


def raw(values: np.ndarray) -> np.ndarray:
    return values.view(np.uint16).astype(np.uint32) if values.itemsize == 2 else values


def test_cmpx_also_sets_exec(rng):
    a = samples("i32", rng)
    wave = run_wave("v_cmpx_gt_i32 vcc, v0, 0", {"v0": a})
    assert wave.read64(EXEC) == wave.read64(VCC) == mask_of(operator.gt, a, np.zeros(64, int))


def test_cmp_class_knows_the_ten_classes():
    bits = [0x7F800001, 0x7FC00000, 0xFF800000, 0xBF800000, 0x80000001, 0x80000000, 0, 1, 0x3F800000, 0x7F800000]
    for position, value in enumerate(bits):
        wave = run_wave(
            "v_cmp_class_f32 vcc, v0, v1", {"v0": value, "v1": np.uint32(1) << LANES.astype(np.uint32) % 10}
        )
        assert wave.read64(VCC) == lanes_to_bits(position == LANES % 10)


def test_cndmask_selects_by_lane(rng):
    a, b, mask = samples("u32", rng), samples("u32", rng), int(rng.integers(0, 1 << 63))
    wave = run_wave(
        "v_cndmask_b32 v2, v0, v1, vcc\nv_cndmask_b32 v3, -v0, 1.0, s[4:5]",
        {"v0": a, "v1": b, "vcc": mask, "s[4:5]": mask},
    )
    chosen = bits_to_lanes(mask)
    assert_same(wave.vector[2], np.where(chosen, b, a))
    assert_same(wave.vector[3], np.where(chosen, np.uint32(0x3F800000), a ^ np.uint32(1 << 31)))


def test_carry_chain_adds_and_subtracts_64_bits(rng):
    a, b = samples("u64", rng), samples("u64", rng)
    registers = {"v[0:1]": a, "v[2:3]": b}
    wave = run_wave("v_add_co_u32 v4, vcc, v0, v2\nv_addc_co_u32 v5, vcc, v1, v3, vcc", registers)
    assert_same(result(wave, 4, "u64"), a + b)
    assert wave.read64(VCC) == lanes_to_bits(a + b < a)
    wave = run_wave("v_sub_co_u32 v4, s[0:1], v0, v2\nv_subb_co_u32 v5, s[2:3], v1, v3, s[0:1]", registers)
    assert_same(result(wave, 4, "u64"), a - b)
    assert wave.read64(2) == lanes_to_bits(a < b)


def test_reversed_subtractions_with_borrow(rng):
    a, b = samples("u64", rng), samples("u64", rng)
    text = "v_subrev_co_u32 v4, vcc, v0, v2\nv_subbrev_co_u32 v5, vcc, v1, v3, vcc"
    wave = run_wave(text, {"v[0:1]": a, "v[2:3]": b})
    assert_same(result(wave, 4, "u64"), b - a)
    assert wave.read64(VCC) == lanes_to_bits(b < a)


def test_mad_i64_i32(rng):
    a, b, c = samples("i32", rng), samples("i32", rng), samples("i64", rng)
    wave = run_wave("v_mad_i64_i32 v[4:5], vcc, v0, v1, v[2:3]", {"v0": a, "v1": b, "v[2:3]": c})
    assert_same(result(wave, 4, "i64"), a.astype(np.int64) * b + c)


def test_mad_u64_u32(rng):
    a, b, c = samples("u32", rng), samples("u32", rng), samples("u64", rng)
    wave = run_wave("v_mad_u64_u32 v[4:5], vcc, v0, v1, v[2:3]", {"v0": a, "v1": b, "v[2:3]": c})
    exact = [int(x) * int(y) + int(z) for x, y, z in zip(a, b, c, strict=True)]
    assert_same(result(wave, 4, "u64"), np.array([e & (1 << 64) - 1 for e in exact], np.uint64))
    assert wave.read64(VCC) == sum(1 << lane for lane, e in enumerate(exact) if e >> 64)


def test_fma_with_a_literal(rng):
    a, b = samples("f32", rng), samples("f32", rng)
    wave = run_wave("v_fmaak_f32 v2, v0, v1, 0x40490fdb\nv_fmamk_f32 v3, v0, 0x40490fdb, v1", {"v0": a, "v1": b})
    constant = float(np.array(0x40490FDB, np.uint32).view(np.float32))
    wide_a, wide_b = a.astype(np.float64), b.astype(np.float64)
    with np.errstate(all="ignore"):
        assert_same(result(wave, 2, "f32"), (wide_a * wide_b + constant).astype(np.float32))
        assert_same(result(wave, 3, "f32"), (wide_a * constant + wide_b).astype(np.float32))


DIVISION = """
v_div_scale_f32 v2, s[0:1], v1, v1, v0
v_div_scale_f32 v3, vcc, v0, v1, v0
v_rcp_f32 v4, v2
v_fma_f32 v5, -v2, v4, 1.0
v_fma_f32 v4, v5, v4, v4
v_mul_f32 v5, v3, v4
v_fma_f32 v6, -v2, v5, v3
v_fma_f32 v5, v6, v4, v5
v_fma_f32 v6, -v2, v5, v3
v_div_fmas_f32 v4, v6, v4, v5
v_div_fixup_f32 v2, v4, v1, v0"""


def test_division_sequence_rounds_correctly_over_the_whole_range(rng):
    # The sequence that LLVM makes of an IEEE division: scale, two Newton steps, undo the scale, fix special cases.
    def wide() -> np.ndarray:
        return (rng.uniform(1, 2, 64) * rng.choice([-1, 1], 64) * 2.0 ** rng.integers(-126, 127, 64)).astype(np.float32)

    for numerator, denominator in [(wide(), wide()) for _ in range(8)] + [(samples("f32", rng), samples("f32", rng))]:
        with np.errstate(all="ignore"):
            expected = numerator / denominator
        normal = ~((np.abs(expected) < 2.0**-125) & (expected != 0))  # a subnormal quotient is rounded twice
        wave = run_wave(DIVISION, {"v0": numerator, "v1": denominator})
        np.testing.assert_array_equal(result(wave, 2, "f32")[normal], expected[normal])


def test_readlane_writelane_and_readfirstlane(rng):
    a = samples("u32", rng)
    wave = run_wave(
        "v_readlane_b32 s1, v0, 17\nv_readlane_b32 s2, v0, s3\nv_writelane_b32 v0, 42, 5", {"v0": a, "s3": 63}
    )
    assert wave.scalar[1:3] == [a[17], a[63]]
    assert wave.vector[0, 5] == 42
    wave = run_wave("v_readfirstlane_b32 s1, v0", {"v0": a}, exec_mask=0b101000)
    assert wave.scalar[1] == a[3]
    assert run_wave("v_readfirstlane_b32 s1, v0", {"v0": a}, exec_mask=0).scalar[1] == a[0]


def test_swaps_exchange_registers_and_rows(rng):
    a, b = samples("u32", rng), samples("u32", rng)
    wave = run_wave("v_swap_b32 v0, v1", {"v0": a, "v1": b})
    assert_same(wave.vector[0], b)
    assert_same(wave.vector[1], a)
    for width in (16, 32):
        wave = run_wave(f"v_permlane{width}_swap_b32 v0, v1", {"v0": a, "v1": b}, arch="gfx950")
        odd = LANES // width % 2 == 1
        assert_same(wave.vector[0], np.where(odd, b[LANES - width], a))
        assert_same(wave.vector[1], np.where(odd, b, a[(LANES + width) % 64]))


def row(lane: int, column: int) -> int:
    return (lane & ~15) + column


DPP = [
    ("quad_perm:[3,0,2,1]", lambda lane: (lane & ~3) + [3, 0, 2, 1][lane & 3]),
    ("row_shl:3", lambda lane: lane + 3 if (lane & 15) + 3 < 16 else None),
    ("row_shr:5", lambda lane: lane - 5 if (lane & 15) >= 5 else None),
    ("row_ror:4", lambda lane: row(lane, (lane - 4) & 15)),
    ("row_newbcast:6", lambda lane: row(lane, 6)),
    ("wave_shr:1", lambda lane: lane - 1 if lane else None),
    ("wave_ror:1", lambda lane: (lane - 1) % 64),
    ("row_mirror", lambda lane: row(lane, 15 - (lane & 15))),
    ("row_half_mirror", lambda lane: (lane & ~7) + 7 - (lane & 7)),
    ("row_bcast:15", lambda lane: row(lane, 0) - 1 if lane >= 16 else None),
    ("row_bcast:31", lambda lane: (lane & ~31) - 1 if lane >= 32 else None),
]


@pytest.mark.parametrize(("control", "source"), DPP, ids=[case[0] for case in DPP])
def test_dpp_moves_lanes(control, source, rng):
    a, old = samples("u32", rng), samples("u32", rng)
    move = f"v0 {control} row_mask:0xf bank_mask:0xf"
    text = f"v_mov_b32_dpp v1, {move}\nv_mov_b32_dpp v2, {move} bound_ctrl:0"
    wave = run_wave(text, {"v0": a, "v1": old, "v2": old})
    sources = [source(lane) for lane in range(64)]
    assert_same(wave.vector[1], np.array([old[lane] if s is None else a[s] for lane, s in enumerate(sources)]))
    assert_same(wave.vector[2], np.array([0 if s is None else a[s] for s in sources], np.uint32))


def test_dpp_masks_rows_and_banks(rng):
    a, b, old = (samples("u32", rng) for _ in range(3))
    wave = run_wave("v_add_u32_dpp v2, v0, v1 row_mirror row_mask:0x5 bank_mask:0xa", {"v0": a, "v1": b, "v2": old})
    enabled = (LANES // 16 % 2 == 0) & (LANES % 16 // 4 % 2 == 1)
    assert_same(wave.vector[2], np.where(enabled, a[LANES // 16 * 16 + 15 - LANES % 16] + b, old))


def test_dpp_does_not_read_a_lane_that_is_off(rng):
    a, old = samples("u32", rng), samples("u32", rng)
    wave = run_wave(
        "v_mov_b32_dpp v1, v0 row_shr:1 row_mask:0xf bank_mask:0xf", {"v0": a, "v1": old}, exec_mask=(1 << 64) - 1 - 2
    )
    assert wave.vector[1, 2] == old[2]
    assert wave.vector[1, 3] == a[2]


def test_sdwa_selects_bytes_and_words(rng):
    a, b, old = (samples("u32", rng) for _ in range(3))
    registers = {"v0": a, "v1": b, "v2": old}
    wave = run_wave(
        "v_add_u32_sdwa v2, v0, v1 dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:BYTE_2 src1_sel:WORD_1", registers
    )
    assert_same(wave.vector[2], (a >> np.uint32(16) & np.uint32(255)) + (b >> np.uint32(16)))
    wave = run_wave(
        "v_add_u32_sdwa v2, sext(v0), v1 dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:BYTE_1 src1_sel:DWORD", registers
    )
    assert_same(wave.vector[2], ((a >> np.uint32(8)).astype(np.int8).astype(np.int32).view(np.uint32)) + b)
    wave = run_wave(
        "v_add_u32_sdwa v2, v0, v1 dst_sel:WORD_1 dst_unused:UNUSED_PRESERVE src0_sel:DWORD src1_sel:DWORD", registers
    )
    assert_same(wave.vector[2], a + b << np.uint32(16) | old & np.uint32(0xFFFF))
    wave = run_wave(
        "v_add_u32_sdwa v2, v0, v1 dst_sel:BYTE_1 dst_unused:UNUSED_PAD src0_sel:DWORD src1_sel:DWORD", registers
    )
    assert_same(wave.vector[2], (a + b & np.uint32(255)) << np.uint32(8))


def test_bitop3_is_its_truth_table(rng):
    a, b, c = (samples("u32", rng) for _ in range(3))
    text = """
    v_bitop3_b32 v3, v0, v1, v2 bitop3:0x96
    v_bitop3_b32 v4, v0, v1, v2 bitop3:0xca
    v_bitop3_b16 v5, v0, v1, v2 bitop3:0xca"""
    wave = run_wave(text, {"v0": a, "v1": b, "v2": c}, arch="gfx950")
    assert_same(wave.vector[3], a ^ b ^ c)
    assert_same(wave.vector[4], a & b | ~a & c)
    assert_same(wave.vector[5], (a & b | ~a & c) & np.uint32(0xFFFF))
