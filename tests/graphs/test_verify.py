"""verify() finds planted bugs, and only those.

The graphs here record operators and replay them (recorded_graph.py), so that what a device graph freezes is
frozen on the CPU too.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from broken_steps import BROKEN, GivesNaN, PadsWriteSlotZero, poison_unused
from recorded_graph import RecordedGraph
from torch import Tensor
from toy_step import SLOTS, WIDTH, ToyStep, example, make_inputs, runner_of, write_rows

from capture import CaptureError, VerificationError, verify
from capture.tolerance import distance, same_bits


@pytest.fixture(autouse=True)
def _recorded_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("capture.runner.EagerGraph", RecordedGraph)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("kind", BROKEN, ids=lambda kind: kind.__name__)
def test_broken_step_is_found(kind: Any, device: str) -> None:
    with torch.device(device):
        step = kind()
        runner = runner_of(
            step,
            state=getattr(step, "state", None),
            make_inputs=getattr(step, "inputs", make_inputs),
            poison_state=getattr(step, "poison", None),
        )
        with pytest.raises(VerificationError, match=BROKEN[kind]) as caught:
            runner.capture()
    assert not caught.value.report.ok
    assert runner.captured == ()


FROZEN = [kind for kind, found in BROKEN.items() if found == "replay differs from eager at the same shape"]


@pytest.mark.parametrize("kind", FROZEN, ids=lambda kind: kind.__name__)
def test_what_a_capture_froze_is_found_by_the_short_proof_too(kind: Any) -> None:
    step = kind()
    runner = runner_of(
        step, make_inputs=getattr(step, "inputs", make_inputs), poison_state=getattr(step, "poison", None)
    )
    runner.capture(verify=False)
    assert any(BROKEN[kind] in line for line in verify(runner, trials=1, again=True).failures)


def test_the_short_proof_runs_the_step_once_for_each_trial_and_passes_the_correct_one() -> None:
    step = ToyStep()
    sizes: list[int] = []
    runner = runner_of(lambda x, slots: (sizes.append(len(x)), step(x, slots))[1], state={"cache": step.cache})
    runner.capture(verify=False)
    del sizes[:]
    report = verify(runner, trials=2, again=True)
    assert report.failures == ()
    assert all(bucket.bitwise and len(bucket.fillings) == 2 for bucket in report.buckets)
    assert sizes == [size for size in runner.captured for _ in range(2)]


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
    assert verify(runner, trials=6, poison_state=lambda inputs: poison_unused(step.cache, inputs["slots"])).ok


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


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("scale", [1, 20, 100, 10_000])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_pads_that_write_zeros_are_found_beside_large_values(dtype: torch.dtype, scale: int, device: str) -> None:
    cache = torch.zeros(SLOTS, WIDTH, dtype=dtype, device=device)

    def step(x: Tensor, slots: Tensor) -> Tensor:
        write_rows(cache, x * scale, slots.clamp_min(0))
        return x + 1

    runner = runner_of(
        step,
        example_inputs=example(8, device, dtype),
        state={"cache": cache},
        pad_values={"slots": -1, "x": 0},
    )
    with pytest.raises(VerificationError, match=r"state 'cache' differs .* was changed by the replay only"):
        runner.capture()


@pytest.mark.parametrize("again", [False, True], ids=["full", "again"])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_value_that_was_there_by_chance_and_is_missed_by_rounding_is_no_difference(device: str, again: bool) -> None:
    width = 8192  # 16 bits hit an old value about once in 500
    cache = torch.zeros(SLOTS, width, dtype=torch.bfloat16, device=device)
    runs: list[int] = []

    def step(x: Tensor, slots: Tensor) -> Tensor:
        runs.append(len(x))
        noise = (len(x) + (len(runs) if again else 0)) % 5 * 2**-10  # as of a kernel chosen by the number of rows
        write_rows(cache, x.float().mul(1.1 + noise).bfloat16(), slots)
        return x + 1

    inputs = {"x": torch.randn(8, width, device=device).bfloat16(), "slots": torch.arange(8, device=device)}
    runner = runner_of(step, (8,), example_inputs=inputs, state={"cache": cache})
    runner.capture(verify=False)
    del runs[:]
    report = verify(runner, trials=4, again=again)
    assert report.failures == ()
    assert len(runs) > (1 if again else 2) * len(report.buckets[0].fillings)  # more than all trials: some were in doubt


@pytest.mark.parametrize("again", [False, True], ids=["full", "again"])
def test_a_nan_that_eager_gives_too_is_found(again: bool) -> None:
    runner = runner_of(lambda x, slots: x.where(x > 0, torch.nan))
    runner.capture(verify=False)
    assert any("NaN" in line for line in verify(runner, again=again).failures)


def test_a_nan_that_eager_writes_into_the_state_too_is_found() -> None:
    step = ToyStep()
    runner = runner_of(lambda x, slots: (step.write(x.log(), slots), x + 1)[1], state={"cache": step.cache})
    runner.capture(verify=False)
    assert any("state 'cache' was written with NaN" in line for line in verify(runner).failures)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_state_is_restored_bit_by_bit(device: str, dtype: torch.dtype) -> None:
    with torch.device(device):
        step = ToyStep(dtype=dtype)
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
    wanted = []
    for size, other, bucket in ((4, 8, small), (8, 4, large)):
        for filling in bucket.fillings:
            wanted += [size, other, size] if filling == size else [size, size, other, size]  # with pads: once more
    assert replayed == wanted


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


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128], ids=str)
def test_complex_results_are_compared_as_their_parts(dtype: torch.dtype) -> None:
    expected = torch.randn(4, 8, dtype=dtype)
    part = expected.real.dtype
    actual = torch.complex(expected.real * (1 + torch.finfo(part).eps), expected.imag)
    assert distance(actual, expected).ok
    actual.imag[2] *= 1.5
    found = distance(actual, expected)
    assert (found.ok, found.row) == (False, 2)
    assert not distance(actual * torch.nan, actual * torch.nan).ok


def test_a_nan_has_the_same_bits_as_itself_also_in_a_complex_tensor() -> None:
    values = torch.tensor([complex("nan"), 0j], dtype=torch.complex128)
    assert same_bits(values, values.clone())
    assert not same_bits(values, torch.tensor([complex("nan"), -0j], dtype=torch.complex128))


@pytest.mark.parametrize("size", [1e-12, 1e-9])
def test_pads_that_change_a_double_state_a_little_are_found(size: float) -> None:
    state = torch.zeros(4, dtype=torch.float64)

    def step(x: Tensor, slots: Tensor) -> Tensor:
        state.add_((slots < 0).sum() * size)
        return x * 1

    with pytest.raises(VerificationError, match="state 'state'"):
        runner_of(step, state={"state": state}, make_inputs=make_inputs).capture()


def test_a_complex_nan_in_a_pad_row_is_found() -> None:
    def step(x: Tensor, slots: Tensor) -> Tensor:
        return torch.complex(x, torch.where(slots[:, None] < 0, torch.nan, x))

    with pytest.raises(VerificationError, match="hold NaN"):
        runner_of(step, state={}, make_inputs=make_inputs).capture()
