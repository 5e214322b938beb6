from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from capture import Fingerprint, WarmupManager, WarmupPlan, WarmupReport, WarmupSpec
from capture import warmup as warmup_module
from capture.explain import explain
from capture.fingerprint import environment_fields
from capture.page import render_page
from capture.report import PHASES, PhaseRow, SpanRow, UnitRow
from capture.trace import chrome_trace
from tests.warmup.toys import FileUnit, kernels, toy_spec

SPEC = toy_spec(*kernels(2), dtype="bfloat16", rope={"factor": 40})
ENVIRONMENT = environment_fields("cpu")


def plan(cache: Path, spec: WarmupSpec = SPEC) -> WarmupPlan:
    return WarmupManager(cache).plan(spec)


def build(cache: Path, spec: WarmupSpec = SPEC) -> WarmupReport:
    manager = WarmupManager(cache)
    return manager.run(manager.plan(spec), progress=False)


@pytest.mark.parametrize("name", sorted(ENVIRONMENT))
def test_each_field_of_the_environment_is_a_miss_and_named(
    name: str, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build(cache)
    monkeypatch.setattr(warmup_module, "environment_fields", lambda device: {**ENVIRONMENT, name: "changed"})
    found = explain(plan(cache))
    assert (found.hits, len(found.missing)) == ((), 2)
    assert [(row.field, row.here, row.there) for row in found.differences] == [(name, "changed", ENVIRONMENT[name])]
    assert f"  {name} is {ENVIRONMENT[name]!r}; here it is 'changed'" in found.lines()


def test_a_nested_field_of_the_specification_is_named_by_its_path(cache: Path) -> None:
    build(cache)
    other = toy_spec(*kernels(2), dtype="bfloat16", rope={"factor": 41})
    assert [row.field for row in explain(plan(cache, other)).differences] == ["rope.factor"]


def test_the_nearest_of_several_entries_is_compared(cache: Path) -> None:
    far = toy_spec(*kernels(2), dtype="float32", rope={"factor": 1})
    build(cache, far)
    near = build(cache)
    build(cache, toy_spec(*kernels(2), dtype="float16", rope={"factor": 2}))
    found = explain(plan(cache, toy_spec(*kernels(2), dtype="bfloat16", rope={"factor": 41})))
    assert found.nearest == near.fingerprint.digest


def test_units_of_a_present_entry_are_named_and_nothing_compared(cache: Path) -> None:
    build(cache)
    (plan(cache).directory / "triton/kernel-1/kernel.bin").write_text("damaged")
    wider = toy_spec(*kernels(2), FileUnit(key="new"), dtype="bfloat16", rope={"factor": 40})
    found = explain(plan(cache, wider))
    assert (found.hits, found.missing, found.damaged) == (("kernel-0",), ("new",), ("kernel-1",))
    assert (found.nearest, found.differences) == (None, ())
    assert json.loads(json.dumps(found.to_json()))["damaged"] == ["kernel-1"]


def test_a_damaged_manifest_is_named_and_nothing_compared(cache: Path) -> None:
    build(cache, toy_spec(*kernels(2), dtype="float32"))
    build(cache)
    (plan(cache).directory / "manifest.json").write_text("{")
    found = explain(plan(cache))
    assert (found.nearest, list(found.files)) == (None, ["manifest.json"])
    assert any(line.startswith("damaged file manifest.json: ") for line in found.lines())


def test_an_empty_cache_has_nothing_to_compare_with(cache: Path) -> None:
    assert "the cache has no other entry to compare with" in explain(plan(cache)).lines()
    assert not cache.exists()


def test_an_entry_that_cannot_be_read_is_said(cache: Path) -> None:
    build(cache)
    (plan(cache).directory / "manifest.json").write_text("{")
    found = explain(plan(cache, toy_spec(*kernels(2), dtype="float16")))
    assert len(found.unreadable) == 1
    assert "cannot be read" in found.unreadable[0]


def report(cold: bool, **changes: Any) -> WarmupReport:
    units = (
        UnitRow("kernel", "decode <kernel> & co", "built" if cold else "hit", 2.0, 10, start=1.5, phase="kernels"),
        UnitRow("graph", "graphs", "built", 0.25, 0, start=3.75, phase="capture"),
    )
    spans = (SpanRow("import", 0.0, 1.0), SpanRow("kernels", 1.5, 2.0), SpanRow("capture", 3.75, 0.25))
    phases = tuple(PhaseRow(name, 1.0) for name in PHASES)
    fields: dict[str, Any] = {
        "fingerprint": Fingerprint({"a": 1}),
        "device": {"type": "cuda", "name": "chip <1>", "arch": "sm_90"},
        "backend": ("triton", "chosen"),
        "phases": phases,
        "units": units,
        "buckets": (),
        "compiled": 2 if cold else 0,
        "seconds": 4.0,
        "cold": cold,
        "spans": spans,
    }
    return WarmupReport(**{**fields, **changes})


class _Page(HTMLParser):
    """Balances tags; collects bars and whatever would be fetched."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.bars: list[str] = []
        self.fetched: list[str] = []
        self.text = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        if tag in ("script", "link", "img", "iframe"):
            self.fetched.append(tag)
        if (values.get("class") or "").startswith("bar"):
            self.bars.append(values["style"] or "")
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_a_page_is_whole_and_fetches_nothing() -> None:
    text = render_page([report(True), report(False)])
    page = _Page(text)
    assert (page.open, page.fetched) == ([], [])
    assert "http" not in text
    assert "url(" not in text


def test_a_page_has_a_bar_for_each_unit_on_one_scale() -> None:
    page = _Page(render_page([report(True), report(False, seconds=2.0)]))
    assert len(page.bars) == 6  # import, a kernel and the graphs, twice
    assert [bar for bar in page.bars if bar.startswith("left:37.500%;width:50.000%")]


def test_names_are_text_and_not_markup() -> None:
    text = render_page([report(True, notes=("<b>note</b>",))])
    assert "decode &lt;kernel&gt; &amp; co" in text
    assert "<b>note" not in text
    assert "decode <kernel> & co" in _Page(text).text


def test_a_failed_unit_is_said_on_the_page() -> None:
    failed = UnitRow("kernel", "k", "failed", 0.1, 0, "RuntimeError: no such instruction", 1.5, "kernels")
    assert "no such instruction" in _Page(render_page([report(True, units=(failed,))])).text


@pytest.mark.parametrize("seconds", [0.0, 0.004, 0.3, 1.0, 9.99, 633.0], ids=str)
def test_a_scale_has_few_ticks(seconds: float) -> None:
    page = render_page([report(True, seconds=seconds)])
    assert 1 <= page.count('<span style="left:') <= 6


def test_a_report_with_spans_survives_json() -> None:
    saved = json.loads(json.dumps(report(True).to_json()))
    assert WarmupReport.from_json(saved) == report(True)


def test_a_report_of_an_earlier_version_has_no_spans() -> None:
    saved = report(True).to_json()
    del saved["spans"]
    for unit in saved["units"]:
        del unit["start"]
    assert WarmupReport.from_json(saved).spans == ()
    assert render_page([WarmupReport.from_json(saved)])


def test_a_trace_has_a_process_for_each_report() -> None:
    events = chrome_trace([report(True), report(False)])["traceEvents"]
    kernels = [event for event in events if event["name"].startswith("decode")]
    assert [(event["pid"], event["ts"], event["dur"]) for event in kernels] == [
        (1, 1500000, 2000000),
        (2, 1500000, 2000000),
    ]
    assert [event["args"]["name"] for event in events if event["name"] == "process_name"] == [
        "cold start, chip <1>",
        "warm start, chip <1>",
    ]


def test_units_start_after_the_phase_that_they_belong_to(cache: Path) -> None:
    made = build(cache)
    for unit in made.units:
        spans = [span for span in made.spans if span.start <= unit.start + 1e-3 <= span.start + span.seconds + 2e-3]
        assert "kernels" in {span.name for span in spans}
