"""What there is of AITER on this machine, for ``mla-warmup doctor``."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from mla_ops.backends.aiter import runtime as aiter_runtime
from mla_ops.backends.aiter.build import modules_for
from mla_ops.backends.aiter.capabilities import ARCHITECTURES, DecodeShape, Refusal, find_decode_row
from mla_ops.backends.aiter.contract import AiterNotFoundError, Installation, locate

__all__ = ["Finding", "findings"]

_HEADS = (8, 16, 32, 64, 128)
_QUERY_LENS = range(1, 5)
_MODES = (("bf16", "bf16", False), ("fp8", "fp8", False), ("bf16", "bf16", True), ("bf16", "fp8", True))


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        topic: what.
        state: ``ok``, ``warning`` (works, worse than it could) or ``problem`` (does not work).
        found: what was found.
        remedy: what to do; empty where nothing.
    """

    topic: str
    state: Literal["ok", "warning", "problem"]
    found: str
    remedy: str = ""


def findings() -> Iterator[Finding]:
    """Where AITER is, whether this process may call it, and what it serves."""
    arch = _device_arch()
    try:
        installation = locate()
    except AiterNotFoundError as error:
        absent = importlib.util.find_spec("aiter") is None
        needed = arch is not None or not absent
        yield Finding("aiter", "problem" if needed else "ok", error.reason, error.remedy if needed else "")
        return
    yield Finding("aiter", "ok", f"{installation.version} in {installation.root}")
    yield from _process(installation, arch)
    yield from _prefill(installation)
    yield _modules(installation)
    for name in ARCHITECTURES if arch is None else (arch,):
        yield from _served(installation, name)


def _device_arch() -> str | None:
    return aiter_runtime.arch_of(torch.device("cuda", 0)) if torch.cuda.is_available() else None


def _process(installation: Installation, arch: str | None) -> Iterator[Finding]:
    if arch is None:
        yield Finding("aiter", "ok", "no AMD GPU is visible: modules can be built here for another machine, not run")
    else:
        units = aiter_runtime.compute_units(torch.device("cuda", 0))
        refusal = aiter_runtime.Runtime(installation).refusal(arch, units)
        if refusal is not None:
            yield Finding("aiter", "problem", refusal.reason, refusal.remedy)
    for variable in ("AITER_ENABLE_EXPERIMENTAL", "AITER_MLA_USE_OPUS"):
        if os.environ.get(variable, "0") not in ("0", ""):
            yield Finding(
                "aiter", "warning", f"{variable} is set: other kernels than listed below", f"unset {variable}"
            )
    if not shutil.which("hipcc") and not Path(os.environ.get("ROCM_HOME", "/opt/rocm"), "bin", "hipcc").exists():
        state: Literal["ok", "problem"] = "ok" if arch is None else "problem"
        yield Finding("aiter", state, "no hipcc: AITER's modules cannot be built here", "install ROCm's compiler")


def _prefill(installation: Installation) -> Iterator[Finding]:
    refusal = aiter_runtime.Runtime(installation).prefill_refusal()
    if refusal is not None:
        yield Finding("prefill", "problem", refusal.reason, refusal.remedy)
    else:
        yield Finding("prefill", "ok", "heads of 192 and 128 in bf16 and fp16")


def _modules(installation: Installation) -> Finding:
    folder = os.environ.get("AITER_JIT_DIR") or str(installation.root / "jit")
    names = modules_for(installation)
    built = [name for name in names if Path(folder, f"{name}.so").is_file()]
    missing = [name for name in names if name not in built]
    found = f"{len(built)} of {len(names)} modules are in {folder}"
    if not missing:
        return Finding("modules", "ok", found)
    return Finding(
        "modules", "warning", f"{found}; missing {', '.join(missing)}", "mla-warmup build builds them before serving"
    )


def _served(installation: Installation, arch: str) -> Iterator[Finding]:
    table = aiter_runtime.Runtime(installation).table(arch)
    for q_type, kv_type, persistent in _MODES:
        parts = []
        for heads in _HEADS:
            rows = {
                n: find_decode_row(
                    table, DecodeShape(arch, q_type, kv_type, heads, n, persistent), installation.version
                )
                for n in _QUERY_LENS
            }
            lens = [str(n) for n, row in rows.items() if not isinstance(row, Refusal)]
            if lens:
                parts.append(f"{heads} heads: {', '.join(lens)}")
        mode = " persistent" if persistent else ""
        what = f"{q_type} over a {kv_type} cache{mode}, query tokens by heads: {'; '.join(parts) or 'none'}"
        yield Finding(arch, "ok", what)
