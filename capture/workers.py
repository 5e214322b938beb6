"""Kernels built side by side in forked processes, while this process opens the device and makes the weights.

A worker compiles with a stand-in for the driver, as ``--target`` does, and so never touches the device. It keeps what
it built in a directory of its own; whoever waits for a kernel puts it into the cache, by its record
(:mod:`capture.kernels`). Nothing depends on a worker: what one does not deliver is built in this process.
"""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import threading
import time
import warnings
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import NoReturn, Self

from capture.guard import CompileWatch
from capture.kernels import KernelBuildUnit, is_target, prebuilt_kernels
from capture.process import ENDINGS, await_background
from capture.units import Unit

__all__ = ["BuiltKernel", "KernelWorkers", "usable_cores"]

_PATIENCE = 300.0  # seconds that one kernel may take; a fork of a process with other threads may hang
_JOB_BYTES = 2


@dataclass(frozen=True)
class BuiltKernel:
    """What a worker built.

    Attributes:
        directory: the Triton cache directory that holds it.
        worker: which one, from 0.
        start: when it began, as ``time.monotonic()``.
        compiled: compilations.
        origin: where its files came from, if they were only put into place, or "".
        error: why it is not there, or "".
    """

    directory: Path
    worker: int
    start: float
    seconds: float
    compiled: int
    origin: str = ""
    error: str = ""


@dataclass
class _Worker:
    pid: int
    results: Connection
    job: int | None = None  # what it works on
    since: float = 0.0


