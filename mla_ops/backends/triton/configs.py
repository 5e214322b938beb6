"""Launch configurations as data: chosen by measurement (``benchmarks/tune.py``), never tuned at run time.

A row that names an architecture was measured on it or, for AMD, compiled for it without spills and within its LDS;
the rows of ``"*"`` are safe anywhere: small tiles that fit 64 KiB of shared memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

__all__ = [
    "ABSORB",
    "DECODE",
    "EXPAND",
    "LINEAR",
    "PREFILL",
    "DecodeConfig",
    "HeadConfig",
    "LinearConfig",
    "PrefillConfig",
    "decode_config",
    "head_configs",
    "linear_configs",
    "pdl_options",
    "prefill_config",
]


@dataclass(frozen=True)
class DecodeConfig:
    """How ``mla_decode`` runs.

    Attributes:
        block_m: rows (query, head) of a tile.
        block_n: keys of a block.
        num_warps: warps of a program.
        num_stages: software pipeline depth.
        programs_per_unit: programs for each multiprocessor or compute unit, over all tiles.
        kernel: ``"portable"``, ``"hopper"`` for 64-row tiles, ``"hopper_narrow"`` for 16- to 64-row ones.
        extra: further compile options of the target.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    programs_per_unit: int = 1
    kernel: str = "portable"
    extra: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True)
