"""A page that shows warm-up reports as waterfalls side by side. One file: no script, nothing from elsewhere."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

from capture.report import PHASES, SpanRow, UnitRow, WarmupReport

__all__ = ["render_page"]

_TICKS = 5
_ROUNDING = 1e-4
_ROUND = (1.0, 2.0, 5.0, 10.0, 20.0)

_STYLE = """
:root { color-scheme: light dark; --text: #1c2330; --faint: #667085; --line: #e3e7ee; --back: #fff; --card: #f7f8fa;
  --import: #8a94a6; --context: #a78bda; --weights: #5b8def; --kernels: #e08a3c; --compile: #d9534f; --capture: #2f9e73;
  --verify: #1d9bb3; --bad: #b42318 }
@media (prefers-color-scheme: dark) { :root { --text: #e6e9ef; --faint: #98a2b3; --line: #2c3442; --back: #12161d;
  --card: #1a202a; --bad: #f97066 } }
* { box-sizing: border-box }
body { font: 14px/1.45 system-ui, sans-serif; color: var(--text); background: var(--back); margin: 24px auto;
  max-width: 1500px; padding: 0 24px }
h1 { font-size: 20px; margin: 0 } h2 { font-size: 16px; margin: 0 0 2px } h3 { font-size: 14px; margin: 28px 0 8px }
.faint { color: var(--faint) } .bad { color: var(--bad); font-weight: 600 }
.legend { display: flex; flex-wrap: wrap; gap: 4px 16px; margin: 12px 0 20px }
.legend i { display: inline-block; width: 10px; height: 10px; border-radius: 2px; margin-right: 6px }
.columns { display: grid; grid-template-columns: repeat(auto-fit, minmax(440px, 1fr)); gap: 20px }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: 16px; min-width: 0 }
.big { font-size: 26px; font-weight: 600; font-variant-numeric: tabular-nums }
.chart { margin-top: 14px }
.row { display: grid; grid-template-columns: minmax(90px, 34%) 1fr 62px; gap: 8px; align-items: center; height: 22px }
.row .name { overflow: hidden; text-overflow: ellipsis; white-space: nowrap }
.row .time { text-align: right; font-variant-numeric: tabular-nums; color: var(--faint) }
.track { position: relative; height: 100%; background: repeating-linear-gradient(to right, var(--line) 0 1px,
  transparent 1px var(--tick)) }
.bar { position: absolute; top: 4px; bottom: 4px; min-width: 2px; border-radius: 2px }
.hit { opacity: .55 } .failed, .skipped { outline: 2px solid var(--bad) }
.axis { position: relative; height: 18px } .axis span { position: absolute; transform: translateX(-50%);
  font-size: 11px; color: var(--faint) }
table { border-collapse: collapse; min-width: min(760px, 100%) } th, td { text-align: left; padding: 4px 10px 4px 0;
  border-bottom: 1px solid var(--line); vertical-align: top } td.number, th.number { text-align: right;
  font-variant-numeric: tabular-nums } th { font-weight: 600 } .scroll { overflow-x: auto }
"""


@dataclass(frozen=True)
class _Bar:
    name: str
    phase: str
    state: str
    start: float
    seconds: float
    note: str


def render_page(reports: Sequence[WarmupReport]) -> str:
    """The reports as one HTML document, on one scale of seconds since the process began."""
    longest = max((report.seconds for report in reports), default=0.0) or 1.0
    step = _step(longest)
    title = " | ".join(f"{report.title} {report.seconds:.2f} s" for report in reports)
    legend = "".join(f'<span><i style="background:var(--{name})"></i>{name}</span>' for name in PHASES)
    columns = "".join(_column(report, longest, step) for report in reports)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>Warm-up: {escape(title)}</title><style>{_STYLE}</style></head><body>"
        '<h1>Warm-up: where the seconds went</h1><div class="faint">Seconds since the process began. Pale bars: the '
        f'cache had it.</div><div class="legend">{legend}</div><div class="columns">{columns}</div>'
        f"{_phase_table(reports)}{_unit_table(reports)}</body></html>\n"
    )


def _column(report: WarmupReport, longest: float, step: float) -> str:
    device = f"{report.device['name']}, backend {report.backend[0]}"
    problems = [f"{unit.key}: {unit.reason}" for unit in report.units if unit.state in ("failed", "skipped")]
    lines = [f'<div class="bad">{escape(line)}</div>' for line in problems]
    said = (report.critical_path_line, *report.quarantined, *report.notes)
    lines += [f'<div class="faint">{escape(line)}</div>' for line in said if line]
    rows = "".join(_row(bar, longest, step) for bar in _bars(report))
    ticks = "".join(
        f'<span style="left:{100 * tick * step / longest:.2f}%">{tick * step:g}</span>'
        for tick in range(int(longest / step) + 1)
    )
    axis = f'<div class="row"><span></span><div class="axis">{ticks}</div><span></span></div>'
    return (
        f'<section class="card"><h2>{report.title}</h2><div class="faint">{escape(device)}</div>'
        f'<div><span class="big">{report.seconds:.2f} s</span> <span class="faint">compilations: '
        f'{report.compiled}</span></div><div class="chart">{rows}{axis}</div>{"".join(lines)}</section>'
    )


def _bars(report: WarmupReport) -> Iterator[_Bar]:
    """Phases that have no units, then the units, by their beginning."""
    bars = [
        _Bar("check the cache" if span.name == "kernels" else span.name, span.name, "", span.start, span.seconds, "")
        for span in report.spans
        if not any(unit.phase == span.name and _within(unit.start, span) for unit in report.units)
    ]
    bars += [
        _Bar(row.key, row.phase or "kernels", row.state, row.start, row.seconds, _note(row)) for row in report.units
    ]
    yield from sorted(bars, key=lambda bar: bar.start)


def _note(row: UnitRow) -> str:
    return row.reason if row.worker is None else f"in worker {row.worker} {row.reason}".rstrip()


def _within(moment: float, span: SpanRow) -> bool:
    return span.start - _ROUNDING <= moment <= span.start + span.seconds + _ROUNDING


def _row(bar: _Bar, longest: float, step: float) -> str:
    left, width = 100 * bar.start / longest, 100 * bar.seconds / longest
    hint = f"{bar.name}: {bar.state or bar.phase}, {bar.start:.3f} s + {bar.seconds:.3f} s {bar.note}".strip()
    style = f"left:{left:.3f}%;width:{width:.3f}%;background:var(--{escape(bar.phase)})"
    return (
        f'<div class="row" title="{escape(hint)}"><span class="name">{escape(bar.name)}</span>'
        f'<div class="track" style="--tick:{100 * step / longest:.3f}%"><div class="bar {escape(bar.state)}" '
        f'style="{style}"></div></div><span class="time">{bar.seconds:.2f} s</span></div>'
    )


def _phase_table(reports: Sequence[WarmupReport]) -> str:
    columns = [{phase.name: phase.seconds for phase in report.phases} for report in reports]
    rows = [(name, [f"{column.get(name, 0.0):.2f} s" for column in columns]) for name in PHASES]
    rows.append(("total", [f"{report.seconds:.2f} s" for report in reports]))
    rows.append(("compilations", [str(report.compiled) for report in reports]))
    return _table("Phases", "phase", reports, rows)


def _unit_table(reports: Sequence[WarmupReport]) -> str:
    columns = [{unit.key: unit for unit in report.units} for report in reports]
    keys = dict.fromkeys(key for column in columns for key in column)
    rows = [
        (key, [f"{unit.state} {unit.seconds:.2f} s" if (unit := column.get(key)) else "-" for column in columns])
        for key in keys
    ]
    return _table("Units", "unit", reports, rows)


def _table(title: str, first: str, reports: Sequence[WarmupReport], rows: Sequence[tuple[str, list[str]]]) -> str:
    head = "".join(f'<th class="number">{report.title}</th>' for report in reports)
    body = ""
    for name, cells in rows:
        numbers = "".join(f'<td class="number">{escape(cell)}</td>' for cell in cells)
        body += f"<tr><td>{escape(name)}</td>{numbers}</tr>"
    return f'<h3>{title}</h3><div class="scroll"><table><tr><th>{first}</th>{head}</tr>{body}</table></div>'


def _step(longest: float) -> float:
    """Seconds between ticks: 1, 2 or 5 times a power of ten. ``longest`` is below 100 of ``scale``."""
    scale = 10.0 ** len(str(int(longest))) / 100
    return min(factor * scale for factor in _ROUND if longest / (factor * scale) <= _TICKS)
