"""Capture sizes: pure Python."""

from __future__ import annotations

import subprocess
import sys
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capture import choose_batch_sizes, default_batch_sizes, padding_waste, smallest_fit

histograms = st.dictionaries(st.integers(1, 40), st.integers(1, 50), min_size=1, max_size=7)


@given(st.integers(1, 2000))
def test_default_sizes_ascend_and_end_at_the_maximum(largest: int) -> None:
    sizes = default_batch_sizes(largest)
    assert sizes[0] == 1
    assert sizes[-1] == largest
    assert list(sizes) == sorted(set(sizes))


def test_default_sizes_pad_under_a_fifth_from_32_requests_on() -> None:
    sizes = default_batch_sizes(1024)
    for n in range(32, 1025):
        bucket = smallest_fit(sizes, n)
        assert bucket is not None
        assert (bucket - n) / bucket < 0.2


def test_default_sizes_for_512_are_31_graphs() -> None:
    assert len(default_batch_sizes(512)) == 31


@pytest.mark.parametrize("largest", [0, -1, 2.0, True])
def test_default_sizes_refuse_what_is_no_batch_size(largest: object) -> None:
    with pytest.raises(ValueError, match="positive int"):
        default_batch_sizes(largest)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("n", "bucket"), [(1, 1), (2, 4), (4, 4), (5, 8), (8, 8), (9, None)], ids=lambda value: str(value)
)
def test_smallest_fit_rounds_up_to_a_bucket(n: int, bucket: int | None) -> None:
    assert smallest_fit((1, 4, 8), n) == bucket


@given(histograms, st.integers(1, 8))
def test_chosen_sizes_pad_no_more_rows_than_any_other_choice(histogram: dict[int, int], graphs: int) -> None:
    chosen = choose_batch_sizes(histogram, graphs)
    largest = max(histogram)
    others = [
        padding_waste(histogram, (*choice, largest)).padded_rows
        for r in range(min(graphs, len(histogram)))
        for choice in combinations(sorted(histogram), r)
    ]
    assert padding_waste(histogram, chosen).padded_rows == min(others)
    assert len(chosen) <= graphs
    assert chosen[-1] == largest


def test_chosen_sizes_ignore_sizes_never_seen() -> None:
    assert choose_batch_sizes({3: 5, 7: 0}, 4) == (3,)


def test_memory_budget_limits_the_number_of_graphs() -> None:
    histogram = {1: 10, 2: 10, 3: 10, 4: 10}
    assert len(choose_batch_sizes(histogram, 4, memory_budget=250, bytes_per_graph=100)) == 2


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"histogram": {}, "max_graphs": 1}, "no calls"),
        ({"histogram": {4: -1}, "max_graphs": 1}, "negative"),
        ({"histogram": {4: 1}, "max_graphs": 0}, "not one graph"),
        ({"histogram": {4: 1}, "max_graphs": 1, "memory_budget": 5}, "go together"),
        ({"histogram": {4: 1}, "max_graphs": 1, "memory_budget": 5, "bytes_per_graph": 9}, "not one graph"),
        (
            {"histogram": {4: 1}, "max_graphs": 1, "memory_budget": 5, "bytes_per_graph": 0},
            "must be positive",
        ),
    ],
    ids=["empty", "negative-count", "no-graphs", "budget-alone", "budget-too-small", "free-graphs"],
)
def test_choice_refuses_what_has_no_answer(kwargs: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        choose_batch_sizes(**kwargs)  # type: ignore[arg-type]


def test_padding_waste_counts_rows_and_calls_that_nothing_covers() -> None:
    waste = padding_waste({1: 2, 3: 4, 9: 5}, [4, 1])
    assert (waste.live_rows, waste.padded_rows, waste.uncovered_calls) == (14, 4, 5)
    assert waste.fraction == pytest.approx(4 / 18)


def test_capture_and_its_sizes_import_no_torch() -> None:
    code = (
        "import sys, capture; capture.default_batch_sizes(8); capture.NotCapturedError; dir(capture);"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_public_names_are_sorted_and_all_there() -> None:
    import capture

    assert list(capture.__all__) == sorted(capture.__all__) == sorted(capture._MODULE_OF)
    assert all(getattr(capture, name) is not None for name in capture.__all__)
    with pytest.raises(AttributeError, match="no_such_name"):
        capture.no_such_name  # noqa: B018
