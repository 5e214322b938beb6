"""Rotary position of DeepSeek's MLA: adjacent pairs, and YaRN.

YaRN has two corrections that are easily taken for one another: the magnitude of cos and sin
(:func:`attention_scaling`, the ratio of two mscales, 1 for DeepSeek's models), and the softmax scale
(``MLAConfig.softmax_scale``, the square of one mscale).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from mla_ops.config import MLAConfig, yarn_mscale

__all__ = ["RotaryEmbedding", "apply_rotary", "attention_scaling", "inverse_frequencies"]


def inverse_frequencies(config: MLAConfig) -> Tensor:
    """``[qk_rope_head_dim / 2]`` float32 radians per position, on the CPU whatever the default device is.

    With YaRN, dimensions that turn more than ``beta_fast`` times over the original context keep their frequency,
    those that turn less than ``beta_slow`` times are slowed by ``factor``, those between are mixed linearly.
    Source: YaRN (arXiv 2309.00071) section 3.2, in the form of DeepSeek-V2's code.
    """
    dim, base = config.qk_rope_head_dim, config.rope_theta
    exponents = torch.arange(0, dim, 2, dtype=torch.float32, device="cpu") / max(dim, 1)
    frequencies: Tensor = 1.0 / torch.pow(base, exponents)
    scaling = config.rope_scaling
    if scaling is None or not dim:
        return frequencies

    def dimension_of(turns: float) -> float:
        context = scaling["original_max_position_embeddings"]
        return dim * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = dimension_of(scaling["beta_fast"]), dimension_of(scaling["beta_slow"])
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    slowed = ((torch.arange(dim // 2, dtype=torch.float32, device="cpu") - low) / (high - low)).clamp(0, 1)
    interpolated: Tensor = frequencies / scaling["factor"] * slowed + frequencies * (1 - slowed)
    return interpolated


def attention_scaling(config: MLAConfig) -> float:
    """What YaRN multiplies cos and sin by.

    ``attention_factor`` if given, else ``mscale(factor, mscale) / mscale(factor, mscale_all_dim)``, else
    ``mscale(factor, 1)`` where the config has not both.
    """
    scaling = config.rope_scaling
    if scaling is None:
        return 1.0
    if "attention_factor" in scaling:
        return float(scaling["attention_factor"])
    if scaling["mscale"] and scaling["mscale_all_dim"]:
        return yarn_mscale(scaling["factor"], scaling["mscale"]) / yarn_mscale(
            scaling["factor"], scaling["mscale_all_dim"]
        )
    return yarn_mscale(scaling["factor"], 1.0)


class RotaryEmbedding(nn.Module):
    """cos and sin of positions; its frequencies stay float32 whatever dtype the model is moved to."""

    inv_freq: Tensor

    def __init__(self, config: MLAConfig, device: torch.device | str | None = None) -> None:
        super().__init__()
        self.config = config
        self.scaling = attention_scaling(config)
        device = torch.get_default_device() if device is None else device
        self.register_buffer("inv_freq", inverse_frequencies(config).to(device), persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> RotaryEmbedding:
        before = self.inv_freq
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self.inv_freq is before:  # nothing has moved: a captured graph may read it where it is
            return self
        # .to(torch.bfloat16) would round the frequencies, and a position of 100,000 turns that into nonsense;
        # .to_empty() would leave them unwritten.
        self.inv_freq = inverse_frequencies(self.config).to(self.inv_freq.device)
        return self

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """positions ``[T]`` to cos and sin ``[T, qk_rope_head_dim / 2]`` float32."""
        angles = positions[:, None].to(torch.float32) * self.inv_freq
        return angles.cos() * self.scaling, angles.sin() * self.scaling

    def extra_repr(self) -> str:
        return f"dim={self.config.qk_rope_head_dim}, theta={self.config.rope_theta}, scaling={self.scaling}"


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor, *, interleave: bool) -> Tensor:
    """Rotate pairs of the last dim.

    Args:
        x: ``[T, ..., P]``.
        cos, sin: ``[T, P / 2]`` float32.
        interleave: pairs are adjacent elements (DeepSeek's checkpoints), else element i and i + P / 2. The result
            keeps x's order: a cache written under one is not one written under the other, nor Hugging Face's, whose
            code reorders the pairs (which no dot product of q and k sees).

    Returns:
        ``[T, ..., P]`` of x's dtype.
    """
    shape: tuple[Any, ...] = (cos.shape[0], *([1] * (x.dim() - 2)), cos.shape[1])
    cos, sin = cos.view(shape), sin.view(shape)
    if interleave:
        first, second = x[..., 0::2].float(), x[..., 1::2].float()
    else:
        first, second = x.float().chunk(2, dim=-1)
    turned = (first * cos - second * sin, second * cos + first * sin)
    result = torch.stack(turned, dim=-1).flatten(-2) if interleave else torch.cat(turned, dim=-1)
    return result.to(x.dtype)
