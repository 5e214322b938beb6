"""Which backend serves a request, and why."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mla_ops.config import MLAConfig
from mla_ops.errors import BackendUnavailableError

__all__ = ["BACKENDS", "Choice", "select"]

BACKENDS = ("reference",)


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
    if device.type == "cpu":
        return Choice("reference", "the device is a CPU")
    return Choice("reference", f"no kernel backend of this version serves a {device.type} device")
