"""Each vector ALU instruction against a lane-by-lane definition on Python numbers."""

import math

import numpy as np
import pytest

from .assemble import run_wave
from .samples import assert_same, lane_by_lane, result, samples

M32, M64 = (1 << 32) - 1, (1 << 64) - 1


def signed(value: int, bits: int = 32) -> int:
    value &= (1 << bits) - 1
    return value - (1 << bits) if value >> bits - 1 else value


def permuted(a: int, b: int, selectors: int) -> int:
    data = a << 32 | b
    out = 0
    for position in range(4):
        selector = selectors >> 8 * position & 255
        if selector >= 13:
            byte = 255
        elif selector == 12:
            byte = 0
        elif selector >= 8:
            byte = 255 * (data >> 8 * (2 * (selector - 8) + 1) + 7 & 1)
        else:
            byte = data >> 8 * selector & 255
        out |= byte << 8 * position
    return out


def bit_field(value: int, offset: int, width: int) -> int:
    return value >> (offset & 31) & (1 << (width & 31)) - 1


def signed_bit_field(value: int, offset: int, width: int) -> int:
    return signed(bit_field(value, offset, width), width & 31) if width & 31 else 0


def low24(a: int) -> int:
    return a & 0xFFFFFF


def truncated(value: float, low: int, high: int) -> int:
    if math.isnan(value):
        return 0
    return low if value <= low else high if value >= high else int(value)


def leading_zeros(a: int) -> int:
    return 32 - a.bit_length() if a else M32


def trailing_zeros(a: int) -> int:
    return (a & -a).bit_length() - 1 if a else M32


