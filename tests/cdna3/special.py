"""Vector instructions that are no plain function of their own lane: masks, carries, divisions, lane moves."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from .decode import Instruction
from .errors import UnsupportedInstructionError
from .machine import EXEC, LANES, MASK32, VCC, Wave, bits_to_lanes, lanes_to_bits
from .operands import DTYPES, scalar_source, vector_destination, vector_source

__all__ = ["build_special"]

Step = Callable[[Wave], None]

_COMPARE = {
    "f": lambda a, b: np.zeros(np.broadcast(a, b).shape, bool),
    "lt": np.less,
    "eq": np.equal,
    "le": np.less_equal,
    "gt": np.greater,
    "lg": lambda a, b: (a < b) | (a > b),
    "ne": np.not_equal,
    "ge": np.greater_equal,
    "o": lambda a, b: ~(np.isnan(a) | np.isnan(b)),
    "u": lambda a, b: np.isnan(a) | np.isnan(b),
    "nge": lambda a, b: ~(a >= b),
    "nlg": lambda a, b: ~((a < b) | (a > b)),
    "ngt": lambda a, b: ~(a > b),
    "nle": lambda a, b: ~(a <= b),
    "neq": lambda a, b: ~(a == b),
    "nlt": lambda a, b: ~(a < b),
    "t": lambda a, b: np.ones(np.broadcast(a, b).shape, bool),
    "tru": lambda a, b: np.ones(np.broadcast(a, b).shape, bool),
}


def build_special(instruction: Instruction) -> Step | None:
    """The step of an instruction of this file; None if there is none."""
    name = instruction.mnemonic
    if name.startswith(("v_cmp_", "v_cmpx_")):
        return _compare(instruction)
    builder = _BUILDERS.get(name)
    return builder(instruction) if builder else None


def _is_vop3(instruction: Instruction) -> bool:
    return instruction.encoding in ("VOP3", "VOP3SD")


def _compare(instruction: Instruction) -> Step:
    prefix, operator, kind = instruction.mnemonic.split("_")[1:]
    if operator == "class":
        if kind != "f32":
            raise UnsupportedInstructionError(f"{instruction}: only the f32 class test has a meaning here")
        function, kinds = _float_class, ("f32", "u32")
    else:
        function, kinds = _COMPARE[operator], (kind, kind)
    first, second = (vector_source(instruction, i, k) for i, k in enumerate(kinds))
    short_destination = instruction["sdst"] if instruction["sd"] else VCC
    destination = instruction["vdst"] if _is_vop3(instruction) else short_destination

    def compare(wave: Wave) -> None:
        lanes = np.broadcast_to(function(first(wave), second(wave)), 64) & wave.active
        bits = lanes_to_bits(lanes)
        wave.write64(destination, bits)
        if prefix == "cmpx":
            wave.write64(EXEC, bits)

    return compare


def _float_class(value: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Whether the class of each fp32 (bit 0 signalling NaN ... bit 9 +infinity) is among the bits of `wanted`."""
    value, wanted = np.broadcast_arrays(value, wanted)
    bits = np.ascontiguousarray(value).view(np.uint32)
    negative, exponent, fraction = np.signbit(value), bits >> np.uint32(23) & np.uint32(255), bits & np.uint32(0x7FFFFF)
    number = np.select(
        [
            (exponent == 255) & (fraction != 0),
            exponent == 255,
            exponent != 0,
            fraction != 0,
        ],
        [fraction >> np.uint32(22), np.where(negative, 2, 9), np.where(negative, 3, 8), np.where(negative, 4, 7)],
        np.where(negative, 5, 6),
    )
    return (wanted >> number.astype(np.uint32) & np.uint32(1)).astype(bool)


def _select_by_mask(instruction: Instruction) -> Step:
    first, second = (vector_source(instruction, i, "b32") for i in range(2))
    mask = scalar_source(instruction, instruction["src2"] if _is_vop3(instruction) else VCC, 64)
    write = vector_destination(instruction, "b32")
    return lambda wave: write(wave, np.where(bits_to_lanes(mask(wave)), second(wave), first(wave)))


