"""Which backend serves a request, and why."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass

import torch

from mla_ops.config import MLAConfig
from mla_ops.errors import BackendUnavailableError

__all__ = ["BACKENDS", "Choice", "select"]

BACKENDS = ("reference", "triton")


@dataclass(frozen=True)
class Choice:
    """A backend and the reason for it."""

    name: str
    reason: str


def select(
    config: MLAConfig | None, device: torch.device | str, dtype: torch.dtype, *, backend: str = "auto"
) -> Choice:
    """Choose a backend.

    Args:
        config: the dimensions, or ``None`` where only the device and dtype are known.
        device: where the tensors are.
        dtype: of the queries.
        backend: ``"auto"``, or the name of one, which then serves or raises: nothing falls back silently.

    Raises:
        BackendUnavailableError: the backend that was asked for cannot serve; says why and what would work.
        ValueError: no backend has that name.
    """
    device = torch.device(device)
    if backend not in ("auto", *BACKENDS):
        raise ValueError(f"backend must be auto, {', '.join(BACKENDS)}, got {backend!r}")
    if not dtype.is_floating_point:
        raise BackendUnavailableError(backend, f"queries of {dtype} are not floating point", "use bfloat16")
    if backend == "reference":
        return Choice("reference", "asked for")
    if backend == "auto" and device.type == "cpu":
        return Choice("reference", "the device is a CPU")
    refusal = _triton_refusal(config, device, dtype)
    if refusal is None:
        return Choice("triton", "asked for" if backend == "triton" else f"its kernels serve {dtype} on {device.type}")
    if backend == "triton":
        raise BackendUnavailableError("triton", refusal, 'use backend="reference"')
    return Choice("reference", f"the triton backend cannot serve: {refusal}")


def _triton_refusal(config: MLAConfig | None, device: torch.device, dtype: torch.dtype) -> str | None:
    """Why our own kernels cannot serve, or None. Does not import triton."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    interpreted = device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"
    if device.type != "cuda" and not interpreted:
        return f"its kernels cannot run on {device.type}"
    if dtype == torch.float64:
        return "its kernels accumulate in float32 and the queries are float64"
    if config is not None:
        for name in ("kv_lora_rank", "qk_rope_head_dim", "v_head_dim"):
            width = getattr(config, name)
            if (width & (width - 1) or width < 16) and (name, width) != ("qk_rope_head_dim", 0):
                return f"{name} must be a power of two and at least 16, got {width}"
    return None
