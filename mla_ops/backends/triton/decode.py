"""Split-KV decode whose split plan is made on the device. Kernels in :mod:`.decode_kernels`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mla_ops.backends.triton.configs import DecodeConfig, decode_config
from mla_ops.backends.triton.decode_hopper import decode_hopper_kernel
from mla_ops.backends.triton.decode_hopper_narrow import decode_hopper_narrow_kernel
from mla_ops.backends.triton.decode_kernels import decode_kernel, merge_kernel
from mla_ops.backends.triton.launch import Launch, arch_of, compute_units, is_power_of_two, refuse
from mla_ops.validation import output_dtype

__all__ = ["decode_launches", "mla_decode"]

# Requests whose lengths a program reads at a time, and parts whose log-sum-exps the merge does.
_CHUNK = 256
_LOG2_E = math.log2(math.e)
_KERNELS: dict[str, Any] = {
    "portable": decode_kernel,
    "hopper": decode_hopper_kernel,
    "hopper_narrow": decode_hopper_narrow_kernel,
}


def mla_decode(
    q: Tensor,
    kv_cache: Tensor,
    qo_indptr: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    kv_last_page_lens: Tensor,
    backend_state: Sequence[Tensor],
    max_seqlen_q: int,
    num_kv_splits: int,
    softmax_scale: float,
    q_scale: Tensor | None,
    kv_scale: Tensor | None,
    kv_lora_rank: int,
) -> tuple[Tensor, Tensor]:
    """Paged attention over latent rows, K and V in one. See :func:`mla_ops.mla_decode`.

    ``backend_state`` is not looked at: the plan is made in the step. ``num_kv_splits`` is the mean number of shares
    of a request; 0 gives each multiprocessor an equal share of the batch.

    Raises:
        BackendUnavailableError: float64, or a width that is no power of two.
    """
    _require_supported(q, kv_lora_rank, softmax_scale)
    config = _config(q, kv_cache, max_seqlen_q * q.shape[1], kv_lora_rank)
    out = q.new_empty(q.shape[0], q.shape[1], kv_lora_rank, dtype=output_dtype(q))
    lse = q.new_empty(q.shape[0], q.shape[1], dtype=torch.float32)
    for launch in decode_launches(
        q, kv_cache, qo_indptr, kv_indptr, kv_indices, kv_last_page_lens, max_seqlen_q, num_kv_splits,
        softmax_scale, q_scale, kv_scale, out, lse, config, compute_units(q),
    ):  # fmt: skip
        launch.run()
    return out, lse


def decode_launches(
    q: Tensor,
    kv_cache: Tensor,
    qo_indptr: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    kv_last_page_lens: Tensor,
    max_seqlen_q: int,
    num_kv_splits: int,
    softmax_scale: float,
    q_scale: Tensor | None,
    kv_scale: Tensor | None,
    out: Tensor,
    lse: Tensor,
    config: DecodeConfig,
    units: int,
) -> tuple[Launch, Launch]:
    """The two launches of a decode into ``out`` [T, H, R] and ``lse`` [T, H] by ``config`` on ``units`` units."""
    num_tokens, num_heads, rank = out.shape
    num_requests = kv_last_page_lens.shape[0]
    rows = max_seqlen_q * num_heads
    tiles = -(-rows // config.block_m)
    share = units * config.programs_per_unit // tiles
    programs = num_kv_splits * num_requests if num_kv_splits else max(1, share)
    part_out = q.new_empty(tiles, programs, 2, config.block_m, rank, dtype=torch.float32)
    part_lse = q.new_empty(tiles, programs, 2, config.block_m, dtype=torch.float32)
    spans = q.new_empty(tiles, num_requests, 2, dtype=torch.int32)
    plan = {"qo_indptr": qo_indptr, "kv_indptr": kv_indptr, "kv_last_page_lens": kv_last_page_lens}
    results = {"out": out, "lse": lse, "part_out": part_out, "part_lse": part_lse, "spans": spans}
    sizes = {"num_requests": num_requests, "num_heads": num_heads, "max_seqlen_q": max_seqlen_q}
    shape = {"R": rank, "PAGE_SIZE": kv_cache.shape[1], "BLOCK_M": config.block_m, "CHUNK": _CHUNK}
    decode = Launch(
        _KERNELS[config.kernel],
        (tiles, programs),
        {
            "q": q,
            "kv_cache": kv_cache,
            **plan,
            "kv_indices": kv_indices,
            "q_scale": q_scale,
            "kv_scale": kv_scale,
            **results,
            "softmax_scale_log2": softmax_scale * _LOG2_E,
            **sizes,
            "stride_token": q.stride(0),
            "stride_head": q.stride(1),
            "stride_page": kv_cache.stride(0),
            "stride_row": kv_cache.stride(1),
            **shape,
            "P": q.shape[2] - rank,
            "BLOCK_N": config.block_n,
            "PRECISION": "ieee",
        },
        {"num_warps": config.num_warps, "num_stages": config.num_stages, **dict(config.extra)},
    )
    group, parts, columns = _merge_shape(num_requests, rows, programs, rank)
    early = config.kernel != "portable"  # the Hopper kernels let the merge be launched before they end
    merge = Launch(
        merge_kernel,
        (-(-rows // group), num_requests, rank // columns),
        {
            **plan,
            **results,
            "programs": programs,
            "num_tokens": num_tokens,
            **sizes,
            **shape,
            "ROWS": group,
            "PARTS": parts,
            "COLUMNS": columns,
            "EARLY": early,
        },
        {"num_warps": 4, **({"launch_pdl": True} if early else {})},
    )
    return decode, merge


def _merge_shape(requests: int, rows: int, programs: int, rank: int) -> tuple[int, int, int]:
    """Rows, parts and columns of a program of the merge.

    Few requests have many parts each, which are loaded side by side, as are those of few rows in all. Of many rows each
    has two or three.
    """
    if requests * 8 <= programs:
        return 1, 32, min(rank, 256)
    return (1, 4, rank) if requests * rows <= 1024 else (8, 1, rank)


def _config(q: Tensor, kv_cache: Tensor, rows: int, rank: int) -> DecodeConfig:
    """The table's row, or the portable one where rows are not of 16-byte pieces, too short or too long, or q is fp8."""
    config = decode_config(arch_of(q), rows, output_dtype(q), kv_cache.dtype)
    aligned = not any(x.data_ptr() % 16 or x.stride(0) % 16 or x.stride(1) % 16 for x in (q, kv_cache))
    if config.kernel == "portable" or (aligned and 128 <= rank <= 512 and q.dtype == output_dtype(q)):
        return config
    return decode_config("*", rows, output_dtype(q), kv_cache.dtype)


def _require_supported(q: Tensor, rank: int, softmax_scale: float) -> None:
    if softmax_scale <= 0:
        raise refuse(f"the kernels take the largest score before they scale it, and softmax_scale is {softmax_scale}")
    if q.dtype == torch.float64:
        raise refuse("the kernels accumulate in float32 and q is float64")
    rope = q.shape[2] - rank
    if not is_power_of_two(rank, 16) or (rope and not is_power_of_two(rope, 16)):
        raise refuse(
            f"kv_lora_rank and qk_rope_head_dim must be powers of two and at least 16 (the latter may be 0), "
            f"got {rank} and {rope}"
        )
