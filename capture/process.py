"""What a warm-up does to the process that it runs in, and what it asks of it."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path

__all__ = [
    "ENDINGS",
    "await_background",
    "builds_in_process",
    "import_seconds",
    "in_background",
    "on_device",
    "open_device",
    "prepare",
    "read_triton_key",
]

ENDINGS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that ask a process to end."""

_IMPORTED = time.monotonic()
_first_run = True
_key_is_read = False
_background: list[threading.Thread] = []
_CACHE_SWITCHES = {
    "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1",
    "TORCHINDUCTOR_FX_GRAPH_CACHE": "0",
    "TORCHINDUCTOR_AUTOGRAD_CACHE": "0",
    "TRITON_ALWAYS_COMPILE": "1",
}


@contextmanager
def builds_in_process() -> Iterator[list[str]]:
    """Inductor compiles in this process, unless the user chose otherwise; yields what weakens the cache.

    Builds in worker processes would be neither counted nor named, and would go on writing into the cache
    after a kill of this process.
    """
    notes = [
        f"{name}={value} is set: a cache of torch or Triton is off, and a warm start compiles again"
        for name, value in _CACHE_SWITCHES.items()
        if os.environ.get(name) == value
    ]
    threads = "TORCHINDUCTOR_COMPILE_THREADS"
    inductor = sys.modules.get("torch._inductor.config")
    if threads in os.environ:
        yield notes
    elif inductor is not None:
        with inductor.patch(compile_threads=1):
            yield notes
    else:
        os.environ[threads] = "1"
        try:
            yield notes
        finally:
            os.environ.pop(threads, None)


def in_background(name: str, work: Callable[[], object]) -> None:
    """Run ``work``, which holds no interpreter lock for most of its time, in a thread of its own."""
    thread = threading.Thread(target=work, name=name, daemon=True)
    _background.append(thread)
    thread.start()


def await_background() -> None:
    """Wait for all that :func:`in_background` began."""
    while _background:
        _background.pop().join()


def prepare(device: str) -> None:
    """Begin, in the background, what a warm start on a GPU waits for: opening it, and the hash of Triton's library.

    Best called before torch is imported, which takes longer than both. Imports Triton, if there is one, and no torch.
    Harmless when called again; on another device nothing happens.

    Args:
        device: as torch names it. With its index (``cuda:0``) its context is made too; see :func:`open_device`.
    """
    if device.partition(":")[0] != "cuda":
        return
    open_device(device)
    with suppress(ImportError):
        import_module("triton")
        read_triton_key()


def read_triton_key() -> None:
    """Begin to hash Triton's library, hundreds of megabytes that all of its keys contain, in the background."""
    global _key_is_read
    if not _key_is_read and "triton" in sys.modules:
        from triton.runtime import cache

        _key_is_read = True
        in_background("triton key", cache.triton_key)


def open_device(device: str) -> None:
    """Begin to open a CUDA device in the background: its first use takes a third of a second that needs no interpreter.

    Whoever uses the device meanwhile waits for that, as for any first use. Where there is no CUDA, nothing happens.
    Without an index only the driver starts: a context on another device than the one in use would waste its memory.
    """
    kind, _, index = device.partition(":")
    if kind == "cuda":
        in_background("open the device", lambda: _open_cuda(int(index) if index else None))


def _open_cuda(index: int | None) -> None:
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return
    chosen, context = ctypes.c_int(), ctypes.c_void_p()
    if cuda.cuInit(0) == 0 and index is not None and cuda.cuDeviceGet(ctypes.byref(chosen), index) == 0:
        cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), chosen)  # the context that torch uses; kept for good


@contextmanager
def on_device(device: str) -> Iterator[None]:
    """Make the context of a GPU, which the first use would do, and make it the current one, where kernels launch."""
    import torch

    if torch.device(device).type != "cuda":
        yield
        return
    with torch.cuda.device(device):
        torch.zeros(1, device="cuda")
        torch.cuda.synchronize()
        yield


def import_seconds() -> float:
    """Seconds from process start to the first warm-up of this process; 0 for the later ones."""
    global _first_run
    if not _first_run:
        return 0.0
    _first_run = False
    try:
        stat = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        started = int(stat[19]) / os.sysconf("SC_CLK_TCK")
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - started)
    except (OSError, ValueError, IndexError):
        return time.monotonic() - _IMPORTED  # no procfs: from the import of this module
