"""Graph capture by batch size, proof of each graph, and a warm-up cache, for any module's step.

Names are imported when first asked for (PEP 562), so that importing the package imports no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from capture.buckets import (
        PaddingWaste,
        choose_batch_sizes,
        default_batch_sizes,
        padding_waste,
        smallest_fit,
    )
    from capture.buffers import BatchDim
    from capture.errors import (
        CacheAccessError,
        CacheCorruptError,
        CacheError,
        CacheLockTimeout,
        CaptureError,
        GraphCaptureError,
        InputMismatchError,
        NotCapturedError,
        VerificationError,
    )
    from capture.runner import CapturedBucket, CaptureReport, GraphRunner
    from capture.verify import BucketResult, VerifyReport, verify

__all__ = [
    "BatchDim",
    "BucketResult",
    "CacheAccessError",
    "CacheCorruptError",
    "CacheError",
    "CacheLockTimeout",
    "CaptureError",
    "CaptureReport",
    "CapturedBucket",
    "GraphCaptureError",
    "GraphRunner",
    "InputMismatchError",
    "NotCapturedError",
    "PaddingWaste",
    "VerificationError",
    "VerifyReport",
    "choose_batch_sizes",
    "default_batch_sizes",
    "padding_waste",
    "smallest_fit",
    "verify",
]

_MODULE_OF = {
    "BatchDim": "buffers",
    "BucketResult": "verify",
    "CacheAccessError": "errors",
    "CacheCorruptError": "errors",
    "CacheError": "errors",
    "CacheLockTimeout": "errors",
    "CaptureError": "errors",
    "CaptureReport": "runner",
    "CapturedBucket": "runner",
    "GraphCaptureError": "errors",
    "GraphRunner": "runner",
    "InputMismatchError": "errors",
    "NotCapturedError": "errors",
    "PaddingWaste": "buckets",
    "VerificationError": "errors",
    "VerifyReport": "verify",
    "choose_batch_sizes": "buckets",
    "default_batch_sizes": "buckets",
    "padding_waste": "buckets",
    "smallest_fit": "buckets",
    "verify": "verify",
}


def __getattr__(name: str) -> object:
    module = _MODULE_OF.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{module}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
