"""State: device memory that knows its buffers, and one wave of 64 lanes."""

import ctypes
from bisect import bisect_right
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from .errors import MemoryFault

__all__ = [
    "EXEC",
    "LANES",
    "M0",
    "MASK32",
    "MASK64",
    "POISON",
    "VCC",
    "Buffer",
    "Memory",
    "Wave",
    "bits_to_lanes",
    "lanes_to_bits",
]

VCC, M0, EXEC = 106, 124, 126  # scalar operand codes
LANES = np.arange(64)
MASK32, MASK64 = (1 << 32) - 1, (1 << 64) - 1
POISON = 0x7FC17FC1  # a NaN as fp32, and in both halves as bf16 and fp16
_VGPRS, _AGPRS, _SGPRS = 256, 256, 128
_COUNTER_LIMITS = {"vm": 63, "lgkm": 15}


def bits_to_lanes(bits: int) -> np.ndarray:
    """64-bit mask -> bool [64]."""
    return np.unpackbits(np.frombuffer(bits.to_bytes(8, "little"), np.uint8), bitorder="little").astype(bool)


def lanes_to_bits(lanes: np.ndarray) -> int:
    """bool [64] -> 64-bit mask."""
    return int.from_bytes(np.packbits(lanes, bitorder="little").tobytes(), "little")


@dataclass
class Buffer:
    """One registered range; `views` are the same bytes as 1-, 2- and 4-byte elements at every byte offset."""

    name: str
    start: int
    end: int
    owner: Any
    views: dict[int, np.ndarray]


class Memory:
    """The address space that a kernel may touch: host addresses, each access inside one registered buffer."""

    def __init__(self) -> None:
        self._buffers: list[Buffer] = []
        self._starts: list[int] = []

    def add(self, owner: Any, name: str) -> int:
        """Register the bytes of a NumPy array or a CPU torch tensor, and return their address.

        A strided tensor owns the span from its first to its last element. Ranges that overlap become one buffer.
        """
        if isinstance(owner, np.ndarray):
            start, size = owner.ctypes.data, owner.nbytes
        else:
            extent = (
                1 + sum((n - 1) * s for n, s in zip(owner.shape, owner.stride(), strict=True)) if owner.numel() else 0
            )
            start, size = owner.data_ptr(), extent * owner.element_size()
        if size:
            self._register(start, start + size, owner, name)
        return start

    def _register(self, start: int, end: int, owner: Any, name: str) -> None:
        touching = [b for b in self._buffers if b.start < end and start < b.end]
        names = list(dict.fromkeys([*(b.name for b in touching), name]))
        start, end = min([start, *(b.start for b in touching)]), max([end, *(b.end for b in touching)])
        data = (ctypes.c_uint8 * (end - start)).from_address(start)
        views = {w: np.ndarray(max(end - start - w + 1, 0), f"<u{w}", data, strides=(1,)) for w in (1, 2, 4)}
        kept = [b for b in self._buffers if b not in touching]
        merged = Buffer("/".join(names), start, end, (owner, [b.owner for b in touching]), views)
        self._buffers = sorted([*kept, merged], key=lambda b: b.start)
        self._starts = [b.start for b in self._buffers]

    def _find(self, address: int, size: int) -> Buffer:
        index = bisect_right(self._starts, address) - 1
        if index >= 0 and address + size <= self._buffers[index].end:
            return self._buffers[index]
        raise MemoryFault(f"{size} bytes at {address:#x} are in no registered buffer; {self._nearest(address)}")

    def _nearest(self, address: int) -> str:
        if not self._buffers:
            return "none is registered"
        buffer = min(self._buffers, key=lambda b: max(b.start - address, address - b.end + 1))
        if address < buffer.start:
            return f"nearest is {buffer.name!r}, which starts {buffer.start - address} bytes later"
        size, at = buffer.end - buffer.start, address - buffer.start
        return f"nearest is {buffer.name!r} of {size} bytes: the access is at its byte {at}"

    def _groups(self, addresses: np.ndarray, size: int):
        """Yield (buffer, selection of lanes): nearly always one buffer and all lanes."""
        low, high = int(addresses.min()), int(addresses.max())
        buffer = self._find(low, size)
        if high + size <= buffer.end:
            yield buffer, slice(None)
            return
        rest = np.ones(len(addresses), bool)
        while rest.any():
            buffer = self._find(int(addresses[rest].min()), size)
            chosen = rest & (addresses + size <= buffer.end)
            yield buffer, chosen
            rest &= ~chosen

    def gather(self, addresses: np.ndarray, width: int, count: int = 1) -> np.ndarray:
        """`count` elements of `width` bytes for each int64 address [N] -> uint32 [count, N]."""
        values = np.zeros((count, len(addresses)), np.uint32)
        if len(addresses):
            for buffer, lanes in self._groups(addresses, width * count):
                offsets = addresses[lanes] - buffer.start
                for element in range(count):
                    values[element, lanes] = buffer.views[width][offsets + width * element]
        return values

    def scatter(self, addresses: np.ndarray, values: np.ndarray, width: int) -> None:
        """Write uint32 [count, N], cut to `width` bytes an element; of lanes with one address the last wins."""
        if len(addresses):
            for buffer, lanes in self._groups(addresses, width * len(values)):
                offsets = addresses[lanes] - buffer.start
                for element, row in enumerate(values):
                    buffer.views[width][offsets + width * element] = row[lanes]

    def dwords(self, address: int, count: int) -> list[int]:
        """`count` consecutive dwords, as a scalar load reads them."""
        buffer = self._find(address, 4 * count)
        offset = address - buffer.start
        return buffer.views[4][offset : offset + 4 * count : 4].tolist()


