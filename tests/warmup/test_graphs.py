"""The graph units over a real runner, and over one whose step is wrong."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from capture import GraphCaptureUnit, GraphRunner, VerifyUnit, WarmupManager, WarmupReport
from tests.warmup.toys import kernels, toy_spec

GRAPHS = GraphCaptureUnit(key="graphs", runner=lambda runner: runner)
PROOF = VerifyUnit(key="proof", graphs="graphs", runner=lambda runner: runner)


def right(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def frozen(x: torch.Tensor) -> torch.Tensor:
    return x * random.random()  # a host value: another one in every call


def warm_up(cache: Path, step: object, *, prove_again: bool = False) -> WarmupReport:
    def setup() -> GraphRunner:
        inputs = {"x": torch.randn(4, 3)}
        return GraphRunner(step, batch_sizes=(1, 4), example_inputs=inputs, batch_dims={"x": 0})

    manager = WarmupManager(cache)
    spec = replace(toy_spec(*kernels(1), GRAPHS, PROOF), setup=setup)
    return manager.run(manager.plan(spec), progress=False, prove_again=prove_again)


def test_graphs_are_captured_and_proved_in_every_process(cache: Path) -> None:
    cold, warm = warm_up(cache, right), warm_up(cache, right)
    assert [unit.state for unit in cold.units] == ["built"] * 3
    assert [unit.state for unit in warm.units] == ["hit"] * 3
    for report in (cold, warm):
        assert [(row.batch_size, row.runner, row.verified) for row in report.buckets] == [
            (1, "graphs", True),
            (4, "graphs", True),
        ]


def fewest_inputs(report: WarmupReport) -> int:
    return min(row.trials for row in report.buckets)


def test_what_was_proved_before_is_compared_once_at_each_size_and_in_full_on_demand(cache: Path) -> None:
    assert fewest_inputs(warm_up(cache, right)) == 3
    warm = warm_up(cache, right)
    assert [row.trials for row in warm.buckets] == [1, 1]
    assert warm.units[-1].reason.startswith("proved before: one input for each graph")
    assert fewest_inputs(warm_up(cache, right, prove_again=True)) == 3


def test_a_proof_on_record_does_not_count_if_a_kernel_is_built_anew(cache: Path) -> None:
    warm_up(cache, right)
    next(cache.glob("*/triton/*/kernel.bin")).unlink()
    assert fewest_inputs(warm_up(cache, right)) == 3


def test_a_graph_that_goes_wrong_later_is_found_by_the_short_proof(cache: Path) -> None:
    warm_up(cache, right)
    report = warm_up(cache, frozen)
    assert [unit.state for unit in report.units] == ["hit", "hit", "failed"]
    assert "replay differs from eager at the same shape" in report.units[-1].reason


def test_a_wrong_graph_fails_its_proof_and_stays_unverified(cache: Path) -> None:
    report = warm_up(cache, frozen)
    assert [unit.state for unit in report.units] == ["built", "built", "failed"]
    assert report.units[-1].reason.startswith("VerificationError: ")
    assert not any(row.verified for row in report.buckets)
    assert not report.ok


def test_a_failed_capture_skips_its_proof(cache: Path) -> None:
    def broken(x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no such kernel")

    report = warm_up(cache, broken)
    assert [unit.state for unit in report.units] == ["built", "failed", "skipped"]
    assert report.units[-1].reason == "needs graphs, which failed"


@pytest.mark.gpu
def test_graphs_on_a_device_report_their_memory(cache: Path) -> None:
    def setup() -> GraphRunner:
        inputs = {"x": torch.randn(4, 3, device="cuda")}
        return GraphRunner(right, batch_sizes=(1, 4), example_inputs=inputs, batch_dims={"x": 0})

    manager = WarmupManager(cache)
    spec = replace(toy_spec(GRAPHS, PROOF), setup=setup, device="cuda")
    report = manager.run(manager.plan(spec), progress=False)
    assert report.ok
    assert report.device["type"] == "cuda"
    assert all(row.verified for row in report.buckets)
