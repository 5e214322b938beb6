"""Graph capture by batch size, proof of each graph, and a warm-up cache, for any module's step.

Names are imported when first asked for (PEP 562), so that importing the package imports no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from capture.fingerprint import Fingerprint
    from capture.guard import CompileEvent, CompileWatch, register_build_source
    from capture.report import WarmupReport
    from capture.store import CacheStore
    from capture.warmup import (
        BuildOptions,
        CompiledFunctionUnit,
        GraphCaptureUnit,
        Unit,
        UnitResult,
        VerifyUnit,
        WarmupManager,
        WarmupPlan,
        WarmupSpec,
    )

__all__ = [
    "BuildOptions",
    "CacheStore",
    "CompileEvent",
    "CompileWatch",
    "CompiledFunctionUnit",
    "Fingerprint",
    "GraphCaptureUnit",
    "Unit",
    "UnitResult",
    "VerifyUnit",
    "WarmupManager",
    "WarmupPlan",
    "WarmupReport",
    "WarmupSpec",
    "register_build_source",
]

_MODULE_OF = {
    "BuildOptions": "warmup",
    "CacheStore": "store",
    "CompileEvent": "guard",
    "CompileWatch": "guard",
    "CompiledFunctionUnit": "warmup",
    "Fingerprint": "fingerprint",
    "GraphCaptureUnit": "warmup",
    "Unit": "warmup",
    "UnitResult": "warmup",
    "VerifyUnit": "warmup",
    "WarmupManager": "warmup",
    "WarmupPlan": "warmup",
    "WarmupReport": "report",
    "WarmupSpec": "warmup",
    "register_build_source": "guard",
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
