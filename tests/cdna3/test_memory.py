"""Global, flat, buffer and scratch accesses, loads into LDS, atomics; bounds, and what a missing wait shows."""

import numpy as np
import pytest

from .assemble import run_wave
from .errors import MemoryFault, UnsupportedInstructionError
from .machine import MASK64, POISON, Memory, bits_to_lanes
from .samples import assert_same

M32 = (1 << 32) - 1
LANES = np.arange(64)


def buffer_of(data: np.ndarray, name: str = "data") -> tuple[Memory, int]:
    memory = Memory()
    return memory, memory.add(data, name)


def resource(address: int, size: int) -> dict[str, int]:
    """A raw buffer resource in s[4:7]."""
    return {"s4": address & M32, "s5": address >> 32, "s6": size, "s7": 0x27000}


LOADS = [
    ("dword", np.uint32, lambda x: x),
    ("ubyte", np.uint8, lambda x: x.astype(np.uint32)),
    ("sbyte", np.int8, lambda x: x.astype(np.int32).view(np.uint32)),
    ("ushort", np.uint16, lambda x: x.astype(np.uint32)),
    ("sshort", np.int16, lambda x: x.astype(np.int32).view(np.uint32)),
]


@pytest.mark.parametrize("space", ["global", "flat", "buffer"])
@pytest.mark.parametrize(("name", "dtype", "widen"), LOADS, ids=[case[0] for case in LOADS])
def test_narrow_loads_extend(name, dtype, widen, space, rng):
    data = rng.integers(0, 256, 64 * np.dtype(dtype).itemsize, np.uint8).view(dtype)
    order = rng.permutation(64)
    memory, address = buffer_of(data)
    offsets = (order * data.itemsize).astype(np.uint32)
    registers = {"v[0:1]": address + offsets.astype(np.uint64), "v4": offsets} | resource(address, data.nbytes)
    text = {"global": "v2, v[0:1], off", "flat": "v2, v[0:1]", "buffer": "v2, v4, s[4:7], 0 offen"}[space]
    wave = run_wave(f"{space}_load_{name} {text}", registers, memory=memory)
    assert_same(wave.vector[2], widen(data[order]))


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_wide_global_accesses_with_scalar_base_and_offset(count, rng):
    data, out = rng.integers(0, 1 << 32, (64, count), np.uint32), np.zeros((64, count), np.uint32)
    memory, source = buffer_of(data)
    target = memory.add(out, "out")
    suffix = f"x{count}" if count > 1 else ""
    span = f"v[4:{3 + count}]" if count > 1 else "v4"
    text = f"""
    global_load_dword{suffix} {span}, v0, s[0:1] offset:-16
    global_store_dword{suffix} v1, {span}, s[2:3] offset:32"""
    stride = (LANES * 4 * count).astype(np.uint32)
    mask = int(rng.integers(0, 1 << 63))
    registers = {"v0": stride + np.uint32(16), "v1": stride, "s[0:1]": source, "s[2:3]": target - 32}
    run_wave(text, registers, memory=memory, exec_mask=mask)
    np.testing.assert_array_equal(out, np.where(bits_to_lanes(mask)[:, None], data, 0))


def test_d16_accesses_touch_one_half(rng):
    data = rng.integers(0, 1 << 16, 64, np.uint16)
    memory, address = buffer_of(data)
    old = rng.integers(0, 1 << 32, 64, np.uint32)
    registers = {"v0": (2 * LANES).astype(np.uint32), "v1": old, "v2": old, "s[0:1]": address}
    text = "global_load_short_d16 v1, v0, s[0:1]\nglobal_load_short_d16_hi v2, v0, s[0:1]"
    wave = run_wave(text, registers, memory=memory)
    assert_same(wave.vector[1], old & np.uint32(0xFFFF0000) | data)
    assert_same(wave.vector[2], old & np.uint32(0xFFFF) | data.astype(np.uint32) << np.uint32(16))
    run_wave("global_store_short_d16_hi v0, v1, s[0:1]", registers, memory=memory)
    assert_same(data, (old >> np.uint32(16)).astype(np.uint16))


def test_narrow_stores_write_only_their_bytes(rng):
    data = np.zeros(256, np.uint8)
    memory, address = buffer_of(data)
    values = rng.integers(0, 1 << 32, 64, np.uint32)
    run_wave(
        "global_store_byte v0, v1, s[0:1]",
        {"v0": (4 * LANES).astype(np.uint32), "v1": values, "s[0:1]": address},
        memory=memory,
    )
    assert_same(data[::4], values.astype(np.uint8))
    assert not data.reshape(64, 4)[:, 1:].any()


def test_unaligned_accesses_are_allowed(rng):
    data = rng.integers(0, 256, 300, np.uint8)
    memory, address = buffer_of(data)
    wave = run_wave(
        "global_load_dword v1, v0, s[0:1]", {"v0": (3 * LANES + 1).astype(np.uint32), "s[0:1]": address}, memory=memory
    )
    assert_same(
        wave.vector[1], np.array([int.from_bytes(data[3 * lane + 1 :][:4], "little") for lane in LANES], np.uint32)
    )


