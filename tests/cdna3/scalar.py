"""Scalar instructions: SOP1, SOP2, SOPC, SOPK, SOPP and scalar loads, after AMD's CDNA3 ISA document."""

import operator
from collections.abc import Callable

from .decode import Instruction
from .errors import UnsupportedInstructionError
from .machine import EXEC, M0, MASK32, MASK64, VCC, Wave
from .operands import scalar_source, sign_extend

__all__ = ["BARRIER", "END", "build_scalar"]

BARRIER, END = "barrier", "end"

Step = Callable[[Wave], str | None]

_COMPARE = {
    "eq": operator.eq, "lg": operator.ne, "gt": operator.gt, "ge": operator.ge, "lt": operator.lt, "le": operator.le
}  # fmt: skip
_LOGIC = {
    "and": operator.and_,
    "or": operator.or_,
    "xor": operator.xor,
    "andn2": lambda a, b: a & ~b,
    "orn2": lambda a, b: a | ~b,
    "nand": lambda a, b: ~(a & b),
    "nor": lambda a, b: ~(a | b),
    "xnor": lambda a, b: ~(a ^ b),
}
# s_<op>_saveexec_b64: from the source and EXEC to the new EXEC.
_SAVE_EXEC = _LOGIC | {"andn1": lambda a, b: ~a & b, "orn1": lambda a, b: ~a | b}
_IGNORED = ("s_nop", "s_setprio", "s_sleep", "s_icache_inv")
_BRANCH = {
    "s_branch": lambda wave: True,
    "s_cbranch_scc0": lambda wave: not wave.scc,
    "s_cbranch_scc1": lambda wave: wave.scc,
    "s_cbranch_vccz": lambda wave: not wave.read64(VCC),
    "s_cbranch_vccnz": lambda wave: wave.read64(VCC),
    "s_cbranch_execz": lambda wave: not wave.read64(EXEC),
    "s_cbranch_execnz": lambda wave: wave.read64(EXEC),
}


def _fits(value: int) -> bool:
    return -(1 << 31) <= value < 1 << 31


def _carry(result: int) -> tuple[int, bool]:
    return result, not 0 <= result <= MASK32


def _overflow(result: int) -> tuple[int, bool]:
    return result, not _fits(result)


def _pick(value: int, other: int, take_first: bool) -> tuple[int, bool]:
    return (value if take_first else other), take_first


def _bit_field(value: int, spec: int, bits: int, signed: bool) -> tuple[int, bool]:
    width = spec >> 16 & 0x7F
    field = value >> (spec & bits - 1) & (1 << width) - 1
    if signed and width:
        field = sign_extend(field, width)
    return field, field & (1 << bits) - 1 != 0


def _leading_zeros(value: int, bits: int) -> int:
    return bits - value.bit_length() if value else -1


