"""A code object as steps: each instruction is decoded and bound to its operands once, when it is first reached."""

from collections.abc import Callable
from dataclasses import replace

from .conversions import build_conversion
from .decode import Instruction, decode
from .elf import CodeObject
from .errors import InterpreterError, MemoryFault, UnsupportedInstructionError
from .lds import build_lds
from .machine import M0, Wave
from .memory import build_memory
from .mfma import build_mfma
from .packed import build_packed
from .scalar import build_scalar
from .special import build_special
from .vector import build_alu

__all__ = ["Program", "build_step"]

Step = Callable[[Wave], str | None]

_BUILDERS = (
    build_scalar,
    build_memory,
    build_lds,
    build_mfma,
    build_packed,
    build_special,
    build_conversion,
    build_alu,
)
# s_set_gpr_idx_on: M0 bits 12..15 choose which operands M0[7:0] is added to; only vector registers move.
_INDEXED = ((1, ("src0",), 256), (2, ("src1", "vsrc1"), 256), (4, ("src2",), 256), (8, ("vdst",), 0))


def build_step(instruction: Instruction) -> Step:
    """The function of the wave that carries `instruction` out."""
    for build in _BUILDERS:
        if step := build(instruction):
            return step
    raise UnsupportedInstructionError(f"{instruction} has no meaning here yet; see tests/cdna3/README.md")


class Program:
    """The instructions of a code object, by byte offset; shared by all waves and launches."""

    def __init__(self, code: CodeObject):
        self.code = code
        self._steps: dict[int, tuple[Step, Instruction]] = {}
        self._indexed_steps: dict[tuple[int, int], tuple[Step, Instruction]] = {}

    @property
    def executed(self) -> set[str]:
        """Mnemonics of every instruction that any launch has reached."""
        return {instruction.mnemonic for _, instruction in self._steps.values()}

    def advance(self, wave: Wave) -> str | None:
        """Carry out the instruction at the wave's pc; what scalar.END and scalar.BARRIER say goes to the scheduler."""
        pc = wave.pc
        step, instruction = self._steps.get(pc) or self._decode(pc)
        if wave.index_mode:
            step, instruction = self._indexed(instruction, wave.scalar[M0] & 0xF0FF, step)
        wave.pc = pc + instruction.size
        try:
            return step(wave)
        except MemoryFault as fault:
            raise MemoryFault(f"{instruction}: {fault}") from fault

    def _decode(self, pc: int) -> tuple[Step, Instruction]:
        if not 0 <= pc < len(self.code.image):
            raise InterpreterError(f"pc {pc:#x} is outside the code object of {len(self.code.image)} bytes")
        instruction = decode(self.code.image[pc : pc + 16].tobytes(), pc, self.code.arch)
        self._steps[pc] = build_step(instruction), instruction
        return self._steps[pc]

    def _indexed(self, instruction: Instruction, m0: int, plain: Step) -> tuple[Step, Instruction]:
        if not instruction.encoding.startswith("VOP"):
            return plain, instruction
        key = instruction.pc, m0
        if key not in self._indexed_steps:
            if instruction.encoding not in ("VOP1", "VOP2") or instruction.variant:
                raise UnsupportedInstructionError(f"{instruction}: this encoding in GPR-index mode")
            moved = _with_index(instruction, m0 & 0xFF, m0 >> 12)
            self._indexed_steps[key] = build_step(moved), moved
        return self._indexed_steps[key]


def _with_index(instruction: Instruction, index: int, modes: int) -> Instruction:
    fields = dict(instruction.fields)
    for bit, names, first_vector_code in _INDEXED:
        for name in names:
            if modes & bit and name in fields and (name in ("vsrc1", "vdst") or fields[name] >= first_vector_code):
                fields[name] += index
    return replace(instruction, fields=fields)
