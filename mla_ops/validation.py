"""Metadata checks of the ops, shared by their kernels' entry and their fakes.

Shapes, dtypes, devices and strides only: nothing here reads a tensor, so a check costs no synchronisation and
traces. A condition over symbolic sizes becomes a ``torch._check`` of the graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "FLOAT8_DTYPES",
    "FLOAT_DTYPES",
    "KNOWN_KV_LORA_RANKS",
    "check_absorb_query",
    "check_expand_values",
    "check_gather_latent_cache",
    "check_linear",
    "check_merge_attn_states",
    "check_mla_decode",
    "check_mla_decode_out",
    "check_mla_prefill",
    "check_norm_rope_write",
    "check_rms_norm",
    "check_write_latent_cache",
    "infer_kv_lora_rank",
    "output_dtype",
]

FLOAT_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
FLOAT8_DTYPES = (torch.float8_e4m3fn, torch.float8_e4m3fnuz)

# kv_lora_rank by the width of a latent row, for the layouts of published models: DeepSeek, Kimi, GLM (512 | 64),
# NoPE layers (512 | 0), Mistral-Small-4 (256 | 64), MiniCPM3 (256 | 32).
KNOWN_KV_LORA_RANKS = {576: 512, 512: 512, 320: 256, 288: 256}


def require(condition: Any, message: Callable[[], str], error: type[Exception] = ValueError) -> None:
    """Raise ``error(message())`` unless ``condition``; on a symbolic condition, let the graph check it."""
    if condition is True:
        return
    if condition is False:
        raise error(message())
    torch._check(condition, message)  # type: ignore[no-untyped-call]


def infer_kv_lora_rank(latent_dim: int, kv_lora_rank: int | None) -> int:
    """The rank that a decode uses: the given one, or the one of the known layout of that width."""
    if kv_lora_rank is not None:
        require(
            0 < kv_lora_rank <= latent_dim,
            lambda: f"kv_lora_rank must be in 1..{latent_dim} (the width of a latent row), got {kv_lora_rank}",
        )
        return kv_lora_rank
    if latent_dim not in KNOWN_KV_LORA_RANKS:
        raise ValueError(
            f"kv_lora_rank must be given for a latent row of {latent_dim}; "
            f"it is known for rows of {', '.join(map(str, sorted(KNOWN_KV_LORA_RANKS)))} only"
        )
    return KNOWN_KV_LORA_RANKS[latent_dim]


def output_dtype(q: Tensor) -> torch.dtype:
    """The dtype of an attention output: q's, or bfloat16 for fp8 queries."""
    return torch.bfloat16 if q.dtype in FLOAT8_DTYPES else q.dtype


def _require_rank(name: str, tensor: Tensor, layout: str) -> None:
    rank = layout.count(",") + 1
    require(
        tensor.dim() == rank,
        lambda: f"{name} must be {rank}-D {layout}, got {tensor.dim()}-D {tuple(tensor.shape)}",
    )


def _require_dtype(name: str, tensor: Tensor, allowed: tuple[torch.dtype, ...]) -> None:
    if tensor.dtype not in allowed:
        names = " or ".join(str(dtype).removeprefix("torch.") for dtype in allowed)
        raise TypeError(f"{name} must be {names}, got {tensor.dtype}; convert it with .to()")


def _require_size(name: str, tensor: Tensor, dim: int, size: Any, meaning: str) -> None:
    require(
        tensor.shape[dim] == size,
        lambda: f"{name} must have {size} ({meaning}) in dim {dim}, got shape {tuple(tensor.shape)}",
    )


def _require_device(name: str, tensor: Tensor, like_name: str, like: Tensor) -> None:
    if tensor.device != like.device:
        raise ValueError(
            f"{name} must be on {like_name}'s device {like.device}, got {tensor.device}; move it before the call"
        )


def _require_dense_rows(name: str, tensor: Tensor) -> None:
    # A kernel reads a row with vector loads: a strided last dim would be read as if it were dense.
    if tensor.dim() and tensor.stride(-1) != 1:
        require(
            tensor.shape[-1] == 1,
            lambda: f"{name} must be dense in its last dim, got strides {tensor.stride()}; use .contiguous()",
        )