class KernelWorkers:
    """Forks at once; the workers wait until :meth:`start`. Closed by ``close()`` or at the end of a ``with`` block.

    A worker whose parent is killed ends with the kernel that it is at.

    Args:
        units: to build.
        arch: the architecture of units that name no target.
        count: workers.
        ahead: directories of kernels that were built ahead, as for :func:`capture.kernels.prebuilt_kernels`: of these
            only what launches them is still to be made.

    Raises:
        OSError: there is no room for a temporary directory, or for more processes.
    """

    def __init__(self, units: Sequence[KernelBuildUnit], arch: str, count: int, ahead: Sequence[Path] = ()) -> None:
        self._keys = [unit.key for unit in units]
        self._order = sorted(range(len(units)), key=lambda index: -units[index].cost)
        self._asked: set[str] = set()
        self._built: dict[str, BuiltKernel] = {}
        self._lost: dict[str, str] = {}
        self._root = Path(tempfile.mkdtemp(prefix="kernel-workers-"))
        jobs, self._jobs = os.pipe()
        self._workers: list[_Worker] = []
        targeted = [unit if unit.target else replace(unit, target=arch, launches_here=True) for unit in units]
        try:
            for index in range(count):
                reader, writer = Pipe(duplex=False)
                pid = _fork()
                if pid == 0:
                    os.close(self._jobs)
                    for connection in (reader, *(worker.results for worker in self._workers)):
                        connection.close()  # with this process's ends open, no worker would notice its parent's death
                    with prebuilt_kernels(ahead):
                        _work(targeted, index, self._root / str(index), jobs, writer)
                writer.close()
                self._workers.append(_Worker(pid, reader))
        except BaseException:
            self.close()
            raise
        finally:
            os.close(jobs)

    @classmethod
    def of(
        cls, units: Sequence[Unit], arch: str, most: int | None, ahead: Sequence[Path] = ()
    ) -> tuple[Self | None, str]:
        """Workers for those of ``units`` that they can build, or None and why, if several would have helped.

        Args:
            units: that the cache lacks.
            arch, ahead: as for the class.
            most: workers at most; None: as many as there are cores for this process.
        """
        kernels = [unit for unit in units if isinstance(unit, KernelBuildUnit) and is_target(unit.target or arch)]
        count = min(len(kernels), usable_cores() if most is None else most)
        if count < 2 or not hasattr(os, "fork"):
            return None, ""
        await_background()  # no thread is left, and the workers need not read Triton's library again
        if (others := threading.active_count() - 1) > 0:
            return None, f"kernels are built one by one: this process has other threads ({others}) and is not forked"
        try:
            return cls(kernels, arch, count, ahead), ""
        except OSError as error:
            return None, f"kernels are built one by one: worker processes cannot be made ({error})"

    def start(self, keys: Sequence[str]) -> None:
        """Let the workers build these units, the costliest first."""
        self._asked = set(keys)
        numbers = [number for number in self._order if self._keys[number] in self._asked]
        self._asked.intersection_update(self._keys)
        with suppress(BrokenPipeError):  # every worker has died: waiting for the first kernel finds out
            os.write(self._jobs, b"".join(number.to_bytes(_JOB_BYTES, "big") for number in numbers))
        self._close_jobs()

    def wait_for(self, key: str) -> BuiltKernel | str | None:
        """What became of a unit: built, or why it was not; None: no worker was asked for it."""
        while key in self._asked and key not in self._built and key not in self._lost:
            self._listen()
        return self._built.get(key) or self._lost.get(key)

    def close(self) -> None:
        """End the workers and remove what they built. Harmless when called twice."""
        self._close_jobs()
        for worker in self._workers:
            self._end(worker)
        self._workers.clear()
        shutil.rmtree(self._root, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _listen(self) -> None:
        """Take in the next message, the next death, or that a worker takes too long."""
        alive = {worker.results: worker for worker in self._workers}
        if not alive:
            self._lost |= dict.fromkeys(self._asked - self._built.keys() - self._lost.keys(), "no worker is left")
            return
        begun = [worker.since for worker in self._workers if worker.job is not None]
        ends = min(begun, default=time.monotonic()) + _PATIENCE
        ready = wait(list(alive), timeout=max(0.0, ends - time.monotonic()))
        for connection in ready:
            assert isinstance(connection, Connection)
            self._receive(alive[connection])
        if not ready:
            overdue = min(self._workers, key=lambda worker: worker.since if worker.job is not None else float("inf"))
            self._bury(overdue, f"a worker took longer than {_PATIENCE:.0f} s")

    def _receive(self, worker: _Worker) -> None:
        try:
            number, built = worker.results.recv()
        except (EOFError, OSError):
            self._bury(worker, "a worker died")
            return
        if built is None:
            worker.job, worker.since = number, time.monotonic()
            return
        worker.job = None
        if built.error:
            self._lost[self._keys[number]] = f"a worker failed: {built.error}"
        else:
            self._built[self._keys[number]] = built

    def _bury(self, worker: _Worker, reason: str) -> None:
        if worker.job is not None:
            self._lost[self._keys[worker.job]] = reason
        self._end(worker)
        self._workers.remove(worker)

    def _end(self, worker: _Worker) -> None:
        worker.results.close()
        with suppress(ProcessLookupError):
            os.kill(worker.pid, signal.SIGKILL)
        with suppress(ChildProcessError):
            os.waitpid(worker.pid, 0)

    def _close_jobs(self) -> None:
        if self._jobs >= 0:
            os.close(self._jobs)
            self._jobs = -1


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _fork() -> int:
    """As ``os.fork``; what ends a process ends the child at once, and runs no handler of the parent there."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDINGS)
    try:
        with warnings.catch_warnings():
            # There are threads of libraries (BLAS, a device's runtime); the workers use none of those.
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if pid == 0:
            for number in ENDINGS:
                if callable(signal.getsignal(number)):
                    signal.signal(number, signal.SIG_DFL)
        return pid
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _work(units: Sequence[KernelBuildUnit], index: int, directory: Path, jobs: int, results: Connection) -> NoReturn:
    """All of a worker's life: it takes jobs until there are no more, or nobody to tell of them."""
    status = 1
    try:
        os.environ["TRITON_CACHE_DIR"] = str(directory)
        # What compilers leave where they are ended goes with the workers' directory
        os.environ["TMPDIR"] = tempfile.tempdir = str(directory.parent)
        while job := os.read(jobs, _JOB_BYTES):
            number = int.from_bytes(job, "big")
            results.send((number, None))
            results.send((number, _build(units[number], index, directory)))
        status = 0
    finally:
        os._exit(status)


def _build(unit: KernelBuildUnit, index: int, directory: Path) -> BuiltKernel:
    start, origin, error = time.monotonic(), "", ""
    with CompileWatch() as watch:
        try:
            origin = unit.build(None).origin
        except (Exception, SystemExit) as failure:
            error = f"{type(failure).__name__}: {failure}"
    return BuiltKernel(directory, index, start, time.monotonic() - start, watch.compiled, origin, error)
