"""What this machine has, what it can serve, and what to do about the rest: ``mla-warmup doctor``.

Looks at files and at torch only. It imports no kernel package and starts nothing on a device.
"""

from __future__ import annotations

import importlib.util
import os
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from mla_ops.backends.aiter import diagnosis as aiter_diagnosis
from mla_ops.backends.aiter.diagnosis import Finding

__all__ = ["Diagnosis", "Finding", "diagnose"]


@dataclass(frozen=True)
class Diagnosis:
    """The findings, in the order in which they are read.

    Attributes:
        findings: each with a state, what was found, and what to do.
    """

    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        """Whether nothing needs the user."""
        return all(finding.state != "problem" for finding in self.findings)

    def to_json(self) -> dict[str, object]:
        """Plain values, for ``--json``."""
        rows = [{"topic": f.topic, "state": f.state, "found": f.found, "remedy": f.remedy} for f in self.findings]
        return {"schema": 1, "ok": self.ok, "findings": rows}

    def render(self) -> str:
        """A line per finding, and a second one for what to do."""
        lines = []
        for finding in self.findings:
            lines.append(f"{finding.state:8} {finding.topic:10} {finding.found}")
            if finding.remedy:
                lines.append(f"{'':20}-> {finding.remedy}")
        return "\n".join(lines)


def diagnose() -> Diagnosis:
    """Look at this machine."""
    return Diagnosis((_torch(), _bytecode(), _device(), _triton(), *aiter_diagnosis.findings()))


def _torch() -> Finding:
    runtime = f"HIP {torch.version.hip}" if torch.version.hip else f"CUDA {torch.version.cuda or 'none'}"
    return Finding("torch", "ok", f"{torch.__version__} ({runtime}), Python {platform.python_version()}")


def _bytecode() -> Finding:
    """Images are often made without: the import of torch then takes some seconds longer, in every process."""
    assert torch.__spec__ is not None
    if os.path.exists(torch.__spec__.cached or ""):
        return Finding("bytecode", "ok", "torch's modules are compiled")
    folder = Path(torch.__file__).parents[1]
    return Finding(
        "bytecode",
        "warning",
        "torch's modules are not compiled: each process does it again, for seconds",
        f"python -m compileall -q {folder} when the image is made (pip install without --no-compile)",
    )


def _device() -> Finding:
    if not torch.cuda.is_available():
        return Finding("device", "ok", "no GPU is visible: the reference backend serves, on the CPU")
    names = {torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())}
    return Finding("device", "ok", f"{torch.cuda.device_count()} x {', '.join(sorted(names))}")


def _triton() -> Finding:
    if importlib.util.find_spec("triton") is not None:
        return Finding("triton", "ok", "installed")
    state: Literal["warning", "ok"] = "warning" if torch.cuda.is_available() else "ok"
    return Finding(
        "triton", state, "not installed", "pip install triton, for its kernels" if state == "warning" else ""
    )