def _require_index(name: str, tensor: Tensor, like_name: str, like: Tensor, size: Any, meaning: str) -> None:
    _require_rank(name, tensor, f"[{meaning}]")
    _require_dtype(name, tensor, (torch.int32,))
    _require_device(name, tensor, like_name, like)
    if size is not None:
        _require_size(name, tensor, 0, size, meaning)
    _require_dense_rows(name, tensor)


def _require_scale(name: str, scale: Tensor | None, like_name: str, like: Tensor, needed: bool) -> None:
    if scale is None:
        if needed:
            raise ValueError(f"{name} must be given for {like_name} of dtype {like.dtype}, got None")
        return
    _require_dtype(name, scale, (torch.float32,))
    _require_device(name, scale, like_name, like)
    require(scale.numel() == 1, lambda: f"{name} must have one element, got shape {tuple(scale.shape)}")


def _require_cache(kv_cache: Tensor, like_name: str, like: Tensor) -> None:
    _require_rank("kv_cache", kv_cache, "[pages, page_size, latent_dim]")
    _require_device("kv_cache", kv_cache, like_name, like)
    _require_dense_rows("kv_cache", kv_cache)
    if kv_cache.dtype not in FLOAT8_DTYPES:
        _require_dtype("kv_cache", kv_cache, FLOAT_DTYPES)


def _require_page_table(
    like_name: str,
    like: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    kv_last_page_lens: Tensor,
    requests: Any,
) -> None:
    _require_index("kv_indptr", kv_indptr, like_name, like, requests + 1, "B + 1")
    _require_index("kv_indices", kv_indices, like_name, like, None, "kv_indptr[-1] or more")
    _require_index("kv_last_page_lens", kv_last_page_lens, like_name, like, requests, "B")


def check_mla_decode(
    q: Tensor,
    kv_cache: Tensor,
    qo_indptr: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    kv_last_page_lens: Tensor,
    max_seqlen_q: Any,
    num_kv_splits: Any,
    q_scale: Tensor | None,
    kv_scale: Tensor | None,
) -> None:
    """Refuse what no kernel of ``mla_decode`` may see."""
    _require_rank("q", q, "[T, H, latent_dim]")
    if q.dtype not in FLOAT8_DTYPES:
        _require_dtype("q", q, FLOAT_DTYPES)
    _require_dense_rows("q", q)
    _require_cache(kv_cache, "q", q)
    _require_size("kv_cache", kv_cache, 2, q.shape[2], "q's latent_dim")
    if kv_cache.dtype != q.dtype and kv_cache.dtype not in FLOAT8_DTYPES:
        raise TypeError(f"kv_cache must have q's dtype {q.dtype} or be fp8, got {kv_cache.dtype}")
    _require_rank("qo_indptr", qo_indptr, "[B + 1]")
    requests = qo_indptr.shape[0] - 1
    require(requests >= 0, lambda: "qo_indptr must have B + 1 elements, got an empty tensor")
    _require_index("qo_indptr", qo_indptr, "q", q, None, "B + 1")
    _require_page_table("q", q, kv_indptr, kv_indices, kv_last_page_lens, requests)
    require(max_seqlen_q >= 1, lambda: f"max_seqlen_q must be at least 1, got {max_seqlen_q}")
    require(
        num_kv_splits >= 0,
        lambda: f"num_kv_splits must be 0 (the backend's choice) or more, got {num_kv_splits}",
    )
    _require_scale("q_scale", q_scale, "q", q, needed=q.dtype in FLOAT8_DTYPES)
    _require_scale("kv_scale", kv_scale, "kv_cache", kv_cache, needed=kv_cache.dtype in FLOAT8_DTYPES)