def test_buffer_accesses_past_num_records_read_zero_and_write_nothing(rng):
    data, out = rng.integers(1, 1 << 32, 64, np.uint32), np.full(64, 7, np.uint32)
    memory, source = buffer_of(data)
    target = memory.add(out, "out")
    offsets = (4 * LANES).astype(np.uint32)
    wave = run_wave(
        "buffer_load_dword v1, v0, s[4:7], s8 offen offset:4",
        {"v0": offsets, "s8": 8} | resource(source, 100),
        memory=memory,
    )
    inside = 4 * LANES + 4 < 100 - 8
    expected = np.where(inside, np.roll(data, -3), 0)
    assert_same(wave.vector[1], expected.astype(np.uint32))
    run_wave(
        "buffer_store_dword v1, v0, s[4:7], 0 offen", {"v0": offsets, "v1": data} | resource(target, 128), memory=memory
    )
    assert_same(out, np.where(LANES < 32, data, np.uint32(7)))


def test_scratch_belongs_to_the_lane(rng):
    a = rng.integers(0, 1 << 32, (2, 64), np.uint32)
    text = """
    scratch_store_dwordx2 off, v[0:1], off offset:8
    scratch_load_dwordx2 v[2:3], off, off offset:8
    scratch_load_dword v4, off, off"""
    wave = run_wave(text, {"v0": a[0], "v1": a[1]}, scratch_bytes=16)
    np.testing.assert_array_equal(wave.vector[2:4], a)
    assert (wave.vector[4] == POISON).all()
    with pytest.raises(MemoryFault, match=r"scratch bytes 12\.\.19 of 16 per lane"):
        run_wave("scratch_load_dwordx2 v[2:3], off, off offset:12", scratch_bytes=16)


@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
def test_loads_to_lds_put_lanes_side_by_side(arch, rng):
    count = 4 if arch == "gfx950" else 1
    data = rng.integers(0, 1 << 32, (64, count), np.uint32)
    memory, address = buffer_of(data)
    offsets = (LANES * 4 * count).astype(np.uint32)[::-1].copy()
    suffix = "x4" if count == 4 else ""
    for text in (f"buffer_load_dword{suffix} v0, s[4:7], 0 offen lds", f"global_load_lds_dword{suffix} v0, s[4:5]"):
        lds = np.full(64 * 4 * count + 32, 0xEE, np.uint8)
        registers = {"v0": offsets, "m0": 32} | resource(address, data.nbytes)
        run_wave(text, registers, memory=memory, lds=lds, arch=arch)
        np.testing.assert_array_equal(lds[32:].view(np.uint32).reshape(64, count), data[::-1])
        assert (lds[:32] == 0xEE).all()
    with pytest.raises(MemoryFault, match="LDS bytes"):
        run_wave(text, registers | {"m0": 36}, memory=memory, lds=lds, arch=arch)


@pytest.mark.parametrize(
    ("name", "kind", "total"),
    [
        ("add", np.uint32, np.sum),
        ("umax", np.uint32, np.max),
        ("smin", np.int32, np.min),
        ("or", np.uint32, np.bitwise_or.reduce),
    ],
)
def test_atomics_of_all_lanes_on_one_address(name, kind, total, rng):
    data = np.zeros(1, kind)
    memory, address = buffer_of(data)
    values = rng.integers(-(1 << 31), 1 << 31, 64).astype(np.int64).astype(np.uint32).view(kind)
    wave = run_wave(
        f"global_atomic_{name} v2, v0, v1, s[0:1] sc0", {"v0": 0, "v1": values, "s[0:1]": address}, memory=memory
    )
    assert data[0] == total(np.append(values, kind(0)).astype(np.int64 if name == "smin" else np.uint64)).astype(kind)
    assert wave.vector[2, 0] == 0


def test_atomic_float_add_and_compare_swap(rng):
    data = np.array([1.0, 0], np.float32)
    memory, address = buffer_of(data)
    values = rng.integers(1, 100, 64).astype(np.float32)
    run_wave("global_atomic_add_f32 v0, v1, s[0:1]", {"v0": 0, "v1": values, "s[0:1]": address}, memory=memory)
    assert data[0] == 1 + values.sum()
    lock = np.zeros(1, np.uint32)
    memory, address = buffer_of(lock)
    registers = {"v0": 0, "v2": (LANES + 1).astype(np.uint32), "v3": 0, "s[0:1]": address}
    wave = run_wave("global_atomic_cmpswap v4, v0, v[2:3], s[0:1] sc0", registers, memory=memory)
    assert lock[0] == 1
    assert wave.vector[4].tolist() == [0] + [1] * 63