# (a, b, scc) -> (result, new SCC or None to keep it)
_SOP2 = {
    "s_add_u32": lambda a, b, scc: _carry(a + b),
    "s_sub_u32": lambda a, b, scc: _carry(a - b),
    "s_addc_u32": lambda a, b, scc: _carry(a + b + scc),
    "s_subb_u32": lambda a, b, scc: _carry(a - b - scc),
    "s_add_i32": lambda a, b, scc: _overflow(sign_extend(a) + sign_extend(b)),
    "s_sub_i32": lambda a, b, scc: _overflow(sign_extend(a) - sign_extend(b)),
    "s_min_u32": lambda a, b, scc: _pick(a, b, a < b),
    "s_max_u32": lambda a, b, scc: _pick(a, b, a > b),
    "s_min_i32": lambda a, b, scc: _pick(a, b, sign_extend(a) < sign_extend(b)),
    "s_max_i32": lambda a, b, scc: _pick(a, b, sign_extend(a) > sign_extend(b)),
    "s_mul_i32": lambda a, b, scc: (a * b, None),
    "s_mul_hi_u32": lambda a, b, scc: (a * b >> 32, None),
    "s_mul_hi_i32": lambda a, b, scc: (sign_extend(a) * sign_extend(b) >> 32, None),
    "s_bfm_b32": lambda a, b, scc: ((1 << (a & 31)) - 1 << (b & 31), None),
    "s_bfm_b64": lambda a, b, scc: ((1 << (a & 63)) - 1 << (b & 63), None),
    "s_bfe_u32": lambda a, b, scc: _bit_field(a, b, 32, signed=False),
    "s_bfe_i32": lambda a, b, scc: _bit_field(a, b, 32, signed=True),
    "s_bfe_u64": lambda a, b, scc: _bit_field(a, b, 64, signed=False),
    "s_bfe_i64": lambda a, b, scc: _bit_field(a, b, 64, signed=True),
    "s_cselect_b32": lambda a, b, scc: (a if scc else b, None),
    "s_cselect_b64": lambda a, b, scc: (a if scc else b, None),
    "s_pack_ll_b32_b16": lambda a, b, scc: (a & 0xFFFF | (b & 0xFFFF) << 16, None),
    "s_pack_lh_b32_b16": lambda a, b, scc: (a & 0xFFFF | b >> 16 << 16, None),
    "s_pack_hh_b32_b16": lambda a, b, scc: (a >> 16 | b >> 16 << 16, None),
    "s_absdiff_i32": lambda a, b, scc: _nonzero(abs(sign_extend(a) - sign_extend(b)), MASK32),
}
for _shift in (1, 2, 3, 4):
    _SOP2[f"s_lshl{_shift}_add_u32"] = lambda a, b, scc, shift=_shift: _carry((a << shift) + b)
for _bits in (32, 64):
    _mask = (1 << _bits) - 1
    for _name, _logic in _LOGIC.items():
        _SOP2[f"s_{_name}_b{_bits}"] = lambda a, b, scc, logic=_logic, mask=_mask: _nonzero(logic(a, b), mask)
    _SOP2[f"s_lshl_b{_bits}"] = lambda a, b, scc, bits=_bits, mask=_mask: _nonzero(a << (b & bits - 1), mask)
    _SOP2[f"s_lshr_b{_bits}"] = lambda a, b, scc, bits=_bits, mask=_mask: _nonzero(a >> (b & bits - 1), mask)
    _SOP2[f"s_ashr_i{_bits}"] = lambda a, b, scc, bits=_bits, mask=_mask: _nonzero(
        sign_extend(a, bits) >> (b & bits - 1), mask
    )


def _nonzero(result: int, mask: int) -> tuple[int, bool]:
    return result, result & mask != 0


# value -> (result, new SCC or None to keep it)
_SOP1 = {
    "s_mov_b32": lambda a: (a, None),
    "s_mov_b64": lambda a: (a, None),
    "s_not_b32": lambda a: _nonzero(~a, MASK32),
    "s_not_b64": lambda a: _nonzero(~a, MASK64),
    "s_abs_i32": lambda a: _nonzero(abs(sign_extend(a)), MASK32),
    "s_brev_b32": lambda a: (int(f"{a:032b}"[::-1], 2), None),
    "s_brev_b64": lambda a: (int(f"{a:064b}"[::-1], 2), None),
    "s_bcnt0_i32_b32": lambda a: _nonzero(32 - a.bit_count(), MASK32),
    "s_bcnt1_i32_b32": lambda a: _nonzero(a.bit_count(), MASK32),
    "s_bcnt1_i32_b64": lambda a: _nonzero(a.bit_count(), MASK32),
    "s_ff1_i32_b32": lambda a: ((a & -a).bit_length() - 1, None),
    "s_ff1_i32_b64": lambda a: ((a & -a).bit_length() - 1, None),
    "s_flbit_i32_b32": lambda a: (_leading_zeros(a, 32), None),
    "s_flbit_i32_b64": lambda a: (_leading_zeros(a, 64), None),
    "s_sext_i32_i8": lambda a: (sign_extend(a, 8), None),
    "s_sext_i32_i16": lambda a: (sign_extend(a, 16), None),
}


