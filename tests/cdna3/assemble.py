"""Assembly text to a program, by the LLVM in Triton: what the unit tests of single instructions are written in."""

import re
import tempfile
from functools import cache
from pathlib import Path

import numpy as np
from triton._C.libtriton import amd
from triton.backends.amd import compiler

from .elf import CodeObject
from .machine import EXEC, LANES, MASK64, Memory, Wave
from .program import Program
from .scalar import END

__all__ = ["assemble", "run_wave"]

# Triton moved its assembler from the extension module into the backend.
_assemble = getattr(compiler, "assemble_amdgcn", None) or amd.assemble_amdgcn


@cache
def assemble(text: str, arch: str = "gfx942") -> Program:
    """The program of `text`, one instruction a line; it starts at the symbol "start" and s_endpgm is added."""
    source = f'.amdgcn_target "amdgcn-amd-amdhsa--{arch}"\n.text\n.globl start\nstart:\n{text}\ns_endpgm\n'
    with tempfile.TemporaryDirectory() as directory:
        object_file, shared_object = Path(directory, "a.o"), Path(directory, "a.so")
        object_file.write_bytes(_assemble(source, arch, ""))
        amd.link_hsaco(str(object_file), str(shared_object))
        return Program(CodeObject(shared_object.read_bytes()))


def run_wave(
    text: str,
    registers: dict[str, np.ndarray | int] | None = None,
    *,
    memory: Memory | None = None,
    lds: np.ndarray | None = None,
    scratch_bytes: int = 0,
    exec_mask: int = MASK64,
    arch: str = "gfx942",
    late: bool = False,
) -> Wave:
    """Run `text` on one wave and return the wave.

    `registers` sets "v3", "a3" (any 4-byte type, [64] or scalar), a pair "v[2:3]" (8-byte types), and from an int "s3",
    "s[2:3]", "vcc", "m0" and "scc".
    """
    program = assemble(text, arch)
    wave = Wave(memory or Memory(), np.zeros(0, np.uint8) if lds is None else lds, scratch_bytes, late)
    for name, value in (registers or {}).items():
        _set_register(wave, name, value)
    wave.write64(EXEC, exec_mask)
    wave.pc = program.code.symbols["start"]
    wave.code_base = program.code.image.ctypes.data
    with np.errstate(all="ignore"):
        while program.advance(wave) != END:
            pass
    return wave


def _set_register(wave: Wave, name: str, value: np.ndarray | int) -> None:
    special = {"vcc": 106, "m0": 124}
    if name == "scc":
        wave.scc = value
    elif name in special:
        wave.write64(special[name], value) if name == "vcc" else wave.write(special[name], value)
    else:
        kind, first, last = re.fullmatch(r"([vas])\[?(\d+)(?::(\d+))?\]?", name).groups()
        first, is_pair = int(first), last is not None
        if kind == "s":
            (wave.write64 if is_pair else wave.write)(first, value)
            return
        row = first + (256 if kind == "a" else 0)
        array = np.broadcast_to(np.asarray(value, None if isinstance(value, np.ndarray) else np.uint32), LANES.shape)
        array = np.ascontiguousarray(array)
        if is_pair:
            halves = array.view(np.uint32).reshape(64, 2)
            wave.vector[row], wave.vector[row + 1] = halves[:, 0], halves[:, 1]
        else:
            wave.vector[row] = array.view(np.uint32)
