"""The graph units over a real runner, and over one whose step is wrong."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from capture import CacheStore, GraphCaptureUnit, GraphRunner, Unit, VerifyUnit, WarmupManager, WarmupReport
from tests.warmup.toys import CallUnit, kernels, toy_spec

GRAPHS = GraphCaptureUnit(key="graphs", runner=lambda runner: runner)
PROOF = VerifyUnit(key="proof", graphs="graphs", runner=lambda runner: runner)


def right(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def frozen(x: torch.Tensor) -> torch.Tensor:
    return x * random.random()  # a host value: another one in every call


def warm_up(
    cache: Path, step: object, *units: Unit, batch_sizes: tuple[int, ...] = (1, 4), prove_again: bool = False
) -> WarmupReport:
    def setup() -> GraphRunner:
        inputs = {"x": torch.randn(batch_sizes[-1], 3)}
        return GraphRunner(step, batch_sizes=batch_sizes, example_inputs=inputs, batch_dims={"x": 0})

    manager = WarmupManager(cache)
    spec = replace(toy_spec(*kernels(1), GRAPHS, PROOF, *units), setup=setup)
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


@pytest.mark.parametrize("prove_again", [True, False], ids=["full", "short"])
def test_a_proof_that_fails_takes_the_one_on_record_away(prove_again: bool, cache: Path) -> None:
    warm_up(cache, right)
    warm_up(cache, frozen, prove_again=prove_again)
    assert fewest_inputs(warm_up(cache, right)) == 3
    assert fewest_inputs(warm_up(cache, right)) == 1


def test_a_failed_proof_that_stays_on_record_is_said(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(store: CacheStore, keys: object) -> None:
        raise OSError("No space left on device")

    warm_up(cache, right)
    monkeypatch.setattr(CacheStore, "forget", full)
    assert warm_up(cache, frozen).notes == ("proof failed, but stays on record: No space left on device",)


def test_a_kernel_that_is_built_anew_takes_the_proof_away_before_the_next_proof_ends(cache: Path) -> None:
    """What is killed between the two leaves a whole cache."""

    def killed() -> None:
        raise KeyboardInterrupt

    warm_up(cache, right)
    next(cache.glob("*/triton/*/kernel.bin")).unlink()
    with pytest.raises(KeyboardInterrupt):
        warm_up(cache, right, CallUnit(key="killed", call=killed))
    assert fewest_inputs(warm_up(cache, right)) == 3


def test_a_batch_size_that_was_never_proved_is_proved_in_full(cache: Path) -> None:
    warm_up(cache, right)
    assert fewest_inputs(warm_up(cache, right, batch_sizes=(1, 4, 6))) == 3
    assert fewest_inputs(warm_up(cache, right, batch_sizes=(1, 4, 6))) == 1


def test_batch_sizes_that_were_proved_stay_so_beside_others(cache: Path) -> None:
    warm_up(cache, right, batch_sizes=(1, 4))
    warm_up(cache, right, batch_sizes=(2, 6))
    assert fewest_inputs(warm_up(cache, right, batch_sizes=(1, 6))) == 1


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