def _add_with_carry(instruction: Instruction) -> Step:
    name, vop3 = instruction.mnemonic, _is_vop3(instruction)
    first, second = (vector_source(instruction, i, "u32") for i in range(2))
    if name.startswith(("v_subrev", "v_subbrev")):
        first, second = second, first
    sign = 1 if name.startswith("v_add") else -1
    carry_in = None
    if name.startswith(("v_addc", "v_subb")):
        carry_in = scalar_source(instruction, instruction["src2"] if vop3 else VCC, 64)
    carry_out = instruction["sdst"] if vop3 else VCC
    write = vector_destination(instruction, "u32")

    def add(wave: Wave) -> None:
        result = first(wave).astype(np.int64) + sign * second(wave).astype(np.int64)
        if carry_in:
            result = result + sign * bits_to_lanes(carry_in(wave)).astype(np.int64)
        result = np.broadcast_to(result, 64)
        wave.write64(carry_out, lanes_to_bits(((result < 0) | (result > MASK32)) & wave.active))
        write(wave, (result & MASK32).astype(np.uint32))

    return add


def _multiply_add_64(instruction: Instruction) -> Step:
    kind, wide, carry_out = (
        ("u32", "u64", instruction["sdst"]) if "u64" in instruction.mnemonic else ("i32", "i64", instruction["sdst"])
    )
    first, second, addend = (vector_source(instruction, i, k) for i, k in enumerate((kind, kind, wide)))
    write = vector_destination(instruction, wide)
    dtype = np.dtype(np.uint64 if wide == "u64" else np.int64)

    def multiply(wave: Wave) -> None:
        product = np.broadcast_to(first(wave).astype(dtype) * second(wave).astype(dtype), 64)
        result = product + addend(wave)
        overflow = result < product if wide == "u64" else (result < product) != (np.broadcast_to(addend(wave), 64) < 0)
        wave.write64(carry_out, lanes_to_bits(overflow & wave.active))
        write(wave, result)

    return multiply


def _literal_multiply_add(instruction: Instruction) -> Step:
    """v_fmaak_f32: src0 * vsrc1 + K; v_fmamk_f32: src0 * K + vsrc1."""
    first, second = (vector_source(instruction, i, "f32") for i in range(2))
    constant = np.array([instruction.literal], np.uint32).view(np.float32).astype(np.float64)
    write = vector_destination(instruction, "f32")
    constant_is_addend = instruction.mnemonic == "v_fmaak_f32"

    def multiply(wave: Wave) -> None:
        a, b = first(wave).astype(np.float64), second(wave).astype(np.float64)
        write(wave, (a * b + constant if constant_is_addend else a * constant + b).astype(np.float32))

    return multiply


def _div_scale(instruction: Instruction) -> Step:
    """Scale numerator or denominator by 2^64 where the refinement would leave the normal range; the mask says where."""
    sources = [vector_source(instruction, i, "f32") for i in range(3)]
    write, mask = vector_destination(instruction, "f32"), instruction["sdst"]
    tiny = np.finfo(np.float32).tiny

    def subnormal(values: np.ndarray, limit: float) -> np.ndarray:
        return (values != 0) & (np.abs(values) < limit)

    def scale(wave: Wave) -> None:
        value, denominator, numerator = (np.broadcast_to(s(wave), 64) for s in sources)
        wide_n, wide_d = numerator.astype(np.float64), denominator.astype(np.float64)
        exponent_n, exponent_d = (
            v.view(np.uint32) >> np.uint32(23) & np.uint32(255)
            for v in map(np.ascontiguousarray, (numerator, denominator))
        )
        undefined = (numerator == 0) | (denominator == 0)
        far_apart = exponent_n.astype(int) - exponent_d >= 96
        quotient_subnormal = subnormal(wide_n / wide_d, tiny)
        inverse_subnormal = subnormal(1 / wide_d, tiny)
        is_denominator, is_numerator = value == denominator, value == numerator
        cases = [
            (undefined, np.float32(np.nan), False),
            (far_apart, np.where(is_denominator, np.ldexp(value, 64), value), True),
            (subnormal(denominator, tiny), np.ldexp(value, 64), False),
            (inverse_subnormal & quotient_subnormal, np.where(is_denominator, np.ldexp(value, 64), value), True),
            (inverse_subnormal, np.ldexp(value, -64), False),
            (quotient_subnormal, np.where(is_numerator, np.ldexp(value, 64), value), True),
            (exponent_n <= 23, np.ldexp(value, 64), False),
        ]
        conditions = [condition for condition, _, _ in cases]
        scaled = np.select(conditions, [np.broadcast_to(result, 64) for _, result, _ in cases], value)
        flags = np.select(conditions, [np.full(64, flag) for _, _, flag in cases], False)
        wave.write64(mask, lanes_to_bits(flags & wave.active))
        write(wave, scaled.astype(np.float32))

    return scale