class Wave:
    """Registers and program counter of one wave.

    `vector` is uint32 [512, 64]: VGPRs, then AGPRs. `lds` is uint8 [bytes], shared by the waves of a workgroup;
    `scratch` is uint32 [dwords, 64].
    With `late`, a load or an LDS operation completes only at the s_waitcnt that must wait for it, as slowly as the ISA
    allows; until then registers and LDS keep their old contents.
    """

    def __init__(self, memory: Memory, lds: np.ndarray, scratch_bytes: int = 0, late: bool = False):
        self.memory, self.lds, self.late = memory, lds, late
        self.scalar: list[int] = [POISON] * _SGPRS
        self.vector = np.full((_VGPRS + _AGPRS, 64), POISON, np.uint32)
        self.scratch = np.full(((scratch_bytes + 3) // 4, 64), POISON, np.uint32)
        self.scc = 0
        self.pc = 0
        self.code_base = 0
        self.index_mode = False
        self._lds_writes: deque[Callable[[], None]] = deque()
        self._pending: dict[str, deque[tuple[bool, Callable[[], None]]]] = {"vm": deque(), "lgkm": deque()}
        self.write64(EXEC, MASK64)

    def read64(self, code: int) -> int:
        return self.scalar[code] | self.scalar[code + 1] << 32

    def write(self, code: int, value: int) -> None:
        self.scalar[code] = value & MASK32
        if code >= EXEC:
            self._exec_changed()

    def write64(self, code: int, value: int) -> None:
        self.scalar[code], self.scalar[code + 1] = value & MASK32, value >> 32 & MASK32
        if code >= EXEC:
            self._exec_changed()

    def _exec_changed(self) -> None:
        # A new array each time: a load in flight keeps the mask that it was issued with.
        bits = self.read64(EXEC)
        self.active = bits_to_lanes(bits)
        self.all_active = bits == MASK64

    def write_vector(self, register: int, values: np.ndarray) -> None:
        """Write 32-bit values [64] or [1] to the active lanes."""
        if values.dtype != np.uint32:
            values = values.view(np.uint32)
        if self.all_active:
            self.vector[register] = values
        else:
            np.copyto(self.vector[register], values, where=self.active)

    def finish(self, counter: str, action: Callable[[], None], in_order: bool = True) -> None:
        """Complete a memory operation: now, or with `late` at the s_waitcnt that requires it."""
        if not self.late:
            action()
            return
        queue = self._pending[counter]
        queue.append((in_order, action))
        if len(queue) > _COUNTER_LIMITS[counter]:
            queue.popleft()[1]()

    def write_lds(self, action: Callable[[], None]) -> None:
        """Carry out an LDS write: now, or with `late` at its s_waitcnt or before this wave reads LDS again."""
        if not self.late:
            action()
            return
        self._lds_writes.append(action)
        self.finish("lgkm", lambda: self.settle_lds(action))

    def settle_lds(self, last: Callable[[], None] | None = None) -> None:
        """Carry out the LDS writes still to come, in order: all, or those up to `last`."""
        while self._lds_writes and (last is None or last in self._lds_writes):
            self._lds_writes.popleft()()

    def wait(self, counter: str, remaining: int) -> None:
        """Complete what must be complete once at most `remaining` operations are in flight."""
        queue = self._pending[counter]
        if remaining and not all(in_order for in_order, _ in queue):
            return  # scalar loads return in any order: only a count of zero proves anything
        while len(queue) > remaining:
            queue.popleft()[1]()
