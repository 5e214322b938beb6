"""Conversions from and to 8-bit floats; "fp8" is e4m3 and "bf8" e5m2, FNUZ on gfx942 and OCP on gfx950."""

from collections.abc import Callable

import numpy as np

from . import floats
from .decode import Instruction
from .errors import UnsupportedInstructionError
from .machine import Wave
from .operands import vector_destination, vector_source

__all__ = ["build_conversion"]

Step = Callable[[Wave], None]


def build_conversion(instruction: Instruction) -> Step | None:
    """The step of a conversion of 8-bit floats; None for any other instruction."""
    builder = _BUILDERS.get(instruction.mnemonic)
    return builder(instruction) if builder else None


def _kind(instruction: Instruction) -> str:
    return "bf8" if "bf8" in instruction.mnemonic else "fp8"


def _decode_fp8_pair(instruction: Instruction) -> Step:
    table = floats.fp8_values(_kind(instruction), instruction.arch).view(np.uint32)
    source = vector_source(instruction, 0, "u32")
    register = instruction["vdst"]
    if instruction.encoding == "VOP3" and instruction["opsel"]:
        raise UnsupportedInstructionError(f"{instruction}: opsel")

    def decode(wave: Wave) -> None:
        codes = source(wave)
        low, high = table[codes & np.uint32(255)], table[codes >> np.uint32(8) & np.uint32(255)]
        wave.write_vector(register, low)
        wave.write_vector(register + 1, high)

    return decode


def _decode_fp8(instruction: Instruction) -> Step:
    table = floats.fp8_values(_kind(instruction), instruction.arch)
    source, write = vector_source(instruction, 0, "u32"), vector_destination(instruction, "f32")
    return lambda wave: write(wave, table[source(wave) & np.uint32(255)])


def _encode_fp8_pair(instruction: Instruction) -> Step:
    kind, arch = _kind(instruction), instruction.arch
    first, second = (vector_source(instruction, i, "f32") for i in range(2))
    register, high = instruction["vdst"], instruction["opsel"] >> 3 & 1
    shift, kept = np.uint32(16 if high else 0), np.uint32(0xFFFF if high else 0xFFFF0000)

    def encode(wave: Wave) -> None:
        low_code, high_code = (floats.fp8_encode(source(wave), kind, arch) for source in (first, second))
        wave.write_vector(register, (low_code | high_code << np.uint32(8)) << shift | wave.vector[register] & kept)

    return encode


def _decode_scaled_pair(instruction: Instruction) -> Step:
    """v_cvt_scalef32_pk_*_fp8 (gfx950): two codes times the power of two in the exponent of src1."""
    table = floats.fp8_values(_kind(instruction), instruction.arch).astype(np.float64)
    codes, scale = vector_source(instruction, 0, "u32"), vector_source(instruction, 1, "u32")
    shift = 16 * (instruction["opsel"] & 1)
    target, register = instruction.mnemonic.split("_")[4], instruction["vdst"]

    def decode(wave: Wave) -> None:
        factor = np.exp2((scale(wave) >> np.uint32(23) & np.uint32(255)).astype(np.float64) - 127)
        pair = [
            (table[codes(wave) >> np.uint32(s) & np.uint32(255)] * factor).astype(np.float32)
            for s in (shift, shift + 8)
        ]
        if target == "f32":
            wave.write_vector(register, pair[0])
            wave.write_vector(register + 1, pair[1])
            return
        if target == "bf16":
            low, high = (floats.bf16_from_f32(value) for value in pair)
        else:
            low, high = (value.astype(np.float16).view(np.uint16).astype(np.uint32) for value in pair)
        wave.write_vector(register, low | high << np.uint32(16))

    return decode


_BUILDERS: dict[str, Callable[[Instruction], Step]] = {}
for _format in ("fp8", "bf8"):
    _BUILDERS |= {
        f"v_cvt_f32_{_format}": _decode_fp8,
        f"v_cvt_pk_f32_{_format}": _decode_fp8_pair,
        f"v_cvt_pk_{_format}_f32": _encode_fp8_pair,
        f"v_cvt_scalef32_pk_f32_{_format}": _decode_scaled_pair,
        f"v_cvt_scalef32_pk_f16_{_format}": _decode_scaled_pair,
        f"v_cvt_scalef32_pk_bf16_{_format}": _decode_scaled_pair,
    }