def _div_fmas(instruction: Instruction) -> Step:
    sources = [vector_source(instruction, i, "f32") for i in range(3)]
    write = vector_destination(instruction, "f32")

    def multiply_add(wave: Wave) -> None:
        a, b, c = (s(wave).astype(np.float64) for s in sources)
        # v_div_scale scaled one operand by 2^64; the addend, a guess of the quotient, tells which. So documented for
        # RDNA3; the CDNA3 text says 2^32 for both.
        unscale = np.where(np.abs(c) >= 2.0, 2.0**64, 2.0**-64)
        write(wave, ((a * b + c) * np.where(bits_to_lanes(wave.read64(VCC)), unscale, 1.0)).astype(np.float32))

    return multiply_add


def _first_active_lane(instruction: Instruction) -> Step:
    source, destination = vector_source(instruction, 0, "b32"), instruction["vdst"]

    def read(wave: Wave) -> None:
        wave.write(destination, int(np.broadcast_to(source(wave), 64)[int(np.argmax(wave.active))]))

    return read


def _read_lane(instruction: Instruction) -> Step:
    source, lane = vector_source(instruction, 0, "b32"), scalar_source(instruction, instruction["src1"])
    destination = instruction["vdst"]
    return lambda wave: wave.write(destination, int(np.broadcast_to(source(wave), 64)[lane(wave) & 63]))


def _write_lane(instruction: Instruction) -> Step:
    value, lane = (scalar_source(instruction, instruction[f"src{i}"]) for i in range(2))
    register = instruction["vdst"]

    def write(wave: Wave) -> None:
        wave.vector[register, lane(wave) & 63] = value(wave)

    return write


def _swap(instruction: Instruction) -> Step:
    first, second = instruction["vdst"], instruction["src0"] - 256

    def swap(wave: Wave) -> None:
        old = wave.vector[first].copy()
        wave.write_vector(first, wave.vector[second])
        wave.write_vector(second, old)

    return swap


def _swap_rows(instruction: Instruction) -> Step:
    """v_permlane{16,32}_swap_b32: the odd rows of vdst change places with the even rows of src0 (gfx950)."""
    width = 16 if "16" in instruction.mnemonic else 32
    first, second = instruction["vdst"], instruction["src0"] - 256
    odd = LANES[LANES // width % 2 == 1]

    def swap(wave: Wave) -> None:
        old = wave.vector[first, odd].copy()
        wave.vector[first, odd] = wave.vector[second, odd - width]
        wave.vector[second, odd - width] = old

    return swap


def _bit_operation(instruction: Instruction) -> Step:
    """v_bitop3: any function of three bits; its truth table is spread over the modifier fields (gfx950)."""
    table = instruction["omod"] << 6 | instruction["abs"] << 3 | instruction["neg"]
    plain = replace(instruction, fields={**instruction.fields, "omod": 0, "abs": 0, "neg": 0})
    kind = instruction.mnemonic.split("_")[2]
    sources = [vector_source(plain, i, kind) for i in range(3)]
    write = vector_destination(plain, kind)

    def combine(wave: Wave) -> None:
        a, b, c = (source(wave) for source in sources)
        result = np.zeros(64, DTYPES[kind])
        for row in range(8):
            if table >> row & 1:
                result = result | (a if row & 4 else ~a) & (b if row & 2 else ~b) & (c if row & 1 else ~c)
        write(wave, result)

    return combine


_BUILDERS: dict[str, Callable[[Instruction], Step]] = {
    "v_nop": lambda instruction: lambda wave: None,
    "v_cndmask_b32": _select_by_mask,
    "v_mad_u64_u32": _multiply_add_64,
    "v_mad_i64_i32": _multiply_add_64,
    "v_fmaak_f32": _literal_multiply_add,
    "v_fmamk_f32": _literal_multiply_add,
    "v_div_scale_f32": _div_scale,
    "v_div_fmas_f32": _div_fmas,
    "v_readfirstlane_b32": _first_active_lane,
    "v_readlane_b32": _read_lane,
    "v_writelane_b32": _write_lane,
    "v_swap_b32": _swap,
    "v_permlane16_swap_b32": _swap_rows,
    "v_permlane32_swap_b32": _swap_rows,
    "v_bitop3_b16": _bit_operation,
    "v_bitop3_b32": _bit_operation,
}
for _name in ("add", "addc", "sub", "subb", "subrev", "subbrev"):
    _BUILDERS[f"v_{_name}_co_u32"] = _add_with_carry
