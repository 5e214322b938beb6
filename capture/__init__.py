"""Graph capture by batch size, proof of each graph, and a warm-up cache, for any module's step.

The public names are handed out on first use, so that importing this package imports neither torch nor rich.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_MODULE_OF = {
    "BuildOptions": "capture.warmup",
    "CacheStore": "capture.store",
    "CompileEvent": "capture.guard",
    "CompileWatch": "capture.guard",
    "CompiledFunctionUnit": "capture.warmup",
    "Fingerprint": "capture.fingerprint",
    "GraphCaptureUnit": "capture.warmup",
    "Unit": "capture.warmup",
    "UnitResult": "capture.warmup",
    "VerifyUnit": "capture.warmup",
    "WarmupManager": "capture.warmup",
    "WarmupPlan": "capture.warmup",
    "WarmupReport": "capture.report",
    "WarmupSpec": "capture.warmup",
    "register_build_source": "capture.guard",
}

__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULE_OF[name]), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