def build_scalar(instruction: Instruction) -> Step | None:
    """The step of a scalar instruction; None if the encoding is not scalar."""
    builders = {"SOP1": _sop1, "SOP2": _sop2, "SOPC": _sopc, "SOPK": _sopk, "SOPP": _sopp, "SMEM": _smem}
    builder = builders.get(instruction.encoding)
    return builder(instruction) if builder else None


def _unsupported(instruction: Instruction) -> UnsupportedInstructionError:
    return UnsupportedInstructionError(f"{instruction} has no meaning here yet; see tests/cdna3/README.md")


def _bits(mnemonic: str, part: int) -> int:
    """The width that a mnemonic names, counted from its end: 64 for s_and_b64, part -1."""
    return 64 if mnemonic.split("_")[part].endswith("64") else 32


def _write_scalar(destination: int, bits: int) -> Callable[[Wave, int], None]:
    if bits == 64:
        return lambda wave, value: wave.write64(destination, value)
    return lambda wave, value: wave.write(destination, value)


def _sop1(instruction: Instruction) -> Step:
    name, destination = instruction.mnemonic, instruction["sdst"]
    source = scalar_source(instruction, instruction["ssrc0"], _bits(name, -1))
    if name in _SOP1:
        function = _SOP1[name]
        counts = name.startswith(("s_bcnt", "s_ff1", "s_flbit"))  # a 32-bit count, whatever it counts in
        write = _write_scalar(destination, 32 if counts else _bits(name, -1))

        def compute(wave: Wave) -> None:
            result, scc = function(source(wave))
            write(wave, result)
            if scc is not None:
                wave.scc = int(scc)

        return compute
    if name.endswith("_saveexec_b64"):
        combine = _SAVE_EXEC[name.split("_")[1]]

        def save_exec(wave: Wave) -> None:
            old = wave.read64(EXEC)
            new = combine(source(wave), old) & MASK64
            wave.write64(destination, old)
            wave.write64(EXEC, new)
            wave.scc = int(new != 0)

        return save_exec
    return _sop1_control(instruction, source)


def _sop1_control(instruction: Instruction, source: Callable[[Wave], int]) -> Step:
    name, destination = instruction.mnemonic, instruction["sdst"]
    if name == "s_getpc_b64":
        return lambda wave: wave.write64(destination, wave.code_base + wave.pc)
    if name in ("s_setpc_b64", "s_swappc_b64"):

        def jump(wave: Wave) -> None:
            target = source(wave)
            if name == "s_swappc_b64":
                wave.write64(destination, wave.code_base + wave.pc)
            wave.pc = target - wave.code_base

        return jump
    raise _unsupported(instruction)


def _sop2(instruction: Instruction) -> Step:
    name = instruction.mnemonic
    if name not in _SOP2:
        raise _unsupported(instruction)
    function, bits = _SOP2[name], 32 if name.startswith("s_pack") else _bits(name, -1)
    second_is_count = name.startswith(("s_lshl_", "s_lshr_", "s_ashr_", "s_bfe_", "s_bfm_"))
    first = scalar_source(instruction, instruction["ssrc0"], 32 if name.startswith("s_bfm_") else bits)
    second = scalar_source(instruction, instruction["ssrc1"], 32 if second_is_count else bits)
    write = _write_scalar(instruction["sdst"], bits)

    def compute(wave: Wave) -> None:
        result, scc = function(first(wave), second(wave), wave.scc)
        write(wave, result)
        if scc is not None:
            wave.scc = int(scc)

    return compute


