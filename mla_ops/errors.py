"""Exceptions that a caller may want to catch.

    MLAError
    ├── BackendUnavailableError   an explicitly chosen backend cannot serve the request
    ├── InferenceOnlyError        a gradient or a vmap was asked of an op that has none
    ├── OutOfPagesError           the paged latent cache has no free page left
    └── PlanError                 a decode plan was used outside its limits, or its buffers were damaged

A caller's mistake in an argument is a plain ``ValueError`` or ``TypeError``.
"""

from __future__ import annotations

from typing import Any

__all__ = ["BackendUnavailableError", "InferenceOnlyError", "MLAError", "OutOfPagesError", "PlanError"]


class MLAError(Exception):
    """Base of every exception of this package."""


class BackendUnavailableError(MLAError):
    """An explicitly chosen backend cannot serve the request.

    Attributes:
        backend: the backend that was asked for.
        reason: why it cannot serve.
        remedy: what would work.
    """

    def __init__(self, backend: str, reason: str, remedy: str) -> None:
        self.backend = backend
        self.reason = reason
        self.remedy = remedy
        super().__init__(f'backend="{backend}" cannot serve this request: {reason}; {remedy}')

    def __reduce__(self) -> tuple[Any, ...]:  # a worker process hands it to its parent
        return type(self), (self.backend, self.reason, self.remedy)


class InferenceOnlyError(MLAError, RuntimeError):
    """A gradient, or a batching rule, was asked of an op that has none."""


class OutOfPagesError(MLAError):
    """The paged latent cache has fewer free pages than the request needs; nothing was changed.

    Attributes:
        needed: pages that the request needs.
        free: pages that are free.
    """

    def __init__(self, needed: int, free: int) -> None:
        self.needed = needed
        self.free = free
        super().__init__(
            f"pages the request still needs: {needed}, free ones: {free}; "
            "free finished sequences or make the cache with more pages"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.needed, self.free)


class PlanError(MLAError):
    """A decode plan was used outside what it was made for, or its buffers were damaged."""
