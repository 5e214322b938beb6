"""Which decode kernels the installed AITER has, and which of them we refuse.

AITER answers an unsupported shape by ending the process, so that everything is decided here, before the call: the
dispatcher's rules (``csrc/py_itfs_cu/asm_mla.cu`` and the gate in ``mla_decode_fwd``), the installed table of kernels
(``hsa/<arch>/mla/mla_asm.csv``), and rows that are known to be wrong.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

__all__ = [
    "ARCHITECTURES",
    "DecodeRow",
    "DecodeShape",
    "KernelTable",
    "Refusal",
    "dtype_name",
    "find_decode_row",
    "float8_dtype",
    "read_table",
]

ARCHITECTURES = ("gfx942", "gfx950")
_FALLBACK = 'use backend="triton"'
_NATIVE_HEADS = (8, 16, 32, 64, 128)

# (qType, kvType, Gqa, ps, qSeqLen, causal, lse) -> code object
Key = tuple[str, str, int, int, int, int, int]
KernelTable = Mapping[Key, str]


@dataclass(frozen=True)
class Refusal:
    """Why AITER does not serve, and what would."""

    reason: str
    remedy: str = _FALLBACK


@dataclass(frozen=True)
class DecodeShape:
    """What decides over a decode kernel.

    Attributes:
        arch: such as ``gfx942``.
        q_type, kv_type: ``bf16`` or ``fp8``.
        num_heads: of the queries.
        query_len: query tokens of each request.
        persistent: whether the work is planned on the device.
    """

    arch: str
    q_type: str
    kv_type: str
    num_heads: int
    query_len: int
    persistent: bool


@dataclass(frozen=True)
class DecodeRow:
    """A kernel that serves.

    Attributes:
        num_heads: heads to call it with; more than asked for where queries must be padded.
        writes_lse: whether the call returns an LSE in persistent mode.
        min_splits: fewest splits with which the LSE of a non-persistent call exists.
        code_object: file of the kernel.
    """

    num_heads: int
    writes_lse: bool
    min_splits: int
    code_object: str


def float8_dtype(arch: str) -> torch.dtype:
    """The fp8 dtype of the machine's matrix instructions."""
    return torch.float8_e4m3fnuz if arch == "gfx942" else torch.float8_e4m3fn


def dtype_name(dtype: torch.dtype, arch: str) -> str | Refusal:
    """AITER's name of a dtype. The other fp8 is not an error in AITER: it silently takes another path."""
    if dtype == torch.bfloat16:
        return "bf16"
    wanted = float8_dtype(arch)
    if dtype == wanted:
        return "fp8"
    if dtype.is_floating_point and dtype.itemsize == 1:
        return Refusal(f"{dtype} is not the fp8 of {arch}, which is {wanted}", f"convert it to {wanted}")
    return Refusal(f"AITER's decode has no kernel for {dtype}", "use bfloat16")


def read_table(path: Path) -> KernelTable:
    """Parse ``mla_asm.csv``; context-parallel and prefill rows are left out."""
    with path.open(newline="", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["prefill"] == "0" and (row.get("cprr") or "0") == "0"]

    def key(row: Mapping[str, str]) -> Key:
        gqa, ps, query_len, causal, lse = (int(row.get(c) or 0) for c in ("Gqa", "ps", "qSeqLen", "causal", "lse"))
        return row["qType"], row["kvType"], gqa, ps, query_len, causal, lse

    return {key(row): row["co_name"] for row in rows}


# The hard-coded dispatcher of the versions without a table (before 0.1.10.post1), the same for gfx942 and gfx950.
_TABLE_BEFORE_CSV: KernelTable = {
    ("bf16", "bf16", 128, 0, 0, 1, 0): "mla_dec_stage1_bf16_a16w16_subQ128_mqa128.co",
    ("bf16", "bf16", 16, 0, 1, 1, 0): "mla_dec_stage1_bf16_a16w16_subQ16_mqa16.co",
    ("bf16", "bf16", 16, 0, 4, 1, 0): "mla_a16w16_qh16_m16x4_n16x1_coex0_mask1.co",
    ("bf16", "bf16", 16, 0, 8, 1, 0): "mla_a16w16_qh16_m32x4_n16x1_coex0_mask1.co",
    ("bf16", "bf16", 16, 1, 4, 1, 0): "mla_a16w16_qh16_m16x4_n16x1_coex0_mask1_ps.co",
    ("bf16", "fp8", 16, 1, 4, 1, 0): "mla_a16w8_qh16_m16x4_n16x1_coex0_mask1_ps.co",
    ("fp8", "fp8", 16, 0, 1, 1, 0): "mla_a8w8_qh16_qseqlen1_gqaratio16.co",
    ("fp8", "fp8", 16, 0, 2, 1, 0): "mla_a8w8_qh16_qseqlen2_gqaratio16.co",
    ("fp8", "fp8", 16, 0, 4, 1, 0): "mla_a8w8_qh16_qseqlen4_gqaratio16.co",
    ("fp8", "fp8", 16, 1, 1, 1, 0): "mla_a8w8_qh16_qseqlen1_gqaratio16_ps.co",
    ("fp8", "fp8", 16, 1, 2, 1, 0): "mla_a8w8_qh16_qseqlen2_gqaratio16_ps.co",
    ("fp8", "fp8", 16, 1, 4, 1, 0): "mla_a8w8_qh16_qseqlen4_gqaratio16_ps.co",
    ("fp8", "fp8", 128, 0, 0, 1, 0): "mla_a8w8_qh128_m32x4_n16x2_msk1.co",
    ("fp8", "fp8", 128, 1, 0, 1, 0): "mla_a8w8_qh128_m32x4_n16x2_msk0_ps.co",
}


