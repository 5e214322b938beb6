"""Operand codes to values: scalar and vector sources with their modifiers, and vector destinations.

Everything is resolved when an instruction is first met; what comes back are small functions of the wave.
"""

from collections.abc import Callable

import numpy as np

from .decode import Instruction
from .errors import UnsupportedInstructionError
from .machine import EXEC, LANES, MASK32, VCC, Wave

__all__ = [
    "DTYPES",
    "dpp_source_lanes",
    "raw_vector_source",
    "scalar_source",
    "sign_extend",
    "vector_destination",
    "vector_source",
]

DTYPES = {
    "b32": np.uint32, "u32": np.uint32, "i32": np.int32, "f32": np.float32,
    "b64": np.uint64, "u64": np.uint64, "i64": np.int64, "f64": np.float64,
    "b16": np.uint16, "u16": np.uint16, "i16": np.int16, "f16": np.float16,
}  # fmt: skip
_LITERAL, _SCC, _VCCZ, _EXECZ, _FIRST_VGPR = 255, 253, 251, 252, 256
_INLINE_FLOATS = {
    240: 0.5,
    241: -0.5,
    242: 1.0,
    243: -1.0,
    244: 2.0,
    245: -2.0,
    246: 4.0,
    247: -4.0,
    248: 0.15915494309189532,
}
_FLOAT_BITS = {16: (np.float16, np.uint16), 32: (np.float32, np.uint32), 64: (np.float64, np.uint64)}
_SDWA_WHOLE, _SDWA_PRESERVE, _SDWA_SIGN_EXTEND = 6, 2, 1

Source = Callable[[Wave], np.ndarray]


def sign_extend(value: int, bits: int = 32) -> int:
    """Read the low `bits` of a non-negative integer as two's complement."""
    sign = 1 << bits - 1
    return (value & (1 << bits) - 1 ^ sign) - sign


def _constant(code: int, instruction: Instruction, bits: int, is_float: bool = False) -> int:
    mask = (1 << bits) - 1
    if code == _LITERAL:
        return instruction.literal << 32 if is_float and bits == 64 else instruction.literal & mask
    if 128 <= code <= 192:
        return code - 128
    if 193 <= code <= 208:
        return 192 - code & mask
    if code in _INLINE_FLOATS:
        float_type, integer_type = _FLOAT_BITS[bits]
        return int(np.array(_INLINE_FLOATS[code], float_type).view(integer_type))
    raise UnsupportedInstructionError(f"{instruction}: operand code {code}")


def scalar_source(instruction: Instruction, code: int, bits: int = 32) -> Callable[[Wave], int]:
    """The unsigned value of a scalar operand."""
    if code < 128:
        if bits == 64:
            return lambda wave: wave.scalar[code] | wave.scalar[code + 1] << 32
        return lambda wave: wave.scalar[code]
    if code == _SCC:
        return lambda wave: wave.scc
    if code == _VCCZ:
        return lambda wave: int(wave.read64(VCC) == 0)
    if code == _EXECZ:
        return lambda wave: int(wave.read64(EXEC) == 0)
    value = _constant(code, instruction, bits)
    return lambda wave: value


def raw_vector_source(
    instruction: Instruction, code: int, bits: int, is_float: bool = False, offset: int = 0
) -> Source:
    """Unsigned [64], or [1] where all lanes see one value; `offset` counts registers past `code`."""
    if code >= _FIRST_VGPR:
        register = code - _FIRST_VGPR + offset
        if bits == 64:

            def pair(wave: Wave) -> np.ndarray:
                low, high = wave.vector[register : register + 2].astype(np.uint64)
                return low | high << np.uint64(32)

            return pair
        return lambda wave: wave.vector[register]
    integer_type = _FLOAT_BITS[max(bits, 32)][1]
    if code < 128 or code in (_SCC, _VCCZ, _EXECZ):
        value = scalar_source(instruction, code + offset if code < 128 else code, bits)
        return lambda wave: np.array([value(wave)], integer_type)
    constant = np.array([_constant(code, instruction, bits, is_float)], integer_type)
    return lambda wave: constant