def test_fault_names_instruction_pc_address_and_nearest_buffer():
    data = np.zeros(16, np.uint32)
    memory, address = buffer_of(data, "weights")
    text = "s_nop 0\nglobal_load_dword v1, v0, s[0:1]"
    where = rf"global_load_dword \(GLOBAL\) at pc 0x[0-9a-f]+: 4 bytes at {address + 64:#x} "
    pattern = where + ".* 'weights' of 64 bytes: .* its byte 64"
    with pytest.raises(MemoryFault, match=pattern):
        run_wave(text, {"v0": (4 * LANES).astype(np.uint32), "s[0:1]": address}, memory=memory)
    with pytest.raises(MemoryFault, match="'weights', which starts 4 bytes later"):
        run_wave(text, {"v0": 0, "s[0:1]": address - 4}, memory=memory, exec_mask=1)
    with pytest.raises(MemoryFault, match="none is registered"):
        run_wave(text, {"v0": 0, "s[0:1]": address}, exec_mask=1)


def test_lanes_that_are_off_may_point_anywhere():
    memory, address = buffer_of(np.arange(64, dtype=np.uint32))
    offsets = np.where(LANES < 32, 4 * LANES, 1 << 30).astype(np.uint32)
    wave = run_wave(
        "global_load_dword v1, v0, s[0:1]", {"v0": offsets, "s[0:1]": address}, memory=memory, exec_mask=M32
    )
    assert wave.vector[1, :32].tolist() == list(range(32))


def test_one_access_may_reach_several_buffers(rng):
    parts = [rng.integers(0, 1 << 32, 8, np.uint32) for _ in range(4)]
    memory = Memory()
    addresses = np.concatenate([memory.add(p, f"part{i}") + 4 * np.arange(8) for i, p in enumerate(parts)])
    order = rng.permutation(32)
    wave = run_wave(
        "flat_load_dword v2, v[0:1]", {"v[0:1]": np.resize(addresses[order], 64).astype(np.uint64)}, memory=memory
    )
    assert_same(wave.vector[2], np.resize(np.concatenate(parts)[order], 64))


def test_overlapping_registrations_are_one_buffer():
    data = np.arange(64, dtype=np.uint32)
    memory = Memory()
    memory.add(data[:40], "head")
    memory.add(data[20:], "tail")
    wave = run_wave("global_load_dwordx2 v[2:3], v0, s[0:1]", {"v0": 156, "s[0:1]": data.ctypes.data}, memory=memory)
    assert wave.vector[2:4, 0].tolist() == [39, 40]


@pytest.mark.parametrize("wait", ["", "s_waitcnt vmcnt(1)", "s_waitcnt vmcnt(0)"])
def test_late_loads_arrive_at_the_wait_that_needs_them(wait):
    memory, address = buffer_of(np.full(64, 5, np.uint32))
    loads = "global_load_dword v1, v0, s[0:1]\nglobal_load_dword v2, v0, s[0:1]"
    text = f"{loads}\n{wait}\nv_mov_b32 v3, v1\nv_mov_b32 v4, v2"
    registers = {"v0": 0, "s[0:1]": address}
    late = run_wave(text, registers, memory=memory, late=True)
    assert late.vector[3, 0] == (5 if wait else POISON)
    assert late.vector[4, 0] == (5 if wait.endswith("(0)") else POISON)
    assert run_wave(text, registers, memory=memory).vector[3:5, 0].tolist() == [5, 5]


def test_both_halves_of_a_register_may_be_in_flight():
    memory, address = buffer_of(np.array([0x1111, 0x2222], np.uint16))
    loads = "global_load_short_d16 v1, v0, s[0:1]\nglobal_load_short_d16_hi v1, v0, s[0:1] offset:2"
    wave = run_wave(f"{loads}\ns_waitcnt vmcnt(0)", {"v0": 0, "s[0:1]": address}, memory=memory, late=True)
    assert wave.vector[1, 0] == 0x22221111


@pytest.mark.parametrize(("wait", "arrived"), [("lgkmcnt(1)", False), ("lgkmcnt(0)", True)])
def test_scalar_loads_arrive_in_any_order(wait, arrived):
    memory, address = buffer_of(np.full(64, 5, np.uint32))
    text = f"s_load_dword s2, s[0:1], 0\ns_load_dword s3, s[0:1], 0\ns_waitcnt {wait}\ns_mov_b32 s4, s2"
    wave = run_wave(text, {"s[0:1]": address}, memory=memory, late=True)
    assert wave.scalar[4] == (5 if arrived else POISON)


@pytest.mark.parametrize(
    "text", ["global_atomic_add_f64 v0, v[2:3], s[0:1]", "buffer_load_dword v0, v1, s[4:7], 0 idxen"]
)
def test_other_forms_are_refused(text):
    with pytest.raises(UnsupportedInstructionError, match="at pc"):
        run_wave(text, exec_mask=MASK64)
