"""AITER's decode stage 1 on the interpreter: which code object, which grid, and the layout of its kernel arguments.

`run_stage1` takes what AITER's `mla_decode_stage1_asm_fwd` takes in its non-persistent bf16 form, on CPU tensors, and
does what its C++ launcher (csrc/py_itfs_cu/asm_mla.cu of amd-aiter 0.1.7) does, so that it can stand in for it.
"""

import struct
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..cdna3.launch import launch
from ..cdna3.machine import Memory
from ..cdna3.program import Program

__all__ = ["KERNARG_SLOTS", "Stage1Kernel", "pack_kernarg", "run_stage1", "select_kernel"]

# One 16-byte slot each, in this order: the value, then padding. Pointers are 8 bytes, the rest 4.
KERNARG_SLOTS = {
    "R": "Q",  # split results [T, S, H, 512] fp32, or bf16 with one split (not subQ16)
    "LSE": "Q",  # [T, S, H, 1] fp32, natural logarithm
    "Q": "Q",  # [T, H, 576]
    "KV": "Q",  # [pages, 1, 1, 576]
    "LTP": "Q",  # kv_indptr
    "LTD": "Q",  # kv_indices
    "LTL": "Q",  # kv_last_page_lens
    "scalar": "f",  # softmax scale
    "s_MQA": "I",  # rows of Q for one request: query_len * H
    "s_kv_split": "I",
    "s_Q_Bs": "I",  # bytes of Q for one request
    "s_Bs": "I",  # bytes of a page
    "s_log2_plen": "I",
    "QTP": "Q",  # qo_indptr
    "STP": "Q",  # num_kv_splits_indptr
    "RP": "Q",  # final output [T, H, 512]
    "QSCALE": "Q",
    "KVSCALE": "Q",
    "out_16_nosplit": "I",  # the launcher passes the number of splits
}
_SLOT_BYTES = 16
_WAVES_PER_WORKGROUP = 4


@dataclass(frozen=True)
class Stage1Kernel:
    """One of AITER's kernels: `query_rows` rows of Q per workgroup; split z takes KV blocks z, z + S, z + 2S, ..."""

    file: str
    query_rows: int
    kv_block: int
    bf16_when_unsplit: bool


_SUB_Q16 = Stage1Kernel("mla_dec_stage1_bf16_a16w16_subQ16_mqa16.co", 16, 64, False)
_SUB_Q128 = Stage1Kernel("mla_dec_stage1_bf16_a16w16_subQ128_mqa128.co", 128, 16, True)
_MTP = Stage1Kernel("mla_a16w16_qh16_m16x4_n16x1_coex0_mask1.co", 128, 16, True)


def select_kernel(num_heads: int, query_len: int) -> Stage1Kernel:
    """The kernel that AITER's dispatcher takes for bf16 queries and cache, not persistent."""
    if num_heads == 128:
        return _SUB_Q128
    if num_heads == 16 and query_len <= 4:
        return _SUB_Q16 if query_len == 1 else _MTP
    raise ValueError(f"no bf16 stage-1 kernel here for {num_heads} heads with query_len {query_len}")


def pack_kernarg(values: dict[str, int | float]) -> bytes:
    """The kernel argument segment from one value per name in KERNARG_SLOTS."""
    if values.keys() != KERNARG_SLOTS.keys():
        raise ValueError(f"expected the arguments {list(KERNARG_SLOTS)}, got {list(values)}")
    return b"".join(
        struct.pack(f"<{code}", values[name]).ljust(_SLOT_BYTES, b"\0") for name, code in KERNARG_SLOTS.items()
    )


def run_stage1(
    load_program: Callable[[str], Program],
    q: torch.Tensor,
    kv_buffer: torch.Tensor,
    qo_indptr: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    kv_last_page_lens: torch.Tensor,
    num_kv_splits_indptr: torch.Tensor,
    max_seqlen_q: int,
    softmax_scale: float,
    split_data: torch.Tensor,
    split_lse: torch.Tensor,
    output: torch.Tensor,
    *,
    order: str = "to_barrier",
    late: bool = False,
) -> None:
    """Run stage 1 in place on `split_data` [T, S, H, 512] and `split_lse` [T, S, H, 1].

    Args:
        load_program: from the file name of a code object to its program.
        order, late: as in `tests.cdna3.launch.launch`.
    """
    num_heads, num_kv_splits = q.shape[1], split_data.shape[1]
    kernel = select_kernel(num_heads, max_seqlen_q)
    memory = Memory()
    pointers = {
        "R": split_data,
        "LSE": split_lse,
        "Q": q,
        "KV": kv_buffer,
        "LTP": kv_indptr,
        "LTD": kv_indices,
        "LTL": kv_last_page_lens,
        "QTP": qo_indptr,
        "STP": num_kv_splits_indptr,
        "RP": output,
    }
    values: dict[str, int | float] = {name: memory.add(tensor, name) for name, tensor in pointers.items()}
    values |= {
        "scalar": softmax_scale,
        "s_MQA": num_heads * max_seqlen_q,
        "s_kv_split": num_kv_splits,
        "s_Q_Bs": q.stride(0) * q.element_size() * max_seqlen_q,
        "s_Bs": kv_buffer.stride(0) * kv_buffer.element_size(),
        "s_log2_plen": kv_buffer.shape[1].bit_length() - 1,
        "QSCALE": 0,
        "KVSCALE": 0,
        "out_16_nosplit": num_kv_splits,
    }
    program = load_program(kernel.file)
    (name,) = program.code.kernels
    grid = (-(-max_seqlen_q * num_heads // kernel.query_rows), qo_indptr.shape[0] - 1, num_kv_splits)
    kernarg = pack_kernarg({name: values[name] for name in KERNARG_SLOTS})
    launch(program, name, grid, (64 * _WAVES_PER_WORKGROUP, 1, 1), kernarg, memory, order=order, late=late)