# instruction, kinds of the sources and (last) of the result, meaning
INTEGER = [
    ("v_mov_b32 {d}, {0}", "u32 u32", lambda a: a),
    ("v_mov_b64 {d}, {0}", "u64 u64", lambda a: a),
    ("v_not_b32 {d}, {0}", "u32 u32", lambda a: ~a),
    ("v_bfrev_b32 {d}, {0}", "u32 u32", lambda a: int(f"{a:032b}"[::-1], 2)),
    ("v_ffbh_u32 {d}, {0}", "u32 u32", leading_zeros),
    ("v_ffbl_b32 {d}, {0}", "u32 u32", trailing_zeros),
    ("v_bcnt_u32_b32 {d}, {0}, {1}", "u32 u32 u32", lambda a, b: a.bit_count() + b),
    ("v_and_b32 {d}, {0}, {1}", "u32 u32 u32", lambda a, b: a & b),
    ("v_or_b32 {d}, {0}, {1}", "u32 u32 u32", lambda a, b: a | b),
    ("v_xor_b32 {d}, {0}, {1}", "u32 u32 u32", lambda a, b: a ^ b),
    ("v_xnor_b32 {d}, {0}, {1}", "u32 u32 u32", lambda a, b: ~(a ^ b)),
    ("v_add_u32 {d}, {0}, {1}", "u32 u32 u32", lambda a, b: a + b),
    ("v_sub_u32 {d}, {0}, {1}", "u32 u32 u32", lambda a, b: a - b),
    ("v_subrev_u32 {d}, {0}, {1}", "u32 u32 u32", lambda a, b: b - a),
    ("v_add_i32 {d}, {0}, {1}", "i32 i32 i32", lambda a, b: a + b),
    ("v_sub_i32 {d}, {0}, {1}", "i32 i32 i32", lambda a, b: a - b),
    ("v_lshlrev_b32 {d}, {0}, {1}", "u32 u32 u32", lambda a, b: b << (a & 31)),
    ("v_lshrrev_b32 {d}, {0}, {1}", "u32 u32 u32", lambda a, b: b >> (a & 31)),
    ("v_ashrrev_i32 {d}, {0}, {1}", "i32 i32 i32", lambda a, b: b >> (a & 31)),
    ("v_lshlrev_b64 {d}, {0}, {1}", "u32 u64 u64", lambda a, b: b << (a & 63)),
    ("v_lshrrev_b64 {d}, {0}, {1}", "u32 u64 u64", lambda a, b: b >> (a & 63)),
    ("v_ashrrev_i64 {d}, {0}, {1}", "u32 i64 i64", lambda a, b: b >> (a & 63)),
    ("v_lshl_add_u64 {d}, {0}, 3, {1}", "u64 u64 u64", lambda a, c: (a << 3) + c),
    ("v_bfi_b32 {d}, {0}, {1}, {2}", "u32 u32 u32 u32", lambda a, b, c: a & b | ~a & c),
    ("v_bfm_b32 {d}, {0}, {1}", "u32 u32 u32", lambda a, b: (1 << (a & 31)) - 1 << (b & 31)),
    ("v_bfe_u32 {d}, {0}, {1}, {2}", "u32 u32 u32 u32", bit_field),
    ("v_bfe_i32 {d}, {0}, {1}, {2}", "u32 u32 u32 u32", signed_bit_field),
    ("v_alignbit_b32 {d}, {0}, {1}, {2}", "u32 u32 u32 u32", lambda a, b, c: (a << 32 | b) >> (c & 31)),
    ("v_alignbyte_b32 {d}, {0}, {1}, {2}", "u32 u32 u32 u32", lambda a, b, c: (a << 32 | b) >> 8 * (c & 3)),
    ("v_lshl_or_b32 {d}, {0}, {1}, {2}", "u32 u32 u32 u32", lambda a, b, c: a << (b & 31) | c),
    ("v_and_or_b32 {d}, {0}, {1}, {2}", "u32 u32 u32 u32", lambda a, b, c: a & b | c),
    ("v_or3_b32 {d}, {0}, {1}, {2}", "u32 u32 u32 u32", lambda a, b, c: a | b | c),
    ("v_xad_u32 {d}, {0}, {1}, {2}", "u32 u32 u32 u32", lambda a, b, c: (a ^ b) + c),
    ("v_add3_u32 {d}, {0}, {1}, {2}", "u32 u32 u32 u32", lambda a, b, c: a + b + c),
    ("v_lshl_add_u32 {d}, {0}, {1}, {2}", "u32 u32 u32 u32", lambda a, b, c: (a << (b & 31)) + c),
    ("v_add_lshl_u32 {d}, {0}, {1}, {2}", "u32 u32 u32 u32", lambda a, b, c: (a + b & M32) << (c & 31)),
    ("v_mul_lo_u32 {d}, {0}, {1}", "u32 u32 u32", lambda a, b: a * b),
    ("v_mul_hi_u32 {d}, {0}, {1}", "u32 u32 u32", lambda a, b: a * b >> 32),
    ("v_mul_hi_i32 {d}, {0}, {1}", "i32 i32 i32", lambda a, b: a * b >> 32),
    ("v_mul_u32_u24 {d}, {0}, {1}", "u32 u32 u32", lambda a, b: low24(a) * low24(b)),
    ("v_mul_i32_i24 {d}, {0}, {1}", "u32 u32 u32", lambda a, b: signed(a, 24) * signed(b, 24)),
    ("v_mad_u32_u24 {d}, {0}, {1}, {2}", "u32 u32 u32 u32", lambda a, b, c: low24(a) * low24(b) + c),
    ("v_mad_i32_i24 {d}, {0}, {1}, {2}", "u32 u32 u32 u32", lambda a, b, c: signed(a, 24) * signed(b, 24) + c),
    ("v_add_u32 {d}, {0}, {1} clamp", "u32 u32 u32", lambda a, b: min(a + b, M32)),
    ("v_sub_u32 {d}, {0}, {1} clamp", "u32 u32 u32", lambda a, b: max(a - b, 0)),
    ("v_subrev_u16 {d}, {0}, {1} clamp", "u16 u16 u16", lambda a, b: max(b - a, 0)),
    ("v_add_u16 {d}, {0}, {1}", "u16 u16 u16", lambda a, b: a + b),
    ("v_sub_u16 {d}, {0}, {1}", "u16 u16 u16", lambda a, b: a - b),
    ("v_mul_lo_u16 {d}, {0}, {1}", "u16 u16 u16", lambda a, b: a * b),
    ("v_lshrrev_b16 {d}, {0}, {1}", "u16 u16 u16", lambda a, b: b >> (a & 15)),
    ("v_lshlrev_b16 {d}, {0}, {1}", "u16 u16 u16", lambda a, b: b << (a & 15)),
    ("v_ashrrev_i16 {d}, {0}, {1}", "i16 i16 i16", lambda a, b: b >> (a & 15)),
]
for KIND in ("u16", "i16", "u32", "i32"):
    INTEGER += [
        (f"v_min_{KIND} {{d}}, {{0}}, {{1}}", f"{KIND} {KIND} {KIND}", min),
        (f"v_max_{KIND} {{d}}, {{0}}, {{1}}", f"{KIND} {KIND} {KIND}", max),
        (f"v_min3_{KIND} {{d}}, {{0}}, {{1}}, {{2}}", f"{KIND} {KIND} {KIND} {KIND}", min),
        (f"v_max3_{KIND} {{d}}, {{0}}, {{1}}, {{2}}", f"{KIND} {KIND} {KIND} {KIND}", max),
        (f"v_med3_{KIND} {{d}}, {{0}}, {{1}}, {{2}}", f"{KIND} {KIND} {KIND} {KIND}", lambda *abc: sorted(abc)[1]),
    ]


