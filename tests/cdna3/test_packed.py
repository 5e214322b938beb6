"""Packed fp32 and fp16 arithmetic, mixed-precision FMA, dot products and accumulator moves."""

import numpy as np
import pytest

from .assemble import run_wave
from .samples import assert_same, result


def pairs(rng, dtype) -> np.ndarray:
    """[64, 2] of random numbers."""
    return rng.standard_normal((64, 2)).astype(dtype)


def as_64(values: np.ndarray) -> np.ndarray:
    return values.view(np.uint64)[:, 0]


def as_32(values: np.ndarray) -> np.ndarray:
    return values.view(np.uint32)[:, 0]


def packed_result(wave, register: int, dtype) -> np.ndarray:
    if np.dtype(dtype).itemsize == 4:
        return np.ascontiguousarray(wave.vector[register : register + 2].T).view(dtype)
    return wave.vector[register].view(dtype).reshape(64, 2)


def fma(a, b, c) -> np.ndarray:
    return (a.astype(np.float64) * b.astype(np.float64) + c.astype(np.float64)).astype(a.dtype)


@pytest.mark.parametrize(
    ("name", "function"), [("v_pk_mul_f32", np.multiply), ("v_pk_add_f32", np.add), ("v_pk_fma_f32", fma)]
)
def test_packed_fp32_with_every_half_selection(name, function, rng):
    count = 3 if "fma" in name else 2
    inputs = [pairs(rng, np.float32) for _ in range(count)]
    registers = {f"v[{2 * i}:{2 * i + 1}]": as_64(x) for i, x in enumerate(inputs)}
    sources = ", ".join(registers)
    wave = run_wave(f"{name} v[8:9], {sources}", registers)
    assert_same(packed_result(wave, 8, np.float32), function(*inputs))
    low, high = [1, 0, 1][:count], [0, 1, 1][:count]
    negated = [0, 1, 0][:count]
    wave = run_wave(f"{name} v[8:9], {sources} op_sel:{low} op_sel_hi:{high} neg_hi:{negated}", registers)
    signs = [-1 if n else 1 for n in negated]
    expected = [
        function(*(x[:, half] for x, half in zip(inputs, low, strict=True))),
        function(*(x[:, half] * np.float32(s) for x, half, s in zip(inputs, high, signs, strict=True))),
    ]
    assert_same(packed_result(wave, 8, np.float32), np.stack(expected, 1))


def test_packed_result_may_overlap_its_source(rng):
    a, b = pairs(rng, np.float32), pairs(rng, np.float32)
    wave = run_wave(
        "v_pk_mul_f32 v[0:1], v[0:1], v[2:3] op_sel:[1,0] op_sel_hi:[0,1]", {"v[0:1]": as_64(a), "v[2:3]": as_64(b)}
    )
    assert_same(packed_result(wave, 0, np.float32), a[:, ::-1] * b)


def test_packed_fp32_scalar_pair_and_constant(rng):
    a = pairs(rng, np.float32)
    scalars = np.array([1.5, -2.25], np.float32)
    wave = run_wave(
        "v_pk_mul_f32 v[2:3], v[0:1], s[0:1]\nv_pk_add_f32 v[4:5], v[0:1], 1.0 op_sel_hi:[1,0]",
        {"v[0:1]": as_64(a), "s[0:1]": int(scalars.view(np.uint64)[0])},
    )
    assert_same(packed_result(wave, 2, np.float32), a * scalars)
    assert_same(packed_result(wave, 4, np.float32)[:, 0], a[:, 0] + 1)


def test_pk_mov_takes_any_two_dwords(rng):
    a, b = pairs(rng, np.float32), pairs(rng, np.float32)
    wave = run_wave("v_pk_mov_b32 v[4:5], v[0:1], v[2:3] op_sel:[1,0]", {"v[0:1]": as_64(a), "v[2:3]": as_64(b)})
    assert_same(packed_result(wave, 4, np.float32), np.stack([a[:, 1], b[:, 0]], 1))


