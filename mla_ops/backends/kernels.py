"""Where an op's implementation is found: the backends by name, imported when first asked for."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any

from mla_ops.errors import BackendUnavailableError

__all__ = ["backend_kernel", "bound_kernel"]

_MODULES = {name: f"mla_ops.backends.{name}" for name in ("aiter", "flash_mla", "reference", "triton")}
_KERNELS: dict[tuple[str, str], Callable[..., Any]] = {}


def backend_kernel(op: str, backend: str) -> Callable[..., Any]:
    """The implementation of ``op`` by ``backend``.

    Raises:
        ValueError: there is no backend of that name.
        BackendUnavailableError: it does not have the op.
    """
    kernel = _KERNELS.get((op, backend))
    if kernel is None:
        if backend not in _MODULES:
            raise ValueError(f"backend must be one of {', '.join(sorted(_MODULES))}, got {backend!r}")
        kernel = getattr(importlib.import_module(_MODULES[backend]), op, None)
        if kernel is None:
            raise BackendUnavailableError(backend, f"it has no {op}", 'use backend="triton" or "reference"')
        _KERNELS[op, backend] = kernel
    return kernel


def bound_kernel(op: str, backend: str) -> Callable[..., Any]:
    """The kernel for calls of one signature: one that learns from the first of them, if the backend has it.

    Raises:
        ValueError, BackendUnavailableError: as :func:`backend_kernel`.
    """
    backend_kernel(op, backend)
    bind = getattr(sys.modules.get(_MODULES[backend]), "BOUND", {}).get(op)
    return (lambda *args: backend_kernel(op, backend)(*args)) if bind is None else bind()
