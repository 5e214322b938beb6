"""The public functions of what a layer does around attention: choose a backend, call the op.

Letters: T query tokens, H heads, R kv_lora_rank, P qk_rope_head_dim, N qk_nope_head_dim, V v_head_dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mla_ops import layer_ops  # which defines the operators
from mla_ops.backends.select import resolve
from mla_ops.transforms import goes_straight

__all__ = ["absorb_query", "expand_values", "linear", "norm_rope_write", "rms_norm"]

_ops = torch.ops.mla_ops


def rms_norm(x: Tensor, weight: Tensor, *, eps: float, backend: str = "auto") -> Tensor:
    """``x / sqrt(mean(x ** 2) + eps) * weight``, row by row, rounded once.

    Args:
        x: ``[T, W]`` fp16, bf16 or fp32.
        weight: ``[W]`` of x's dtype.
        eps: epsilon.
        backend: ``"auto"``, ``"triton"`` or ``"reference"``.

    Returns:
        ``[T, W]`` of x's dtype.

    Raises:
        ValueError, TypeError: as in :func:`mla_ops.mla_decode`.
        InferenceOnlyError: a gradient is asked of a backend without one.
    """
    # The dispatcher alone refuses or converts a scalar of another type; so below
    op = layer_ops.rms_norm if type(eps) is float and goes_straight(x, weight) else _ops.rms_norm
    result: Tensor = op(x, weight, eps, resolve(backend, x, op="layer"))
    return result


def linear(
    x: Tensor,
    weight: Tensor,
    second: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    backend: str = "auto",
) -> Tensor:
    """``x @ weight.T``, ``x @ second.T`` beside it, added to a residual: few rows at the speed of reading weights.

    Args:
        x: ``[T, K]`` fp16, bf16 or fp32.
        weight: ``[N, K]`` of x's dtype.
        second: ``[M, K]`` of x's dtype, or ``None``.
        residual: ``[T, N + M]`` of x's dtype, or ``None``.
        backend: as in :func:`rms_norm`; for many rows ``"triton"`` is torch's own product.

    Returns:
        ``[T, N + M]`` of x's dtype.

    Raises:
        ValueError, TypeError: as in :func:`mla_ops.mla_decode`.
        InferenceOnlyError: a gradient is asked of a backend without one, or of ``second`` or ``residual``.
    """
    op = layer_ops.linear if goes_straight(x, weight, second, residual) else _ops.linear
    result: Tensor = op(x, weight, second, residual, resolve(backend, x, op="layer"))
    return result


def norm_rope_write(
    q_a: Tensor,
    latent: Tensor,
    q_weight: Tensor,
    kv_weight: Tensor,
    positions: Tensor,
    inv_freq: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    *,
    eps: float,
    rope_scale: float = 1.0,
    interleave: bool = True,
    kv_scale: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """All that is done to the rows of MLA's two down-projections, in one kernel; the cache is written in place.

    Norms q_a; norms the first R of each latent row and rotates the rest, by ``positions * inv_freq`` radians in
    float32 and then as :func:`mla_ops.rope.apply_rotary`; stores that row as :func:`mla_ops.write_latent_cache` does.

    Args:
        q_a: ``[T, q_lora_rank]``, result of ``q_a_proj``; of width 0 where a model has none.
        latent: ``[T, R + P]`` of q_a's dtype, result of ``kv_a_proj_with_mqa``.
        q_weight: ``[q_lora_rank]`` of ``q_a_layernorm``.
        kv_weight: ``[R]`` of ``kv_a_layernorm``.
        positions: ``[T]`` int64.
        inv_freq: ``[P / 2]`` float32 radians per position.
        kv_cache: ``[pages, page_size, R + P]`` of latent's dtype, or fp8. Written.
        slot_mapping: ``[T]`` int64; a slot that the cache does not have (-1) writes nothing.
        eps: epsilon of both norms.
        rope_scale: multiplies cos and sin (YaRN's attention scaling).
        interleave: pairs are adjacent elements, else element i and i + P / 2.
        kv_scale: ``[1]`` float32, needed for an fp8 cache.
        backend: as in :func:`rms_norm`.

    Returns:
        Normed q_a ``[T, q_lora_rank]`` and the latent rows ``[T, R + P]``, of the inputs' dtype.

    Raises:
        ValueError, TypeError: as in :func:`mla_ops.mla_decode`.
        InferenceOnlyError: an input requires a gradient.
    """
    tensors = (q_a, latent, q_weight, kv_weight, positions, inv_freq, kv_cache, slot_mapping)
    straight = (type(eps), type(rope_scale), type(interleave)) == (float, float, bool)
    op = layer_ops.norm_rope_write if straight and goes_straight(*tensors, kv_scale) else _ops.norm_rope_write
    result: tuple[Tensor, Tensor] = op(
        *tensors, eps, rope_scale, interleave, kv_scale, resolve(backend, latent, op="layer")
    )
    return result


def absorb_query(
    q: Tensor,
    w_uk: Tensor,
    positions: Tensor,
    inv_freq: Tensor,
    *,
    rope_scale: float = 1.0,
    interleave: bool = True,
    scaling_beta: float = 0.0,
    scaling_window: int = 1,
    backend: str = "auto",
) -> Tensor:
    """Queries as :func:`mla_ops.mla_decode` takes them: ``[q_nope W_UK | rotated q_pe]`` per head.

    Args:
        q: ``[T, H, N + P]`` fp16, bf16 or fp32, result of ``q_b_proj`` (or ``q_proj``).
        w_uk: ``[H, N, R]`` of q's dtype.
        positions: ``[T]`` int64.
        inv_freq: ``[P / 2]`` float32 radians per position.
        rope_scale, interleave: as in :func:`norm_rope_write`.
        scaling_beta: Mistral 4's growth of queries: all of a query times ``1 + beta * log(1 + position // window)``.
        scaling_window: positions of its first window, within which that is 1.
        backend: as in :func:`rms_norm`.

    Returns:
        ``[T, H, R + P]`` of q's dtype.

    Raises:
        ValueError, TypeError: as in :func:`mla_ops.mla_decode`.
        InferenceOnlyError: a gradient is asked of a backend without one.
    """
    tensors = (q, w_uk, positions, inv_freq)
    scalars = (rope_scale, interleave, scaling_beta, scaling_window)
    straight = tuple(map(type, scalars)) == (float, bool, float, int)
    op = layer_ops.absorb_query if straight and goes_straight(*tensors) else _ops.absorb_query
    result: Tensor = op(*tensors, *scalars, resolve(backend, q, op="layer"))
    return result


def expand_values(latent: Tensor, w_uv: Tensor, *, backend: str = "auto") -> Tensor:
    """Values of attended latents, the heads side by side as ``o_proj`` takes them.

    Args:
        latent: ``[T, H, R]``, out of :func:`mla_ops.mla_decode`.
        w_uv: ``[H, V, R]`` of latent's dtype.
        backend: as in :func:`rms_norm`.

    Returns:
        ``[T, H * V]`` of latent's dtype.

    Raises:
        ValueError, TypeError: as in :func:`mla_ops.mla_decode`.
        InferenceOnlyError: a gradient is asked of a backend without one.
    """
    op = layer_ops.expand_values if goes_straight(latent, w_uv) else _ops.expand_values
    result: Tensor = op(latent, w_uv, resolve(backend, latent, op="layer"))
    return result
