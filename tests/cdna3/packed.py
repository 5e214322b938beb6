"""VOP3P apart from MFMA: packed fp32, packed 16-bit, mixed-precision FMA, dot products and accumulator moves."""

from collections.abc import Callable

import numpy as np

from . import floats
from .decode import Instruction
from .errors import UnsupportedInstructionError
from .machine import Wave
from .operands import DTYPES, raw_vector_source

__all__ = ["build_packed"]

Step = Callable[[Wave], None]

_SIGN = np.uint32(1 << 31)
_AGPR = 256


def _fma(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    return (a.astype(np.float64) * b.astype(np.float64) + c.astype(np.float64)).astype(a.dtype)


_PACKED_F32 = {"v_pk_fma_f32": (3, _fma), "v_pk_mul_f32": (2, np.multiply), "v_pk_add_f32": (2, np.add)}
_PACKED_16 = {
    "v_pk_fma_f16": ("f16", 3, _fma),
    "v_pk_add_f16": ("f16", 2, np.add),
    "v_pk_mul_f16": ("f16", 2, np.multiply),
    "v_pk_max_f16": ("f16", 2, np.fmax),
    "v_pk_min_f16": ("f16", 2, np.fmin),
    "v_pk_add_u16": ("u16", 2, np.add),
    "v_pk_sub_u16": ("u16", 2, np.subtract),
    "v_pk_add_i16": ("u16", 2, np.add),
    "v_pk_sub_i16": ("u16", 2, np.subtract),
    "v_pk_mul_lo_u16": ("u16", 2, np.multiply),
    "v_pk_max_u16": ("u16", 2, np.maximum),
    "v_pk_min_u16": ("u16", 2, np.minimum),
    "v_pk_max_i16": ("i16", 2, np.maximum),
    "v_pk_min_i16": ("i16", 2, np.minimum),
    "v_pk_lshlrev_b16": ("u16", 2, lambda a, b: b << (a & np.uint16(15))),
    "v_pk_lshrrev_b16": ("u16", 2, lambda a, b: b >> (a & np.uint16(15))),
    "v_pk_ashrrev_i16": ("i16", 2, lambda a, b: b >> (a & np.int16(15))),
}
_MIXED = ("v_mad_mix_f32", "v_mad_mixlo_f16", "v_mad_mixhi_f16")  # the decoder's names of v_fma_mix*


def build_packed(instruction: Instruction) -> Step | None:
    """The step of an instruction of this file; None if there is none."""
    name = instruction.mnemonic
    if name in _PACKED_F32:
        return _packed_f32(instruction)
    if name == "v_pk_mov_b32":
        return _packed_move(instruction)
    if name in _PACKED_16:
        return _packed_16(instruction)
    if name in _MIXED:
        return _mixed_fma(instruction)
    if name in ("v_dot2_f32_f16", "v_dot2_f32_bf16"):
        return _dot2(instruction)
    if name.startswith("v_accvgpr_"):
        return _accumulator_move(instruction)
    return None


def _high_selectors(instruction: Instruction) -> int:
    return instruction["opsel_hi"] | instruction["opsel_hi2"] << 2


def _refuse_clamp(instruction: Instruction) -> None:
    if instruction["clmp"]:
        raise UnsupportedInstructionError(f"{instruction}: clamp")


def _packed_f32(instruction: Instruction) -> Step:
    _refuse_clamp(instruction)
    count, function = _PACKED_F32[instruction.mnemonic]

    def half(selectors: int, negate: int) -> list[Callable[[Wave], np.ndarray]]:
        return [_f32_element(instruction, i, selectors >> i & 1, negate >> i & 1) for i in range(count)]

    low = half(instruction["opsel"], instruction["neg"])
    high = half(_high_selectors(instruction), instruction["neg_hi"])
    register = instruction["vdst"]

    def compute(wave: Wave) -> None:
        # Both halves are read before either is written: the destination may overlap a source.
        results = [np.array(function(*(source(wave) for source in sources))) for sources in (low, high)]
        wave.write_vector(register, results[0])
        wave.write_vector(register + 1, results[1])

    return compute


def _f32_element(instruction: Instruction, index: int, selector: int, negate: int) -> Callable[[Wave], np.ndarray]:
    code = instruction[f"src{index}"]
    is_register = code >= 256 or code < 128
    source = raw_vector_source(instruction, code, 32, offset=selector if is_register else 0)
    if negate:
        return lambda wave: (source(wave) ^ _SIGN).view(np.float32)
    return lambda wave: source(wave).view(np.float32)


def _packed_move(instruction: Instruction) -> Step:
    low, high = (
        raw_vector_source(instruction, instruction[f"src{i}"], 32, offset=instruction["opsel"] >> i & 1)
        for i in range(2)
    )
    register = instruction["vdst"]

    def move(wave: Wave) -> None:
        values = [np.array(source(wave)) for source in (low, high)]
        wave.write_vector(register, values[0])
        wave.write_vector(register + 1, values[1])

    return move


def _source_32(instruction: Instruction, index: int) -> Callable[[Wave], np.ndarray]:
    """A source of packed 16-bit values; an inline float constant is an fp16 number in the low half."""
    code = instruction[f"src{index}"]
    return raw_vector_source(instruction, code, 16 if 240 <= code <= 248 else 32)


def _packed_16(instruction: Instruction) -> Step:
    _refuse_clamp(instruction)
    kind, count, function = _PACKED_16[instruction.mnemonic]
    sources = [_source_32(instruction, i) for i in range(count)]
    halves = [
        [(selectors >> i & 1, np.uint16(0x8000 if negate >> i & 1 else 0)) for i in range(count)]
        for selectors, negate in (
            (instruction["opsel"], instruction["neg"]),
            (_high_selectors(instruction), instruction["neg_hi"]),
        )
    ]
    register, dtype = instruction["vdst"], DTYPES[kind]

    def compute(wave: Wave) -> None:
        values = [source(wave) for source in sources]
        results = []
        for half in halves:
            elements = [
                ((value >> np.uint32(16) if high else value).astype(np.uint16) ^ flip).view(dtype)
                for value, (high, flip) in zip(values, half, strict=True)
            ]
            results.append(function(*elements).view(np.uint16).astype(np.uint32))
        wave.write_vector(register, results[0] | results[1] << np.uint32(16))

    return compute


def _mixed_fma(instruction: Instruction) -> Step:
    """opsel_hi says that a source is fp16, opsel which half of it; neg_hi takes the absolute value."""
    _refuse_clamp(instruction)
    is_half = _high_selectors(instruction)
    sources = [_mixed_source(instruction, i, is_half >> i & 1) for i in range(3)]
    register, name = instruction["vdst"], instruction.mnemonic

    def compute(wave: Wave) -> None:
        result = _fma(*(source(wave) for source in sources))
        if name.endswith("_f32"):
            wave.write_vector(register, result)
            return
        half = result.astype(np.float16).view(np.uint16).astype(np.uint32)
        old = wave.vector[register]
        merged = (
            old & np.uint32(0xFFFF) | half << np.uint32(16) if "mixhi" in name else old & np.uint32(0xFFFF0000) | half
        )
        wave.write_vector(register, merged)

    return compute


def _mixed_source(instruction: Instruction, index: int, is_half: int) -> Callable[[Wave], np.ndarray]:
    source = (
        _source_32(instruction, index) if is_half else raw_vector_source(instruction, instruction[f"src{index}"], 32)
    )
    high, negate = instruction["opsel"] >> index & 1, instruction["neg"] >> index & 1
    absolute = instruction["neg_hi"] >> index & 1

    def read(wave: Wave) -> np.ndarray:
        value = source(wave)
        if is_half:
            value = (value >> np.uint32(16) if high else value).astype(np.uint16).view(np.float16).astype(np.float32)
        else:
            value = value.view(np.float32)
        value = np.abs(value) if absolute else value
        return -value if negate else value

    return read


def _dot2(instruction: Instruction) -> Step:
    _refuse_clamp(instruction)
    if instruction["opsel"] or _high_selectors(instruction) & 3 != 3 or instruction["neg"] & 3 or instruction["neg_hi"]:
        raise UnsupportedInstructionError(f"{instruction}: source modifiers")
    first, second = (_source_32(instruction, i) for i in range(2))
    addend = _f32_element(instruction, 2, 0, instruction["neg"] >> 2 & 1)
    register, is_bf16 = instruction["vdst"], instruction.mnemonic.endswith("_bf16")

    def elements(value: np.ndarray, shift: int) -> np.ndarray:
        half = (value >> np.uint32(shift)).astype(np.uint16)
        return (floats.f32_from_bf16(half) if is_bf16 else half.view(np.float16)).astype(np.float64)

    def compute(wave: Wave) -> None:
        a, b = first(wave), second(wave)
        total = sum(elements(a, shift) * elements(b, shift) for shift in (0, 16)) + addend(wave)
        wave.write_vector(register, total.astype(np.float32))

    return compute


def _accumulator_move(instruction: Instruction) -> Step:
    name, register, code = instruction.mnemonic, instruction["vdst"], instruction["src0"]
    from_accumulator = not name.startswith("v_accvgpr_write")
    source = raw_vector_source(instruction, code, 32, offset=_AGPR if from_accumulator else 0)
    destination = register if name.startswith("v_accvgpr_read") else register + _AGPR
    return lambda wave: wave.write_vector(destination, source(wave))
