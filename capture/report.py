"""What a warm-up did, and where the seconds went."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any

from capture.critical import critical_path
from capture.fingerprint import JSON, Fingerprint

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

__all__ = [
    "PHASES",
    "BucketRow",
    "PhaseRow",
    "SpanRow",
    "UnitRow",
    "WarmupReport",
    "render_side_by_side",
]

PHASES = ("import", "context", "weights", "kernels", "compile", "capture", "verify")
"""The phases of a warm-up, in order."""

_SCHEMA = 1
_STYLES = {"built": "yellow", "hit": "green", "failed": "bold red", "skipped": "dim"}


@dataclass(frozen=True)
class PhaseRow:
    """Seconds that one phase took."""

    name: str
    seconds: float


@dataclass(frozen=True)
class SpanRow:
    """One stretch of a phase, in seconds since the process began; a phase may have several."""

    name: str
    start: float
    seconds: float


@dataclass(frozen=True)
class UnitRow:
    """What became of one unit.

    Attributes:
        state: ``hit`` (the cache had it and nothing was compiled for it), ``built``, ``failed`` or
            ``skipped`` (a unit that it needs failed).
        seconds: building or loading it.
        bytes: of its files in the cache.
        reason: why it failed, was skipped, or was built although the cache had it; where its files came from, if
            they were only put into place; else "".
        start: seconds since the process began.
        phase: where its time was counted.
        worker: the worker process that built it, from 0; None: the process itself.
    """

    kind: str
    key: str
    state: str
    seconds: float
    bytes: int
    reason: str = ""
    start: float = 0.0
    phase: str = ""
    worker: int | None = None


@dataclass(frozen=True)
class BucketRow:
    """One captured batch size of one runner: seconds, and bytes of device memory that its graph took.

    Attributes:
        verified: it was compared with eager, on ``trials`` inputs.
    """

    batch_size: int
    capture_seconds: float
    memory_bytes: int
    verified: bool
    runner: str = ""
    trials: int = 0


@dataclass(frozen=True)
class WarmupReport:
    """The result of :meth:`capture.warmup.WarmupManager.run`.

    Attributes:
        compiled: compilations that no cache spared; 0 in a warm start.
        seconds: from process start (from the call, in a process that warmed up before) to the end.
        cold: the cache had none of the units at the start.
        notes: what a user should know, one sentence each.
        quarantined: files that were set aside, with the reason.
        environment: the cache variables that this process ran under.
        spans: when the phases ran.
    """

    fingerprint: Fingerprint
    device: Mapping[str, JSON]
    backend: tuple[str, str]
    phases: tuple[PhaseRow, ...]
    units: tuple[UnitRow, ...]
    buckets: tuple[BucketRow, ...]
    compiled: int
    seconds: float
    cold: bool
    notes: tuple[str, ...] = ()
    quarantined: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    spans: tuple[SpanRow, ...] = ()

    @property
    def ok(self) -> bool:
        """No unit failed or was skipped."""
        return all(unit.state in ("built", "hit") for unit in self.units)

    @property
    def title(self) -> str:
        """``cold`` or ``warm``."""
        return "cold" if self.cold else "warm"

    @property
    def critical_path(self) -> tuple[SpanRow, ...]:
        """The chain of work that the whole waited for; see :func:`capture.critical.critical_path`."""
        return critical_path(self.spans, self.units)

    @property
    def critical_path_line(self) -> str:
        """That in one line, or "" where nothing was timed."""
        links = ", ".join(f"{link.name} {link.seconds:.2f} s" for link in self.critical_path)
        return f"critical path: {links}" if links else ""

    def to_json(self) -> dict[str, Any]:
        """The report as plain JSON values (schema 1)."""
        return {
            "schema": _SCHEMA,
            "fingerprint": {"digest": self.fingerprint.digest, "fields": dict(self.fingerprint.fields)},
            "device": dict(self.device),
            "backend": {"name": self.backend[0], "reason": self.backend[1]},
            "phases": [asdict(phase) for phase in self.phases],
            "units": [asdict(unit) for unit in self.units],
            "buckets": [asdict(bucket) for bucket in self.buckets],
            "compiled": self.compiled,
            "seconds": self.seconds,
            "cold": self.cold,
            "notes": list(self.notes),
            "quarantined": list(self.quarantined),
            "environment": dict(self.environment),
            "spans": [asdict(span) for span in self.spans],
            "critical_path": [asdict(link) for link in self.critical_path],
        }

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> WarmupReport:
        """The inverse of :meth:`to_json`; keys that a later version added are left out.

        Raises:
            ValueError: ``raw`` is not a report of this schema.
        """
        schema = raw.get("schema") if isinstance(raw, Mapping) else None
        if schema != _SCHEMA:
            raise ValueError(f"not a warm-up report of schema {_SCHEMA}: its schema is {schema!r}")
        try:
            return cls(
                fingerprint=Fingerprint(raw["fingerprint"]["fields"]),
                device=raw["device"],
                backend=(raw["backend"]["name"], raw["backend"]["reason"]),
                phases=tuple(PhaseRow(**_known(PhaseRow, row)) for row in raw["phases"]),
                units=tuple(UnitRow(**_known(UnitRow, row)) for row in raw["units"]),
                buckets=tuple(BucketRow(**_known(BucketRow, row)) for row in raw["buckets"]),
                compiled=raw["compiled"],
                seconds=raw["seconds"],
                cold=raw["cold"],
                notes=tuple(raw.get("notes", ())),
                quarantined=tuple(raw.get("quarantined", ())),
                environment=raw.get("environment", {}),
                spans=tuple(SpanRow(**_known(SpanRow, row)) for row in raw.get("spans", ())),
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"not a warm-up report: {type(error).__name__} {error}") from None

    def render(self) -> RenderableType:
        """The report as tables for a :class:`rich.console.Console`."""
        from rich.console import Group
        from rich.text import Text

        parts: list[RenderableType] = [_phase_table([self]), _unit_table(self.units)]
        if self.buckets:
            parts.append(_bucket_table(self.buckets))
        parts += [Text(f"set aside: {line}", style="yellow") for line in self.quarantined]
        parts += [Text(f"note: {line}") for line in self.notes]
        if line := self.critical_path_line:
            parts.append(Text(line))
        failed = sum(unit.state in ("failed", "skipped") for unit in self.units)
        verdict = f"{self.title}: {self.seconds:.1f} s, compilations: {self.compiled}"
        parts.append(Text(f"{verdict}, units failed: {failed}" if failed else verdict, style="red" if failed else ""))
        return Group(*parts)


def render_side_by_side(reports: Sequence[WarmupReport]) -> RenderableType:
    """Phases and units of several reports in columns, such as cold | warm."""
    from rich.console import Group

    return Group(_phase_table(reports), _state_table(reports))


def _phase_table(reports: Sequence[WarmupReport]) -> Table:
    table = _table("phase", *(report.title for report in reports))
    columns = [{phase.name: phase.seconds for phase in report.phases} for report in reports]
    for name in PHASES:
        table.add_row(name, *(f"{column[name]:.2f} s" if name in column else "-" for column in columns))
    table.add_section()
    table.add_row("total", *(f"{report.seconds:.2f} s" for report in reports))
    table.add_row("compilations", *(str(report.compiled) for report in reports))
    return table


def _unit_table(units: Sequence[UnitRow]) -> Table:
    table = _table("unit", "kind", "state", "time", "size")
    for unit in units:
        name = f"{unit.key}\n  {unit.reason}" if unit.reason else unit.key
        style = _STYLES.get(unit.state, "")
        state = f"[{style}]{unit.state}[/]" if style else unit.state
        table.add_row(_escape(name), _escape(unit.kind), state, f"{unit.seconds:.2f} s", _size(unit.bytes))
    return table


def _bucket_table(buckets: Sequence[BucketRow]) -> Table:
    table = _table("batch size", "runner", "capture", "memory", "verified")
    for row in buckets:
        inputs = "1 input" if row.trials == 1 else f"{row.trials} inputs"
        verified = inputs if row.verified and row.trials else "yes" if row.verified else "no"
        size = _size(row.memory_bytes)
        seconds = f"{row.capture_seconds * 1e3:.1f} ms"
        table.add_row(str(row.batch_size), _escape(row.runner), seconds, size, verified)
    return table


def _state_table(reports: Sequence[WarmupReport]) -> Table:
    table = _table("unit", *(report.title for report in reports))
    columns = [{unit.key: unit for unit in report.units} for report in reports]
    for key in dict.fromkeys(key for column in columns for key in column):
        cells = [f"{unit.state} {unit.seconds:.2f} s" if (unit := column.get(key)) else "-" for column in columns]
        table.add_row(_escape(key), *cells)
    return table


def _table(first: str, *others: str) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD)
    table.add_column(first)
    for name in others:
        table.add_column(name, justify="right")
    return table


def _escape(text: str) -> str:
    from rich.markup import escape

    return escape(text)


def _size(count: int) -> str:
    amount = float(count)
    for unit in ("B", "KiB", "MiB"):
        if amount < 1024:
            return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.1f} GiB"


def _known(row: type[Any], raw: Mapping[str, Any]) -> dict[str, Any]:
    names = {item.name for item in fields(row)}
    return {name: value for name, value in raw.items() if name in names}
