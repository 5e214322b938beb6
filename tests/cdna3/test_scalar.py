"""Scalar instructions against definitions on Python integers, and control flow."""

import numpy as np
import pytest

from .assemble import run_wave
from .errors import InterpreterError, UnsupportedInstructionError
from .machine import EXEC, VCC, Memory

M32, M64 = (1 << 32) - 1, (1 << 64) - 1
EDGES_32 = [0, 1, 2, 31, 32, 0x7FFFFFFF, 0x80000000, M32, 0xFFFF8000]
EDGES_64 = [0, 1, 63, 1 << 31, 1 << 32, (1 << 63) - 1, 1 << 63, M64]


def signed(value: int, bits: int = 32) -> int:
    value &= (1 << bits) - 1
    return value - (1 << bits) if value >> bits - 1 else value


def overflows(value: int) -> bool:
    return not -(1 << 31) <= value < 1 << 31


def bit_field(value: int, spec: int) -> int:
    return value >> (spec & 31) & (1 << (spec >> 16 & 127)) - 1


def signed_bit_field(value: int, spec: int) -> int:
    width = spec >> 16 & 127
    return signed(bit_field(value, spec), width) if width else 0


# instruction; result; SCC afterwards (None: kept)
BINARY_32 = [
    ("s_add_u32", lambda a, b: a + b, lambda a, b: a + b > M32),
    ("s_sub_u32", lambda a, b: a - b, lambda a, b: a < b),
    ("s_addc_u32", lambda a, b: a + b + 1, lambda a, b: a + b + 1 > M32),
    ("s_subb_u32", lambda a, b: a - b - 1, lambda a, b: a < b + 1),
    ("s_add_i32", lambda a, b: a + b, lambda a, b: overflows(signed(a) + signed(b))),
    ("s_sub_i32", lambda a, b: a - b, lambda a, b: overflows(signed(a) - signed(b))),
    ("s_min_i32", lambda a, b: min(signed(a), signed(b)), lambda a, b: signed(a) < signed(b)),
    ("s_max_i32", lambda a, b: max(signed(a), signed(b)), lambda a, b: signed(a) > signed(b)),
    ("s_min_u32", min, lambda a, b: a < b),
    ("s_max_u32", max, lambda a, b: a > b),
    ("s_mul_i32", lambda a, b: a * b, None),
    ("s_mul_hi_u32", lambda a, b: a * b >> 32, None),
    ("s_mul_hi_i32", lambda a, b: signed(a) * signed(b) >> 32, None),
    ("s_lshl_b32", lambda a, b: a << (b & 31), lambda a, b: a << (b & 31) & M32 != 0),
    ("s_lshr_b32", lambda a, b: a >> (b & 31), lambda a, b: a >> (b & 31) != 0),
    ("s_ashr_i32", lambda a, b: signed(a) >> (b & 31), lambda a, b: signed(a) >> (b & 31) != 0),
    ("s_absdiff_i32", lambda a, b: abs(signed(a) - signed(b)), lambda a, b: a != b),
    ("s_and_b32", lambda a, b: a & b, lambda a, b: a & b != 0),
    ("s_or_b32", lambda a, b: a | b, lambda a, b: a | b != 0),
    ("s_xor_b32", lambda a, b: a ^ b, lambda a, b: a ^ b != 0),
    ("s_andn2_b32", lambda a, b: a & ~b, lambda a, b: a & ~b & M32 != 0),
    ("s_xnor_b32", lambda a, b: ~(a ^ b), lambda a, b: ~(a ^ b) & M32 != 0),
    ("s_bfm_b32", lambda a, b: (1 << (a & 31)) - 1 << (b & 31), None),
    ("s_nand_b32", lambda a, b: ~(a & b), lambda a, b: a & b != M32),
    ("s_nor_b32", lambda a, b: ~(a | b), lambda a, b: (a | b) != M32),
    ("s_orn2_b32", lambda a, b: a | ~b, lambda a, b: (a | ~b) & M32 != 0),
    ("s_bfe_u32", bit_field, lambda a, b: bit_field(a, b) & M32 != 0),
    ("s_bfe_i32", signed_bit_field, lambda a, b: signed_bit_field(a, b) & M32 != 0),
    ("s_pack_ll_b32_b16", lambda a, b: a & 0xFFFF | b << 16, None),
    ("s_pack_lh_b32_b16", lambda a, b: a & 0xFFFF | b >> 16 << 16, None),
    ("s_pack_hh_b32_b16", lambda a, b: a >> 16 | b >> 16 << 16, None),
    ("s_cselect_b32", lambda a, b: a, None),
]
for SHIFT in (1, 2, 3, 4):
    BINARY_32.append(
        (
            f"s_lshl{SHIFT}_add_u32",
            lambda a, b, shift=SHIFT: (a << shift) + b,
            lambda a, b, shift=SHIFT: (a << shift) + b > M32,
        )
    )


