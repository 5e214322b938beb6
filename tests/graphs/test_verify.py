"""verify() finds planted bugs, and only those.

The graphs here record operators and replay them (recorded_graph.py), so that what a device graph freezes is
frozen on the CPU too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from recorded_graph import RecordedGraph
from torch import Tensor
from toy_step import SLOTS, WIDTH, ToyStep, example, runner_of, write_rows

from capture import CaptureError, VerificationError, verify
from capture.tolerance import distance, same_bits


@pytest.fixture(autouse=True)
def _recorded_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("capture.runner.EagerGraph", RecordedGraph)


def make_inputs(batch_size: int, generator: torch.Generator) -> dict[str, Tensor]:
    return {
        "x": torch.randn(batch_size, WIDTH, generator=generator),
        "slots": torch.randperm(SLOTS, generator=generator)[:batch_size],
    }


class FreezesHostValue(ToyStep):
    """Reads a Python number that changes from step to step."""

    length = 0

    def inputs(self, batch_size: int, generator: torch.Generator) -> dict[str, Tensor]:
        self.length += 1
        return make_inputs(batch_size, generator)

    def __call__(self, x: Tensor, slots: Tensor) -> Tensor:
        return super().__call__(x, slots) * self.length


class RebindsMetadata(ToyStep):
    """Its metadata is a new tensor for each step instead of one that is written in place."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.ones(1)

    def inputs(self, batch_size: int, generator: torch.Generator) -> dict[str, Tensor]:
        self.scale = torch.rand(1, generator=generator)
        return make_inputs(batch_size, generator)

    def __call__(self, x: Tensor, slots: Tensor) -> Tensor:
        return super().__call__(x, slots) * self.scale


class CachesMetadataByShape(ToyStep):
    """Computes metadata from the first inputs of a batch size and keeps it."""

    def __init__(self) -> None:
        super().__init__()
        self.offsets: dict[int, Tensor] = {}

    def __call__(self, x: Tensor, slots: Tensor) -> Tensor:
        offset = self.offsets.setdefault(len(x), slots.clone())
        return super().__call__(x, slots) + offset[:, None]


class PadsWriteSlotZero(ToyStep):
    def write(self, x: Tensor, slots: Tensor) -> None:
        super().write(x, slots.clamp_min(0))


class WritesToItsInput(ToyStep):
    def __call__(self, x: Tensor, slots: Tensor) -> Tensor:
        super().__call__(x, slots)
        return x.mul_(2)


class ForgetsTheLastRow(ToyStep):
    def __init__(self) -> None:
        super().__init__()
        self.out = torch.zeros(8, WIDTH)

    def __call__(self, x: Tensor, slots: Tensor) -> Tensor:
        out = self.out[: len(x)]
        out[: max(1, len(x) - 1)].copy_(super().__call__(x, slots)[: max(1, len(x) - 1)])
        return out


class ScratchOfASmallerMaximum(ToyStep):
    """Scratch for 4 requests: the rows of requests 4..7 fall on those of 0..3."""

    def __init__(self) -> None:
        super().__init__()
        self.scratch = torch.zeros(4, WIDTH)

    def __call__(self, x: Tensor, slots: Tensor) -> Tensor:
        out = super().__call__(x, slots)
        for start in range(0, len(out), 4):
            part = out[start : start + 4]
            self.scratch[: len(part)].copy_(part)
        return self.scratch.repeat(2, 1)[: len(x)]


class MixesRows(ToyStep):
    """Quantizes by the maximum over the batch, pads included."""

    def __call__(self, x: Tensor, slots: Tensor) -> Tensor:
        return super().__call__(x, slots) / x.abs().max()


class WritesWrongSlot(ToyStep):
    """Finds its slot from the end of the batch, where the pads are."""

    def write(self, x: Tensor, slots: Tensor) -> None:
        super().write(x, torch.where(slots >= 0, (slots + len(slots)) % SLOTS, slots))


class WritesWrongValue(ToyStep):
    """Leaves in the cache what depends on the number of rows; its result is right."""

    def __call__(self, x: Tensor, slots: Tensor) -> Tensor:
        out = super().__call__(x, slots)
        super().write(x * len(x), slots)
        return out


class WritesOnlyTheFirstTime(ToyStep):
    """A Python flag decides at capture that nothing is left to write."""

    def __init__(self) -> None:
        super().__init__()
        self.written = 0

    def inputs(self, batch_size: int, generator: torch.Generator) -> dict[str, Tensor]:
        self.written = 0
        return make_inputs(batch_size, generator)

    def write(self, x: Tensor, slots: Tensor) -> None:
        if self.written < 2 * 3:
            self.written += 1
            super().write(x, slots)

    def read(self, x: Tensor, slots: Tensor) -> Tensor:
        return x + 1