def half_to_even(value: float) -> float:
    return float(np.rint(value))


def maximum(*values: float) -> float:
    numbers = [v for v in values if not math.isnan(v)]
    return max(numbers, key=lambda v: (v, math.copysign(1, v))) if numbers else math.nan


def minimum(*values: float) -> float:
    numbers = [v for v in values if not math.isnan(v)]
    return min(numbers, key=lambda v: (v, math.copysign(1, v))) if numbers else math.nan


def median(a: float, b: float, c: float) -> float:
    return minimum(a, b, c) if any(map(math.isnan, (a, b, c))) else sorted((a, b, c))[1]


def rounding(function):
    return lambda a: math.copysign(float(function(a)), a) if math.isfinite(a) else a


FLOAT = [
    ("v_add_f32 {d}, {0}, {1}", "f32 f32 f32", lambda a, b: a + b),
    ("v_sub_f32 {d}, {0}, {1}", "f32 f32 f32", lambda a, b: a - b),
    ("v_subrev_f32 {d}, {0}, {1}", "f32 f32 f32", lambda a, b: b - a),
    ("v_mul_f32 {d}, {0}, {1}", "f32 f32 f32", lambda a, b: a * b),
    ("v_mul_f32 {d}, -{0}, |{1}|", "f32 f32 f32", lambda a, b: -a * abs(b)),
    ("v_mul_f32 {d}, {0}, {1} mul:4", "f32 f32 f32", lambda a, b: float(np.float32(np.float32(a) * np.float32(b))) * 4),
    ("v_mul_f32 {d}, {0}, {1} div:2", "f32 f32 f32", lambda a, b: float(np.float32(np.float32(a) * np.float32(b))) / 2),
    ("v_add_f32 {d}, {0}, {1} clamp", "f32 f32 f32", lambda a, b: min(max(a + b, 0.0), 1.0) if a + b == a + b else 0.0),
    ("v_add_f16 {d}, {0}, {1}", "f16 f16 f16", lambda a, b: a + b),
    ("v_mul_f16 {d}, {0}, -{1}", "f16 f16 f16", lambda a, b: a * -b),
    ("v_sub_f16 {d}, {0}, {1}", "f16 f16 f16", lambda a, b: a - b),
    ("v_subrev_f16 {d}, {0}, {1}", "f16 f16 f16", lambda a, b: b - a),
    ("v_mul_legacy_f32 {d}, {0}, {1}", "f32 f32 f32", lambda a, b: 0.0 if a == 0 or b == 0 else a * b),
    ("v_rsq_f32 {d}, {0}", "f32 f32", lambda a: float(1 / np.sqrt(np.float64(a)))),
    ("v_rcp_iflag_f32 {d}, {0}", "f32 f32", lambda a: 1 / a if a else math.copysign(math.inf, a)),
    (
        "v_fract_f32 {d}, {0}",
        "f32 f32",
        lambda a: min(a + -float(np.floor(a)), 1 - 2.0**-24) if math.isfinite(a) else math.nan,
    ),
    ("v_frexp_exp_i32_f32 {d}, {0}", "f32 i32", lambda a: math.frexp(a)[1] if math.isfinite(a) else 0),
    ("v_frexp_mant_f32 {d}, {0}", "f32 f32", lambda a: math.frexp(a)[0]),
    ("v_ldexp_f32 {d}, {0}, {1}", "f32 i32 f32", lambda a, b: float(np.ldexp(a, max(min(b, 2000), -2000)))),
    ("v_rcp_f32 {d}, {0}", "f32 f32", lambda a: 1 / a if a else math.copysign(math.inf, a)),
    ("v_sqrt_f32 {d}, {0}", "f32 f32", lambda a: math.sqrt(a) if a >= 0 else a if a == 0 else math.nan),
    ("v_exp_f32 {d}, {0}", "f32 f32", lambda a: float(np.exp2(np.float64(a)))),
    ("v_log_f32 {d}, {0}", "f32 f32", lambda a: float(np.log2(np.float64(a)))),
    ("v_cvt_f32_u32 {d}, {0}", "u32 f32", float),
    ("v_cvt_f32_i32 {d}, {0}", "i32 f32", float),
    ("v_cvt_u32_f32 {d}, {0}", "f32 u32", lambda a: truncated(a, 0, M32)),
    ("v_cvt_i32_f32 {d}, {0}", "f32 i32", lambda a: truncated(a, -(1 << 31), (1 << 31) - 1)),
    ("v_cvt_f16_f32 {d}, {0}", "f32 f16", lambda a: a),
    ("v_cvt_f32_f16 {d}, {0}", "f16 f32", lambda a: a),
    ("v_cvt_f16_u16 {d}, {0}", "u16 f16", float),
    ("v_cvt_f16_i16 {d}, {0}", "i16 f16", float),
    ("v_cvt_u16_f16 {d}, {0}", "f16 u16", lambda a: truncated(a, 0, 65535)),
    ("v_cvt_i16_f16 {d}, {0}", "f16 i16", lambda a: truncated(a, -32768, 32767)),
    ("v_pack_b32_f16 {d}, {0}, {1}", "u16 u16 u32", lambda a, b: a | b << 16),
]
for BYTE in range(4):
    FLOAT.append((f"v_cvt_f32_ubyte{BYTE} {{d}}, {{0}}", "u32 f32", lambda a, byte=BYTE: float(a >> 8 * byte & 255)))
