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
    from capture.compile_sources import CompileEvent
    from capture.errors import (
        BundleError,
        CacheAccessError,
        CacheCorruptError,
        CacheError,
        CacheLockTimeout,
        CaptureError,
        CompileForbiddenError,
        GraphCaptureError,
        InputMismatchError,
        NotCapturedError,
        VerificationError,
    )
    from capture.fingerprint import Fingerprint
    from capture.guard import (
        CompileWarning,
        CompileWatch,
        Seal,
        install_from_environment,
        no_compile,
        register_build_source,
    )
    from capture.memory import CapturedBucket, CaptureReport, Memory
    from capture.process import prepare
    from capture.report import WarmupReport
    from capture.runner import GraphRunner
    from capture.store import CacheStore
    from capture.verification import BucketResult, VerifyReport, verify
    from capture.warmup import (
        BuildOptions,
        CompiledFunctionUnit,
        GraphCaptureUnit,
        KernelBuildUnit,
        Unit,
        UnitResult,
        VerifyUnit,
        WarmupManager,
        WarmupPlan,
        WarmupSpec,
    )

__all__ = [
    "BatchDim",
    "BucketResult",
    "BuildOptions",
    "BundleError",
    "CacheAccessError",
    "CacheCorruptError",
    "CacheError",
    "CacheLockTimeout",
    "CacheStore",
    "CaptureError",
    "CaptureReport",
    "CapturedBucket",
    "CompileEvent",
    "CompileForbiddenError",
    "CompileWarning",
    "CompileWatch",
    "CompiledFunctionUnit",
    "Fingerprint",
    "GraphCaptureError",
    "GraphCaptureUnit",
    "GraphRunner",
    "InputMismatchError",
    "KernelBuildUnit",
    "Memory",
    "NotCapturedError",
    "PaddingWaste",
    "Seal",
    "Unit",
    "UnitResult",
    "VerificationError",
    "VerifyReport",
    "VerifyUnit",
    "WarmupManager",
    "WarmupPlan",
    "WarmupReport",
    "WarmupSpec",
    "choose_batch_sizes",
    "default_batch_sizes",
    "install_from_environment",
    "no_compile",
    "padding_waste",
    "prepare",
    "register_build_source",
    "smallest_fit",
    "verify",
]

_MODULE_OF = {
    "BatchDim": "buffers",
    "BucketResult": "verification",
    "BuildOptions": "warmup",
    "BundleError": "errors",
    "CacheAccessError": "errors",
    "CacheCorruptError": "errors",
    "CacheError": "errors",
    "CacheLockTimeout": "errors",
    "CacheStore": "store",
    "CaptureError": "errors",
    "CaptureReport": "memory",
    "CapturedBucket": "memory",
    "CompileEvent": "compile_sources",
    "CompileForbiddenError": "errors",
    "CompileWarning": "guard",
    "CompileWatch": "guard",
    "CompiledFunctionUnit": "warmup",
    "Fingerprint": "fingerprint",
    "GraphCaptureError": "errors",
    "GraphCaptureUnit": "warmup",
    "GraphRunner": "runner",
    "InputMismatchError": "errors",
    "KernelBuildUnit": "warmup",
    "Memory": "memory",
    "NotCapturedError": "errors",
    "PaddingWaste": "buckets",
    "Seal": "guard",
    "Unit": "warmup",
    "UnitResult": "warmup",
    "VerificationError": "errors",
    "VerifyReport": "verification",
    "VerifyUnit": "warmup",
    "WarmupManager": "warmup",
    "WarmupPlan": "warmup",
    "WarmupReport": "report",
    "WarmupSpec": "warmup",
    "choose_batch_sizes": "buckets",
    "default_batch_sizes": "buckets",
    "install_from_environment": "guard",
    "no_compile": "guard",
    "padding_waste": "buckets",
    "prepare": "process",
    "register_build_source": "guard",
    "smallest_fit": "buckets",
    "verify": "verification",
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