def _operand_code(instruction: Instruction, index: int) -> int:
    if instruction.variant in ("DPP16", "SDWA") and index == 0:
        is_scalar = instruction.variant == "SDWA" and instruction["s0"]
        return instruction["vsrc0"] if is_scalar else _FIRST_VGPR + instruction["vsrc0"]
    if index == 1 and "src1" not in instruction.fields:
        is_scalar = instruction.variant == "SDWA" and instruction["s1"]
        return instruction["vsrc1"] if is_scalar else _FIRST_VGPR + instruction["vsrc1"]
    return instruction[f"src{index}"]


def dpp_source_lanes(control: int) -> tuple[np.ndarray, np.ndarray]:
    """DPP_CTRL -> (source lane of each lane, whether that lane exists)."""
    row, column = LANES & ~15, LANES & 15
    exists = np.ones(64, bool)
    if control <= 0xFF:  # quad_perm
        return (LANES & ~3) + np.array([control >> 2 * i & 3 for i in range(4)])[LANES & 3], exists
    if 0x101 <= control <= 0x10F:  # row_shl
        return row + np.minimum(column + (control & 15), 15), column + (control & 15) < 16
    if 0x111 <= control <= 0x11F:  # row_shr
        return row + np.maximum(column - (control & 15), 0), column >= (control & 15)
    if 0x121 <= control <= 0x12F:  # row_ror
        return row + (column - (control & 15) & 15), exists
    if 0x150 <= control <= 0x15F:  # row_newbcast
        return row + (control & 15), exists
    fixed = {
        0x130: (np.minimum(LANES + 1, 63), LANES < 63),  # wave_shl
        0x134: ((LANES + 1) % 64, exists),  # wave_rol
        0x138: (np.maximum(LANES - 1, 0), LANES > 0),  # wave_shr
        0x13C: ((LANES - 1) % 64, exists),  # wave_ror
        0x140: (row + 15 - column, exists),  # row_mirror
        0x141: (row + (column & 8) + 7 - (column & 7), exists),  # row_half_mirror
        0x142: (np.maximum(row - 1, 0), LANES >= 16),  # row_bcast:15
        0x143: (np.maximum((LANES & ~31) - 1, 0), LANES >= 32),  # row_bcast:31
    }
    if control not in fixed:
        raise UnsupportedInstructionError(f"DPP control {control:#x}")
    return fixed[control]


