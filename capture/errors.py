"""Exceptions that a caller may want to catch.

CaptureError
├── NotCapturedError       no captured graph fits the call
├── InputMismatchError     an input differs from what was captured (also a ValueError)
├── GraphCaptureError      a capture failed: the bucket, the cause, the remedies
├── CompileForbiddenError  something was compiled under no_compile(); carries the event
├── VerificationError      a captured graph does not give what eager gives; carries the report
└── CacheError             the warm-up cache
    ├── BundleError        a bundle is not what its digest, its manifest or this machine says
    ├── CacheCorruptError  a file of the cache is not what its manifest says
    ├── CacheLockTimeout   another process kept the cache's lock for too long
    └── CacheAccessError   the directory cannot be used: owner, mode, read-only, no space
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from capture.compile_sources import CompileEvent
    from capture.verification import VerifyReport

__all__ = [
    "BundleError",
    "CacheAccessError",
    "CacheCorruptError",
    "CacheError",
    "CacheLockTimeout",
    "CaptureError",
    "CompileForbiddenError",
    "GraphCaptureError",
    "InputMismatchError",
    "NotCapturedError",
    "VerificationError",
]


class CaptureError(Exception):
    """Base of every exception of this package."""


class NotCapturedError(CaptureError):
    """No captured graph fits the call.

    Attributes:
        batch_size: the batch size of the call.
        captured: the batch sizes that have a graph, ascending.
    """

    def __init__(self, batch_size: int, captured: Sequence[int]) -> None:
        self.batch_size = batch_size
        self.captured = tuple(captured)
        have = ", ".join(map(str, self.captured)) or "none"
        super().__init__(
            f"no captured graph fits a batch of {batch_size} (captured: {have}); "
            'capture a larger batch size, or make the runner with fallback="eager"'
        )

    def __reduce__(self) -> tuple[Any, ...]:  # a worker process hands it to its parent
        return type(self), (self.batch_size, self.captured)


class InputMismatchError(CaptureError, ValueError):
    """An input of a call differs from what was captured; the message names it."""


class GraphCaptureError(CaptureError, RuntimeError):
    """A capture failed. The message names the bucket, the cause and the remedies.

    Attributes:
        batch_size: the bucket whose capture failed.
    """

    def __init__(self, batch_size: int, message: str) -> None:
        self.batch_size = batch_size
        super().__init__(message)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.batch_size, str(self))


class CompileForbiddenError(CaptureError, AssertionError):
    """Something was compiled, tuned or captured under ``no_compile()``.

    An AssertionError, because Dynamo wraps what it does not know of into an error of its own.

    Attributes:
        event: the :class:`capture.CompileEvent`, with its stack.
    """

    def __init__(self, event: CompileEvent, message: str) -> None:
        self.event = event
        super().__init__(message)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.event, str(self))


class VerificationError(CaptureError):
    """A captured graph does not give what eager gives.

    Attributes:
        report: the :class:`capture.verification.VerifyReport` that failed.
    """

    def __init__(self, report: VerifyReport, message: str) -> None:
        self.report = report
        super().__init__(message)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.report, str(self))


class CacheError(CaptureError):
    """Base of what can go wrong with the warm-up cache."""


class BundleError(CacheError):
    """A bundle is refused: another digest, another machine, too large, or not what a bundle is."""


class CacheCorruptError(CacheError):
    """A file of the cache is not what its manifest says."""


class CacheLockTimeout(CacheError, TimeoutError):
    """Another process kept the cache's lock for longer than the caller would wait."""


class CacheAccessError(CacheError, OSError):
    """The cache directory cannot be used: wrong owner or mode, read-only, no space."""
