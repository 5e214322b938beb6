"""Arguments of the ops around attention, small and fresh at each call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

TOKENS, HEADS, WIDTH, RANK, NOPE, ROPE, VALUE = 3, 2, 6, 8, 5, 4, 7
FREQUENCIES = torch.tensor([1.0, 0.01])


def rms_norm(dtype: torch.dtype) -> dict[str, Any]:
    return {"x": torch.randn(TOKENS, WIDTH).to(dtype), "weight": torch.randn(WIDTH).to(dtype), "eps": 1e-5}


def linear(dtype: torch.dtype) -> dict[str, Any]:
    return {
        "x": torch.randn(TOKENS, WIDTH).to(dtype),
        "weight": torch.randn(4, WIDTH).to(dtype),
        "second": torch.randn(2, WIDTH).to(dtype),
        "residual": torch.randn(TOKENS, 6).to(dtype),
    }


def norm_rope_write(dtype: torch.dtype) -> dict[str, Any]:
    return {
        "q_a": torch.randn(TOKENS, WIDTH).to(dtype),
        "latent": torch.randn(TOKENS, RANK + ROPE).to(dtype),
        "q_weight": torch.randn(WIDTH).to(dtype),
        "kv_weight": torch.randn(RANK).to(dtype),
        "positions": torch.tensor([0, 7, 160_000]),
        "inv_freq": FREQUENCIES,
        "kv_cache": torch.randn(2, 4, RANK + ROPE).to(dtype),
        "slot_mapping": torch.tensor([5, -1, 2]),
        "eps": 1e-5,
        "rope_scale": 1.5,
        "interleave": True,
    }


def absorb_query(dtype: torch.dtype) -> dict[str, Any]:
    return {
        "q": torch.randn(TOKENS, HEADS, NOPE + ROPE).to(dtype),
        "w_uk": torch.randn(HEADS, NOPE + VALUE, RANK).to(dtype)[:, :NOPE],
        "positions": torch.tensor([0, 7, 160_000]),
        "inv_freq": FREQUENCIES,
        "rope_scale": 1.5,
        "interleave": False,
        "scaling_beta": 0.5,
        "scaling_window": 4,
    }


def expand_values(dtype: torch.dtype) -> dict[str, Any]:
    weight = torch.randn(HEADS, NOPE + VALUE, RANK).to(dtype)[:, NOPE:]
    return {"latent": torch.randn(TOKENS, HEADS, RANK).to(dtype), "w_uv": weight}


CALLS: dict[str, Callable[[torch.dtype], dict[str, Any]]] = {
    "absorb_query": absorb_query,
    "expand_values": expand_values,
    "linear": linear,
    "norm_rope_write": norm_rope_write,
    "rms_norm": rms_norm,
}