for KIND in ("f16", "f32"):
    FLOAT += [
        (f"v_floor_{KIND} {{d}}, {{0}}", f"{KIND} {KIND}", rounding(np.floor)),
        (f"v_ceil_{KIND} {{d}}, {{0}}", f"{KIND} {KIND}", rounding(np.ceil)),
        (f"v_trunc_{KIND} {{d}}, {{0}}", f"{KIND} {KIND}", rounding(np.trunc)),
        (f"v_rndne_{KIND} {{d}}, {{0}}", f"{KIND} {KIND}", rounding(half_to_even)),
        (f"v_min_{KIND} {{d}}, {{0}}, {{1}}", f"{KIND} {KIND} {KIND}", minimum),
        (f"v_max_{KIND} {{d}}, {{0}}, {{1}}", f"{KIND} {KIND} {KIND}", maximum),
        (f"v_min3_{KIND} {{d}}, {{0}}, {{1}}, {{2}}", f"{KIND} {KIND} {KIND} {KIND}", minimum),
        (f"v_max3_{KIND} {{d}}, {{0}}, {{1}}, {{2}}", f"{KIND} {KIND} {KIND} {KIND}", maximum),
        (f"v_med3_{KIND} {{d}}, {{0}}, {{1}}, {{2}}", f"{KIND} {KIND} {KIND} {KIND}", median),
    ]