def _sopc(instruction: Instruction) -> Step:
    name = instruction.mnemonic
    first = scalar_source(instruction, instruction["ssrc0"], _bits(name, -1))
    if name == "s_set_gpr_idx_on":
        modes = instruction["ssrc1"] & 15

        def index_on(wave: Wave) -> None:
            wave.write(M0, wave.scalar[M0] & ~0xF0FF | first(wave) & 0xFF | modes << 12)
            wave.index_mode = True

        return index_on
    if name.startswith("s_bitcmp"):
        bits, wanted = _bits(name, -1), int(name[len("s_bitcmp")])
        second = scalar_source(instruction, instruction["ssrc1"])

        def test_bit(wave: Wave) -> None:
            wave.scc = int(first(wave) >> (second(wave) & bits - 1) & 1 == wanted)

        return test_bit
    if not name.startswith("s_cmp_"):
        raise _unsupported(instruction)
    compare, signed = _COMPARE[name.split("_")[2]], name.endswith("i32")
    second = scalar_source(instruction, instruction["ssrc1"], _bits(name, -1))

    def compare_values(wave: Wave) -> None:
        a, b = first(wave), second(wave)
        wave.scc = int(compare(sign_extend(a), sign_extend(b)) if signed else compare(a, b))

    return compare_values


def _sopk(instruction: Instruction) -> Step:
    name, register = instruction.mnemonic, instruction["sdst"]
    constant = sign_extend(instruction["simm16"], 16)
    if name == "s_movk_i32":
        return lambda wave: wave.write(register, constant)
    if name == "s_mulk_i32":
        return lambda wave: wave.write(register, wave.scalar[register] * constant)
    if name == "s_addk_i32":

        def add(wave: Wave) -> None:
            result, overflow = _overflow(sign_extend(wave.scalar[register]) + constant)
            wave.write(register, result)
            wave.scc = int(overflow)

        return add
    if name == "s_cmovk_i32":
        return lambda wave: wave.write(register, constant) if wave.scc else None
    if name.startswith("s_cmpk_"):
        compare, unsigned = _COMPARE[name.split("_")[2]], name.endswith("u32")
        limit = constant & 0xFFFF if unsigned else constant

        def compare_constant(wave: Wave) -> None:
            value = wave.scalar[register]
            wave.scc = int(compare(value if unsigned else sign_extend(value), limit))

        return compare_constant
    if name.startswith("s_setreg"):
        return lambda wave: None  # rounding and denormal modes are not modelled
    raise _unsupported(instruction)


def _sopp(instruction: Instruction) -> Step:
    name, constant = instruction.mnemonic, instruction["simm16"]
    if name in _BRANCH:
        condition, distance = _BRANCH[name], 4 * sign_extend(constant, 16)

        def branch(wave: Wave) -> None:
            if condition(wave):
                wave.pc += distance

        return branch
    if name == "s_barrier":
        return lambda wave: BARRIER
    if name == "s_endpgm":
        return lambda wave: END
    if name == "s_waitcnt":
        vector_memory, local_or_scalar = constant & 15 | constant >> 14 << 4, constant >> 8 & 15

        def wait(wave: Wave) -> None:
            if wave.late:
                if vector_memory != 63:
                    wave.wait("vm", vector_memory)
                if local_or_scalar != 15:
                    wave.wait("lgkm", local_or_scalar)

        return wait
    if name == "s_set_gpr_idx_off":
        return lambda wave: setattr(wave, "index_mode", False)
    if name in _IGNORED:
        return lambda wave: None
    raise _unsupported(instruction)


def _smem(instruction: Instruction) -> Step:
    name = instruction.mnemonic
    if name.startswith("s_dcache_"):
        return lambda wave: None
    if not name.startswith("s_load_dword"):
        raise _unsupported(instruction)
    count = int(name.removeprefix("s_load_dword").removeprefix("x") or 1)
    base, destination = 2 * instruction["sbase"], instruction["sdata"]
    offset = sign_extend(instruction["offset"], 21) if instruction["imm"] else 0
    # Without either flag the offset field is itself the number of a scalar register.
    register_code = instruction["soffset"] if instruction["soffset_en"] else instruction["offset"] & 127
    has_register = instruction["soffset_en"] or not instruction["imm"]
    register = scalar_source(instruction, register_code) if has_register else None

    def load(wave: Wave) -> None:
        address = wave.read64(base) + offset + (register(wave) if register else 0) & ~3
        values = wave.memory.dwords(address, count)

        def commit() -> None:
            wave.scalar[destination : destination + count] = values

        wave.finish("lgkm", commit, in_order=False)

    return load