class Accumulates(ToyStep):
    """Adds to scratch that nobody clears."""

    def __init__(self) -> None:
        super().__init__()
        self.sums = torch.zeros(8, WIDTH)

    def __call__(self, x: Tensor, slots: Tensor) -> Tensor:
        return self.sums[: len(x)].add_(super().__call__(x, slots)).clone()


class IsRandom(ToyStep):
    def __call__(self, x: Tensor, slots: Tensor) -> Tensor:
        return super().__call__(x, slots) + 1e-6 * torch.rand_like(x)


class GivesNaN(ToyStep):
    def __call__(self, x: Tensor, slots: Tensor) -> Tensor:
        out = super().__call__(x, slots)
        return torch.where(torch.arange(len(x))[:, None] == len(x) - 1, torch.nan, out)


class ReadsUnusedSlots(ToyStep):
    """Sums over the whole cache with weight 0 on what is not its own."""

    def read(self, x: Tensor, slots: Tensor) -> Tensor:
        weights = (torch.arange(SLOTS) == slots[:, None]).float()
        return weights @ self.cache + x

    def poison(self, inputs: Mapping[str, Tensor]) -> None:
        unused = torch.ones(SLOTS, dtype=torch.bool)
        unused[inputs["slots"]] = False
        self.cache[unused] = torch.nan


BROKEN = {
    FreezesHostValue: "replay differs from eager at the same shape",
    RebindsMetadata: "replay differs from eager at the same shape",
    CachesMetadataByShape: "differs from eager",
    PadsWriteSlotZero: r"state 'cache' differs .* first, \(0, 0\), was changed by the replay only",
    WritesToItsInput: "the step wrote to its input 'x'",
    ForgetsTheLastRow: "replay differs from eager on the live rows",
    ScratchOfASmallerMaximum: r"bucket 8, 1 live: replay differs from eager on the live rows: output row 0",
    MixesRows: "eager with pad rows differs from eager without",
    WritesWrongSlot: r"state 'cache' differs in \d+ elements",
    WritesWrongValue: "state 'cache' was written with other values",
    WritesOnlyTheFirstTime: "changed by eager only",
    Accumulates: "a second replay of the same inputs differs: output row 0",
    IsRandom: "a second replay of the same inputs differs",
    GivesNaN: r"output row \d: NaN",
    ReadsUnusedSlots: "NaN",
}


@pytest.mark.parametrize("kind", BROKEN, ids=lambda kind: kind.__name__)
def test_broken_step_is_found(kind: Any) -> None:
    step = kind()
    runner = runner_of(
        step, make_inputs=getattr(step, "inputs", make_inputs), poison_state=getattr(step, "poison", None)
    )
    with pytest.raises(VerificationError, match=BROKEN[kind]) as caught:
        runner.capture()
    assert not caught.value.report.ok
    assert runner.captured == ()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("batch_sizes", [(1,), (8,), (1, 2, 3), (1, 4, 8)], ids=str)
def test_correct_step_passes_bitwise(dtype: torch.dtype, batch_sizes: tuple[int, ...]) -> None:
    report = runner_of(ToyStep(dtype=dtype), batch_sizes).capture().verification
    assert report is not None
    assert report.failures == ()
    assert [bucket.batch_size for bucket in report.buckets] == list(batch_sizes)
    assert all(bucket.bitwise for bucket in report.buckets)


def test_correct_step_passes_with_every_unused_slot_poisoned() -> None:
    step = ToyStep()
    runner = runner_of(step, make_inputs=make_inputs)
    runner.capture(verify=False)
    assert verify(runner, trials=6, poison_state=lambda inputs: ReadsUnusedSlots.poison(step, inputs)).ok


def test_correct_step_with_an_fp8_cache_and_a_counter_passes() -> None:
    cache = torch.zeros(SLOTS, WIDTH).to(torch.float8_e4m3fn)
    counts = torch.zeros(SLOTS, dtype=torch.int64)

    def step(x: Tensor, slots: Tensor) -> Tensor:
        rows = cache.float()
        write_rows(rows, x * 2, slots)
        cache.copy_(rows.to(cache.dtype))
        counts.add_((torch.arange(SLOTS)[:, None] == slots).sum(1))
        return rows[slots.clamp_min(0)]

    counts.fill_(3)
    report = runner_of(step, state={"cache": cache, "counts": counts}, make_inputs=make_inputs).capture()
    assert report.verification is not None
    assert report.verification.ok
    assert (counts == 3).all()


def test_state_is_restored_bit_by_bit() -> None:
    step = ToyStep()
    step.cache.normal_()[0, 0] = torch.nan
    before = step.cache.clone()
    runner_of(step).capture()
    assert same_bits(step.cache, before)