def check_mla_decode_out(q: Tensor, out: Tensor, lse: Tensor, kv_lora_rank: int) -> None:
    """Refuse output buffers that a kernel would write past or write wrong."""
    for name, tensor, dtype in (("out", out, output_dtype(q)), ("lse", lse, torch.float32)):
        _require_dtype(name, tensor, (dtype,))
        _require_device(name, tensor, "q", q)
    _require_rank("out", out, "[T, H, kv_lora_rank]")
    _require_rank("lse", lse, "[T, H]")
    for dim, (size, meaning) in enumerate(((q.shape[0], "T"), (q.shape[1], "H"), (kv_lora_rank, "kv_lora_rank"))):
        _require_size("out", out, dim, size, meaning)
        if dim < 2:
            _require_size("lse", lse, dim, size, meaning)
    for name, tensor in (("out", out), ("lse", lse)):
        if not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous, got strides {tensor.stride()}")


def check_mla_prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: Any,
    max_seqlen_k: Any,
) -> None:
    """Refuse what no kernel of ``mla_prefill`` may see."""
    _require_rank("q", q, "[T, H, qk_head_dim]")
    _require_rank("k", k, "[S, H, qk_head_dim]")
    _require_rank("v", v, "[S, H, v_head_dim]")
    _require_dtype("q", q, FLOAT_DTYPES)
    for name, tensor in (("k", k), ("v", v)):
        _require_device(name, tensor, "q", q)
        _require_dtype(name, tensor, (q.dtype,))
        _require_size(name, tensor, 1, q.shape[1], "q's heads")
    _require_size("k", k, 2, q.shape[2], "q's qk_head_dim")
    _require_size("v", v, 0, k.shape[0], "k's tokens")
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        _require_dense_rows(name, tensor)
    _require_index("cu_seqlens_q", cu_seqlens_q, "q", q, None, "B + 1")
    require(cu_seqlens_q.shape[0] >= 1, lambda: "cu_seqlens_q must have B + 1 elements, got an empty tensor")
    _require_index("cu_seqlens_k", cu_seqlens_k, "q", q, cu_seqlens_q.shape[0], "B + 1")
    require(max_seqlen_q >= 0, lambda: f"max_seqlen_q must not be negative, got {max_seqlen_q}")
    require(max_seqlen_k >= 0, lambda: f"max_seqlen_k must not be negative, got {max_seqlen_k}")


def check_write_latent_cache(
    kv_c: Tensor, k_pe: Tensor, kv_cache: Tensor, slot_mapping: Tensor, kv_scale: Tensor | None
) -> None:
    """Refuse what no kernel of ``write_latent_cache`` may see."""
    _require_rank("kv_c", kv_c, "[T, kv_lora_rank]")
    _require_rank("k_pe", k_pe, "[T, qk_rope_head_dim]")
    _require_dtype("kv_c", kv_c, FLOAT_DTYPES)
    _require_dtype("k_pe", k_pe, (kv_c.dtype,))
    _require_device("k_pe", k_pe, "kv_c", kv_c)
    _require_size("k_pe", k_pe, 0, kv_c.shape[0], "kv_c's tokens")
    _require_cache(kv_cache, "kv_c", kv_c)
    _require_size("kv_cache", kv_cache, 2, kv_c.shape[1] + k_pe.shape[1], "kv_lora_rank + qk_rope_head_dim")
    if kv_cache.dtype != kv_c.dtype and kv_cache.dtype not in FLOAT8_DTYPES:
        raise TypeError(f"kv_cache must have kv_c's dtype {kv_c.dtype} or be fp8, got {kv_cache.dtype}")
    _require_rank("slot_mapping", slot_mapping, "[T]")
    # AITER before 0.1.8 reads int64 slots without looking at the dtype
    _require_dtype("slot_mapping", slot_mapping, (torch.int64,))
    _require_device("slot_mapping", slot_mapping, "kv_c", kv_c)
    _require_size("slot_mapping", slot_mapping, 0, kv_c.shape[0], "kv_c's tokens")
    _require_scale("kv_scale", kv_scale, "kv_cache", kv_cache, needed=kv_cache.dtype in FLOAT8_DTYPES)


