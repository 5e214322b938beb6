"""What graphs cost, and a budget that is honoured by leaving batch sizes out. Real bytes: test_runner_gpu.py."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from toy_step import ToyStep, example, runner_of

from capture import GraphCaptureError, GraphRunner, Memory, choose_batch_sizes
from capture.memory import MemoryMeter, fit_budget

SIZES = (1, 2, 4, 8, 16)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each capture takes 10 bytes outside of the allocator; the first also 100 of the pool."""
    costs: Iterator[Memory] = iter([Memory(100, 10)] + [Memory(0, 10)] * 20)
    monkeypatch.setattr(MemoryMeter, "taken", lambda self: next(costs))


def runner_within(budget: int | None) -> GraphRunner:
    return runner_of(ToyStep(), SIZES, memory_budget=budget)


def test_the_report_tells_pool_from_graph_objects(device: None) -> None:
    report = runner_within(None).capture()
    assert [bucket.memory for bucket in report.buckets] == [Memory(100, 10)] + [Memory(0, 10)] * 4
    assert report.buckets[0].memory_bytes == 110
    assert report.dropped == ()


@pytest.mark.parametrize(("budget", "captured"), [(110, 1), (119, 1), (120, 2), (139, 3), (150, 5), (10**9, 5)])
def test_as_many_batch_sizes_are_captured_as_fit_the_budget(device: None, budget: int, captured: int) -> None:
    runner = runner_within(budget)
    report = runner.capture()
    assert len(runner.captured) == captured
    assert runner.captured[-1] == 16
    assert sum(bucket.memory_bytes for bucket in report.buckets) <= budget
    assert sorted((*runner.captured, *report.dropped)) == list(SIZES)
    assert report.verification is not None


def test_a_call_of_a_dropped_size_uses_the_next_larger_graph(device: None) -> None:
    runner = runner_within(130)
    dropped = runner.capture().dropped
    inputs = example(dropped[0])
    torch.testing.assert_close(runner(**inputs), runner.step(**inputs))


def test_a_budget_below_the_largest_graph_is_refused_with_what_it_takes(device: None) -> None:
    runner = runner_within(109)
    with pytest.raises(GraphCaptureError, match=r"batch size, 16, takes 110 bytes, over the memory_budget of 109"):
        runner.capture()
    assert runner.captured == ()


def test_the_estimate_comes_from_the_largest_batch_size_alone(device: None) -> None:
    report = runner_within(110).capture()
    assert len(report.buckets) == 1
    assert report.estimated_bytes == 100 + 10 * len(SIZES)


def test_graphs_that_take_nothing_outside_the_pool_all_fit() -> None:
    assert fit_budget(SIZES, Memory(100, 0), 100) == SIZES


def test_the_sizes_kept_are_those_that_pad_least() -> None:
    assert fit_budget((1, 2, 4, 8, 16), Memory(0, 10), 30) == choose_batch_sizes(dict.fromkeys(SIZES, 1), 3)


def test_shared_bytes_are_counted_once() -> None:
    histogram = dict.fromkeys(range(1, 17), 1)
    chosen = choose_batch_sizes(histogram, 16, memory_budget=150, bytes_per_graph=10, shared_bytes=100)
    assert len(chosen) == 5
    with pytest.raises(ValueError, match=r"not one graph is allowed.*shared_bytes=145"):
        choose_batch_sizes(histogram, 16, memory_budget=150, bytes_per_graph=10, shared_bytes=145)


def test_nothing_is_measured_on_a_cpu() -> None:
    assert MemoryMeter(torch.device("cpu")).taken() == Memory(0, 0)
