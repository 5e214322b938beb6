"""AMD code objects: loadable segments, kernel descriptors and the metadata note.

Sources: the ELF-64 specification and LLVM's "User Guide for AMDGPU Backend" (code object V3 and later, kernel
descriptor, note record NT_AMDGPU_METADATA).
"""

import struct
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

__all__ = ["CodeObject", "Kernel", "KernelArgument"]

_PT_LOAD, _PT_NOTE = 1, 4
_SYMBOL_TABLES = (2, 11)  # SHT_SYMTAB, SHT_DYNSYM
_NT_AMDGPU_METADATA = 32
_ARCHITECTURES = {0x4C: "gfx942", 0x4F: "gfx950"}  # EF_AMDGPU_MACH, the low byte of e_flags


@dataclass(frozen=True)
class KernelArgument:
    """One entry of the kernarg segment; `offset` and `size` in bytes."""

    name: str
    kind: str
    offset: int
    size: int


@dataclass(frozen=True)
class Kernel:
    """What a dispatch needs to know; addresses are byte offsets from the start of the loaded code object."""

    name: str
    entry: int
    lds_bytes: int
    scratch_bytes: int
    kernarg_bytes: int
    user_sgprs: int
    workgroup_id_sgprs: tuple[bool, bool, bool]
    properties: int
    preload_dwords: int
    preload_offset: int
    arguments: tuple[KernelArgument, ...]


class CodeObject:
    """A gfx942 or gfx950 shared object, laid out as the loader would.

    `image` is uint8 [size]: segments at their virtual addresses, zero between them.
    """

    def __init__(self, data: bytes):
        if data[:5] != b"\x7fELF\x02":
            raise ValueError(f"a code object is a 64-bit ELF file, got {len(data)} bytes that start with {data[:5]!r}")
        (flags,) = struct.unpack_from("<I", data, 48)
        if flags & 0xFF not in _ARCHITECTURES:
            raise ValueError(f"expected a code object for gfx942 or gfx950, got EF_AMDGPU_MACH {flags & 0xFF:#x}")
        self.arch = _ARCHITECTURES[flags & 0xFF]
        self._data = data
        segments = list(self._segments())
        loads = [
            (offset, address, file_size, size)
            for kind, offset, address, file_size, size in segments
            if kind == _PT_LOAD
        ]
        self.image = np.zeros(max(address + size for _, address, _, size in loads), np.uint8)
        for offset, address, file_size, _ in loads:
            self.image[address : address + file_size] = np.frombuffer(data, np.uint8, file_size, offset)
        self.symbols = dict(self._symbols())
        self.metadata = self._metadata([(offset, size) for kind, offset, _, size, _ in segments if kind == _PT_NOTE])

    @cached_property
    def kernels(self) -> dict[str, Kernel]:
        """Kernel name -> descriptor, for every kernel in the object."""
        return {name.removesuffix(".kd"): self._kernel(name) for name in self.symbols if name.endswith(".kd")}

    def _segments(self):
        offset, count = struct.unpack_from("<Q", self._data, 32)[0], struct.unpack_from("<H", self._data, 56)[0]
        for index in range(count):
            kind, _, file_offset, address, _, file_size, size, _ = struct.unpack_from(
                "<IIQQQQQQ", self._data, offset + 56 * index
            )
            yield kind, file_offset, address, file_size, size

    def _section(self, index: int) -> tuple[int, ...]:
        (table,) = struct.unpack_from("<Q", self._data, 40)
        return struct.unpack_from("<IIQQQQIIQQ", self._data, table + 64 * index)

    def _symbols(self):
        (count,) = struct.unpack_from("<H", self._data, 60)
        for index in range(count):
            _, kind, _, _, offset, size, link, *_ = self._section(index)
            if kind not in _SYMBOL_TABLES:
                continue
            strings = self._section(link)[4]
            for entry in range(offset, offset + size, 24):
                name_offset, _, _, _, value, _ = struct.unpack_from("<IBBHQQ", self._data, entry)
                name = self._data[strings + name_offset : self._data.index(b"\0", strings + name_offset)].decode()
                if name:
                    yield name, value

    def _metadata(self, notes: list[tuple[int, int]]) -> dict[str, Any]:
        for start, size in notes:
            position = start
            while position < start + size:
                name_size, description_size, kind = struct.unpack_from("<III", self._data, position)
                description = position + 12 + (name_size + 3) // 4 * 4
                if kind == _NT_AMDGPU_METADATA:
                    return _message_pack(self._data, description)[0]
                position = description + (description_size + 3) // 4 * 4
        return {}

    def _kernel(self, symbol: str) -> Kernel:
        address, name = self.symbols[symbol], symbol.removesuffix(".kd")
        descriptor = self.image[address : address + 64].tobytes()
        lds, scratch, kernarg, _, entry = struct.unpack_from("<IIIIq", descriptor)
        _, _, resources, properties, preload = struct.unpack_from("<IIIHH", descriptor, 44)
        described = next((k for k in self.metadata.get("amdhsa.kernels", []) if k[".name"] == name), {})
        arguments = tuple(
            KernelArgument(a.get(".name", ""), a[".value_kind"], a[".offset"], a[".size"])
            for a in described.get(".args", [])
        )
        return Kernel(
            name=name,
            entry=address + entry,
            lds_bytes=lds,
            scratch_bytes=scratch,
            kernarg_bytes=max(kernarg, described.get(".kernarg_segment_size", 0)),
            user_sgprs=resources >> 1 & 0x1F,
            workgroup_id_sgprs=tuple(bool(resources >> bit & 1) for bit in (7, 8, 9)),
            properties=properties,
            preload_dwords=preload & 0x7F,
            preload_offset=preload >> 7,
            arguments=arguments,
        )


def _message_pack(data: bytes, at: int) -> tuple[Any, int]:
    """The MessagePack value at `at` and the offset behind it; only the types that the metadata note uses."""
    tag = data[at]
    at += 1
    if tag <= 0x7F:
        return tag, at
    if tag <= 0x9F:
        return _message_pack_collection(data, at, tag & 15, is_map=tag <= 0x8F)
    if tag <= 0xBF:
        return data[at : at + (tag & 31)].decode(), at + (tag & 31)
    if tag in (0xC2, 0xC3):
        return tag == 0xC3, at
    if tag in (0xCC, 0xCD, 0xCE, 0xCF):
        size = 1 << tag - 0xCC
        return int.from_bytes(data[at : at + size], "big"), at + size
    if tag in (0xD9, 0xDA, 0xDB):
        size = 1 << tag - 0xD9
        end = at + size + int.from_bytes(data[at : at + size], "big")
        return data[at + size : end].decode(), end
    if tag in (0xDC, 0xDD, 0xDE, 0xDF):
        size = 4 if tag & 1 else 2
        return _message_pack_collection(
            data, at + size, int.from_bytes(data[at : at + size], "big"), is_map=tag >= 0xDE
        )
    if tag >= 0xE0:
        return tag - 256, at
    raise ValueError(f"metadata note: MessagePack type {tag:#x} is not one that code objects use")


def _message_pack_collection(data: bytes, at: int, length: int, is_map: bool) -> tuple[Any, int]:
    items = []
    for _ in range(length * (2 if is_map else 1)):
        item, at = _message_pack(data, at)
        items.append(item)
    return (dict(zip(items[::2], items[1::2], strict=True)) if is_map else items), at
