"""What a warm-up shows while it runs."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from capture import Unit, WarmupManager
from capture.progress import Heartbeat, ProgressEvent, line_progress, rich_progress
from tests.warmup.toys import CallUnit, kernels, toy_spec


def warm_up(cache: Path, *units: Unit, progress: Any) -> None:
    manager = WarmupManager(cache)
    manager.run(manager.plan(toy_spec(*units)), progress=progress)


def test_progress_tells_phases_units_and_the_share_done(cache: Path) -> None:
    events: list[ProgressEvent] = []
    warm_up(cache, *kernels(2), progress=events.append)
    done = [event for event in events if event.kind == "done"]
    assert [event.done / event.total for event in done] == [0.5, 1.0]
    assert [event.text.split(" (")[0] for event in done] == ["built: kernel-0", "built: kernel-1"]
    phases = [event.text for event in events if event.kind == "phase"]
    assert phases == ["kernels", "context", "weights", "kernels"]


def test_a_skipped_unit_is_done_with(cache: Path) -> None:
    events: list[ProgressEvent] = []
    bad = CallUnit(key="bad", call=lambda: exit(3))
    warm_up(cache, bad, CallUnit(key="next", needs=("bad",), call=lambda: None), progress=events.append)
    assert [event.text.split(" (")[0] for event in events if event.kind == "done"] == ["failed: bad", "skipped: next"]
    assert events[-1].done == events[-1].total


def test_a_silence_is_broken_by_heartbeats_that_end_with_the_work() -> None:
    beat_seen = threading.Event()
    events: list[ProgressEvent] = []

    def show(event: ProgressEvent) -> None:
        events.append(event)
        if event.kind == "heartbeat":
            beat_seen.set()

    with Heartbeat(show, total=1.0, interval=0.02) as beat:
        beat.unit("compile", "block")
        assert beat_seen.wait(30)
    count = len(events)
    assert next(event.text for event in events if event.kind == "heartbeat") == "compile: block"
    assert not [thread for thread in threading.enumerate() if thread.name == "warm-up heartbeat"]
    assert len(events) == count


def test_lines_go_to_stderr_where_there_is_no_terminal(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    warm_up(cache, *kernels(1), progress=True)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "built: kernel-0" in captured.err


def test_the_bar_goes_to_stderr_and_takes_any_text(capsys: pytest.CaptureFixture[str]) -> None:
    with rich_progress() as show:
        for kind in ("phase", "unit", "message", "heartbeat", "done"):
            show(ProgressEvent(kind, f"{kind} of decode[bold]", 0.5, 1.0, 2.0))
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "message of decode[bold]" in captured.err


def test_a_heartbeat_line_says_that_work_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    line_progress()(ProgressEvent("heartbeat", "compile: block", 0.0, 1.0, 12.0))
    assert capsys.readouterr().err == "mla-warmup [  12.0 s] still at compile: block\n"


def test_a_daemon_without_stderr_warms_up_silently(
    cache: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    warm_up(cache, *kernels(1), progress=True)
    assert capsys.readouterr().out == ""
