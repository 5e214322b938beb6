from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from capture import (
    BuildOptions,
    CompileEvent,
    GraphCaptureUnit,
    Unit,
    UnitResult,
    VerifyUnit,
    WarmupManager,
    WarmupReport,
    WarmupSpec,
    guard,
    process,
    register_build_source,
)
from capture.errors import CacheLockTimeout, VerificationError
from capture.progress import ProgressEvent
from capture.report import PHASES, BucketRow, render_side_by_side
from tests.warmup.toys import CallUnit, FileUnit, kernels, toy_spec

Log = Callable[[], list[str]]


def warm_up(cache: Path, *units: Unit, progress: Any = False, **fields: Any) -> WarmupReport:
    manager = WarmupManager(cache)
    return manager.run(manager.plan(toy_spec(*units, **fields)), progress=progress)


def states(report: WarmupReport) -> dict[str, str]:
    return {unit.key: unit.state for unit in report.units}


def test_a_cold_start_builds_and_a_warm_one_loads(cache: Path, log: Log) -> None:
    cold = warm_up(cache, *kernels(2))
    warm = warm_up(cache, *kernels(2))
    assert log() == ["build kernel-0", "build kernel-1", "load kernel-0", "load kernel-1"]
    assert (cold.cold, warm.cold) == (True, False)
    assert set(states(cold).values()) == {"built"}
    assert set(states(warm).values()) == {"hit"}
    assert [unit.bytes for unit in cold.units] == [unit.bytes for unit in warm.units]
    assert all(unit.bytes > 0 for unit in cold.units)


def test_a_plan_says_what_the_cache_has_and_changes_nothing(cache: Path) -> None:
    manager = WarmupManager(cache)
    spec = replace(toy_spec(*kernels(2)), setup=lambda: pytest.fail("setup ran"))
    assert [planned.state for planned in manager.plan(spec).units] == ["missing", "missing"]
    assert not cache.exists()
    warm_up(cache, *kernels(2))
    plan = manager.plan(spec)
    (plan.directory / "triton/kernel-1/kernel.bin").unlink()
    assert [planned.state for planned in manager.plan(spec).units] == ["hit", "damaged"]
    assert manager.plan(spec).damaged == {"triton/kernel-1/kernel.bin": "missing"}


def test_units_run_phase_by_phase_whatever_their_order(cache: Path, log: Log) -> None:
    phases = ("verify", "capture", "compile", "kernels")
    warm_up(cache, *(CallUnit(key=phase, phase=phase, call=lambda: None) for phase in phases))
    assert log() == [f"build {phase}" for phase in reversed(phases)]


def raises(error: BaseException) -> Callable[[], UnitResult]:
    def call() -> UnitResult:
        raise error

    return call


@pytest.mark.parametrize("error", [RuntimeError("no compiler"), SystemExit(3)], ids=["exception", "exit"])
def test_a_failed_unit_is_reported_and_the_others_go_on(error: BaseException, cache: Path) -> None:
    first, second = kernels(2)
    report = warm_up(cache, first, CallUnit(key="bad", phase="kernels", persistent=True, call=raises(error)), second)
    assert states(report) == {"kernel-0": "built", "bad": "failed", "kernel-1": "built"}
    assert report.units[1].reason == f"{type(error).__name__}: {error}"
    assert not report.ok


