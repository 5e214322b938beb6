"""Vector memory: global, flat, buffer and scratch instructions, loads straight into LDS, and atomics.

A flat address is taken as global: no kernel here forms a flat pointer to LDS or scratch, and one that did would fault.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from .decode import Instruction
from .errors import MemoryFault, UnsupportedInstructionError
from .machine import LANES, M0, Wave
from .operands import scalar_source, sign_extend

__all__ = ["Transfer", "build_memory"]

Step = Callable[[Wave], None]
Addresses = Callable[[Wave], tuple[np.ndarray, np.ndarray]]

_NAME = re.compile(r"(global|flat|buffer|scratch)_(load|store|atomic)_(lds_)?(\w+)")
_KINDS = {
    "ubyte": (1, False),
    "sbyte": (1, True),
    "byte": (1, False),
    "ushort": (2, False),
    "sshort": (2, True),
    "short": (2, False),
}
_NO_SADDR, _AGPR = 0x7F, 256


@dataclass(frozen=True)
class Transfer:
    """What one lane moves: `count` elements of `width` bytes; for D16 forms, into or out of which half."""

    width: int
    count: int
    signed: bool
    half: str

    @staticmethod
    def parse(text: str) -> "Transfer | None":
        """Read the tail of a mnemonic: "dwordx4", "ushort", "short_d16_hi"."""
        if match := re.fullmatch(r"dword(?:x(\d))?", text):
            return Transfer(4, int(match[1] or 1), False, "")
        base, _, tail = text.partition("_d16")
        if base.endswith("_d16"):
            base = base.removesuffix("_d16")
        if base not in _KINDS:
            return None
        width, signed = _KINDS[base]
        return Transfer(width, 1, signed, {"_hi": "high"}.get(tail, "low") if "_d16" in text else "")

    def extend(self, values: np.ndarray) -> np.ndarray:
        if not self.signed:
            return values
        top = np.uint32(1 << 8 * self.width - 1)
        return (values ^ top) - top

    def merge(self, old: np.ndarray, values: np.ndarray) -> np.ndarray:
        if self.half == "high":
            return old & np.uint32(0xFFFF) | values << np.uint32(16)
        if self.half == "low":
            return old & np.uint32(0xFFFF0000) | values & np.uint32(0xFFFF)
        return values


def build_memory(instruction: Instruction) -> Step | None:
    """The step of a vector memory instruction; None if the encoding is another."""
    if instruction.encoding not in ("GLOBAL", "FLAT", "MUBUF", "SCRATCH"):
        return None
    if instruction.mnemonic.startswith("buffer_") and instruction.mnemonic.split("_")[1] in ("wbl2", "inv"):
        return lambda wave: None
    match = _NAME.fullmatch(instruction.mnemonic)
    space, action, to_lds, what = match.groups() if match else (None,) * 4
    addresses = _buffer_addresses(instruction) if space == "buffer" else _flat_addresses(instruction)
    accumulator = _AGPR if instruction["acc"] else 0
    if action == "atomic":
        return _atomic(instruction, addresses, what, accumulator)
    transfer = Transfer.parse(what) if match else None
    if transfer is None:
        raise UnsupportedInstructionError(f"{instruction} has no meaning here yet; see tests/cdna3/README.md")
    if space == "scratch":
        return _scratch(instruction, action, transfer, accumulator)
    if to_lds or instruction["lds"]:
        return _load_to_lds(instruction, addresses, transfer)
    is_buffer = space == "buffer"
    if action == "load":
        return _load(addresses, transfer, instruction["vdata" if is_buffer else "vdst"] + accumulator)
    return _store(addresses, transfer, instruction["vdata" if is_buffer else "data"] + accumulator)


def _flat_addresses(instruction: Instruction) -> Addresses:
    register = instruction["addr"]
    is_flat = instruction.encoding == "FLAT"
    offset = instruction["offset"] if is_flat else sign_extend(instruction["offset"], 13)
    scalar_base = instruction["saddr"]

    def addresses(wave: Wave) -> tuple[np.ndarray, np.ndarray]:
        low = wave.vector[register].astype(np.int64)
        if is_flat or scalar_base == _NO_SADDR:
            base = low | wave.vector[register + 1].astype(np.int64) << np.int64(32)
        else:
            base = low + wave.read64(scalar_base)
        return base + offset, wave.active

    return addresses


def _buffer_addresses(instruction: Instruction) -> Addresses:
    """Raw buffer addressing: what starts past num_records - soffset reads zero and writes nothing."""
    if instruction["idxen"]:
        raise UnsupportedInstructionError(f"{instruction}: structured buffers (idxen)")
    resource, register, offset = 4 * instruction["srsrc"], instruction["vaddr"], instruction["offset"]
    scalar_offset = scalar_source(instruction, instruction["soffset"])
    has_vector_offset = instruction["offen"]

    def addresses(wave: Wave) -> tuple[np.ndarray, np.ndarray]:
        low, high, records, _ = wave.scalar[resource : resource + 4]
        if high >> 31:
            raise UnsupportedInstructionError(f"{instruction}: swizzled buffer resource")
        extra = scalar_offset(wave)
        inside = np.full(64, offset, np.int64)
        if has_vector_offset:
            inside = inside + wave.vector[register]
        return (low | (high & 0xFFFF) << 32) + extra + inside, wave.active & (inside < records - extra)

    return addresses


def _load(addresses: Addresses, transfer: Transfer, register: int) -> Step:
    width, count = transfer.width, transfer.count

    def load(wave: Wave) -> None:
        active, rows = wave.active, wave.vector[register : register + count]
        where, in_range = addresses(wave)
        values = np.zeros((count, 64), np.uint32)
        values[:, in_range] = wave.memory.gather(where[in_range], width, count)
        # D16 loads of both halves of a register may be in flight together, so halves are put together on arrival.
        wave.finish("vm", lambda: np.copyto(rows, transfer.merge(rows, transfer.extend(values)), where=active))

    return load


def _store(addresses: Addresses, transfer: Transfer, register: int) -> Step:
    shift = np.uint32(16 if transfer.half == "high" else 0)

    def store(wave: Wave) -> None:
        where, in_range = addresses(wave)
        values = wave.vector[register : register + transfer.count, in_range] >> shift
        wave.memory.scatter(where[in_range], values, transfer.width)
        wave.finish("vm", lambda: None)

    return store


def _load_to_lds(instruction: Instruction, addresses: Addresses, transfer: Transfer) -> Step:
    """Global memory to LDS at M0 + offset, lanes side by side; the vector registers are not touched."""
    offset = sign_extend(instruction["offset"], 13) if instruction.encoding == "GLOBAL" else instruction["offset"]
    width, count = transfer.width, transfer.count
    stride = max(4, width * count)

    def load(wave: Wave) -> None:
        active = wave.active
        where, in_range = addresses(wave)
        values = np.zeros((count, 64), np.uint32)
        values[:, in_range] = transfer.extend(wave.memory.gather(where[in_range], width, count))
        start = (wave.scalar[M0] & 0x3FFFC) + offset + stride * LANES[active]
        if len(start) and (start.min() < 0 or start.max() + stride > len(wave.lds)):
            raise MemoryFault(f"LDS bytes {start.min()}..{start.max() + stride - 1} of {len(wave.lds)} allocated")
        data = np.ascontiguousarray(values[:, active].T).view(np.uint8)

        def commit() -> None:
            wave.lds[start[:, None] + np.arange(stride)] = data

        wave.finish("vm", commit)

    return load


def _scratch(instruction: Instruction, action: str, transfer: Transfer, accumulator: int) -> Step:
    if transfer.width != 4:
        raise UnsupportedInstructionError(f"{instruction}: scratch accesses of whole dwords only")
    offset, count = sign_extend(instruction["offset"], 13), transfer.count
    register = instruction["vdst" if action == "load" else "data"] + accumulator

    def move(wave: Wave) -> None:
        base = offset + (wave.scalar[instruction["saddr"]] if instruction["saddr"] != _NO_SADDR else 0)
        start = base + (
            wave.vector[instruction["addr"]].astype(np.int64) if instruction["sve"] else np.zeros(64, np.int64)
        )
        active = wave.active
        first = start[active]
        if len(first) and (first.min() < 0 or first.max() + 4 * count > 4 * len(wave.scratch) or (first & 3).any()):
            raise MemoryFault(
                f"scratch bytes {first.min()}..{first.max() + 4 * count - 1} of {4 * len(wave.scratch)} per lane"
            )
        lanes, rows = LANES[active], (first >> 2) + np.arange(count)[:, None]
        if action == "store":
            wave.scratch[rows, lanes] = wave.vector[register : register + count, active]
            wave.finish("vm", lambda: None)
            return
        values = wave.scratch[rows, lanes]
        target = wave.vector[register : register + count]

        def commit() -> None:
            target[:, active] = values

        wave.finish("vm", commit)

    return move


_ATOMICS: dict[str, tuple[type, Callable[[np.generic, np.generic], np.generic]]] = {
    "swap": (np.uint32, lambda old, new: new),
    "add": (np.uint32, np.add),
    "sub": (np.uint32, np.subtract),
    "smin": (np.int32, np.minimum),
    "umin": (np.uint32, np.minimum),
    "smax": (np.int32, np.maximum),
    "umax": (np.uint32, np.maximum),
    "and": (np.uint32, np.bitwise_and),
    "or": (np.uint32, np.bitwise_or),
    "xor": (np.uint32, np.bitwise_xor),
    "add_f32": (np.float32, np.add),
}


def _atomic(instruction: Instruction, addresses: Addresses, what: str, accumulator: int) -> Step:
    """32-bit read-modify-write, one lane after another; sc0 asks for the old value."""
    if what != "cmpswap" and what not in _ATOMICS:
        raise UnsupportedInstructionError(f"{instruction}: this atomic has no meaning here yet")
    is_buffer = instruction.encoding == "MUBUF"
    data = instruction["vdata" if is_buffer else "data"] + accumulator
    returned = instruction["vdata" if is_buffer else "vdst"] + accumulator if instruction["sc0"] else None
    dtype, function = _ATOMICS.get(what, (np.uint32, None))

    def update(wave: Wave) -> None:
        where, in_range = addresses(wave)
        old = np.zeros(64, np.uint32)
        for lane in np.flatnonzero(in_range):
            address = where[lane : lane + 1]
            old[lane] = wave.memory.gather(address, 4)[0, 0]
            operand = wave.vector[data, lane]
            if function is None:
                new = operand if old[lane] == wave.vector[data + 1, lane] else old[lane]
            else:
                new = function(old[lane : lane + 1].view(dtype), operand.reshape(1).view(dtype)).view(np.uint32)[0]
            wave.memory.scatter(address, np.array([[new]], np.uint32), 4)
        active = wave.active
        if returned is not None:
            row = wave.vector[returned]
            wave.finish("vm", lambda: np.copyto(row, old, where=active))
        else:
            wave.finish("vm", lambda: None)

    return update