def check_gather_latent_cache(
    kv_cache: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    kv_last_page_lens: Tensor,
    cu_seqlens: Tensor,
    seq_starts: Tensor | None,
    num_tokens: Any,
    kv_scale: Tensor | None,
    dtype: torch.dtype | None,
) -> None:
    """Refuse what no kernel of ``gather_latent_cache`` may see."""
    _require_cache(kv_cache, "kv_cache", kv_cache)
    _require_rank("kv_indptr", kv_indptr, "[B + 1]")
    requests = kv_indptr.shape[0] - 1
    require(requests >= 0, lambda: "kv_indptr must have B + 1 elements, got an empty tensor")
    _require_page_table("kv_cache", kv_cache, kv_indptr, kv_indices, kv_last_page_lens, requests)
    _require_index("cu_seqlens", cu_seqlens, "kv_cache", kv_cache, requests + 1, "B + 1")
    if seq_starts is not None:
        _require_index("seq_starts", seq_starts, "kv_cache", kv_cache, requests, "B")
    require(num_tokens >= 0, lambda: f"num_tokens must not be negative, got {num_tokens}")
    _require_scale("kv_scale", kv_scale, "kv_cache", kv_cache, needed=kv_cache.dtype in FLOAT8_DTYPES)
    if dtype is None:
        if kv_cache.dtype in FLOAT8_DTYPES:
            raise ValueError(f"dtype must be given for a kv_cache of dtype {kv_cache.dtype}, got None")
    elif dtype not in FLOAT_DTYPES:
        raise TypeError(f"dtype must be a floating dtype of the model, got {dtype}")


