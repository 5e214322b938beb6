"""Split-KV decode whose split plan is made on the device. Kernels in :mod:`.decode_kernels`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mla_ops.backends.triton.configs import DecodeConfig, decode_config
from mla_ops.backends.triton.decode_hopper import decode_hopper_kernel
from mla_ops.backends.triton.decode_hopper_narrow import decode_hopper_narrow_kernel
from mla_ops.backends.triton.decode_kernels import decode_kernel, merge_kernel
from mla_ops.backends.triton.launch import (
    BoundLaunch,
    Launch,
    arch_of,
    bound_stream,
    compute_units,
    empty_strided,
    heads_lie_near,
    refuse,
)
from mla_ops.backends.widths import is_served
from mla_ops.validation import output_dtype

__all__ = ["BoundDecode", "choose_decode", "decode_launches", "mla_decode"]

# Requests whose lengths a program reads at a time, and parts whose log-sum-exps the merge does.
_CHUNK = 256
_LOG2_E = math.log2(math.e)
_MOST_PROGRAMS = 65535  # of a grid's second dimension; a request's share may be larger than what was asked for
_KERNELS: dict[str, Any] = {
    "portable": decode_kernel,
    "hopper": decode_hopper_kernel,
    "hopper_narrow": decode_hopper_narrow_kernel,
}


# What the kernels point to, in the order of a bound call's addresses.
_NAMES = (
    *("q", "kv_cache", "qo_indptr", "kv_indptr", "kv_indices", "kv_last_page_lens", "q_scale", "kv_scale"),
    *("out", "lse", "part_out", "part_lse", "spans"),
)


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
    return BoundDecode()(
        q, kv_cache, qo_indptr, kv_indptr, kv_indices, kv_last_page_lens, backend_state, max_seqlen_q, num_kv_splits,
        softmax_scale, q_scale, kv_scale, kv_lora_rank,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Ready:
    """What all calls of one signature have in common."""

    device: int
    tensors: tuple[tuple[tuple[int, ...], tuple[int, ...], torch.dtype], ...]  # out, lse and scratch memory
    part_lse: int  # byte offsets in the scratch memory
    spans: int
    launches: tuple[BoundLaunch, ...]


class BoundDecode:
    """:func:`mla_decode` for calls of one signature: the same shapes, strides, dtypes, devices, alignments, scalars.

    The first call makes the launches; the next ones only allocate, and launch what Triton compiled then. Nothing on
    the device is kept between calls.
    """

    def __init__(self) -> None:
        self._ready: _Ready | None = None

    def __call__(
        self,
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
        ready = self._ready
        stream = None if ready is None else bound_stream(ready.device)
        if ready is None or stream is None:
            _require_supported(q, kv_lora_rank, softmax_scale)
            config = choose_decode(arch_of(q), q, kv_cache, max_seqlen_q * q.shape[1], kv_lora_rank)
            out = q.new_empty(q.shape[0], q.shape[1], kv_lora_rank, dtype=output_dtype(q))
            lse = q.new_empty(q.shape[0], q.shape[1], dtype=torch.float32)
            launches = decode_launches(
                q, kv_cache, qo_indptr, kv_indptr, kv_indices, kv_last_page_lens, max_seqlen_q, num_kv_splits,
                softmax_scale, q_scale, kv_scale, out, lse, config, compute_units(q),
            )  # fmt: skip
            compiled = [launch.run() for launch in launches]
            if None not in compiled:
                self._ready = _bind(launches, compiled, out, lse)
            return out, lse
        out, lse, scratch = [empty_strided(*layout) for layout in ready.tensors]
        base = scratch.data_ptr()
        addresses = (
            q.data_ptr(),
            kv_cache.data_ptr(),
            qo_indptr.data_ptr(),
            kv_indptr.data_ptr(),
            kv_indices.data_ptr(),
            kv_last_page_lens.data_ptr(),
            None if q_scale is None else q_scale.data_ptr(),
            None if kv_scale is None else kv_scale.data_ptr(),
            out.data_ptr(),
            lse.data_ptr(),
            base,
            base + ready.part_lse,
            base + ready.spans,
        )
        for launch in ready.launches:
            launch(stream, addresses)
        return out, lse


def _bind(launches: Sequence[Launch], compiled: Sequence[Any], out: Tensor, lse: Tensor) -> _Ready:
    scratch = launches[0].args
    words = scratch["part_out"].untyped_storage().nbytes() // 4
    results = [(tuple(x.shape), x.stride(), x.dtype) for x in (out, lse)]
    return _Ready(
        device=out.device.index,
        tensors=(*results, ((words,), (1,), torch.float32)),
        part_lse=scratch["part_lse"].storage_offset() * 4,
        spans=scratch["spans"].storage_offset() * 4,
        launches=tuple(BoundLaunch(launch, code, _NAMES) for launch, code in zip(launches, compiled, strict=True)),
    )


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
    programs = min(num_kv_splits * num_requests, _MOST_PROGRAMS) if num_kv_splits else max(1, share)
    part_out, part_lse, spans = _scratch(q, (tiles, programs, 2, config.block_m, rank), num_requests)
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
    """Rows, parts and columns of a program of the merge, of which each is the fastest where it is chosen.

    Few requests have many parts each, which are loaded side by side: as many as the rows leave programs for.
    """
    if requests * 8 <= programs and requests * rows <= 512:
        return 1, 16, rank
    return (1, 4, rank) if requests * rows <= 1024 or requests * 3 <= programs else (8, 1, rank)


def choose_decode(arch: str, q: Tensor, kv_cache: Tensor, rows: int, rank: int) -> DecodeConfig:
    """The table's row, or the portable one where rows are not of 16-byte pieces, too short or too long, or q is fp8."""
    config = decode_config(arch, rows, output_dtype(q), kv_cache.dtype)
    aligned = not any(x.data_ptr() % 16 or x.stride(0) % 16 or x.stride(1) % 16 for x in (q, kv_cache))
    if config.kernel == "portable" or (aligned and 128 <= rank <= 512 and q.dtype == output_dtype(q)):
        return config
    return decode_config("*", rows, output_dtype(q), kv_cache.dtype)


def _require_supported(q: Tensor, rank: int, softmax_scale: float) -> None:
    if softmax_scale <= 0:
        raise refuse(f"the kernels take the largest score before they scale it, and softmax_scale is {softmax_scale}")
    if q.dtype == torch.float64:
        raise refuse("the kernels accumulate in float32 and q is float64")
    if not heads_lie_near(q):
        raise refuse("the heads of q lie further apart than 32 bits count; make q contiguous")
    rope = q.shape[2] - rank
    if not is_served(rank) or (rope and not is_served(rope)):
        raise refuse(
            f"kv_lora_rank and qk_rope_head_dim must be powers of two and at least 16 (the latter may be 0), "
            f"got {rank} and {rope}"
        )


def _scratch(q: Tensor, parts: tuple[int, ...], num_requests: int) -> tuple[Tensor, Tensor, Tensor]:
    """``part_out`` of shape ``parts``, ``part_lse`` and ``spans`` in one allocation; each starts at 16 bytes."""
    rows = math.prod(parts[:-1])
    spans = parts[0] * num_requests * 2
    memory = q.new_empty(rows * parts[-1] + rows + spans, dtype=torch.float32)
    part_out, part_lse, rest = torch.split(memory, [rows * parts[-1], rows, spans])
    return part_out.view(parts), part_lse.view(parts[:-1]), rest.view(torch.int32).view(parts[0], num_requests, 2)
