"""Cold and warm starts in fresh processes, repeated."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from capture.errors import CaptureError
from capture.report import PHASES, WarmupReport

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["Benchmark", "measure_starts"]

_PATIENCE = 10.0  # a start that is inside of a compiler heeds a signal only afterwards


@dataclass(frozen=True)
class Benchmark:
    """Reports of cold starts, each over a cache of its own, and of warm ones over the last of these."""

    cold: tuple[WarmupReport, ...]
    warm: tuple[WarmupReport, ...]

    def to_json(self) -> dict[str, Any]:
        """The reports as plain JSON values (schema 1)."""
        cold, warm = ([report.to_json() for report in reports] for reports in (self.cold, self.warm))
        return {"schema": 1, "cold": cold, "warm": warm}

    def render(self) -> Table:
        """Seconds of each phase as ``median (smallest-largest)``, for a :class:`rich.console.Console`."""
        from rich.box import SIMPLE_HEAD
        from rich.table import Table

        table = Table(box=SIMPLE_HEAD)
        table.add_column("phase")
        for name, reports in (("cold", self.cold), ("warm", self.warm)):
            table.add_column(f"{name}, {len(reports)} start{'s' if len(reports) > 1 else ''}", justify="right")
        for phase in PHASES:
            table.add_row(phase, *(_spread([_seconds(report, phase) for report in column]) for column in self._columns))
        table.add_section()
        table.add_row("total", *(_spread([report.seconds for report in column]) for column in self._columns))
        counts = (sorted({report.compiled for report in column}) for column in self._columns)
        table.add_row("compilations", *(", ".join(map(str, count)) for count in counts))
        return table

    @property
    def _columns(self) -> tuple[tuple[WarmupReport, ...], ...]:
        return self.cold, self.warm


def measure_starts(arguments: Sequence[str], repeat: int, say: Callable[[str], None] = lambda line: None) -> Benchmark:
    """Run ``mla-warmup build`` in fresh processes over caches in a temporary directory.

    Args:
        arguments: of ``mla-warmup build``, without ``--cache-dir`` and ``--json``.
        repeat: cold starts, and then as many warm ones.

    Raises:
        CaptureError: a start failed.
    """
    with tempfile.TemporaryDirectory(prefix="mla-warmup-bench-") as folder:
        places = [Path(folder, str(index)) for index in range(repeat)]
        cold = tuple(_start(arguments, place, f"cold start {index + 1}", say) for index, place in enumerate(places))
        warm = tuple(_start(arguments, places[-1], f"warm start {index + 1}", say) for index in range(repeat))
    return Benchmark(cold, warm)


def _start(arguments: Sequence[str], place: Path, title: str, say: Callable[[str], None]) -> WarmupReport:
    command = [sys.executable, "-m", "capture.cli", "build", *arguments, "--json", "--quiet", "--cache-dir", str(place)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            output, errors = process.communicate()
        except BaseException:  # asked to end: so is the start, whose workers and temporary files must go with it
            process.terminate()
            try:
                process.communicate(timeout=_PATIENCE)
            except subprocess.TimeoutExpired:
                process.kill()
            raise
    if process.returncode:
        raise CaptureError(f"{title} failed with status {process.returncode}: {errors.strip()[-2000:]}")
    report = WarmupReport.from_json(json.loads(output))
    say(f"{title}: {report.seconds:.2f} s, compilations: {report.compiled}")
    return report


def _seconds(report: WarmupReport, phase: str) -> float:
    return next((row.seconds for row in report.phases if row.name == phase), 0.0)


def _spread(seconds: Sequence[float]) -> str:
    middle = f"{statistics.median(seconds):.2f} s"
    return middle if len(seconds) == 1 else f"{middle} ({min(seconds):.2f}-{max(seconds):.2f})"
