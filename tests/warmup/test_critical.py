"""The critical path of a report: what the end waited for, and nothing else."""

from __future__ import annotations

import pytest

from capture.critical import critical_path
from capture.report import SpanRow, UnitRow


def spans(*rows: tuple[str, float, float]) -> list[SpanRow]:
    """From (name, begin, end)."""
    return [SpanRow(name, begin, round(end - begin, 4)) for name, begin, end in rows]


def built(name: str, begin: float, end: float, worker: int = 0) -> UnitRow:
    return UnitRow(
        "kernel", f"{name} q:bfloat16", "built", round(end - begin, 4), 1, start=begin, phase="kernels", worker=worker
    )


def path(*arguments: object) -> list[tuple[str, float]]:
    return [(link.name, pytest.approx(link.seconds)) for link in critical_path(*arguments)]  # type: ignore[arg-type]


def test_one_thing_after_another_is_all_of_it_with_equal_neighbours_joined() -> None:
    rows = spans(("import", 0, 3), ("kernels", 3, 3.5), ("kernels", 3.5, 5), ("capture", 5, 6))
    assert path(rows, [built("k", 0, 0.1)]) == [("import", 3), ("kernels", 2), ("capture", 1)]


def test_a_kernel_that_is_waited_for_stands_in_place_of_what_ran_beside_it() -> None:
    rows = spans(("import", 0, 4), ("context", 4.1, 4.3), ("weights", 4.3, 5), ("kernels", 5, 7.1), ("capture", 7.1, 8))
    units = [built("short", 4, 5.5, 1), built("long", 4, 7)]
    assert path(rows, units) == [("import", 4), ("long in a worker", 3), ("kernels", 0.1), ("capture", 0.9)]


def test_a_kernel_that_nobody_waits_for_is_not_on_it() -> None:
    rows = spans(("import", 0, 4), ("weights", 4, 9), ("kernels", 9, 9.1), ("capture", 9.1, 10))
    assert path(rows, [built("k", 4, 6)]) == [("import", 4), ("weights", 5), ("kernels", 0.1), ("capture", 0.9)]


def test_kernels_one_after_another_in_one_worker_are_links_of_their_own() -> None:
    rows = spans(("import", 0, 1), ("kernels", 1, 6))
    units = [built("first", 1, 3), built("second", 3, 6)]
    assert path(rows, units) == [("import", 1), ("first in a worker", 2), ("second in a worker", 3)]


def test_moments_too_short_to_matter_are_left_out() -> None:
    assert path(spans(("import", 0, 1), ("kernels", 1, 1.004), ("verify", 1.004, 2)), []) == [
        ("import", 1),
        ("verify", 0.996),
    ]


def test_a_report_of_nothing_has_none() -> None:
    assert critical_path([], []) == ()