@pytest.mark.parametrize(
    ("text", "kinds", "oracle"),
    INTEGER + FLOAT,
    ids=[case[0].replace("{", "").replace("}", "") for case in INTEGER + FLOAT],
)
def test_each_lane_follows_the_definition(text, kinds, oracle, rng):
    *sources, kind = kinds.split()
    inputs = [samples(source, rng) for source in sources]
    names = [f"v[{2 * i}:{2 * i + 1}]" if k.endswith("64") else f"v{2 * i}" for i, k in enumerate(sources)]
    destination = "v[8:9]" if kind.endswith("64") else "v8"
    registers = {name: widened(values) for name, values in zip(names, inputs, strict=True)}
    with np.errstate(all="ignore"):
        expected = lane_by_lane(oracle, kind, *inputs)
    wave = run_wave(text.format(*names, d=destination), registers)
    actual = result(wave, 8, kind)
    if text.startswith(("v_max", "v_min", "v_med")):
        np.testing.assert_array_equal(actual, expected)  # which zero wins differs between documents
    else:
        assert_same(actual, expected)


def widened(values: np.ndarray) -> np.ndarray:
    """16-bit values in the low half of a dword, with noise above that must not matter."""
    if values.itemsize != 2:
        return values
    return values.view(np.uint16).astype(np.uint32) | np.uint32(0xABCD0000)


def test_perm_takes_bytes_signs_zeros_and_ones(rng):
    a, b = samples("u32", rng), samples("u32", rng)
    selectors = rng.integers(0, 16, (64, 4), np.uint8).view(np.uint32)[:, 0]
    wave = run_wave("v_perm_b32 v8, v0, v1, v2", {"v0": a, "v1": b, "v2": selectors})
    assert_same(result(wave, 8, "u32"), lane_by_lane(permuted, "u32", a, b, selectors))


def test_fma_rounds_once(rng):
    # a * b + c cancels to what a rounded product would lose.
    a = (1 + rng.integers(1, 1 << 23, 64) * 2.0**-23).astype(np.float32)
    product = a.astype(np.float64) ** 2
    c = -product.astype(np.float32)
    wave = run_wave("v_fma_f32 v8, v0, v0, v1\nv_mov_b32 v9, v1\nv_fmac_f32 v9, v0, v0", {"v0": a, "v1": c})
    expected = (product + c.astype(np.float64)).astype(np.float32)
    assert_same(result(wave, 8, "f32"), expected)
    assert_same(result(wave, 9, "f32"), expected)


def test_mbcnt_counts_the_mask_bits_below_each_lane(rng):
    low, high = (int(x) for x in rng.integers(0, 1 << 32, 2))
    wave = run_wave("v_mbcnt_lo_u32_b32 v0, s0, 0\nv_mbcnt_hi_u32_b32 v0, s1, v0", {"s0": low, "s1": high})
    mask = high << 32 | low
    assert_same(wave.vector[0], np.array([(mask & (1 << lane) - 1).bit_count() for lane in range(64)], np.uint32))