def _dpp_enabled(instruction: Instruction) -> np.ndarray:
    rows = (instruction["row_mask"] >> LANES // 16 & 1).astype(bool)
    return rows & (instruction["bank_mask"] >> (LANES & 15) // 4 & 1).astype(bool)


def _select(source: Source, selector: int, sign: int) -> Source:
    """SDWA's choice of a byte (0..3) or word (4, 5) of a 32-bit source, zero- or sign-extended to 32 bits."""
    if selector == _SDWA_WHOLE:
        return source
    shift, mask = (8 * selector, 0xFF) if selector < 4 else (16 * (selector - 4), 0xFFFF)
    top = np.uint32(mask + 1 >> 1)

    def selected(wave: Wave) -> np.ndarray:
        value = source(wave) >> np.uint32(shift) & np.uint32(mask)
        return (value ^ top) - top if sign else value

    return selected


def vector_source(instruction: Instruction, index: int, kind: str) -> Source:
    """Source `index` as the NumPy type of `kind`, shape [64] or [1], with SDWA, DPP, opsel, neg and abs applied."""
    bits, dtype = int(kind[1:]), DTYPES[kind]
    source = raw_vector_source(instruction, _operand_code(instruction, index), bits, kind[0] == "f")
    if instruction.variant == "SDWA" and bits <= 32:
        source = _select(source, instruction[f"src{index}_sel"], instruction[f"src{index}_sext"])
    if instruction.variant == "DPP16" and index == 0:
        lanes, exists = dpp_source_lanes(instruction["dpp"])
        inner = source

        def source(wave: Wave) -> np.ndarray:
            return np.where(exists & wave.active[lanes], inner(wave)[lanes], np.uint32(0))

    if bits == 16:
        high = instruction["opsel"] >> index & 1 if instruction.encoding == "VOP3" else 0
        wide = source

        def source(wave: Wave) -> np.ndarray:
            return (wide(wave) >> np.uint32(16) if high else wide(wave)).astype(np.uint16)

    if instruction.variant:
        negative, absolute = instruction[f"src{index}_neg"], instruction[f"src{index}_abs"]
    else:
        negative, absolute = instruction["neg"] >> index & 1, instruction["abs"] >> index & 1
    if not negative and not absolute:
        return source if dtype in (np.uint16, np.uint32, np.uint64) else lambda wave: source(wave).view(dtype)
    raw_type = _FLOAT_BITS[bits][1]
    keep = raw_type((1 << bits - 1) - 1 if absolute else (1 << bits) - 1)
    flip = raw_type(1 << bits - 1 if negative else 0)
    return lambda wave: (source(wave) & keep ^ flip).view(dtype)


def vector_destination(instruction: Instruction, kind: str) -> Callable[[Wave, np.ndarray], None]:
    """How a result of `kind` reaches vdst: output modifiers, half and byte selection, register pairs, lane masks."""
    bits, register = int(kind[1:]), instruction["vdst"]
    if instruction.variant == "DPP16":
        return _dpp_destination(instruction, register)
    write = _plain_destination(instruction, register, bits)
    scale = {1: 2.0, 2: 4.0, 3: 0.5}.get(instruction["omod"])
    if (scale or instruction["clmp"]) and kind[0] != "f":
        raise UnsupportedInstructionError(f"{instruction}: omod or clamp on an integer result")
    if not scale and not instruction["clmp"]:
        return write
    dtype = DTYPES[kind]

    def modified(wave: Wave, values: np.ndarray) -> None:
        values = values.view(dtype)
        if scale:
            values = values * dtype(scale)
        if instruction["clmp"]:
            values = np.clip(np.where(np.isnan(values), dtype(0), values), dtype(0), dtype(1))
        write(wave, values)

    return modified


def _plain_destination(instruction: Instruction, register: int, bits: int) -> Callable[[Wave, np.ndarray], None]:
    if bits == 64:

        def write_pair(wave: Wave, values: np.ndarray) -> None:
            values = values.view(np.uint64)
            wave.write_vector(register, (values & np.uint64(MASK32)).astype(np.uint32))
            wave.write_vector(register + 1, (values >> np.uint64(32)).astype(np.uint32))

        return write_pair
    if instruction.variant == "SDWA" and instruction["dst_sel"] != _SDWA_WHOLE:
        return _sdwa_destination(instruction, register, bits)
    if bits == 32:
        return lambda wave, values: wave.write_vector(register, values)
    high = instruction.encoding == "VOP3" and instruction["opsel"] >> 3 & 1

    def write_half(wave: Wave, values: np.ndarray) -> None:
        wide = values.view(np.uint16).astype(np.uint32)
        wave.write_vector(register, wave.vector[register] & np.uint32(0xFFFF) | wide << np.uint32(16) if high else wide)

    return write_half


def _sdwa_destination(instruction: Instruction, register: int, bits: int) -> Callable[[Wave, np.ndarray], None]:
    selector, unused = instruction["dst_sel"], instruction["dst_unused"]
    if unused == _SDWA_SIGN_EXTEND:
        raise UnsupportedInstructionError(f"{instruction}: SDWA with a sign-extended destination")
    shift, mask = (8 * selector, 0xFF) if selector < 4 else (16 * (selector - 4), 0xFFFF)
    kept = np.uint32(MASK32 ^ mask << shift if unused == _SDWA_PRESERVE else 0)

    def write(wave: Wave, values: np.ndarray) -> None:
        wide = values.view(np.uint16 if bits == 16 else np.uint32).astype(np.uint32)
        wave.write_vector(register, (wide & np.uint32(mask)) << np.uint32(shift) | wave.vector[register] & kept)

    return write


def _dpp_destination(instruction: Instruction, register: int) -> Callable[[Wave, np.ndarray], None]:
    lanes, exists = dpp_source_lanes(instruction["dpp"])
    enabled = _dpp_enabled(instruction)

    def write(wave: Wave, values: np.ndarray) -> None:
        if values.dtype.itemsize == 2:
            values = values.view(np.uint16).astype(np.uint32)
        # Without bound_ctrl a lane whose source does not exist keeps its old value.
        where = wave.active & enabled & (True if instruction["bc"] else exists & wave.active[lanes])
        np.copyto(wave.vector[register], values.view(np.uint32), where=where)

    return write
