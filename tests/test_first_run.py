"""Which rows of benchmarks/first_run.py get a process, and what stands in place of the others."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import first_run
from benchmarks.first_run import SIZES, _Bench, _Cell

SMALL, DEEP, WIDE = _Cell(4, SIZES[8]), _Cell(61, SIZES[8]), _Cell(4, SIZES[35])


class Bench(_Bench):
    """Starts nothing: each row is what ``answers`` has for its way, or the way itself."""

    def __init__(self, folder: Path, budget: float = 100.0, **answers: Any) -> None:
        self.answers, self.ran = answers, [""]
        super().__init__(Namespace(budget=budget, row_timeout=20.0, bytecode=False, repeat=3), folder)

    def _child(self, cell: _Cell, way: str, cache: Path, limit: float) -> dict[str, Any]:
        self.ran.append(way)
        answer = self.answers.get(way.replace(" ", "_"), {"seconds": 1.0})
        if isinstance(answer, list):
            answer = answer.pop(0)
        if answer == "slow":
            raise subprocess.TimeoutExpired(way, limit)
        assert isinstance(answer, dict)
        return answer


def test_a_number_of_sizes_that_there_is_not_is_wrong_usage(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["first_run", "--sizes", "8,2"])
    with pytest.raises(SystemExit):
        first_run.main()
    assert "argument --sizes: must be of 4, 8, 35, got 2" in capsys.readouterr().err


def test_a_row_that_takes_too_long_says_how_long_it_was_given(tmp_path: Path) -> None:
    assert Bench(tmp_path, ours_cold="slow").row(SMALL, "ours cold")["word"] == "more than 20 s"


@pytest.mark.parametrize("larger", [DEEP, WIDE, _Cell(61, SIZES[35])], ids=["layers", "sizes", "both"])
def test_what_took_too_long_is_not_tried_with_more_work(larger: _Cell, tmp_path: Path) -> None:
    bench = Bench(tmp_path, Hugging_Face_cold="slow")
    bench.row(SMALL, "Hugging Face cold")
    started = len(bench.ran)
    assert bench.row(larger, "Hugging Face cold")["word"] == "more than 20 s, as with less work"
    assert len(bench.ran) == started
    assert bench.row(larger, "ours cold") == {"seconds": 1.0}


@pytest.mark.parametrize(
    ("cold", "warm"),
    [("ours cold", "ours warm"), ("torch.compile dynamic cold", "mega-cache warm")],
    ids=["same way", "what it loads"],
)
def test_without_its_cold_start_there_is_no_warm_one(cold: str, warm: str, tmp_path: Path) -> None:
    bench = Bench(tmp_path, **{cold.replace(" ", "_"): {"seconds": None, "word": "skipped: not installed"}})
    bench.row(SMALL, cold)
    assert bench.row(SMALL, warm)["word"] == "skipped: not installed"
    assert bench.ran[-1] == cold
    assert bench.row(DEEP, warm) == {"seconds": 1.0}


def test_when_the_budget_is_used_up_no_row_is_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(tmp_path)
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + 95.0)
    assert bench.row(SMALL, "ours cold")["word"] == "not run: --budget is used up"


@pytest.mark.parametrize(
    ("seconds", "median", "spread"),
    [((3.0, 1.0, 2.0), 2.0, (1.0, 3.0)), ((2.0, None, 1.0), 1.0, (1.0, 2.0)), ((None, 1.0, None), 1.0, None)],
    ids=["all", "one failed", "two failed"],
)
@pytest.mark.parametrize("way", ["floor", "ours warm"])
def test_what_is_compared_is_repeated_and_its_median_shown(
    way: str, seconds: tuple[float | None, ...], median: float, spread: tuple[float, float] | None, tmp_path: Path
) -> None:
    bench = Bench(tmp_path)
    bench.answers[way.replace(" ", "_")] = [
        {"seconds": None, "word": "failed"} if number is None else {"seconds": number} for number in seconds
    ]
    row = bench.median_row(SMALL, way)
    assert row["seconds"] == median
    assert row.get("range") == spread


def test_a_cold_start_is_not_repeated(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.median_row(SMALL, "ours cold")
    assert bench.ran.count("ours cold") == 1


def test_cold_and_warm_share_a_cache_and_cells_do_not(tmp_path: Path) -> None:
    caches = []

    class Noting(Bench):
        def _child(self, cell: _Cell, way: str, cache: Path, limit: float) -> dict[str, Any]:
            caches.append(cache)
            return {"seconds": 1.0}

    bench = Noting(tmp_path)
    for cell in (SMALL, DEEP):
        for way in ("ours cold", "ours warm"):
            bench.row(cell, way)
    _, cold, warm, deep, _ = caches
    assert cold == warm != deep
    assert " " not in str(cold.relative_to(tmp_path))


def test_packages_are_imported_from_the_bytecode_that_was_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "a_package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "template.py").write_text("no {{ Python }")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(first_run, "_PACKAGES", ("a_package", "no_such_package"))
    environment = first_run._compile_packages(tmp_path / "bytecode")
    command = [sys.executable, "-c", "import a_package; print(a_package.__cached__)"]
    where = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", **environment, "PYTHONPATH": str(tmp_path)}
    cached = Path(subprocess.run(command, env=where, capture_output=True, text=True, check=True).stdout.strip())
    assert cached.is_relative_to(tmp_path / "bytecode")
    assert cached.is_file()


def test_rows_come_a_line_each_the_costliest_last(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(first_run, "_Bench", lambda arguments, folder: Bench(folder))
    ways = "ours warm,torch.compile static cold,Hugging Face cold"
    monkeypatch.setattr(sys, "argv", ["first_run", "--json", "--layers", "4,61", "--sizes", "8", "--ways", ways])
    first_run.main()
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(row["layers"], row["way"].split()[0]) for row in rows] == [
        *((4, "ours"), (61, "ours")),
        *((4, "torch.compile"), (4, "Hugging"), (61, "torch.compile"), (61, "Hugging")),
    ]
    assert {row["seconds"] for row in rows} == {1.0}
