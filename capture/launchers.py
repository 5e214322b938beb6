"""The host functions that launch Triton kernels.

Some versions of Triton (3.6 does, 3.9 does not) have the C compiler make one for each signature when a kernel is
first launched: seconds of a cold start, in the middle of a capture. So they are made with the kernel, and kept with
its files.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from capture.manifest import write_durably

__all__ = ["build_launcher", "take_launchers"]


def build_launcher(kernel: Any, backend: str) -> None:
    """Make what launches ``kernel`` on this machine, without touching the device; nothing where Triton needs nothing.

    Args:
        kernel: what ``warmup`` of a Triton kernel returned.
        backend: ``cuda`` or ``hip``.
    """
    name, launcher = ("nvidia", "CudaLauncher") if backend == "cuda" else ("amd", "HIPLauncher")
    driver = importlib.import_module(f"triton.backends.{name}.driver")
    if hasattr(driver, "make_launcher"):
        getattr(driver, launcher)(kernel.src, kernel.metadata)


def take_launchers(source: Path, target: Path) -> None:
    """Copy the launchers of one Triton cache directory into another, under the keys that they have."""
    for path in source.glob("*/*.so"):
        copy = target / path.parent.name / path.name
        if not copy.exists():
            copy.parent.mkdir(parents=True, exist_ok=True)
            write_durably(copy, path.read_bytes())