@pytest.mark.parametrize(("name", "value", "scc"), BINARY_32, ids=[case[0] for case in BINARY_32])
def test_two_operand_instructions(name, value, scc, rng):
    numbers = [*EDGES_32, *(int(x) for x in rng.integers(0, 1 << 32, 4))]
    for a in numbers:
        for b in numbers:
            wave = run_wave(f"{name} s2, s0, s1", {"s0": a, "s1": b, "scc": 1})
            assert wave.scalar[2] == value(a, b) & M32, (a, b)
            assert wave.scc == (1 if scc is None else int(scc(a, b))), (a, b)


def test_pairs_of_registers(rng):
    for a in [*EDGES_64, int(rng.integers(0, 1 << 63))]:
        for b in (0, 1, 31, 63, 64, int(rng.integers(0, 1 << 63))):
            text = "\n".join(
                (
                    "s_and_b64 s[4:5], s[0:1], s[2:3]",
                    "s_orn2_b64 s[6:7], s[0:1], s[2:3]",
                    "s_lshl_b64 s[8:9], s[0:1], s2",
                    "s_lshr_b64 s[10:11], s[0:1], s2",
                    "s_ashr_i64 s[12:13], s[0:1], s2",
                    "s_not_b64 s[14:15], s[0:1]",
                    "s_bcnt1_i32_b64 s16, s[0:1]",
                    "s_ff1_i32_b64 s17, s[0:1]",
                    "s_flbit_i32_b64 s18, s[0:1]",
                )
            )
            wave = run_wave(text, {"s[0:1]": a, "s[2:3]": b})
            assert wave.read64(4) == a & b
            assert wave.read64(6) == (a | ~b) & M64
            assert wave.read64(8) == a << (b & 63) & M64
            assert wave.read64(10) == a >> (b & 63)
            assert wave.read64(12) == signed(a, 64) >> (b & 63) & M64
            assert wave.read64(14) == ~a & M64
            assert wave.scalar[16] == a.bit_count()
            assert wave.scalar[17] == (M32 if a == 0 else (a & -a).bit_length() - 1)
            assert wave.scalar[18] == (M32 if a == 0 else 64 - a.bit_length())


@pytest.mark.parametrize("value", EDGES_32)
def test_one_operand_instructions(value):
    names = ("mov_b32", "not_b32", "abs_i32", "brev_b32", "sext_i32_i8", "sext_i32_i16", "ff1_i32_b32")
    text = "\n".join(f"s_{name} s{register}, s0" for register, name in enumerate(names, 1))
    wave = run_wave(text, {"s0": value})
    expected = [
        value,
        ~value,
        abs(signed(value)),
        int(f"{value:032b}"[::-1], 2),
        signed(value, 8),
        signed(value, 16),
        (value & -value).bit_length() - 1,
    ]
    assert wave.scalar[1:8] == [e & M32 for e in expected]


@pytest.mark.parametrize("constant", [0, 1, -1, 32767, -32768])
@pytest.mark.parametrize("value", EDGES_32)
def test_sixteen_bit_constants_are_sign_extended(value, constant):
    wave = run_wave(
        f"s_addk_i32 s0, {constant}\ns_movk_i32 s2, {constant}\ns_mulk_i32 s3, {constant}", {"s0": value, "s3": value}
    )
    assert wave.scalar[0] == value + constant & M32
    assert wave.scc == int(overflows(signed(value) + constant))
    assert wave.scalar[2] == constant & M32
    assert wave.scalar[3] == value * constant & M32
    assert run_wave(f"s_cmpk_lt_i32 s0, {constant}", {"s0": value}).scc == int(signed(value) < constant)
    assert run_wave(f"s_cmpk_lg_u32 s0, {constant & 0xFFFF}", {"s0": value}).scc == int(value != constant & 0xFFFF)


@pytest.mark.parametrize("name", ["eq", "lg", "gt", "ge", "lt", "le"])
def test_compares_set_scc(name):
    compare = {"eq": "__eq__", "lg": "__ne__", "gt": "__gt__", "ge": "__ge__", "lt": "__lt__", "le": "__le__"}[name]
    for a in EDGES_32:
        for b in EDGES_32:
            assert run_wave(f"s_cmp_{name}_u32 s0, s1", {"s0": a, "s1": b}).scc == int(getattr(a, compare)(b))
            assert run_wave(f"s_cmp_{name}_i32 s0, s1", {"s0": a, "s1": b}).scc == int(
                getattr(signed(a), compare)(signed(b))
            )


def test_bit_test():
    assert [run_wave(f"s_bitcmp1_b32 s0, {bit}", {"s0": 0b1010}).scc for bit in range(4)] == [0, 1, 0, 1]
    assert [run_wave(f"s_bitcmp0_b32 s0, {bit}", {"s0": 0b1010}).scc for bit in range(4)] == [1, 0, 1, 0]