@pytest.mark.parametrize(
    ("name", "dtype", "function"),
    [
        ("v_pk_add_f16", np.float16, np.add),
        ("v_pk_mul_f16", np.float16, np.multiply),
        ("v_pk_max_f16", np.float16, np.fmax),
        ("v_pk_min_f16", np.float16, np.fmin),
        ("v_pk_fma_f16", np.float16, fma),
        ("v_pk_add_u16", np.uint16, np.add),
        ("v_pk_mul_lo_u16", np.uint16, np.multiply),
        ("v_pk_sub_u16", np.uint16, np.subtract),
        ("v_pk_add_i16", np.uint16, np.add),
        ("v_pk_sub_i16", np.uint16, np.subtract),
        ("v_pk_min_i16", np.int16, np.minimum),
        ("v_pk_max_i16", np.int16, np.maximum),
        ("v_pk_min_u16", np.uint16, np.minimum),
        ("v_pk_max_u16", np.uint16, np.maximum),
        ("v_pk_lshlrev_b16", np.uint16, lambda a, b: b << (a & np.uint16(15))),
        ("v_pk_lshrrev_b16", np.uint16, lambda a, b: b >> (a & np.uint16(15))),
        ("v_pk_ashrrev_i16", np.int16, lambda a, b: b >> (a & np.int16(15))),
    ],
)
def test_packed_16_bit(name, dtype, function, rng):
    count = 3 if "fma" in name else 2
    make = (
        (lambda: pairs(rng, dtype))
        if dtype is np.float16
        else (lambda: rng.integers(0, 1 << 16, (64, 2), np.uint16).view(dtype))
    )
    inputs = [make() for _ in range(count)]
    registers = {f"v{i}": as_32(x) for i, x in enumerate(inputs)}
    sources = ", ".join(registers)
    wave = run_wave(
        f"{name} v8, {sources}\n{name} v9, {sources} op_sel:{[1, 0, 1][:count]} op_sel_hi:{[0, 0, 1][:count]}",
        registers,
    )
    assert_same(packed_result(wave, 8, dtype), function(*inputs))
    low = function(*(x[:, half] for x, half in zip(inputs, (1, 0, 1), strict=False)))
    high = function(*(x[:, half] for x, half in zip(inputs, (0, 0, 1), strict=False)))
    assert_same(packed_result(wave, 9, dtype), np.stack([low, high], 1))


def test_mixed_fma_reads_halves_and_writes_one(rng):
    halves, c, old = pairs(rng, np.float16), rng.standard_normal(64).astype(np.float32), pairs(rng, np.float16)
    registers = {"v0": as_32(halves), "v1": c, "v2": as_32(old), "v3": as_32(old)}
    text = """
    v_fma_mix_f32 v4, v0, v0, -v1 op_sel:[0,1,0] op_sel_hi:[1,1,0]
    v_fma_mixlo_f16 v2, v0, v1, |v1| op_sel_hi:[1,0,0]
    v_fma_mixhi_f16 v3, v0, v1, v1 op_sel:[1,0,0] op_sel_hi:[1,0,0]"""
    wave = run_wave(text, registers)
    low, high = (halves[:, i].astype(np.float32) for i in range(2))
    assert_same(result(wave, 4, "f32"), fma(low, high, -c))
    assert_same(packed_result(wave, 2, np.float16), np.stack([fma(low, c, np.abs(c)).astype(np.float16), old[:, 1]], 1))
    assert_same(packed_result(wave, 3, np.float16), np.stack([old[:, 0], fma(high, c, c).astype(np.float16)], 1))


def test_dot2_adds_two_products(rng):
    a, b, c = pairs(rng, np.float16), pairs(rng, np.float16), rng.standard_normal(64).astype(np.float32)
    wave = run_wave("v_dot2_f32_f16 v3, v0, v1, v2", {"v0": as_32(a), "v1": as_32(b), "v2": c})
    assert_same(result(wave, 3, "f32"), ((a.astype(np.float64) * b).sum(1) + c).astype(np.float32))


def test_accumulator_moves(rng):
    a = rng.integers(0, 1 << 32, 64, np.uint32)
    wave = run_wave(
        "v_accvgpr_write_b32 a3, v0\nv_accvgpr_mov_b32 a4, a3\nv_accvgpr_read_b32 v1, a4\nv_accvgpr_write_b32 a5, 1.0",
        {"v0": a},
    )
    assert_same(wave.vector[1], a)
    assert_same(wave.vector[256 + 3], a)
    assert (wave.vector[256 + 5].view(np.float32) == 1).all()
