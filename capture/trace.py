"""A warm-up report as a trace that chrome://tracing and https://ui.perfetto.dev open."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from capture.report import WarmupReport

__all__ = ["chrome_trace"]

_CRITICAL, _PHASES, _UNITS, _WORKERS = 0, 1, 2, 3


def chrome_trace(reports: Sequence[WarmupReport]) -> dict[str, Any]:
    """The reports as processes of one trace: the critical path, phases, units and each worker as threads; times in
    microseconds.
    """
    events: list[dict[str, Any]] = []
    for process, report in enumerate(reports, 1):
        title = f"{'cold' if report.cold else 'warm'} start, {report.device['name']}"
        events.append(_name("process_name", process, 0, title))
        events.append(_name("thread_name", process, _CRITICAL, "critical path"))
        events.append(_name("thread_name", process, _PHASES, "phases"))
        events.append(_name("thread_name", process, _UNITS, "units"))
        for worker in sorted({unit.worker for unit in report.units if unit.worker is not None}):
            events.append(_name("thread_name", process, _WORKERS + worker, f"worker {worker}"))
        for link in report.critical_path:
            events.append(_span(process, _CRITICAL, link.name, "critical path", link.start, link.seconds, {}))
        for span in report.spans:
            events.append(_span(process, _PHASES, span.name, "phase", span.start, span.seconds, {}))
        for unit in report.units:
            details = {"kind": unit.kind, "state": unit.state, "bytes": unit.bytes, "reason": unit.reason}
            thread = _UNITS if unit.worker is None else _WORKERS + unit.worker
            events.append(_span(process, thread, unit.key, unit.state, unit.start, unit.seconds, details))
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _span(
    process: int, thread: int, name: str, category: str, start: float, seconds: float, details: dict[str, Any]
) -> dict[str, Any]:
    event = {"name": name, "cat": category, "ph": "X", "pid": process, "tid": thread, "args": details}
    return {**event, "ts": round(start * 1e6), "dur": round(seconds * 1e6)}


def _name(kind: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": process, "tid": thread, "args": {"name": name}}