def find_decode_row(table: KernelTable | None, shape: DecodeShape, version: str = "") -> DecodeRow | Refusal:
    """The kernel for a shape, with as few padded heads as it can have, or why there is none.

    Args:
        table: the installed one; ``None`` for the versions whose dispatcher is hard-coded.
        shape: what is asked.
        version: AITER's, for the releases that are known to fault.
    """
    if shape.arch not in ARCHITECTURES:
        return Refusal(f"AITER's MLA decode is served on {' and '.join(ARCHITECTURES)} here, not on {shape.arch}")
    if (shape.q_type, shape.kv_type) == ("fp8", "bf16"):
        return Refusal("AITER has no decode of fp8 queries over a bf16 cache", "use bf16 queries")
    if (shape.q_type, shape.kv_type) == ("bf16", "fp8") and not shape.persistent:
        return Refusal(
            "AITER decodes bf16 queries over an fp8 cache in persistent mode only",
            "set MLA_AITER_PERSISTENT=1, or quantise the queries too",
        )
    refusal: Refusal | None = None
    for num_heads in _head_counts(shape):
        denied = _known_fault(shape, num_heads, version)
        row = None if denied else _row(table, shape, num_heads)
        if row is not None:
            return row
        refusal = refusal or denied
    return refusal or Refusal(
        f"no AITER kernel on {shape.arch} for {shape.num_heads} heads with query_len {shape.query_len}, "
        f"{shape.q_type} queries and a {shape.kv_type} cache{' in persistent mode' if shape.persistent else ''}",
        f"{_FALLBACK}, or a tensor-parallel size that leaves {_served_heads(table, shape)} heads on a rank",
    )


def _head_counts(shape: DecodeShape) -> list[int]:
    """The heads as they are, then padded ones. Decode reads each cached row once for all heads: up to 16 heads the
    padding is free; above, twice the heads is the most that can be worth it.
    """
    padded = [n for n in _NATIVE_HEADS if shape.num_heads < n <= max(16, 2 * shape.num_heads)]
    return [shape.num_heads, *padded]


def _served_heads(table: KernelTable | None, shape: DecodeShape) -> str:
    served = [n for n in _NATIVE_HEADS if not _known_fault(shape, n, "") and _row(table, shape, n)]
    return " or ".join(map(str, served)) or "no number of"


def _known_fault(shape: DecodeShape, num_heads: int, version: str) -> Refusal | None:
    """Rows that exist and are known to be wrong or to fault, with the report."""
    bf16, fp8 = (shape.q_type, shape.kv_type) == ("bf16", "bf16"), shape.q_type == "fp8"
    mi300 = shape.arch == "gfx942"
    if mi300 and bf16 and not shape.persistent and shape.query_len > 4:
        return Refusal("AITER's bf16 decode with more than 4 query tokens is wrong on gfx942 (vllm#55609)")
    if num_heads == 64 and bf16 and shape.query_len > 1:
        return Refusal("AITER's bf16 decode of 64 heads with several query tokens faults (its own tests skip it)")
    if num_heads == 128 and bf16 and not shape.persistent and shape.query_len > 1:
        # Seen in its machine code for gfx942, run in an interpreter (tests/aiter); the same kernel serves gfx950.
        return Refusal("AITER's bf16 decode of 128 heads lets every query token see the last key: it masks nothing")
    if mi300 and fp8 and num_heads == 64 and shape.persistent:
        return Refusal("AITER's fp8 decode of 64 heads faults on gfx942 with page size 1 (ROCm/aiter#4363)")
    if mi300 and fp8 and num_heads == 128 and shape.persistent:
        return Refusal("AITER's persistent fp8 decode of 128 heads faults on gfx942 (vllm#43067)")
    if version.startswith(("0.1.13rc1", "0.1.13-rc1", "0.1.13.dev0")) and num_heads in (32, 64):
        return Refusal("this AITER faults with 32 and 64 heads (ROCm/aiter#2983)", "upgrade AITER")
    return None