def check_merge_attn_states(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> None:
    """Refuse what no kernel of ``merge_attn_states`` may see."""
    _require_rank("out_a", out_a, "[T, H, V]")
    _require_dtype("out_a", out_a, FLOAT_DTYPES)
    _require_dtype("out_b", out_b, (out_a.dtype,))
    _require_rank("out_b", out_b, "[T, H, V]")
    for dim, meaning in enumerate(("out_a's tokens", "out_a's heads", "out_a's width")):
        _require_size("out_b", out_b, dim, out_a.shape[dim], meaning)
    for name, lse in (("lse_a", lse_a), ("lse_b", lse_b)):
        _require_rank(name, lse, "[T, H]")
        _require_dtype(name, lse, (torch.float32,))
        for dim, meaning in enumerate(("out_a's tokens", "out_a's heads")):
            _require_size(name, lse, dim, out_a.shape[dim], meaning)
    for name, tensor in (("out_b", out_b), ("lse_a", lse_a), ("lse_b", lse_b)):
        _require_device(name, tensor, "out_a", out_a)


def _require_rows(name: str, tensor: Tensor, layout: str) -> None:
    _require_rank(name, tensor, layout)
    _require_dtype(name, tensor, FLOAT_DTYPES)
    _require_dense_rows(name, tensor)


def _require_weight(name: str, tensor: Tensor, layout: str, like_name: str, like: Tensor) -> None:
    _require_rank(name, tensor, layout)
    _require_dtype(name, tensor, (like.dtype,))
    _require_device(name, tensor, like_name, like)
    _require_dense_rows(name, tensor)


def _require_int64(name: str, tensor: Tensor, like_name: str, like: Tensor) -> None:
    _require_rank(name, tensor, "[T]")
    _require_dtype(name, tensor, (torch.int64,))
    _require_device(name, tensor, like_name, like)
    _require_size(name, tensor, 0, like.shape[0], f"{like_name}'s tokens")
    _require_dense_rows(name, tensor)


def _require_frequencies(inv_freq: Tensor, like_name: str, like: Tensor) -> None:
    _require_rank("inv_freq", inv_freq, "[qk_rope_head_dim / 2]")
    _require_dtype("inv_freq", inv_freq, (torch.float32,))
    _require_device("inv_freq", inv_freq, like_name, like)
    _require_dense_rows("inv_freq", inv_freq)


def check_rms_norm(x: Tensor, weight: Tensor) -> None:
    """Refuse what no kernel of ``rms_norm`` may see."""
    _require_rows("x", x, "[T, W]")
    _require_weight("weight", weight, "[W]", "x", x)
    _require_size("weight", weight, 0, x.shape[1], "x's width")


def check_norm_rope_write(
    q_a: Tensor,
    latent: Tensor,
    q_weight: Tensor,
    kv_weight: Tensor,
    positions: Tensor,
    inv_freq: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    kv_scale: Tensor | None,
) -> None:
    """Refuse what no kernel of ``norm_rope_write`` may see."""
    _require_rows("latent", latent, "[T, latent_dim]")
    _require_weight("q_a", q_a, "[T, q_lora_rank]", "latent", latent)
    _require_size("q_a", q_a, 0, latent.shape[0], "latent's tokens")
    _require_weight("q_weight", q_weight, "[q_lora_rank]", "latent", latent)
    _require_size("q_weight", q_weight, 0, q_a.shape[1], "q_a's width")
    _require_frequencies(inv_freq, "latent", latent)
    _require_weight("kv_weight", kv_weight, "[kv_lora_rank]", "latent", latent)
    _require_size("kv_weight", kv_weight, 0, latent.shape[1] - 2 * inv_freq.shape[0], "latent_dim - qk_rope_head_dim")
    _require_int64("positions", positions, "latent", latent)
    _require_int64("slot_mapping", slot_mapping, "latent", latent)
    _require_cache(kv_cache, "latent", latent)
    _require_size("kv_cache", kv_cache, 2, latent.shape[1], "latent's width")
    if kv_cache.dtype != latent.dtype and kv_cache.dtype not in FLOAT8_DTYPES:
        raise TypeError(f"kv_cache must have latent's dtype {latent.dtype} or be fp8, got {kv_cache.dtype}")
    _require_scale("kv_scale", kv_scale, "kv_cache", kv_cache, needed=kv_cache.dtype in FLOAT8_DTYPES)


def check_absorb_query(
    q: Tensor, w_uk: Tensor, positions: Tensor, inv_freq: Tensor, scaling_beta: float, scaling_window: int
) -> None:
    """Refuse what no kernel of ``absorb_query`` may see."""
    _require_rows("q", q, "[T, H, qk_head_dim]")
    _require_weight("w_uk", w_uk, "[H, qk_nope_head_dim, kv_lora_rank]", "q", q)
    _require_size("w_uk", w_uk, 0, q.shape[1], "q's heads")
    _require_frequencies(inv_freq, "q", q)
    _require_size("q", q, 2, w_uk.shape[1] + 2 * inv_freq.shape[0], "qk_nope_head_dim + qk_rope_head_dim")
    _require_int64("positions", positions, "q", q)
    if scaling_beta and scaling_window < 1:
        raise ValueError(f"scaling_window must be at least 1, got {scaling_window}")


def check_expand_values(latent: Tensor, w_uv: Tensor) -> None:
    """Refuse what no kernel of ``expand_values`` may see."""
    _require_rows("latent", latent, "[T, H, kv_lora_rank]")
    _require_weight("w_uv", w_uv, "[H, v_head_dim, kv_lora_rank]", "latent", latent)
    _require_size("w_uv", w_uv, 0, latent.shape[1], "latent's heads")
    _require_size("w_uv", w_uv, 2, latent.shape[2], "latent's width")


def check_linear(x: Tensor, weight: Tensor, second: Tensor | None, residual: Tensor | None) -> None:
    """Refuse what no kernel of ``linear`` may see."""
    _require_rows("x", x, "[T, K]")
    for name, tensor in (("weight", weight), ("second", second)):
        if tensor is not None:
            _require_weight(name, tensor, "[N, K]", "x", x)
            _require_size(name, tensor, 1, x.shape[1], "x's width")
    if residual is not None:
        _require_weight("residual", residual, "[T, N]", "x", x)
        _require_size("residual", residual, 0, x.shape[0], "x's tokens")
        columns = weight.shape[0] + (0 if second is None else second.shape[0])
        _require_size("residual", residual, 1, columns, "the weights' rows")
