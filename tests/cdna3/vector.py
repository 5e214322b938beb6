"""Vector ALU without lane crossing: one table from mnemonic to operand types and NumPy function.

A signature "f32 <- f32 i32" names the type of the result and of each source; "+dst" adds the old destination as the
last source. Transcendental functions are rounded correctly here; hardware is within about one unit in the last place.
Denormals are kept.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from . import floats
from .decode import Instruction
from .errors import UnsupportedInstructionError
from .machine import LANES, MASK32, Wave
from .operands import DTYPES, vector_destination, vector_source

__all__ = ["ALU", "Operation", "build_alu"]

u32, i32, f32, u64, i64, f64 = np.uint32, np.int32, np.float32, np.uint64, np.int64, np.float64


@dataclass(frozen=True)
class Operation:
    """Types of result and sources, and the function from source arrays to the result array."""

    result: str
    sources: tuple[str, ...]
    reads_destination: bool
    function: Callable[..., np.ndarray]


def _op(signature: str, function: Callable[..., np.ndarray]) -> Operation:
    result, _, sources = signature.partition(" <- ")
    kinds = sources.split()
    return Operation(result, tuple(k for k in kinds if k != "+dst"), "+dst" in kinds, function)


def _exactly(function: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    """An fp32 function evaluated in fp64 and rounded once."""
    return lambda *sources: function(*(s.astype(f64) for s in sources)).astype(f32)


def _swapped(function: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    return lambda a, b: function(b, a)


def _fma(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    return (a.astype(f64) * b.astype(f64) + c.astype(f64)).astype(a.dtype)


def _shift_count(count: np.ndarray, bits: int = 32) -> np.ndarray:
    return count & count.dtype.type(bits - 1)


def _median(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    if a.dtype.kind == "f":
        middle = np.fmax(np.fmin(a, b), np.fmin(np.fmax(a, b), c))
        return np.where(np.isnan(a) | np.isnan(b) | np.isnan(c), np.fmin(np.fmin(a, b), c), middle)
    return np.maximum(np.minimum(a, b), np.minimum(np.maximum(a, b), c))


def _float_to_integer(low: float, high: float, dtype: type) -> Callable[[np.ndarray], np.ndarray]:
    """Truncate, saturate, NaN to zero."""
    return lambda a: np.clip(np.nan_to_num(np.trunc(a.astype(f64)), posinf=high, neginf=low), low, high).astype(dtype)


def _bit_field(value: np.ndarray, offset: np.ndarray, width: np.ndarray) -> np.ndarray:
    return value >> (offset & u32(31)) & (u32(1) << (width & u32(31))) - u32(1)


def _signed_bit_field(value: np.ndarray, offset: np.ndarray, width: np.ndarray) -> np.ndarray:
    width = width & u32(31)
    field = _bit_field(value, offset, width)
    shift = u32(32) - width & u32(31)
    return np.where(width == 0, i32(0), (field << shift).view(i32) >> shift.view(i32))


def _byte_permute(a: np.ndarray, b: np.ndarray, selectors: np.ndarray) -> np.ndarray:
    """v_perm_b32: bytes 0..3 are b's, 4..7 a's; 8..11 a sign fill; 12 zero; 13 and above 0xff."""
    a, b, selectors = np.broadcast_arrays(a, b, selectors)
    pair = a.astype(u64) << u64(32) | b.astype(u64)
    result = np.zeros(pair.shape, u32)
    for position in range(4):
        selector = selectors >> u32(8 * position) & u32(0xFF)
        byte = pair >> u64(8) * np.minimum(selector, u32(7)).astype(u64) & u64(0xFF)
        if (selector > 7).any():
            sign_bit = (u64(2) * (selector.astype(u64) & u64(3)) + u64(1)) * u64(8) + u64(7)
            fill = (pair >> sign_bit & u64(1)) * u64(0xFF)
            special = np.where(selector < 12, fill, np.where(selector == 12, u64(0), u64(0xFF)))
            byte = np.where(selector > 7, special, byte)
        result |= byte.astype(u32) << u32(8 * position)
    return result


def _align(bits_per_step: int, steps: int) -> Callable[..., np.ndarray]:
    def function(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
        shift = (c & u32(steps - 1)).astype(u64) * u64(bits_per_step)
        return ((a.astype(u64) << u64(32) | b.astype(u64)) >> shift).astype(u32)

    return function


def _signed24(a: np.ndarray) -> np.ndarray:
    return (a << u32(8)).view(i32) >> i32(8)


def _unsigned24(a: np.ndarray) -> np.ndarray:
    return a & u32(0xFFFFFF)


def _pack(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    low, high = np.broadcast_arrays(low, high)
    return low.astype(u32) | high.astype(u32) << u32(16)


def _leading_zeros(a: np.ndarray) -> np.ndarray:
    exponent = np.frexp(a.astype(f64))[1]
    return np.where(a == 0, MASK32, 32 - exponent).astype(u32)


def _trailing_zeros(a: np.ndarray) -> np.ndarray:
    lowest = a & (~a + u32(1))
    return np.where(a == 0, MASK32, np.frexp(lowest.astype(f64))[1] - 1).astype(u32)


def _reverse_bits(a: np.ndarray) -> np.ndarray:
    bits = np.unpackbits(np.ascontiguousarray(a).view(np.uint8).reshape(-1, 4), axis=1, bitorder="little")
    return np.packbits(bits[:, ::-1], axis=1, bitorder="little").view(u32).reshape(a.shape)


def _count_below(low_half: bool) -> Callable[..., np.ndarray]:
    """v_mbcnt: how many mask bits belong to lanes below each lane, in one half of the mask."""
    below = [(1 << min(max(lane - (0 if low_half else 32), 0), 32)) - 1 for lane in LANES.tolist()]
    mask = np.array(below, u32)
    return lambda a, b: np.bitwise_count(a & mask).astype(u32) + b


def _div_fixup(quotient: np.ndarray, denominator: np.ndarray, numerator: np.ndarray) -> np.ndarray:
    """The last step of a division: special values, and the sign of the true quotient.

    The text names underflow only, but a quotient past the largest number comes here as NaN and must leave as infinity.
    """
    exponents = [
        v.view(u32) >> u32(23) & u32(255) for v in (np.ascontiguousarray(numerator), np.ascontiguousarray(denominator))
    ]
    distance = exponents[0].astype(i32) - exponents[1].astype(i32)
    quotient, denominator, numerator, distance = np.broadcast_arrays(quotient, denominator, numerator, distance)
    magnitude = np.select(
        [
            np.isnan(denominator) | np.isnan(numerator),
            (numerator == 0) & (denominator == 0) | np.isinf(numerator) & np.isinf(denominator),
            (denominator == 0) | np.isinf(numerator),
            (numerator == 0) | np.isinf(denominator),
            distance < -150,
            distance > 128,
        ],
        [f32(np.nan), f32(np.nan), f32(np.inf), f32(0), f32(0), f32(np.inf)],
        np.abs(quotient),
    )
    return np.where(np.signbit(denominator) ^ np.signbit(numerator), -magnitude, magnitude).astype(f32)


ALU: dict[str, Operation] = {
    "v_mov_b32": _op("b32 <- b32", lambda a: a),
    "v_mov_b64": _op("b64 <- b64", lambda a: a),
    "v_not_b32": _op("b32 <- b32", np.invert),
    "v_bfrev_b32": _op("b32 <- b32", _reverse_bits),
    "v_ffbh_u32": _op("u32 <- u32", _leading_zeros),
    "v_ffbl_b32": _op("u32 <- b32", _trailing_zeros),
    "v_bcnt_u32_b32": _op("u32 <- b32 u32", lambda a, b: np.bitwise_count(a).astype(u32) + b),
    "v_mbcnt_lo_u32_b32": _op("u32 <- b32 u32", _count_below(low_half=True)),
    "v_mbcnt_hi_u32_b32": _op("u32 <- b32 u32", _count_below(low_half=False)),
    # Integers
    "v_and_b32": _op("b32 <- b32 b32", np.bitwise_and),
    "v_or_b32": _op("b32 <- b32 b32", np.bitwise_or),
    "v_xor_b32": _op("b32 <- b32 b32", np.bitwise_xor),
    "v_xnor_b32": _op("b32 <- b32 b32", lambda a, b: ~(a ^ b)),
    "v_bfi_b32": _op("b32 <- b32 b32 b32", lambda a, b, c: a & b | ~a & c),
    "v_bfm_b32": _op("b32 <- u32 u32", lambda a, b: (u32(1) << _shift_count(a)) - u32(1) << _shift_count(b)),
    "v_bfe_u32": _op("u32 <- u32 u32 u32", _bit_field),
    "v_bfe_i32": _op("i32 <- u32 u32 u32", _signed_bit_field),
    "v_perm_b32": _op("b32 <- b32 b32 b32", _byte_permute),
    "v_alignbit_b32": _op("b32 <- b32 b32 u32", _align(1, 32)),
    "v_alignbyte_b32": _op("b32 <- b32 b32 u32", _align(8, 4)),
    "v_lshlrev_b32": _op("b32 <- u32 b32", lambda a, b: b << _shift_count(a)),
    "v_lshrrev_b32": _op("b32 <- u32 b32", lambda a, b: b >> _shift_count(a)),
    "v_ashrrev_i32": _op("i32 <- i32 i32", lambda a, b: b >> _shift_count(a)),
    "v_lshlrev_b64": _op("b64 <- u32 b64", lambda a, b: b << _shift_count(a, 64).astype(u64)),
    "v_lshrrev_b64": _op("b64 <- u32 b64", lambda a, b: b >> _shift_count(a, 64).astype(u64)),
    "v_ashrrev_i64": _op("i64 <- u32 i64", lambda a, b: b >> _shift_count(a, 64).astype(i64)),
    "v_lshl_or_b32": _op("b32 <- b32 u32 b32", lambda a, b, c: a << _shift_count(b) | c),
    "v_and_or_b32": _op("b32 <- b32 b32 b32", lambda a, b, c: a & b | c),
    "v_or3_b32": _op("b32 <- b32 b32 b32", lambda a, b, c: a | b | c),
    "v_xad_u32": _op("u32 <- u32 u32 u32", lambda a, b, c: (a ^ b) + c),
    "v_add3_u32": _op("u32 <- u32 u32 u32", lambda a, b, c: a + b + c),
    "v_lshl_add_u32": _op("u32 <- u32 u32 u32", lambda a, b, c: (a << _shift_count(b)) + c),
    "v_add_lshl_u32": _op("u32 <- u32 u32 u32", lambda a, b, c: a + b << _shift_count(c)),
    "v_lshl_add_u64": _op("u64 <- u64 u32 u64", lambda a, b, c: (a << (b & u32(7)).astype(u64)) + c),
    "v_mul_lo_u32": _op("u32 <- u32 u32", np.multiply),
    "v_mul_hi_u32": _op("u32 <- u32 u32", lambda a, b: (a.astype(u64) * b.astype(u64) >> u64(32)).astype(u32)),
    "v_mul_hi_i32": _op("i32 <- i32 i32", lambda a, b: (a.astype(i64) * b.astype(i64) >> i64(32)).astype(i32)),
    "v_mul_u32_u24": _op("u32 <- u32 u32", lambda a, b: _unsigned24(a) * _unsigned24(b)),
    "v_mul_i32_i24": _op("i32 <- u32 u32", lambda a, b: _signed24(a) * _signed24(b)),
    "v_mad_u32_u24": _op("u32 <- u32 u32 u32", lambda a, b, c: _unsigned24(a) * _unsigned24(b) + c),
    "v_mad_i32_i24": _op("i32 <- u32 u32 i32", lambda a, b, c: _signed24(a) * _signed24(b) + c),
    # Floats
    "v_mul_legacy_f32": _op("f32 <- f32 f32", lambda a, b: np.where((a == 0) | (b == 0), f32(0), a * b)),
    "v_rcp_f32": _op("f32 <- f32", _exactly(np.reciprocal)),
    "v_rcp_iflag_f32": _op("f32 <- f32", _exactly(np.reciprocal)),
    "v_rsq_f32": _op("f32 <- f32", _exactly(lambda a: 1 / np.sqrt(a))),
    "v_sqrt_f32": _op("f32 <- f32", np.sqrt),
    "v_exp_f32": _op("f32 <- f32", _exactly(np.exp2)),
    "v_log_f32": _op("f32 <- f32", _exactly(np.log2)),
    "v_fract_f32": _op("f32 <- f32", lambda a: np.minimum(a - np.floor(a), f32(1 - 2**-24))),
    "v_frexp_exp_i32_f32": _op("i32 <- f32", lambda a: np.where(np.isfinite(a), np.frexp(a)[1], 0).astype(i32)),
    "v_frexp_mant_f32": _op("f32 <- f32", lambda a: np.frexp(a)[0]),
    "v_ldexp_f32": _op("f32 <- f32 i32", np.ldexp),
    "v_div_fixup_f32": _op("f32 <- f32 f32 f32", _div_fixup),
    "v_fmac_f32": _op("f32 <- f32 f32 +dst", _fma),
    # Conversions
    "v_cvt_f32_u32": _op("f32 <- u32", lambda a: a.astype(f32)),
    "v_cvt_f32_i32": _op("f32 <- i32", lambda a: a.astype(f32)),
    "v_cvt_u32_f32": _op("u32 <- f32", _float_to_integer(0, 2.0**32 - 1, u32)),
    "v_cvt_i32_f32": _op("i32 <- f32", _float_to_integer(-(2.0**31), 2.0**31 - 1, i32)),
    "v_cvt_f16_f32": _op("f16 <- f32", lambda a: a.astype(np.float16)),
    "v_cvt_f32_f16": _op("f32 <- f16", lambda a: a.astype(f32)),
    "v_cvt_f16_u16": _op("f16 <- u16", lambda a: a.astype(np.float16)),
    "v_cvt_f16_i16": _op("f16 <- i16", lambda a: a.astype(np.float16)),
    "v_cvt_u16_f16": _op("u16 <- f16", _float_to_integer(0, 65535, np.uint16)),
    "v_cvt_i16_f16": _op("i16 <- f16", _float_to_integer(-32768, 32767, np.int16)),
    "v_cvt_pkrtz_f16_f32": _op(
        "b32 <- f32 f32", lambda a, b: _pack(*(floats.f16_round_to_zero(x).view(np.uint16) for x in (a, b)))
    ),
    "v_cvt_pk_bf16_f32": _op("b32 <- f32 f32", lambda a, b: _pack(floats.bf16_from_f32(a), floats.bf16_from_f32(b))),
    "v_cvt_pk_f16_f32": _op(
        "b32 <- f32 f32", lambda a, b: _pack(*(x.astype(np.float16).view(np.uint16) for x in (a, b)))
    ),
    "v_pack_b32_f16": _op("b32 <- b16 b16", _pack),
}
for _byte in range(4):
    ALU[f"v_cvt_f32_ubyte{_byte}"] = _op(
        "f32 <- u32", lambda a, byte=_byte: (a >> u32(8 * byte) & u32(255)).astype(f32)
    )
for _kind in ("f16", "f32"):
    ALU |= {
        f"v_add_{_kind}": _op(f"{_kind} <- {_kind} {_kind}", np.add),
        f"v_sub_{_kind}": _op(f"{_kind} <- {_kind} {_kind}", np.subtract),
        f"v_subrev_{_kind}": _op(f"{_kind} <- {_kind} {_kind}", _swapped(np.subtract)),
        f"v_mul_{_kind}": _op(f"{_kind} <- {_kind} {_kind}", np.multiply),
        f"v_fma_{_kind}": _op(f"{_kind} <- {_kind} {_kind} {_kind}", _fma),
        f"v_floor_{_kind}": _op(f"{_kind} <- {_kind}", np.floor),
        f"v_ceil_{_kind}": _op(f"{_kind} <- {_kind}", np.ceil),
        f"v_trunc_{_kind}": _op(f"{_kind} <- {_kind}", np.trunc),
        f"v_rndne_{_kind}": _op(f"{_kind} <- {_kind}", np.rint),
    }
for _kind, _max, _min in (
    ("f16", np.fmax, np.fmin),
    ("f32", np.fmax, np.fmin),
    *((k, np.maximum, np.minimum) for k in ("u16", "i16", "u32", "i32")),
):
    _two, _three = f"{_kind} <- {_kind} {_kind}", f"{_kind} <- {_kind} {_kind} {_kind}"
    ALU |= {
        f"v_max_{_kind}": _op(_two, _max),
        f"v_min_{_kind}": _op(_two, _min),
        f"v_max3_{_kind}": _op(_three, lambda a, b, c, pick=_max: pick(pick(a, b), c)),
        f"v_min3_{_kind}": _op(_three, lambda a, b, c, pick=_min: pick(pick(a, b), c)),
        f"v_med3_{_kind}": _op(_three, _median),
    }
for _kind in ("u16", "u32"):
    ALU[f"v_subrev_{_kind}"] = _op(f"{_kind} <- {_kind} {_kind}", _swapped(np.subtract))
for _kind in ("u16", "u32", "i32"):
    ALU[f"v_add_{_kind}"] = _op(f"{_kind} <- {_kind} {_kind}", np.add)
    ALU[f"v_sub_{_kind}"] = _op(f"{_kind} <- {_kind} {_kind}", np.subtract)
ALU |= {
    "v_mul_lo_u16": _op("u16 <- u16 u16", np.multiply),
    "v_lshlrev_b16": _op("b16 <- u16 b16", lambda a, b: b << _shift_count(a, 16)),
    "v_lshrrev_b16": _op("b16 <- u16 b16", lambda a, b: b >> _shift_count(a, 16)),
    "v_ashrrev_i16": _op("i16 <- i16 i16", lambda a, b: b >> _shift_count(a, 16)),
}


def build_alu(instruction: Instruction) -> Callable[[Wave], None] | None:
    """The step of an instruction in `ALU`; None if it is not there."""
    operation = ALU.get(instruction.mnemonic)
    if operation is None:
        return None
    if operation.result[0] != "f" and instruction["clmp"]:
        return _build_saturating(instruction, operation)
    write = vector_destination(instruction, operation.result)
    sources = [vector_source(instruction, index, kind) for index, kind in enumerate(operation.sources)]
    function, dtype = operation.function, DTYPES[operation.result]
    if operation.reads_destination:
        register = instruction["vdst"]
        sources.append(lambda wave: wave.vector[register].view(dtype))
    if len(sources) == 1:
        (only,) = sources
        return lambda wave: write(wave, function(only(wave)))
    if len(sources) == 2:
        first, second = sources
        return lambda wave: write(wave, function(first(wave), second(wave)))
    return lambda wave: write(wave, function(*[source(wave) for source in sources]))


def _build_saturating(instruction: Instruction, operation: Operation) -> Callable[[Wave], None]:
    """An integer addition or subtraction with clamp: the exact result, cut to the range of its type."""
    if not instruction.mnemonic.startswith(("v_add_", "v_sub_", "v_subrev_")):
        raise UnsupportedInstructionError(f"{instruction}: clamp")
    plain = replace(instruction, fields={**instruction.fields, "clmp": 0})
    first, second = (vector_source(plain, index, kind) for index, kind in enumerate(operation.sources))
    write, limits = vector_destination(plain, operation.result), np.iinfo(DTYPES[operation.result])

    def saturate(wave: Wave) -> None:
        exact = operation.function(first(wave).astype(i64), second(wave).astype(i64))
        write(wave, np.clip(exact, limits.min, limits.max).astype(limits.dtype))

    return saturate
