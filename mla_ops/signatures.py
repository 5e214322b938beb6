"""What is known of calls whose like has been seen before.

A call's signature is all that its checks look at and that code for it is made for. So the first call of a signature is
checked and finds its kernel, and the next ones only look it up.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

from torch import Tensor

__all__ = ["READY", "alignment", "remember", "signature"]

READY: dict[tuple[Any, ...], Any] = {}
"""What :func:`remember` was given, by signature. Nothing in it may hold device memory."""

_MOST = 4096
_T = TypeVar("_T")


def signature(tensors: Iterable[Tensor | None]) -> tuple[Any, ...]:
    """What checks of these tensors may look at, and what code for them may be made for."""
    return tuple([None if x is None else (x.shape, x.stride(), x.dtype, x.device, alignment(x)) for x in tensors])


def alignment(x: Tensor) -> int:
    """Bytes beyond a multiple of 16; 0 for a tensor without memory, as a transform of ``torch.func`` passes it."""
    try:
        return x.data_ptr() & 15
    except RuntimeError:
        return 0


def remember(key: tuple[Any, ...], ready: _T) -> _T:
    """Keep ``ready`` for the calls of signature ``key``. So many are never in use at once that all are dropped then."""
    if len(READY) >= _MOST:
        READY.clear()
    READY[key] = ready
    return ready
