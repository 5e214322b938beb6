"""Showing that a warm-up is alive: callbacks, a bar on a terminal, and lines elsewhere."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Literal, Protocol, TextIO

from capture.lock import rank_of_process

__all__ = ["Heartbeat", "Progress", "ProgressEvent", "line_progress", "rich_progress", "shown"]


@dataclass(frozen=True)
class ProgressEvent:
    """One step of a warm-up.

    Attributes:
        kind: ``phase`` and ``unit`` (one began), ``done`` (a unit ended), ``heartbeat`` (still at work) or
            ``message``.
        text: one line for a human.
        done, total: cost guesses in seconds of the units that ended, and of all.
        seconds: since the warm-up began.
    """

    kind: Literal["phase", "unit", "done", "heartbeat", "message"]
    text: str
    done: float
    total: float
    seconds: float


class Progress(Protocol):
    """What :meth:`capture.warmup.WarmupManager.run` calls: from two threads, but never at the same time."""

    def __call__(self, event: ProgressEvent, /) -> None: ...


class Heartbeat:
    """Hands events to ``progress``, and a ``heartbeat`` whenever ``interval`` seconds went by without one.

    The beats come from a thread, which ends with the context. A build that keeps the interpreter's lock for
    longer than the interval delays them.
    """

    def __init__(self, progress: Progress, total: float, interval: float) -> None:
        self._progress = progress
        self._total = total
        self._interval = interval
        self._done = 0.0
        self._begun = self._spoke = time.monotonic()
        self._what = "starting"
        self._phase = ""
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="warm-up heartbeat", daemon=True)

    def __enter__(self) -> Heartbeat:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()

    def phase(self, name: str) -> None:
        """Work on a phase begins, or goes on."""
        self._what = name
        if name != self._phase:
            self._phase = name
            self._emit("phase", name)

    def unit(self, phase: str, key: str) -> None:
        """A unit begins."""
        self._what = f"{phase}: {key}"
        self._emit("unit", self._what)

    def done(self, text: str, cost: float) -> None:
        """A unit of ``cost`` ended."""
        self._done += cost
        self._emit("done", text)

    def say(self, text: str) -> None:
        """A message, such as who holds the cache's lock."""
        self._emit("message", text)

    def _emit(self, kind: Literal["phase", "unit", "done", "heartbeat", "message"], text: str) -> None:
        with self._lock:
            self._spoke = time.monotonic()
            self._progress(ProgressEvent(kind, text, self._done, self._total, self._spoke - self._begun))

    def _beat(self) -> None:
        while not self._stop.wait(max(0.01, self._spoke + self._interval - time.monotonic())):
            if time.monotonic() - self._spoke >= self._interval:
                self._emit("heartbeat", self._what)


def line_progress(stream: TextIO | None = None) -> Progress:
    """A line on ``stream`` (default: stderr) for every event but the start of a unit; names the process's rank."""
    rank = rank_of_process()
    who = "mla-warmup" if rank is None else f"mla-warmup rank {rank}"

    def show(event: ProgressEvent) -> None:
        if event.kind == "unit":
            return
        target = stream or sys.stderr
        still = "still at " if event.kind == "heartbeat" else ""
        print(f"{who} [{event.seconds:6.1f} s] {still}{event.text}", file=target, flush=True)

    return show


@contextmanager
def rich_progress() -> Iterator[Callable[[ProgressEvent], None]]:
    """A bar on stderr; messages scroll above it."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    text = TextColumn("{task.description}", markup=False)
    columns = (BarColumn(bar_width=24), text, TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("starting", total=None)

        def show(event: ProgressEvent) -> None:
            if event.kind == "message":
                bar.console.print(event.text, markup=False)
            else:
                bar.update(task, description=event.text, completed=event.done, total=event.total or None)

        yield show


@contextmanager
def shown(progress: bool | Progress) -> Iterator[Progress]:
    """``progress`` itself, silence (False), or (True) a bar on a terminal and lines elsewhere."""
    if callable(progress):
        yield progress
    elif not progress or sys.stderr is None:  # closed, as for a daemon: print would turn to stdout
        yield lambda event: None
    elif sys.stderr.isatty():
        with rich_progress() as show:
            yield show
    else:
        yield line_progress()
