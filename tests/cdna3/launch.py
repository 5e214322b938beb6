"""A dispatch: registers as the hardware sets them up, workgroups one after another, waves in a chosen order."""

import struct
from collections.abc import Iterator

import numpy as np

from .elf import Kernel
from .errors import InterpreterError
from .machine import EXEC, LANES, POISON, Memory, Wave
from .program import Program
from .scalar import BARRIER, END

__all__ = ["WAVE_ORDERS", "launch"]

# Each runs the waves of a workgroup from barrier to barrier: one after another, in the opposite order, or all at once.
WAVE_ORDERS = ("to_barrier", "reversed", "lockstep")
_MAX_INSTRUCTIONS = 5_000_000
_UNLIMITED = 1 << 60


def launch(
    program: Program,
    name: str,
    grid: tuple[int, int, int],
    block: tuple[int, int, int],
    kernarg: bytes,
    memory: Memory,
    *,
    dynamic_lds: int = 0,
    order: str = "to_barrier",
    late: bool = False,
) -> int:
    """Run `grid` workgroups of `block` work-items and return the number of wave instructions.

    Args:
        kernarg: the kernel argument segment; it is padded with zeros to what the kernel declares.
        memory: every buffer that the kernel may touch.
        dynamic_lds: bytes of LDS beyond those that the kernel descriptor asks for.
        order: one of WAVE_ORDERS.
        late: complete a load or an LDS operation only at the s_waitcnt that must wait for it; until then registers
            and LDS keep their old contents.

    Raises:
        MemoryFault: an access outside `memory`, the LDS or the scratch; it names instruction, pc, address and the
            nearest buffer.
        UnsupportedInstructionError: an instruction without a meaning here; names mnemonic and pc.
        InterpreterError: a pc outside the code, or a kernel that does not end.
    """
    if order not in WAVE_ORDERS:
        raise ValueError(f"order must be one of {', '.join(WAVE_ORDERS)}, got {order!r}")
    kernel = program.code.kernels[name]
    kernarg = _with_hidden_arguments(kernarg, kernel, grid, block, dynamic_lds)
    arguments = _aligned_copy(kernarg)
    memory.add(program.code.image, "code object")
    memory.add(arguments, "kernel arguments")
    packet = np.frombuffer(
        struct.pack("<6H3I", 0, 3, *block, 0, *(g * b for g, b in zip(grid, block, strict=True))).ljust(64, b"\0"),
        np.uint8,
    )
    memory.add(packet, "dispatch packet")
    user = _user_sgprs(kernel, packet.ctypes.data, arguments.ctypes.data, kernarg)
    lds_bytes = kernel.lds_bytes + dynamic_lds
    executed = 0
    with np.errstate(all="ignore"):
        for workgroup in _workgroups(grid):
            lds = np.full((lds_bytes + 3) // 4, POISON, np.uint32).view(np.uint8)
            waves = list(_waves(program, kernel, memory, lds, user, workgroup, block, late))
            executed += _run_workgroup(program, waves, order, workgroup)
    return executed


def _workgroups(grid: tuple[int, int, int]) -> Iterator[tuple[int, int, int]]:
    for z in range(grid[2]):
        for y in range(grid[1]):
            for x in range(grid[0]):
                yield x, y, z


def _with_hidden_arguments(
    kernarg: bytes, kernel: Kernel, grid: tuple[int, int, int], block: tuple[int, int, int], dynamic_lds: int
) -> bytes:
    """The argument segment padded to its declared size, with what the compiler asks the runtime to put behind it."""
    hidden = {"hidden_dynamic_lds_size": dynamic_lds, "hidden_grid_dims": 3}
    for axis, count, size in zip("xyz", grid, block, strict=True):
        hidden |= {f"hidden_block_count_{axis}": count, f"hidden_group_size_{axis}": size}
    segment = bytearray(kernarg.ljust(max(kernel.kernarg_bytes, 4), b"\0"))
    for argument in kernel.arguments:
        if argument.kind in hidden:
            end = argument.offset + argument.size
            segment[argument.offset : end] = hidden[argument.kind].to_bytes(argument.size, "little")
    return bytes(segment)


def _aligned_copy(data: bytes) -> np.ndarray:
    storage = np.zeros(len(data) + 64, np.uint8)
    start = -storage.ctypes.data % 64
    aligned = storage[start : start + len(data)]
    aligned[:] = np.frombuffer(data, np.uint8)
    return aligned


def _user_sgprs(kernel: Kernel, packet: int, arguments: int, kernarg: bytes) -> list[int]:
    """The user SGPRs in the order that the descriptor's enable bits give them."""
    values = []
    for bit, size, value in (
        (0, 4, 0),  # private segment buffer
        (1, 2, packet),
        (2, 2, 0),  # queue
        (3, 2, arguments),
        (4, 2, 0),  # dispatch id
        (5, 2, 0),  # flat scratch
        (6, 1, kernel.scratch_bytes),
    ):
        if kernel.properties >> bit & 1:
            values += [value >> 32 * part & 0xFFFFFFFF for part in range(size)]
    if kernel.preload_dwords:
        start, stop = 4 * kernel.preload_offset, 4 * (kernel.preload_offset + kernel.preload_dwords)
        values += struct.unpack(f"<{kernel.preload_dwords}I", kernarg.ljust(stop, b"\0")[start:stop])
    return values + [POISON] * (kernel.user_sgprs - len(values))


def _waves(
    program: Program,
    kernel: Kernel,
    memory: Memory,
    lds: np.ndarray,
    user: list[int],
    workgroup: tuple[int, int, int],
    block: tuple[int, int, int],
    late: bool,
) -> Iterator[Wave]:
    ids = [i for i, enabled in zip(workgroup, kernel.workgroup_id_sgprs, strict=True) if enabled]
    sgprs = [*user, *ids]
    items = block[0] * block[1] * block[2]
    for first in range(0, items, 64):
        wave = Wave(memory, lds, kernel.scratch_bytes, late)
        wave.scalar[: len(sgprs)] = sgprs
        item = first + LANES
        wave.vector[0] = item % block[0] | item // block[0] % block[1] << 10 | item // (block[0] * block[1]) << 20
        wave.write64(EXEC, (1 << min(64, items - first)) - 1)
        wave.code_base = program.code.image.ctypes.data
        # With preloaded arguments the firmware enters 256 bytes later, behind the loads for older firmware.
        wave.pc = kernel.entry + (256 if kernel.preload_dwords else 0)
        yield wave


def _run_workgroup(program: Program, waves: list[Wave], order: str, workgroup: tuple[int, int, int]) -> int:
    quantum = 1 if order == "lockstep" else _UNLIMITED
    numbered = list(enumerate(waves))
    if order == "reversed":
        numbered.reverse()
    running, waiting, executed = dict(numbered), {}, 0
    while running:
        for number, wave in list(running.items()):
            for _ in range(quantum):
                executed += 1
                if executed > _MAX_INSTRUCTIONS:
                    raise InterpreterError(f"workgroup {workgroup} ran {_MAX_INSTRUCTIONS} instructions without an end")
                event = program.advance(wave)
                if event is not None:
                    del running[number]
                    if event == BARRIER:
                        waiting[number] = wave
                    elif event == END:
                        wave.wait("vm", 0)
                        wave.wait("lgkm", 0)
                    break
        if not running:
            running, waiting = {n: waiting[n] for n, _ in numbered if n in waiting}, {}
    return executed
