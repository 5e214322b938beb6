"""Number formats that NumPy lacks: bf16, and two 8-bit floats in the FNUZ (gfx942) and the OCP (gfx950) flavour."""

from functools import cache

import numpy as np

__all__ = ["bf16_from_f32", "f16_round_to_zero", "f32_from_bf16", "fp8_encode", "fp8_values"]


def bf16_from_f32(values: np.ndarray) -> np.ndarray:
    """fp32 -> bf16 bits as uint32, round to nearest even, NaN stays NaN."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1)) >> np.uint32(16)
    return np.where(np.isnan(values), bits >> np.uint32(16) | np.uint32(0x40), rounded).astype(np.uint32)


def f32_from_bf16(bits: np.ndarray) -> np.ndarray:
    """bf16 bits of any integer type -> fp32."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def f16_round_to_zero(values: np.ndarray) -> np.ndarray:
    """fp32 -> fp16, rounding towards zero; a finite value never becomes infinity."""
    half = values.astype(np.float16)
    too_far = np.isfinite(values) & (np.abs(half.astype(np.float64)) > np.abs(values.astype(np.float64)))
    return np.where(too_far, np.nextafter(half, np.float16(0)), half).astype(np.float16)


@cache
def fp8_values(kind: str, arch: str) -> np.ndarray:
    """fp32 [256]: the value of each code of "fp8" (e4m3) or "bf8" (e5m2)."""
    exponent_bits, mantissa_bits = (5, 2) if kind == "bf8" else (4, 3)
    fnuz = arch == "gfx942"
    bias = (1 << exponent_bits - 1) - (0 if fnuz else 1)
    codes = np.arange(256)
    sign, exponent = np.where(codes & 128, -1.0, 1.0), (codes & 127) >> mantissa_bits
    mantissa = (codes & (1 << mantissa_bits) - 1) / (1 << mantissa_bits)
    values = sign * np.where(exponent == 0, mantissa * 2.0 ** (1 - bias), (1 + mantissa) * 2.0 ** (exponent - bias))
    if fnuz:
        values[128] = np.nan
    elif kind == "fp8":
        values[[127, 255]] = np.nan
    else:
        top = exponent == 31
        values[top] = np.where(mantissa[top] == 0, sign[top] * np.inf, np.nan)
    return values.astype(np.float32)


def fp8_encode(values: np.ndarray, kind: str, arch: str) -> np.ndarray:
    """fp32 -> codes as uint32, round to nearest even.

    What rounds past the largest finite value becomes infinity where the format has one, else NaN.
    """
    table = fp8_values(kind, arch)
    finite = np.flatnonzero(np.isfinite(table[:128]))
    # One step past the largest finite value, so that what rounds up to there overflows.
    grid = np.append(table[finite].astype(np.float64), 2.0 * table[finite[-1]] - table[finite[-2]])
    magnitude = np.minimum(np.abs(values.astype(np.float64)), grid[-1])
    above = np.clip(np.searchsorted(grid, magnitude), 1, len(grid) - 1)
    to_low, to_high = magnitude - grid[above - 1], grid[above] - magnitude
    code = np.where((to_low > to_high) | ((to_low == to_high) & (above % 2 == 0)), above, above - 1)
    fnuz = arch == "gfx942"
    negative = np.signbit(values) & ~(fnuz & (code == 0))
    nan = 0x80 if fnuz else 0x7F
    overflow = 0x7C if kind == "bf8" and not fnuz else nan
    result = np.where(code > finite[-1], overflow, code) | np.where(negative, 0x80, 0)
    return np.where(np.isnan(values), nan, result).astype(np.uint32)