class PrefillConfig:
    """How ``mla_prefill`` runs.

    Attributes:
        block_m: query rows of a block.
        block_n: keys of a block.
        num_warps: warps of a program.
        num_stages: software pipeline depth.
        kernel: ``"portable"`` or ``"hopper"``.
        extra: further compile options of the target.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    kernel: str = "portable"
    extra: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True)
class HeadConfig:
    """How ``absorb_query`` or ``expand_values`` runs: a product of one head's rows and weight per program.

    Attributes:
        block_t: tokens of a tile.
        block_n: columns of a tile.
        block_k: of the summed dim, at a time.
        num_warps: warps of a program.
        num_stages: software pipeline depth.
        extra: further compile options of the target.
    """

    block_t: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    extra: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True)
class LinearConfig:
    """How ``linear`` runs where the rows are few; above that torch's product does.

    Attributes:
        most_rows: rows of x up to which this serves.
        least_n: rows of all weights from which this serves.
        block_n: rows of the weight of a program.
        block_k: of the summed dim, at a time.
        num_warps: warps of a program, which share ``block_k``.
        num_stages: software pipeline depth.
        fetched: columns of each weight row that are brought to the L2 cache before the wait.
    """

    most_rows: int
    least_n: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    fetched: int = 0


_GFX942 = (("waves_per_eu", 1), ("matrix_instr_nonkdim", 16), ("kpack", 2))
_GFX950 = (("waves_per_eu", 1), ("matrix_instr_nonkdim", 16))

# (arch, rows of a tile, kind of operand) -> config. Kinds: "half" is fp16 or bf16 in a cache of the same type,
# "fp8" the same over an fp8 cache, "float" fp32.
DECODE: Mapping[tuple[str, int, str], DecodeConfig] = MappingProxyType(
    {
        ("sm_90", 16, "half"): DecodeConfig(16, 64, 4, 1, kernel="hopper_narrow"),
        ("sm_90", 32, "half"): DecodeConfig(32, 64, 8, 1, kernel="hopper_narrow"),
        ("sm_90", 64, "half"): DecodeConfig(64, 64, 4, 1, kernel="hopper"),
        ("sm_90", 16, "fp8"): DecodeConfig(16, 64, 4, 1, kernel="hopper_narrow"),
        ("sm_90", 32, "fp8"): DecodeConfig(32, 64, 8, 1, kernel="hopper_narrow"),
        ("sm_90", 64, "fp8"): DecodeConfig(64, 64, 4, 1, kernel="hopper"),
        ("gfx942", 16, "half"): DecodeConfig(16, 32, 4, 1, 2, extra=_GFX942),
        ("gfx942", 32, "half"): DecodeConfig(32, 32, 4, 1, extra=_GFX942),
        ("gfx942", 16, "fp8"): DecodeConfig(16, 32, 4, 1, 2, extra=_GFX942),
        ("gfx950", 16, "half"): DecodeConfig(16, 32, 4, 1, 2, extra=_GFX950),
        ("gfx950", 32, "half"): DecodeConfig(32, 32, 4, 1, extra=_GFX950),
        ("gfx950", 16, "fp8"): DecodeConfig(16, 32, 4, 1, 2, extra=_GFX950),
        ("*", 16, "half"): DecodeConfig(16, 32, 4, 1, 2),
        ("*", 16, "fp8"): DecodeConfig(16, 32, 4, 1, 2),
        ("*", 16, "float"): DecodeConfig(16, 16, 4, 1, 2),
    }
)

PREFILL: Mapping[tuple[str, str], PrefillConfig] = MappingProxyType(
    {
        ("sm_90", "half"): PrefillConfig(128, 128, 4, 1, kernel="hopper"),
        ("gfx942", "half"): PrefillConfig(128, 64, 4, 1, extra=_GFX942),
        ("gfx950", "half"): PrefillConfig(128, 64, 4, 1, extra=_GFX950),
        ("*", "half"): PrefillConfig(64, 32, 4, 1),
        ("*", "float"): PrefillConfig(32, 16, 4, 1),
    }
)


# (arch, kind of operand) -> configs by rising tile of tokens: the first that holds the step's tokens is taken.
ABSORB: Mapping[tuple[str, str], tuple[HeadConfig, ...]] = MappingProxyType(
    {
        ("sm_90", "half"): (HeadConfig(16, 64, 128, 2, 2), HeadConfig(64, 128, 128, 4, 2)),
        ("gfx942", "half"): (HeadConfig(16, 64, 64, 4, 2, _GFX942), HeadConfig(64, 64, 64, 4, 2, _GFX942)),
        ("gfx950", "half"): (HeadConfig(16, 64, 64, 4, 2, _GFX950), HeadConfig(64, 64, 64, 4, 2, _GFX950)),
        ("*", "half"): (HeadConfig(16, 64, 64, 4, 2), HeadConfig(64, 64, 64, 4, 2)),
        ("*", "float"): (HeadConfig(16, 32, 32, 4, 1),),
    }
)
EXPAND: Mapping[tuple[str, str], tuple[HeadConfig, ...]] = MappingProxyType(
    {
        ("sm_90", "half"): (
            HeadConfig(16, 64, 256, 4, 2),
            HeadConfig(64, 128, 64, 4, 4),
            HeadConfig(128, 128, 64, 8, 3),
        ),
        ("gfx942", "half"): (HeadConfig(16, 32, 128, 4, 2, _GFX942), HeadConfig(64, 64, 64, 4, 2, _GFX942)),
        ("gfx950", "half"): (HeadConfig(16, 32, 128, 4, 2, _GFX950), HeadConfig(64, 64, 64, 4, 2, _GFX950)),
        ("*", "half"): (HeadConfig(16, 32, 128, 4, 2), HeadConfig(64, 64, 64, 4, 2)),
        ("*", "float"): (HeadConfig(16, 32, 32, 4, 1),),
    }
)

# (arch, kind of operand) -> configs, of which the first that serves is taken. Where there is none, torch's product
# runs; "cpu" is the interpreter.
LINEAR: Mapping[tuple[str, str], tuple[LinearConfig, ...]] = MappingProxyType(
    {
        ("sm_90", "half"): (
            LinearConfig(1, 4096, 4, 1024, 4, 1, 512),
            LinearConfig(1, 4096, 16, 512, 8, 1, 512),
            LinearConfig(1, 0, 8, 512, 4, 4),
            LinearConfig(8, 4096, 16, 512, 4, 3, 512),
            LinearConfig(8, 0, 16, 512, 4, 4),
        ),
        ("cpu", "float"): (LinearConfig(1, 0, 4, 32, 4, 1), LinearConfig(8, 0, 16, 64, 2, 1)),
    }
)

# Where a kernel may start before the one in front of it has ended (programmatic dependent launch).
_PDL = frozenset({"sm_90"})


def _kind(dtype: torch.dtype, kv_dtype: torch.dtype) -> str:
    if dtype == torch.float32:
        return "float"
    return "half" if kv_dtype in (torch.float16, torch.bfloat16) else "fp8"


def decode_config(arch: str, rows: int, dtype: torch.dtype, kv_dtype: torch.dtype) -> DecodeConfig:
    """The row for ``rows`` = H x query_len rows of a request: the smallest tile that holds them, else the largest."""
    kind = _kind(dtype, kv_dtype)
    for name in (arch, "*"):
        tiles = sorted(tile for row_arch, tile, row_kind in DECODE if (row_arch, row_kind) == (name, kind))
        if tiles:
            tile = next((tile for tile in tiles if tile >= rows), tiles[-1])
            return DECODE[name, tile, kind]
    raise AssertionError(f"no default row for {kind}")


def prefill_config(arch: str, dtype: torch.dtype) -> PrefillConfig:
    """The row for an architecture and dtype, or the safe one."""
    kind = _kind(dtype, dtype)
    return PREFILL.get((arch, kind)) or PREFILL["*", kind]


def head_configs(
    table: Mapping[tuple[str, str], tuple[HeadConfig, ...]], arch: str, dtype: torch.dtype
) -> tuple[HeadConfig, ...]:
    """The rows of :data:`ABSORB` or :data:`EXPAND` for an architecture and dtype, or the safe ones."""
    kind = _kind(dtype, dtype)
    return table.get((arch, kind)) or table["*", kind]


def linear_configs(arch: str, dtype: torch.dtype) -> tuple[LinearConfig, ...]:
    """The rows of :data:`LINEAR`, none for most architectures."""
    return LINEAR.get((arch, _kind(dtype, dtype)), ())


def pdl_options(arch: str) -> Mapping[str, bool]:
    """Launch options of a kernel that waits for its inputs itself; empty where that cannot be."""
    return {"launch_pdl": True} if arch in _PDL else {}