@pytest.mark.parametrize(
    ("name", "combine"),
    [
        ("and", lambda s, e: s & e),
        ("or", lambda s, e: s | e),
        ("xor", lambda s, e: s ^ e),
        ("andn2", lambda s, e: s & ~e),
        ("andn1", lambda s, e: ~s & e),
    ],
)
def test_saveexec_keeps_the_old_mask_and_sets_the_new(name, combine, rng):
    source, mask = (int(x) for x in rng.integers(0, 1 << 63, 2))
    wave = run_wave(f"s_{name}_saveexec_b64 s[4:5], s[0:1]", {"s[0:1]": source}, exec_mask=mask)
    assert wave.read64(4) == mask
    assert wave.read64(EXEC) == combine(source, mask) & M64
    assert wave.scc == int(wave.read64(EXEC) != 0)


def test_loop_counts_down_to_zero():
    text = "loop:\ns_add_u32 s1, s1, 3\ns_sub_u32 s0, s0, 1\ns_cmp_lg_u32 s0, 0\ns_cbranch_scc1 loop"
    assert run_wave(text, {"s0": 7, "s1": 0}).scalar[1] == 21


@pytest.mark.parametrize(
    ("branch", "mask", "taken"),
    [("vccz", 0, True), ("vccz", 1, False), ("vccnz", 1, True), ("execz", 0, True), ("execnz", 1 << 63, True)],
)
def test_branches_on_masks(branch, mask, taken):
    text = f"s_cbranch_{branch} over\ns_mov_b32 s0, 1\nover:\ns_nop 0"
    registers = {"s0": 0, "vcc": mask}
    wave = run_wave(text, registers, exec_mask=mask if "exec" in branch else M64)
    assert wave.scalar[0] == (0 if taken else 1)


def test_call_and_return():
    caller = "s_getpc_b64 s[0:1]\ns_add_u32 s0, s0, 16\ns_swappc_b64 s[2:3], s[0:1]\ns_mov_b32 s5, 2\ns_endpgm"
    text = f"{caller}\ns_mov_b32 s4, 1\ns_setpc_b64 s[2:3]"
    wave = run_wave(text, {"s4": 0, "s5": 0})
    assert wave.scalar[4:6] == [1, 2]


@pytest.mark.parametrize("count", [1, 2, 4, 8, 16])
def test_scalar_loads_read_consecutive_dwords(count, rng):
    data = rng.integers(0, 1 << 32, 32, np.uint32)
    memory = Memory()
    address = memory.add(data, "data")
    suffix = f"x{count}" if count > 1 else ""
    target = f"s[16:{15 + count}]" if count > 1 else "s16"
    wave = run_wave(
        f"s_load_dword{suffix} {target}, s[0:1], 0x10\ns_waitcnt lgkmcnt(0)", {"s[0:1]": address}, memory=memory
    )
    assert wave.scalar[16 : 16 + count] == data[4 : 4 + count].tolist()
    wave = run_wave(f"s_load_dword{suffix} {target}, s[0:1], s2", {"s[0:1]": address, "s2": 8}, memory=memory)
    assert wave.scalar[16 : 16 + count] == data[2 : 2 + count].tolist()


def test_gpr_index_mode_moves_only_the_chosen_vector_operands(rng):
    data = rng.integers(0, 1 << 32, (8, 64), np.uint32)
    source = "s_set_gpr_idx_on s0, gpr_idx(SRC0)\nv_mov_b32 v20, v2\ns_set_gpr_idx_off\nv_mov_b32 v21, v2"
    text = f"{source}\ns_set_gpr_idx_on s0, gpr_idx(DST)\nv_mov_b32 v24, v1\ns_set_gpr_idx_off"
    wave = run_wave(text, {"s0": 3, **{f"v{i}": row for i, row in enumerate(data)}})
    np.testing.assert_array_equal(wave.vector[20], data[5])
    np.testing.assert_array_equal(wave.vector[21], data[2])
    np.testing.assert_array_equal(wave.vector[27], data[1])


def test_special_sources_read_status(rng):
    wave = run_wave("s_mov_b32 s0, src_scc\ns_mov_b32 s1, src_vccz\ns_mov_b32 s2, src_execz", {"scc": 1, "vcc": 0})
    assert wave.scalar[0:3] == [1, 1, 0]
    assert wave.read64(VCC) == 0


def test_unknown_instruction_names_mnemonic_and_pc():
    with pytest.raises(UnsupportedInstructionError, match=r"s_memtime .*at pc 0x[0-9a-f]+ has no meaning here yet"):
        run_wave("s_memtime s[0:1]")


def test_pc_outside_the_code_is_an_error():
    with pytest.raises(InterpreterError, match="outside the code object"):
        run_wave("s_mov_b64 s[0:1], 0\ns_setpc_b64 s[0:1]")
