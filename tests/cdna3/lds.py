"""LDS instructions, and the lane permutations that go through the LDS crossbar.

LDS carries out the operations of a wave in order. Reads look at LDS when they issue, behind the writes of their wave.
"""

import re
from collections.abc import Callable

import numpy as np

from .decode import Instruction
from .errors import MemoryFault, UnsupportedInstructionError
from .machine import LANES, Wave

__all__ = ["build_lds"]

Step = Callable[[Wave], None]

_WHOLE = re.compile(r"ds_(read|write)(2|2st64)?_b(32|64|96|128)")
_NARROW_READ = re.compile(r"ds_read_([ui])(8|16)(_d16)?(_hi)?")
_NARROW_WRITE = re.compile(r"ds_write_b(8|16)(_d16_hi)?")
_TRANSPOSED = re.compile(r"ds_read_b64_tr_b(8|16)")
_AGPR = 256


def build_lds(instruction: Instruction) -> Step | None:
    """The step of a DS instruction; None if the encoding is another."""
    if instruction.encoding != "DS":
        return None
    name = instruction.mnemonic
    builders = (
        (_WHOLE, _whole),
        (_NARROW_READ, _narrow_read),
        (_NARROW_WRITE, _narrow_write),
        (_TRANSPOSED, _transposed),
    )
    for pattern, builder in builders:
        if match := pattern.fullmatch(name):
            return builder(instruction, match)
    if name in _CROSSBAR:
        return _crossbar(instruction)
    raise UnsupportedInstructionError(f"{instruction} has no meaning here yet; see tests/cdna3/README.md")


def _offset(instruction: Instruction) -> int:
    return instruction["offset1"] << 8 | instruction["offset0"]


def _register(instruction: Instruction, field: str) -> int:
    return instruction[field] + (_AGPR if instruction["acc"] else 0)


def _check(wave: Wave, start: np.ndarray, size: int) -> None:
    if len(start) and start.max() + size > len(wave.lds):
        raise MemoryFault(f"LDS bytes {start.min()}..{start.max() + size - 1} of {len(wave.lds)} allocated")


def _elements(wave: Wave, width: int) -> np.ndarray:
    """LDS as unsigned elements of `width` bytes, one at every byte offset."""
    return np.ndarray(max(len(wave.lds) - width + 1, 0), f"<u{width}", wave.lds, strides=(1,))


def _whole(instruction: Instruction, match: re.Match) -> Step:
    is_read, two, dwords = match[1] == "read", match[2], int(match[3]) // 32
    if two:
        scale = 4 * dwords * (64 if two == "2st64" else 1)
        offsets = [instruction["offset0"] * scale, instruction["offset1"] * scale]
    else:
        offsets = [_offset(instruction)]
    address, sources = instruction["addr"], [_register(instruction, "data0"), _register(instruction, "data1")]
    destination = _register(instruction, "vdst")

    def starts(wave: Wave) -> list[np.ndarray]:
        base = wave.vector[address, wave.active].astype(np.int64)
        for offset in offsets:
            _check(wave, base + offset, 4 * dwords)
        return [base + offset + 4 * element for offset in offsets for element in range(dwords)]

    def read(wave: Wave) -> None:
        wave.settle_lds()
        active, memory = wave.active, _elements(wave, 4)
        data = [memory[start] for start in starts(wave)]

        def commit() -> None:
            for register, values in enumerate(data, destination):
                wave.vector[register, active] = values

        wave.finish("lgkm", commit)

    def write(wave: Wave) -> None:
        memory, rows = _elements(wave, 4), starts(wave)
        data = [wave.vector[source + element, wave.active] for source in sources for element in range(dwords)]

        def commit() -> None:
            for start, values in zip(rows, data, strict=False):
                memory[start] = values

        wave.write_lds(commit)

    return read if is_read else write


