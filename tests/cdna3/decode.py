"""Machine code to named fields: the only file that knows the decoder, which tinygrad generates from AMD's ISA XML."""

from dataclasses import dataclass

from tinygrad.renderer.amd import decode_inst

__all__ = ["Instruction", "decode"]

_SCALED_MFMA_PREFIX = 0xD3AC
_LONGEST = 16


@dataclass(frozen=True)
class Instruction:
    """One instruction: `mnemonic` without encoding suffix, raw `fields` by the names of the ISA document."""

    pc: int
    size: int
    arch: str
    mnemonic: str
    encoding: str
    variant: str
    fields: dict[str, int]
    literal: int | None

    def __getitem__(self, field: str) -> int:
        return self.fields.get(field, 0)

    def __str__(self) -> str:
        return f"{self.mnemonic} ({self.encoding}) at pc {self.pc:#x}"


def decode(code: bytes, pc: int, arch: str) -> Instruction:
    """The instruction at the start of `code`; `pc` is kept for messages."""
    code = code[:_LONGEST].ljust(_LONGEST, b"\0")
    if int.from_bytes(code[2:4], "little") != _SCALED_MFMA_PREFIX:
        # The decoder takes any instruction in front of an F8F6F4 MFMA for a scaled MFMA, unless it cannot see that far.
        code = code[:8]
    try:
        decoded = decode_inst(code, "cdna")
    except ValueError as error:
        raise ValueError(f"no {arch} instruction at pc {pc:#x}: {code[:8].hex()}") from error
    size = decoded.size()
    raw = int.from_bytes(code, "little")
    fields = {
        name: raw >> field.lo & (1 << field.hi - field.lo + 1) - 1
        for name, field in decoded._fields
        if name not in ("op", "encoding", "literal")
    }
    name = type(decoded).__name__
    has_literal = name.endswith("_LIT")
    encoding, _, variant = name.removesuffix("_LIT").partition("_")
    return Instruction(
        pc=pc,
        size=size,
        arch=arch,
        mnemonic=decoded.op.name.lower().removesuffix("_e32").removesuffix("_e64"),
        encoding=encoding,
        variant="" if variant in ("SDST", "MFMA") else variant.removesuffix("_SDST"),
        fields=fields,
        literal=raw >> 8 * (size - 4) & 0xFFFFFFFF if has_literal else None,
    )