def test_state_is_restored_after_a_failure() -> None:
    step = PadsWriteSlotZero()
    runner = runner_of(step)
    runner.capture(verify=False)
    before = step.cache.normal_().clone()
    assert not verify(runner).ok
    assert torch.equal(step.cache, before)


def test_each_bucket_is_tried_full_alone_nearly_full_and_at_random() -> None:
    runner = runner_of(ToyStep())
    runner.capture(verify=False)
    report = verify(runner, trials=7)
    for bucket in report.buckets:
        size = bucket.batch_size
        assert {1, size, max(1, size - 1)} <= set(bucket.fillings)
        assert len(bucket.fillings) == 7
        assert all(1 <= filling <= size for filling in bucket.fillings)


def test_another_bucket_is_replayed_before_the_second_replay() -> None:
    runner = runner_of(ToyStep(), batch_sizes=(4, 8))
    runner.capture(verify=False)
    replayed = []
    for size, graph in runner._graphs.items():
        inner = graph.replay
        graph.replay = lambda size=size, inner=inner: (replayed.append(size), inner())
    small, large = verify(runner).buckets
    assert replayed == [4, 8, 4] * len(small.fillings) + [8, 4, 8] * len(large.fillings)


def test_same_seed_repeats_the_trials() -> None:
    runner = runner_of(ToyStep())
    runner.capture(verify=False)
    first = verify(runner, generator=torch.Generator().manual_seed(11))
    second = verify(runner, generator=torch.Generator().manual_seed(first.seed))
    assert first.seed == 11
    assert first.buckets == second.buckets


def test_poisoned_pads_can_be_switched_off_for_a_step_that_relies_on_zeros() -> None:
    runner = runner_of(lambda x, slots: x - 0 * x.sum())
    runner.capture(verify=False)
    assert not verify(runner).ok
    assert verify(runner, poison=False).ok


def test_declared_pad_values_are_not_poisoned() -> None:
    runner = runner_of(lambda x, slots: x / x.abs().amax().clamp_min(100), pad_values={"x": 0, "slots": -1})
    assert runner.capture().verification


def test_moved_state_is_named() -> None:
    step = ToyStep()
    state = {"cache": step.cache}
    runner = runner_of(step, state=state)
    runner.capture(verify=False)
    step.cache = state["cache"] = step.cache.clone()
    assert any("state cache is no longer at its captured address" in line for line in verify(runner).failures)


def test_make_inputs_of_another_batch_size_is_refused() -> None:
    runner = runner_of(ToyStep(), make_inputs=lambda batch_size, generator: example(2))
    with pytest.raises(ValueError, match=r"make_inputs\(1, generator\) returned inputs of batch size 2"):
        runner.capture()


def test_trials_must_be_positive_and_a_runner_captured() -> None:
    runner = runner_of(ToyStep())
    with pytest.raises(ValueError, match="at least 1"):
        verify(runner, trials=0)
    with pytest.raises(CaptureError, match="not captured"):
        verify(runner)


def test_long_reports_are_cut_in_the_message_but_not_in_the_report() -> None:
    runner = runner_of(GivesNaN(), batch_sizes=(1, 2, 4, 8))
    with pytest.raises(VerificationError, match=r"batch sizes 1, 2, 4, 8 .*\(seed \d+\)[\s\S]*and \d+ more") as caught:
        runner.capture()
    assert len(caught.value.report.failures) > 10


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_distance_passes_rounding_and_finds_one_wrong_row(dtype: torch.dtype) -> None:
    expected = torch.randn(64, 128).to(dtype)
    actual = (expected.double() * (1 + torch.finfo(dtype).eps * (torch.rand(64, 128, dtype=torch.float64) - 0.5))).to(
        dtype
    )
    assert distance(actual, expected).ok
    actual[37] *= 1 + (0.2 if dtype.itemsize == 2 else 1000 * torch.finfo(dtype).eps)
    found = distance(actual, expected)
    assert not found.ok
    assert found.row == 37


@pytest.mark.parametrize(
    ("actual", "expected", "ok"),
    [
        ([1.0, float("inf")], [1.0, float("inf")], True),
        ([1.0, float("inf")], [1.0, float("-inf")], False),
        ([1.0, 2.0], [1.0, float("inf")], False),
        ([float("nan")], [float("nan")], False),
        ([0.0], [0.0], True),
        ([1e-3], [0.0], False),
        ([3], [3], True),
        ([3], [4], False),
        ([1.0], [1], False),
        ([], [], True),
    ],
    ids=["inf", "other-inf", "one-inf", "nan", "zero", "not-zero", "int", "other-int", "dtype", "empty"],
)
def test_distance_at_the_edges(actual: list[float], expected: list[float], ok: bool) -> None:
    assert distance(torch.tensor(actual), torch.tensor(expected)).ok is ok
    assert distance(torch.tensor(actual), torch.tensor(expected), None).ok is ok
