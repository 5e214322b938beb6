"""The specification of the ops around attention, in plain PyTorch; a part of :mod:`mla_ops.backends.reference`.

Letters: T tokens, H heads, Q q_lora_rank, R kv_lora_rank, P qk_rope_head_dim, N qk_nope_head_dim, V v_head_dim.
float64 inside for float32 inputs, float32 for the half types.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["absorb_query", "compute_dtype", "expand_values", "linear", "norm_rope_rows", "rms_norm"]


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """What the reference computes in."""
    return torch.float64 if dtype in (torch.float32, torch.float64) else torch.float32


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm of rows. See :func:`mla_ops.rms_norm`."""
    value = x.to(compute_dtype(x.dtype))
    value = value * torch.rsqrt(value.square().mean(-1, keepdim=True) + eps)
    return (value * weight.to(value.dtype)).to(x.dtype)


def linear(x: Tensor, weight: Tensor, second: Tensor | None, residual: Tensor | None) -> Tensor:
    """Products with one weight or two, side by side, added to a residual. See :func:`mla_ops.linear`."""
    weight = weight if second is None else torch.cat([weight, second])
    compute = compute_dtype(x.dtype)
    result = x.to(compute) @ weight.mT.to(compute)
    return (result if residual is None else result + residual).to(x.dtype)


def norm_rope_rows(
    latent: Tensor,
    weight: Tensor,
    positions: Tensor,
    inv_freq: Tensor,
    eps: float,
    rope_scale: float,
    interleave: bool,
) -> tuple[Tensor, Tensor]:
    """Normed kv_c ``[T, R]`` and roped k_pe ``[T, P]``."""
    rank = latent.shape[1] - 2 * inv_freq.shape[0]
    kv_c, k_pe = latent[:, :rank], latent[:, rank:]
    return rms_norm(kv_c, weight, eps), _roped(k_pe, positions, inv_freq, rope_scale, interleave).to(latent.dtype)


def absorb_query(
    q: Tensor,
    w_uk: Tensor,
    positions: Tensor,
    inv_freq: Tensor,
    rope_scale: float,
    interleave: bool,
    scaling_beta: float,
    scaling_window: int,
) -> Tensor:
    """Queries in absorbed form. See :func:`mla_ops.absorb_query`."""
    compute, nope = compute_dtype(q.dtype), w_uk.shape[1]
    absorbed = torch.bmm(q[..., :nope].transpose(0, 1).to(compute), w_uk.to(compute)).transpose(0, 1)
    result = torch.cat([absorbed, _roped(q[..., nope:], positions, inv_freq, rope_scale, interleave)], dim=-1)
    if scaling_beta:
        window = (positions // scaling_window).to(compute)
        result = result * (1 + scaling_beta * torch.log1p(window))[:, None, None]
    return result.to(q.dtype)


def expand_values(latent: Tensor, w_uv: Tensor) -> Tensor:
    """Values of attended latents. See :func:`mla_ops.expand_values`."""
    compute = compute_dtype(latent.dtype)
    values = torch.bmm(latent.transpose(0, 1).to(compute), w_uv.mT.to(compute))  # [H, T, V]
    return values.transpose(0, 1).flatten(1).to(latent.dtype)


def _roped(x: Tensor, positions: Tensor, inv_freq: Tensor, scale: float, interleave: bool) -> Tensor:
    """[T, ..., P] in the reference's dtype. The angles are float32 products, as everybody's are."""
    compute = compute_dtype(x.dtype)
    angles = (positions[:, None].to(torch.float32) * inv_freq).to(compute)
    angles = angles.view(angles.shape[0], *([1] * (x.dim() - 2)), angles.shape[1])
    cos, sin = angles.cos() * scale, angles.sin() * scale
    x = x.to(compute)
    first, second = (x[..., 0::2], x[..., 1::2]) if interleave else x.tensor_split(2, dim=-1)
    turned = (first * cos - second * sin, second * cos + first * sin)
    return torch.stack(turned, dim=-1).flatten(-2) if interleave else torch.cat(turned, dim=-1)