def test_inline_constants_literals_and_scalars_are_sources(rng):
    a = samples("u32", rng)
    wave = run_wave(
        "v_add_u32 v1, -16, v0\nv_add_u32 v2, 64, v0\nv_add_u32 v3, 0x12345678, v0\nv_add_u32 v4, s7, v0",
        {"v0": a, "s7": 99},
    )
    for register, constant in ((1, -16), (2, 64), (3, 0x12345678), (4, 99)):
        assert_same(wave.vector[register], (a.astype(np.int64) + constant & M32).astype(np.uint32))
    values = [0.5, -0.5, 1.0, -1.0, 2.0, -2.0, 4.0, -4.0, np.float32(0.15915494)]
    wave = run_wave("\n".join(f"v_mov_b32 v{i}, {value}" for i, value in enumerate(values)))
    assert [wave.vector[i].view(np.float32)[0] for i in range(len(values))] == values


def test_lanes_that_are_off_keep_their_value(rng):
    a, old, mask = samples("u32", rng), samples("u32", rng), int(rng.integers(0, 1 << 63))
    wave = run_wave("v_mov_b32 v1, v0", {"v0": a, "v1": old}, exec_mask=mask)
    on = np.array([mask >> lane & 1 for lane in range(64)], bool)
    assert_same(wave.vector[1], np.where(on, a, old))


def test_opsel_reads_and_writes_high_halves(rng):
    a, b, old = (rng.standard_normal((64, 2)).astype(np.float16) for _ in range(3))
    registers = {f"v{i}": x.view(np.uint32)[:, 0] for i, x in enumerate((a, b, old))}
    wave = run_wave("v_fma_f16 v2, v0, v1, v1 op_sel:[1,0,0,1]", registers)
    halves = wave.vector[2].view(np.float16).reshape(64, 2)
    exact = a[:, 1].astype(np.float64) * b[:, 0] + b[:, 0]
    assert_same(halves[:, 1], exact.astype(np.float16))
    assert_same(halves[:, 0], old[:, 0])


def test_pack_conversions(rng):
    a, b = samples("f32", rng), samples("f32", rng)
    wave = run_wave("v_cvt_pkrtz_f16_f32 v2, v0, v1", {"v0": a, "v1": b})
    halves = wave.vector[2].view(np.float16).reshape(64, 2)
    for got, source in ((halves[:, 0], a), (halves[:, 1], b)):
        finite = np.isfinite(source)
        assert np.all(np.abs(got[finite].astype(np.float64)) <= np.abs(source[finite].astype(np.float64)))
        grid = np.minimum(np.abs(source[finite].astype(np.float64)), 65504)
        step = np.maximum(2.0 ** (np.floor(np.log2(np.maximum(grid, 2.0**-30))) - 10), 2.0**-24)
        assert np.all(grid - np.abs(got[finite].astype(np.float64)) < step)
        np.testing.assert_array_equal(got[~finite], source[~finite].astype(np.float16))
    wave = run_wave("v_cvt_pk_f16_f32 v2, v0, v1", {"v0": a, "v1": b}, arch="gfx950")
    with np.errstate(over="ignore"):
        assert_same(wave.vector[2].view(np.float16).reshape(64, 2), np.stack([a, b], 1).astype(np.float16))
    wave = run_wave("v_cvt_pk_bf16_f32 v2, v0, v1", {"v0": a, "v1": b}, arch="gfx950")
    halves = wave.vector[2].view(np.uint16).reshape(64, 2).astype(np.uint32) << np.uint32(16)
    for got, source in ((halves[:, 0], a), (halves[:, 1], b)):
        value = got.view(np.float32)
        number = np.isfinite(source) & np.isfinite(value)
        step = np.spacing(np.abs(source[number])).astype(np.float64) * 2.0**16
        assert np.all(np.abs(value[number].astype(np.float64) - source[number]) <= step / 2)
        np.testing.assert_array_equal(np.isnan(value), np.isnan(source))
