"""Code objects, dispatch registers, workgroups, barriers, wave orders and the poison of what nobody wrote."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from .assemble import assemble, run_wave
from .elf import CodeObject
from .errors import MemoryFault
from .launch import WAVE_ORDERS, launch
from .machine import POISON, Memory
from .triton_launch import compile_triton, launch_triton


@triton.jit
def copy_ids(out, BLOCK: tl.constexpr):
    program = tl.program_id(0) + 10 * tl.program_id(1) + 100 * tl.program_id(2)
    lane = tl.arange(0, BLOCK)
    where = ((tl.program_id(2) * 3 + tl.program_id(1)) * 2 + tl.program_id(0)) * BLOCK
    tl.store(out + where + lane, program * 1000 + lane)


def test_every_workgroup_and_work_item_runs_once():
    out = torch.full((4, 3, 2, 128), -1, dtype=torch.int32)
    launch_triton(copy_ids, (2, 3, 4), out, BLOCK=128, num_warps=2)
    z, y, x = torch.meshgrid(torch.arange(4), torch.arange(3), torch.arange(2), indexing="ij")
    expected = (x + 10 * y + 100 * z)[..., None] * 1000 + torch.arange(128)
    assert torch.equal(out, expected.int())


@triton.jit
def store_grid(out):
    for axis in tl.static_range(3):
        tl.store(out + axis, tl.num_programs(axis))


def test_a_kernel_knows_the_size_of_its_grid():
    out = torch.zeros(3, dtype=torch.int32)
    launch_triton(store_grid, (2, 3, 4), out)
    assert out.tolist() == [2, 3, 4]


@triton.jit
def reverse(source, out, BLOCK: tl.constexpr):
    lane = tl.arange(0, BLOCK)
    tl.store(out + lane, tl.flip(tl.cumsum(tl.load(source + lane), 0), 0))


@pytest.mark.parametrize("late", [False, True], ids=["eager", "late"])
@pytest.mark.parametrize("order", WAVE_ORDERS)
def test_waves_meet_at_barriers_in_every_order(order, late):
    source = torch.randint(-1000, 1000, (1024,), dtype=torch.int32)
    out = torch.empty_like(source)
    program = launch_triton(reverse, (1,), source, out, BLOCK=1024, num_warps=4, order=order, late=late)
    assert "s_barrier" in program.executed
    assert torch.equal(out, source.cumsum(0).flip(0).int())


def test_metadata_gives_the_argument_layout():
    tensors = {"source": torch.zeros(64, dtype=torch.int32), "out": torch.zeros(64, dtype=torch.int32)}
    compiled, constants = compile_triton(reverse, tensors | {"BLOCK": 64}, {"num_warps": 1}, "gfx942")
    code = CodeObject(compiled.asm["hsaco"])
    kernel = code.kernels["reverse"]
    assert code.arch == "gfx942"
    assert constants == {"BLOCK": 64}
    assert [(a.kind, a.offset, a.size) for a in kernel.arguments[:2]] == [
        ("global_buffer", 0, 8),
        ("global_buffer", 8, 8),
    ]
    assert kernel.kernarg_bytes >= 16


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"not an object", "is a 64-bit ELF file, got 13 bytes"),
        (b"\x7fELF\x02" + bytes(59), "expected a code object for gfx942 or gfx950"),
    ],
    ids=["not-elf", "other-machine"],
)
def test_other_files_are_refused(data, message):
    with pytest.raises(ValueError, match=message):
        CodeObject(data)


def test_unknown_order_lists_the_known():
    with pytest.raises(ValueError, match="order must be one of to_barrier, reversed, lockstep, got 'random'"):
        launch(assemble("s_nop 0"), "start", (1, 1, 1), (64, 1, 1), b"", Memory(), order="random")


def test_what_nobody_wrote_is_nan():
    wave = run_wave("s_nop 0", scratch_bytes=8)
    for values in (wave.vector, wave.scratch):
        assert np.isnan(values.view(np.float32)).all()
    halves = np.array([POISON], np.uint32).view(np.uint16)
    assert np.isnan(halves.view(np.float16)).all()
    assert torch.from_numpy(halves.view(np.int16)).view(torch.bfloat16).isnan().all()


@triton.jit
def add_one(source, out, BLOCK: tl.constexpr):
    lane = tl.arange(0, BLOCK)
    tl.store(out + lane, tl.load(source + lane) + 1)


def test_a_kernel_that_reads_past_its_tensor_faults():
    source, out = torch.zeros(63), torch.zeros(64)
    with pytest.raises(
        MemoryFault, match=r"(global|buffer)_load_dword.* 'source' of 252 bytes: the access is at its byte 252"
    ):
        launch_triton(add_one, (1,), source, out, BLOCK=64, num_warps=1)


def test_a_strided_tensor_owns_its_span():
    storage = torch.zeros(10, 10)
    memory = Memory()
    address = memory.add(storage[:5, :3], "view")
    assert memory.dwords(address + 4 * 42, 1) == [0]
    with pytest.raises(MemoryFault, match="'view' of 172 bytes"):
        memory.dwords(address + 4 * 43, 1)


def test_scalar_arguments_are_packed_by_type():
    @triton.jit
    def store_scalars(out, small, large, real):
        tl.store(out, small + large)
        tl.store(out + 1, (real * 4).to(tl.int64))

    out = torch.zeros(2, dtype=torch.int64)
    launch_triton(store_scalars, (1,), out, -7, 1 << 40, 2.5)
    assert out.tolist() == [(1 << 40) - 7, 10]


def test_none_one_and_keywords_are_specialised_as_at_a_launch():
    @triton.jit
    def scaled(out, scale, count, other, BLOCK: tl.constexpr = 64):
        factor = 2 if scale is None else tl.load(scale)
        tl.store(out + tl.arange(0, BLOCK), factor * count + other)

    out = torch.zeros(64, dtype=torch.int32)
    launch_triton(scaled, (1,), out, None, other=5, count=1, num_warps=1)
    assert (out == 7).all()
    launch_triton(scaled, (1,), out, torch.tensor([9], dtype=torch.int32), 16, 5)
    assert (out == 149).all()


def test_missing_arguments_are_named():
    with pytest.raises(TypeError, match="add_one is missing the arguments out"):
        launch_triton(add_one, (1,), torch.zeros(64), BLOCK=64)