def test_an_interrupt_is_not_a_failure(cache: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        warm_up(cache, CallUnit(key="interrupted", call=raises(KeyboardInterrupt())))


def test_what_a_failed_build_left_is_set_aside_and_not_given_to_the_next(cache: Path) -> None:
    @dataclass(frozen=True, kw_only=True)
    class Half(FileUnit):
        def build(self, resources: Any) -> None:
            super().build(resources)
            raise RuntimeError("half way")

    report = warm_up(cache, Half(key="half"), FileUnit(key="good"))
    assert states(report) == {"half": "failed", "good": "built"}
    assert {line.split(":")[0] for line in report.quarantined} == {
        "triton/half/kernel.bin",
        "triton/half/kernel.json",
    }
    assert states(warm_up(cache, FileUnit(key="good"))) == {"good": "hit"}


def test_what_needs_a_failed_unit_is_skipped(cache: Path) -> None:
    bad = CallUnit(key="bad", call=raises(RuntimeError()))
    next_one = CallUnit(key="next", needs=("bad",), call=lambda: None)
    last = CallUnit(key="last", needs=("next",), call=lambda: None)
    report = warm_up(cache, bad, next_one, last)
    assert states(report) == {"bad": "failed", "next": "skipped", "last": "skipped"}
    assert [unit.reason for unit in report.units[1:]] == ["needs bad, which failed", "needs next, which was skipped"]


def test_a_unit_that_does_not_load_is_built_again_once_and_said(cache: Path) -> None:
    @dataclass(frozen=True, kw_only=True)
    class Moody(FileUnit):
        def load(self, resources: Any) -> None:
            raise ValueError("other version")

    warm_up(cache, Moody(key="moody"))
    report = warm_up(cache, Moody(key="moody"))
    assert states(report) == {"moody": "built"}
    assert report.quarantined[0] == "moody did not load (ValueError: other version); building it again"
    assert len(report.quarantined) == 3


def test_setup_gives_units_their_resources_and_its_error_is_the_callers(cache: Path) -> None:
    seen = []

    @dataclass(frozen=True, kw_only=True)
    class Looks(Unit):
        def build(self, resources: Any) -> None:
            seen.append(resources)

    unit = Looks(kind="toy", key="looks", phase="compile", persistent=False)
    manager = WarmupManager(cache)
    manager.run(manager.plan(replace(toy_spec(unit), setup=lambda: "weights")), progress=False)
    assert seen == ["weights"]
    with pytest.raises(MemoryError):
        manager.run(manager.plan(replace(toy_spec(unit), setup=raises(MemoryError()))), progress=False)


def test_a_unit_that_compiles_although_cached_is_no_hit(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "_SOURCES", {})
    reports: list[Callable[[CompileEvent], None]] = []

    def attach(report: Callable[[CompileEvent], None]) -> Callable[[], None]:
        reports.append(report)
        return lambda: reports.remove(report)

    def build() -> None:
        for report in reports:
            report(CompileEvent("toy", "decode", 0.1, False))

    register_build_source("toy", "sys", attach)
    unit = CallUnit(key="unit", call=build, persistent=True)
    assert warm_up(cache, unit).compiled == 1
    report = warm_up(cache, unit)
    assert states(report) == {"unit": "built"}
    assert report.units[0].reason == "cached, yet compiled decode"
    assert report.compiled == 1


class ToyRunner:
    """As much of a graph runner as the units use."""

    captured = (1, 4)

    def capture(self, verify: bool = True) -> Any:
        assert not verify
        rows = [SimpleNamespace(batch_size=n, capture_seconds=n / 10, memory_bytes=n * 100) for n in (4, 1)]
        return SimpleNamespace(buckets=rows)


def graph_units() -> tuple[Unit, ...]:
    graphs = GraphCaptureUnit(key="graphs", runner=lambda resources: resources)
    return graphs, VerifyUnit(key="proof", graphs="graphs", runner=lambda resources: resources)


@pytest.fixture
def verdict(monkeypatch: pytest.MonkeyPatch) -> list[Exception]:
    """Replaces the verification; an exception in the list is what its report raises."""
    errors: list[Exception] = []

    def raise_if_failed() -> None:
        if errors:
            raise errors[0]

    module = ModuleType("capture.verification")
    module.verify = lambda runner, trials, again: SimpleNamespace(  # type: ignore[attr-defined]
        raise_if_failed=raise_if_failed,
        buckets=[SimpleNamespace(batch_size=size, fillings=(1,) * trials) for size in runner.captured],
    )
    monkeypatch.setitem(sys.modules, "capture.verification", module)
    return errors


def run_graphs(cache: Path) -> WarmupReport:
    manager = WarmupManager(cache)
    return manager.run(manager.plan(replace(toy_spec(*graph_units()), setup=ToyRunner)), progress=False)


def test_graphs_are_captured_in_every_process_and_reported_by_bucket(cache: Path, verdict: list[Exception]) -> None:
    cold, warm = run_graphs(cache), run_graphs(cache)
    assert states(cold) == {"graphs": "built", "proof": "built"}
    assert states(warm) == {"graphs": "hit", "proof": "hit"}
    for report, trials in ((cold, 3), (warm, 1)):
        rows = (BucketRow(1, 0.1, 100, True, "graphs", trials), BucketRow(4, 0.4, 400, True, "graphs", trials))
        assert report.buckets == rows


def test_a_cache_made_on_one_device_serves_another_of_its_kind(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chip = SimpleNamespace(name="some chip", gcnArchName="gfx942", major=9, minor=0, multi_processor_count=304)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda device: chip)
    monkeypatch.setattr("capture.run.on_device", lambda device: nullcontext())
    manager = WarmupManager(cache)
    reports = [
        manager.run(manager.plan(replace(toy_spec(*kernels()), device=device)), progress=False)
        for device in ("cuda:0", "cuda:1", "cuda:7")
    ]
    assert [set(states(report).values()) for report in reports] == [{"built"}, {"hit"}, {"hit"}]


def test_a_graph_that_is_wrong_fails_its_verification_only(cache: Path, verdict: list[Exception]) -> None:
    verdict.append(VerificationError(None, "bucket 4, row 3"))  # type: ignore[arg-type]
    report = run_graphs(cache)
    assert states(report) == {"graphs": "built", "proof": "failed"}
    assert [bucket.verified for bucket in report.buckets] == [False, False]


def test_two_units_cannot_have_one_key() -> None:
    with pytest.raises(ValueError, match="two units have the key 'kernel-0'"):
        toy_spec(*kernels(1), *kernels(1))


def test_a_unit_cannot_need_a_later_one() -> None:
    with pytest.raises(ValueError, match="needs \\['kernel-0'\\], which no earlier unit makes"):
        toy_spec(FileUnit(key="early", needs=("kernel-0",)), *kernels(1))


def test_a_persistent_unit_cannot_need_a_transient_one() -> None:
    transient = CallUnit(key="transient", phase="kernels", call=lambda: None)
    with pytest.raises(ValueError, match="needs \\['transient'\\], which no earlier unit makes"):
        toy_spec(transient, CallUnit(key="persistent", persistent=True, needs=("transient",), call=lambda: None))


def test_damage_is_set_aside_before_setup_could_load_it(cache: Path) -> None:
    warm_up(cache, *kernels(1))
    manager = WarmupManager(cache)
    path = manager.plan(toy_spec(*kernels(1))).directory / "triton/kernel-0/kernel.bin"
    path.write_text("damaged")
    seen = []
    spec = replace(toy_spec(*kernels(1)), setup=lambda: seen.append(path.exists()))
    report = manager.run(manager.plan(spec), progress=False)
    assert seen == [False]
    assert states(report) == {"kernel-0": "built"}


def test_a_field_cannot_hide_one_of_the_environment(cache: Path) -> None:
    with pytest.raises(ValueError, match="'torch'"):
        WarmupManager(cache).plan(toy_spec(torch="1.0"))


@pytest.mark.parametrize("name", ["query_len", "page_size", "tp", "layers", "max_seq_len"])
def test_build_options_refuse_zero(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
        BuildOptions(**{name: 0})


def test_specs_that_share_a_fingerprint_share_a_directory(cache: Path) -> None:
    warm_up(cache, FileUnit(key="a"))
    warm_up(cache, FileUnit(key="b"))
    assert states(warm_up(cache, FileUnit(key="a"), FileUnit(key="b"))) == {"a": "hit", "b": "hit"}


def test_the_torch_key_tag_is_appended_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch.compiler.config as config

    monkeypatch.setattr(config, "cache_key_tag", "mine")
    manager = WarmupManager(cache)
    spec = replace(toy_spec(*kernels(1)), cache_key_tag="ops-1")
    for _ in range(2):
        manager.run(manager.plan(spec), progress=False)
    assert config.cache_key_tag == "mine|ops-1"


def test_caches_that_are_switched_off_are_said(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_FX_GRAPH_CACHE", "0")
    assert any("TORCHINDUCTOR_FX_GRAPH_CACHE=0" in line for line in warm_up(cache).notes)


def test_inductors_own_default_directory_is_no_setting_of_the_user(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", default_cache_dir())
    report = warm_up(cache, FileUnit(key="a", variable="TORCHINDUCTOR_CACHE_DIR"))
    assert report.environment["TORCHINDUCTOR_CACHE_DIR"].startswith(str(cache))
    assert report.notes == (
        f"torch.compile had begun to use {default_cache_dir()}; what it compiled before stays there",
    )


def test_the_lock_is_waited_for_visibly_and_not_for_ever(cache: Path) -> None:
    manager = WarmupManager(cache, lock_timeout=0.05)
    plan = manager.plan(toy_spec(*kernels(1)))
    entered, leave = threading.Event(), threading.Event()

    def slow() -> None:
        entered.set()
        leave.wait(30)

    other = WarmupManager(cache)
    spec = toy_spec(
        CallUnit(
            key="slow",
            phase="kernels",
            persistent=True,
            call=slow,
        )
    )
    builder = threading.Thread(target=lambda: other.run(other.plan(spec), progress=False))
    builder.start()
    try:
        assert entered.wait(30)
        said: list[ProgressEvent] = []
        with pytest.raises(CacheLockTimeout, match=r"waited .* for pid \d+ of host"):
            manager.run(plan, progress=said.append)
        assert any(event.text.startswith("waiting for pid") for event in said if event.kind == "message")
    finally:
        leave.set()
        builder.join()


def test_a_report_survives_json(cache: Path, verdict: list[Exception]) -> None:
    report = run_graphs(cache)
    raw = report.to_json()
    assert raw["schema"] == 1
    assert [phase["name"] for phase in raw["phases"]] == list(PHASES)
    assert (
        WarmupReport.from_json({**raw, "later": 1, "units": [{**unit, "later": 2} for unit in raw["units"]]}) == report
    )


@pytest.mark.parametrize(
    "raw",
    [{}, {"schema": 2}, {"schema": 1}, [], {"schema": 1, "fingerprint": {"fields": []}}],
    ids=["empty", "newer", "incomplete", "list", "fields"],
)
def test_what_is_no_report_is_refused(raw: Any) -> None:
    with pytest.raises(ValueError, match="not a warm-up report"):
        WarmupReport.from_json(raw)


def test_reports_are_shown_alone_and_side_by_side(cache: Path) -> None:
    from rich.console import Console

    cold, warm = warm_up(cache, *kernels(2)), warm_up(cache, *kernels(2))
    console = Console(record=True, width=100, file=open("/dev/null", "w"))  # noqa: SIM115
    with console.file:
        console.print(warm.render())
        console.print(render_side_by_side([cold, warm]))
    text = console.export_text()
    assert "warm: " in text
    assert [line for line in text.splitlines() if "cold" in line and "warm" in line]
    assert [line for line in text.splitlines() if "kernel-1" in line and "built" in line and "hit" in line]


def test_brackets_in_names_are_no_markup(cache: Path) -> None:
    from rich.console import Console

    key = "graphs [tp 8] [/tp]"
    rows = (BucketRow(1, 0.001, 0, True, key),)
    unit = CallUnit(key=key, kind="[graph]", call=lambda: UnitResult(buckets=rows), phase="capture")
    with open("/dev/null", "w") as null:
        console = Console(record=True, width=100, file=null)
        console.print(warm_up(cache, unit).render())
    text = console.export_text()
    assert text.count(key) == 2
    assert "[graph]" in text


def test_import_time_counts_from_process_start_and_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "_first_run", True)
    first, second = warm_up(cache), warm_up(cache)
    assert first.phases[0].seconds > 0.0
    assert second.phases[0].seconds == 0.0
    assert first.seconds >= first.phases[0].seconds


def test_a_spec_can_be_listed_without_its_setup() -> None:
    spec = WarmupSpec("toy", "cpu", ("toy", ""), {}, raises(AssertionError("setup ran")), kernels(2))
    assert [unit.key for unit in spec.ordered()] == ["kernel-0", "kernel-1"]