def _narrow_read(instruction: Instruction, match: re.Match) -> Step:
    signed, width, half, high = match[1] == "i", int(match[2]) // 8, match[3], match[4]
    address, offset, destination = instruction["addr"], _offset(instruction), _register(instruction, "vdst")
    top = np.uint32(1 << 8 * width - 1)

    def read(wave: Wave) -> None:
        wave.settle_lds()
        active = wave.active
        start = wave.vector[address, active].astype(np.int64) + offset
        _check(wave, start, width)
        loaded = _elements(wave, width)[start].astype(np.uint32)
        if signed:
            loaded = (loaded ^ top) - top

        def commit() -> None:
            values = loaded
            if half:
                old, low = wave.vector[destination, active], values & np.uint32(0xFFFF)
                values = old & np.uint32(0xFFFF) | low << np.uint32(16) if high else old & np.uint32(0xFFFF0000) | low
            wave.vector[destination, active] = values

        wave.finish("lgkm", commit)

    return read


def _narrow_write(instruction: Instruction, match: re.Match) -> Step:
    width, shift = int(match[1]) // 8, np.uint32(16 if match[2] else 0)
    address, offset, source = instruction["addr"], _offset(instruction), _register(instruction, "data0")

    def write(wave: Wave) -> None:
        memory, values = _elements(wave, width), wave.vector[source, wave.active] >> shift
        start = wave.vector[address, wave.active].astype(np.int64) + offset
        _check(wave, start, width)

        def commit() -> None:
            memory[start] = values

        wave.write_lds(commit)

    return write


def _transposed(instruction: Instruction, match: re.Match) -> Step:
    """ds_read_b64_tr (gfx950): 16 lanes read 16 rows of 64 bits and receive the transpose.

    With n elements in 64 bits, element j of lane l is element l % n of lane 16 / n * j + l // n, within each 16 lanes.
    """
    width = int(match[1]) // 8
    per_lane = 8 // width
    address, offset, destination = instruction["addr"], _offset(instruction), _register(instruction, "vdst")
    element = np.arange(per_lane)[:, None]
    source_lane = (LANES & ~15) + 16 // per_lane * element + (LANES & 15) // per_lane
    source_element = np.broadcast_to(LANES % per_lane, source_lane.shape)

    def read(wave: Wave) -> None:
        wave.settle_lds()
        start = wave.vector[address].astype(np.int64) + offset
        _check(wave, start, 8)
        elements = _elements(wave, width)[start[source_lane] + width * source_element]
        dwords = np.ascontiguousarray(elements.T).view(np.uint32).T
        active, rows = wave.active, wave.vector[destination : destination + 2]
        wave.finish("lgkm", lambda: np.copyto(rows, dwords, where=active))

    return read


def _swizzle_lanes(offset: int) -> np.ndarray:
    """ds_swizzle_b32: bit 15 set is a quad permutation, else (lane & and | or) ^ xor within 32 lanes."""
    if offset & 0x8000:
        return (LANES & ~3) + np.array([offset >> 2 * i & 3 for i in range(4)])[LANES & 3]
    return LANES & 32 | (LANES & 31 & offset & 31 | offset >> 5 & 31) ^ (offset >> 10 & 31)


_CROSSBAR = ("ds_bpermute_b32", "ds_permute_b32", "ds_swizzle_b32")


def _crossbar(instruction: Instruction) -> Step:
    name, offset = instruction.mnemonic, _offset(instruction)
    address, data, destination = instruction["addr"], _register(instruction, "data0"), _register(instruction, "vdst")
    swizzle = _swizzle_lanes(offset)

    def permute(wave: Wave) -> None:
        if name == "ds_swizzle_b32":
            # The source of a swizzle is in the address field; lanes that are off read as zero.
            values = np.where(wave.active, wave.vector[address], np.uint32(0))[swizzle]
        else:
            other = (wave.vector[address] + np.uint32(offset) >> np.uint32(2)) & np.uint32(63)
            if name == "ds_bpermute_b32":
                values = np.where(wave.active, wave.vector[data], np.uint32(0))[other]
            else:
                values = np.zeros(64, np.uint32)
                values[other[wave.active]] = wave.vector[data, wave.active]
        active = wave.active
        wave.finish("lgkm", lambda: np.copyto(wave.vector[destination], values, where=active))

    return permute