def _row(table: KernelTable | None, shape: DecodeShape, num_heads: int) -> DecodeRow | None:
    kernel_heads = _python_gate(shape, num_heads, legacy=table is None)
    if kernel_heads is None:
        return None
    query = _kernel_query(shape, kernel_heads, legacy=table is None)
    if query is None:
        return None
    gqa, ps, query_len = query
    rows = _TABLE_BEFORE_CSV if table is None else table
    key = (shape.q_type, shape.kv_type, gqa, ps, query_len, 1, 0)
    code_object = rows.get(key)
    if code_object is None:
        return None
    with_lse = rows.get((*key[:6], 1)) if shape.persistent else None
    # One split writes the final rows and no LSE, but for this kernel.
    single = shape.q_type == "bf16" and kernel_heads == 16 and shape.query_len == 1
    return DecodeRow(num_heads, with_lse is not None, 1 if single else 2, with_lse or code_object)


def _python_gate(shape: DecodeShape, heads: int, *, legacy: bool) -> int | None:
    """The heads that ``mla_decode_fwd`` hands to the kernel, or ``None`` where it asserts or its result detaches."""
    fp8 = shape.q_type == shape.kv_type == "fp8"
    if not shape.persistent:
        return heads if not legacy or heads in (16, 128) else None
    if legacy:
        native = heads == 16 or (heads == 128 and shape.kv_type == "fp8")
    else:
        bf16 = shape.q_type == shape.kv_type == "bf16"
        mi300 = shape.arch == "gfx942"
        native = (
            heads == 16
            or (mi300 and fp8 and (heads == 128 or (heads == 64 and shape.query_len == 1)))
            or (mi300 and bf16 and heads == 8 and shape.query_len == 2)
            or (not mi300 and fp8 and (heads in (32, 64, 128) or (heads == 8 and shape.query_len == 4)))
            or (not mi300 and bf16)
        )
    if native:
        return heads
    # Other multiples of 16 are viewed as requests of 16 heads. With several query tokens that path ends with
    # o.set_(), which detaches the caller's buffer from what a captured graph reads: not ours.
    return 16 if shape.query_len == 1 and heads in range(32, 129, 16) else None


def _kernel_query(shape: DecodeShape, heads: int, *, legacy: bool) -> tuple[int, int, int] | None:
    """The dispatcher's (Gqa, ps, qSeqLen) of the kernel, ``None`` where it aborts."""
    if shape.q_type == "fp8":
        return _fp8_query(shape, heads, legacy=legacy)
    ps, q = shape.persistent, shape.query_len
    if shape.kv_type == "fp8":
        return (heads, 1, 4) if ps and heads == 16 and q <= 4 else None
    if ps and shape.arch == "gfx950" and not legacy:
        if (heads * q >= 128 or heads > 64) and heads != 48:
            return 32, 1, 4
        if heads * q >= 64 or heads >= 16:
            return 64, 1, 1
    if heads == 128:
        return (128, 0, 0) if not (ps and legacy) else None
    if heads == 16:
        if ps:
            return (16, 1, 4) if q <= 4 else None
        return 16, 0, 1 if q == 1 else 4 if q <= 4 else 8
    if heads in (32, 64) and not ps:
        return heads, 0, 1 if (heads == 64 and q == 1) else 0
    return heads, int(ps), q


def _fp8_query(shape: DecodeShape, heads: int, *, legacy: bool) -> tuple[int, int, int] | None:
    ps, q = shape.persistent, shape.query_len
    if ps and shape.arch == "gfx950" and not legacy:
        if (heads == 32 and q >= 4) or (heads == 64 and q >= 2) or heads == 128 or (heads == 16 and q > 4):
            return 32, 1, 4
        if (heads == 16 and q in (3, 4)) or (heads == 32 and q in (2, 3)) or (heads == 64 and q == 1):
            return 16, 1, 4
    if heads == 128:
        return 128, int(ps), 0
    if heads == 16:
        return (16, int(ps), q if q <= 2 else 4) if q <= 4 else None
    if heads == 32:
        return (32, int(ps), q) if q == 1 or (q == 2 and ps) else None
    if heads == 64:
        return (64, 1, 1 if q == 1 else 4) if ps else None
    return heads, int(ps), q
