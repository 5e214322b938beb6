"""Matrix instructions: D = A @ B + C over the whole wave, EXEC ignored.

Layouts after AMD's "Matrix Instruction Calculator". With 64 / M groups of lanes, lane = group * M + i holds K / groups
consecutive k of row i of A (column i of B), and its register r of C and D is column lane % M of row
4 * group + r % 4 + 4 * groups * (r // 4).
Products are summed in fp64 and rounded once; hardware rounds in an order of its own.
"""

import re
from collections.abc import Callable

import numpy as np

from . import floats
from .decode import Instruction
from .errors import UnsupportedInstructionError
from .machine import LANES, Wave
from .operands import raw_vector_source

__all__ = ["build_mfma"]

_NAME = re.compile(r"v_mfma_(f32|i32)_(16x16|32x32)x(\d+)_(bf16|f16|f32|i8|fp8_fp8|fp8_bf8|bf8_fp8|bf8_bf8)(?:_1k)?")
_BYTES = {"f32": 4, "f16": 2, "bf16": 2}
_SINGLE_BLOCK_K = {"f32": 16, "f16": 64, "bf16": 64, "i8": 128}  # M * K below these means several small blocks
_AGPR = 256


def build_mfma(instruction: Instruction) -> Callable[[Wave], None] | None:
    """The step of a single-block 16x16 or 32x32 MFMA; None if the mnemonic is no MFMA."""
    if not instruction.mnemonic.startswith("v_mfma_"):
        return None
    match = _NAME.fullmatch(instruction.mnemonic)
    if not match or instruction["cbsz"] or instruction["abid"] or instruction["blgp"]:
        raise UnsupportedInstructionError(
            f"{instruction}: only plain single-block 16x16 and 32x32 MFMA have a meaning here"
        )
    size, depth, kind = int(match[2][:2]), int(match[3]), match[4]
    if size * depth < _SINGLE_BLOCK_K.get(kind, 0):
        raise UnsupportedInstructionError(f"{instruction}: several blocks in one instruction")
    kinds = kind.split("_") if "_" in kind else [kind, kind]
    matrix_a = _input(instruction, 0, size, depth, kinds[0])
    matrix_b = _input(instruction, 1, size, depth, kinds[1])
    dtype = np.dtype(np.int32 if match[1] == "i32" else np.float32)
    addend = _addend(instruction, size, dtype)
    accumulator = _AGPR if instruction["acc_cd"] else 0
    first, count = instruction["vdst"] + accumulator, size * size // 64
    groups = 64 // size
    register = np.arange(count)[:, None]
    rows = 4 * (LANES // size) + register % 4 + 4 * groups * (register // 4)
    columns = np.broadcast_to(LANES % size, rows.shape)

    def multiply(wave: Wave) -> None:
        product = matrix_a(wave) @ matrix_b(wave).T
        wave.vector[first : first + count] = (product[rows, columns] + addend(wave)).astype(dtype).view(np.uint32)

    return multiply


def _input(instruction: Instruction, index: int, size: int, depth: int, kind: str) -> Callable[[Wave], np.ndarray]:
    """fp64 [size, depth]; B comes back transposed, since its layout is that of A."""
    code = instruction[f"src{index}"]
    if code < 256:
        raise UnsupportedInstructionError(f"{instruction}: A or B not in vector registers")
    per_lane = depth * size // 64
    first = code - 256 + (_AGPR if instruction["acc"] >> index & 1 else 0)
    count = per_lane * _BYTES.get(kind, 1) // 4
    convert = _converter(kind, instruction.arch)

    def read(wave: Wave) -> np.ndarray:
        elements = convert(np.ascontiguousarray(wave.vector[first : first + count].T))
        return elements.reshape(64 // size, size, per_lane).transpose(1, 0, 2).reshape(size, depth).astype(np.float64)

    return read


def _converter(kind: str, arch: str) -> Callable[[np.ndarray], np.ndarray]:
    """Dwords [64, n] -> numbers [64, elements of each lane]."""
    if kind == "bf16":
        return lambda dwords: floats.f32_from_bf16(dwords.view(np.uint16))
    if kind in ("fp8", "bf8"):
        table = floats.fp8_values(kind, arch)
        return lambda dwords: table[dwords.view(np.uint8)]
    dtype = np.dtype({"f16": np.float16, "f32": np.float32, "i8": np.int8}[kind])
    return lambda dwords: dwords.view(dtype)


def _addend(instruction: Instruction, size: int, dtype: np.dtype) -> Callable[[Wave], np.ndarray]:
    code, count = instruction["src2"], size * size // 64
    if code < 256:
        constant = raw_vector_source(instruction, code, 32)
        return lambda wave: constant(wave).view(dtype)
    first = code - 256 + (_AGPR if instruction["acc_cd"] else 0)
    return lambda wave: wave.vector[first : first + count].view(dtype)
