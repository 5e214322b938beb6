"""What a warm-up waited for: the chain of work whose end was the end of the whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from capture.report import SpanRow, UnitRow

__all__ = ["critical_path"]

_ROUNDING = 2e-4
_SHORT = 0.01  # seconds: stretches that change no decision


def critical_path(spans: Sequence[SpanRow], units: Sequence[UnitRow]) -> tuple[SpanRow, ...]:
    """The chain, first link first: phases of the process, and kernels that a worker built while it waited.

    Found from the end backwards: before each link comes the work that ended last before it began. Links of one phase in
    a row are one; those under 10 ms are left out.
    """
    from capture.report import SpanRow

    built = [
        SpanRow(f"{unit.key.split()[0]} in a worker", unit.start, unit.seconds)
        for unit in units
        if unit.worker is not None
    ]
    work = [*built, *(_without_wait(span, built) for span in spans)]
    chain: list[SpanRow] = []
    moment = max((_end(row) for row in work), default=0.0)
    while before := [row for row in work if _end(row) <= moment + _ROUNDING and row.start < moment - _ROUNDING]:
        last = max(before, key=_end)
        if chain and chain[-1].name == last.name:
            chain[-1] = SpanRow(last.name, last.start, round(_end(chain[-1]) - last.start, 4))
        elif last.seconds >= _SHORT:
            chain.append(last)
        moment = last.start
    return tuple(reversed(chain))


def _without_wait(span: SpanRow, built: Sequence[SpanRow]) -> SpanRow:
    """What is left of a stretch of the process after the last kernel that arrived in it."""
    arrivals = [_end(row) for row in built if span.start < _end(row) <= _end(span) + _ROUNDING]
    if span.name != "kernels" or not arrivals:
        return span
    start = min(max(arrivals), _end(span))
    return replace(span, start=start, seconds=round(_end(span) - start, 4))


def _end(row: SpanRow) -> float:
    return row.start + row.seconds
