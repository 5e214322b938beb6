"""GraphRunner on the CPU: padding, outputs, errors, life cycle. The device: test_runner_gpu.py."""

from __future__ import annotations

import copy
import gc
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor
from toy_step import SLOTS, WIDTH, ToyStep, example, runner_of

from capture import (
    BatchDim,
    CaptureError,
    GraphCaptureError,
    GraphRunner,
    InputMismatchError,
    NotCapturedError,
)
from capture.inputs import RandomInputs


def captured(step: Any = None, **options: Any) -> GraphRunner:
    runner = runner_of(step or ToyStep(), **options)
    runner.capture(verify=False)
    return runner


@pytest.mark.parametrize("batch_size", range(1, 9))
def test_every_batch_size_gives_what_eager_gives(batch_size: int) -> None:
    runner, twin = captured(), ToyStep()
    twin.weight = runner.step.weight
    inputs = example(batch_size)
    out = runner(**inputs)
    assert out.shape == (batch_size, WIDTH)
    torch.testing.assert_close(out, twin(**inputs))
    torch.testing.assert_close(runner.step.cache, twin.cache)


@pytest.mark.parametrize(("batch_size", "bucket"), [(1, 1), (2, 4), (4, 4), (5, 8)])
def test_call_replays_the_smallest_bucket_that_fits(batch_size: int, bucket: int) -> None:
    runner = captured()
    ran = []
    for size, graph in runner._graphs.items():
        graph.replay = lambda size=size: ran.append(size)
    runner(**example(batch_size))
    assert ran == [bucket]


def test_warm_up_and_capture_write_nothing_into_live_state() -> None:
    step = ToyStep()
    step.cache.normal_()
    before = step.cache.clone()
    captured(step)
    assert torch.equal(step.cache, before)


def test_each_size_is_warmed_before_the_first_capture_and_captured_largest_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    events: list[tuple[str, int]] = []

    def step(x: Tensor, slots: Tensor) -> Tensor:
        events.append(("run", len(x)))
        return x + slots[:, None]

    class CountingGraph:
        def __init__(self, body: Any) -> None:
            events.append(("capture", 0))
            body()

    monkeypatch.setattr("capture.runner.EagerGraph", CountingGraph)
    captured(step)
    warm, graphs = events[:3], events[3:]
    assert warm == [("run", size) for size in (1, 8, 4)]
    assert graphs == [event for size in (8, 4, 1) for event in (("capture", 0), ("run", size))]


def test_garbage_collection_is_off_during_capture_and_back_on_after(monkeypatch: pytest.MonkeyPatch) -> None:
    states = []

    class Graph:
        def __init__(self, body: Any) -> None:
            states.append(gc.isenabled())

    monkeypatch.setattr("capture.runner.EagerGraph", Graph)
    captured()
    assert states == [False] * 3
    assert gc.isenabled()


def test_report_has_each_bucket_largest_first() -> None:
    report = runner_of(ToyStep()).capture()
    assert [bucket.batch_size for bucket in report.buckets] == [8, 4, 1]
    assert all(bucket.verified and bucket.capture_seconds > 0 for bucket in report.buckets)
    assert report.verification is not None
    assert report.verification.ok
    assert report.seconds >= sum(bucket.capture_seconds for bucket in report.buckets)


def test_report_without_verification_says_so() -> None:
    report = runner_of(ToyStep()).capture(verify=False)
    assert report.verification is None
    assert not any(bucket.verified for bucket in report.buckets)


def test_outputs_keep_the_structure_that_the_step_returns() -> None:
    def step(x: Tensor, slots: Tensor) -> dict[str, Any]:
        tokens = x.repeat_interleave(2, 0)
        return {"row": x * 2, "parts": (tokens, slots.cumsum(0)), "across": x.T + 1, "total": x.new_ones(())}

    out = captured(step)(**(inputs := example(3)))
    assert list(out) == ["row", "parts", "across", "total"]
    assert isinstance(out["parts"], tuple)
    assert torch.equal(out["row"], inputs["x"] * 2)
    assert torch.equal(out["parts"][0], inputs["x"].repeat_interleave(2, 0))
    assert torch.equal(out["across"], inputs["x"].T + 1)
    assert out["total"].shape == ()


def test_one_bucket_alone_finds_the_batch_dimension_of_its_outputs() -> None:
    runner = captured(lambda x, slots: (x.T @ x, x), batch_sizes=(8,))
    gram, rows = runner(**example(3))
    assert gram.shape == (WIDTH, WIDTH)
    assert rows.shape == (3, WIDTH)


def test_largest_batch_size_one_needs_no_second_size() -> None:
    assert captured(batch_sizes=(1,))(**example(1)).shape == (1, WIDTH)


def test_query_tokens_and_indptr_follow_the_batch() -> None:
    def step(tokens: Tensor, indptr: Tensor) -> Tensor:
        lengths = (indptr[1:] - indptr[:-1]).repeat_interleave(3)
        return tokens * lengths[:, None]

    runner = GraphRunner(
        step,
        batch_sizes=[2, 4],
        example_inputs={"tokens": torch.randn(12, 2), "indptr": torch.arange(5) * 2},
        batch_dims={"tokens": 0, "indptr": BatchDim(0, extra=1)},
        pad_values={"indptr": "last"},
    )
    assert runner.capture().verification
    tokens, indptr = torch.randn(9, 2), torch.tensor([0, 1, 4, 9])
    assert torch.equal(runner(tokens=tokens, indptr=indptr), step(tokens, indptr))


def test_call_before_capture_is_refused() -> None:
    with pytest.raises(NotCapturedError, match="captured: none"):
        runner_of(ToyStep(), fallback="eager")(**example(1))


def test_batch_above_the_largest_is_refused_with_the_list_of_sizes() -> None:
    with pytest.raises(NotCapturedError, match=r"batch of 9 \(captured: 1, 4, 8\)") as caught:
        captured()(**example(9))
    assert caught.value.captured == (1, 4, 8)


def test_batch_above_the_largest_runs_eagerly_if_asked() -> None:
    runner = captured(fallback="eager")
    inputs = example(9)
    assert torch.equal(runner(**inputs), runner.step(**inputs))
    with pytest.raises(InputMismatchError, match="dtype"):
        runner(**(inputs | {"x": inputs["x"].double()}))


def test_mismatched_input_is_refused_before_anything_is_written() -> None:
    runner = captured()
    before = runner.static_inputs.views(8)["x"].clone()
    inputs = example(3)
    with pytest.raises(InputMismatchError, match="'slots'"):
        runner(x=inputs["x"], slots=inputs["slots"].int())
    assert torch.equal(runner.static_inputs.views(8)["x"], before)


def test_call_needs_no_grad_and_outputs_carry_none() -> None:
    weight = torch.randn(WIDTH, WIDTH, requires_grad=True)
    out = captured(lambda x, slots: x @ weight)(**example(2))
    assert not out.requires_grad


def test_calls_work_inside_and_outside_inference_mode() -> None:
    with torch.inference_mode():
        runner = captured(lambda x, slots: x * 2)
    inputs = example(2)
    assert torch.equal(runner(**inputs), inputs["x"] * 2)
    with torch.inference_mode():
        assert torch.equal(runner(**inputs), inputs["x"] * 2)


def test_caller_may_write_static_inputs_and_replay_without_a_copy() -> None:
    runner = captured(lambda x, slots: x * 2)
    view = runner.static_inputs.views(4)["x"].normal_()
    runner.replay(4)
    assert torch.equal(runner.static_outputs.live(4, 4)[0], view * 2)
    with pytest.raises(NotCapturedError):
        runner.replay(3)


def test_moved_names_a_state_that_was_rebound_or_resized() -> None:
    step = ToyStep()
    state = {"cache": step.cache}
    runner = captured(step, state=state)
    assert runner.moved() == ()
    state["cache"] = step.cache.clone()
    assert runner.moved() == ("state cache",)


def test_close_frees_graphs_buffers_and_step_output_and_is_idempotent() -> None:
    runner = captured()
    runner.close()
    runner.close()
    for use in (lambda: runner(**example(1)), runner.capture, runner.moved):
        with pytest.raises(CaptureError, match="closed"):
            use()
    assert runner.captured == ()


def test_context_manager_closes() -> None:
    with captured() as runner:
        runner(**example(1))
    with pytest.raises(CaptureError, match="closed"):
        runner(**example(1))


def test_views_returned_before_close_stay_readable() -> None:
    runner = captured(lambda x, slots: x * 2)
    inputs = example(2)
    out = runner(**inputs)
    runner.close()
    assert torch.equal(out, inputs["x"] * 2)


@pytest.mark.parametrize("use", [pickle.dumps, copy.copy, copy.deepcopy], ids=["pickle", "copy", "deepcopy"])
def test_pickling_and_copying_are_refused_with_the_reason(use: Any) -> None:
    with pytest.raises(TypeError, match="device addresses of this process"):
        use(captured())


def test_second_capture_is_refused() -> None:
    with pytest.raises(CaptureError, match="captured already"):
        captured().capture()


def test_failed_capture_leaves_nothing_captured_and_can_be_tried_again() -> None:
    broken = True

    def step(x: Tensor, slots: Tensor) -> Tensor:
        if broken and len(x) == 4:
            raise RuntimeError("not today")
        return x * 2

    runner = runner_of(step)
    with pytest.raises(RuntimeError, match="not today") as caught:
        runner.capture()
    assert "batch of 4" in caught.value.__notes__[0]
    assert runner.captured == ()
    broken = False
    runner.capture()
    assert runner.captured == (1, 4, 8)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no"), RuntimeError("HIP error: out of memory")])
def test_out_of_memory_names_the_bucket_and_four_remedies(error: Exception) -> None:
    def step(x: Tensor, slots: Tensor) -> Tensor:
        if len(x) == 4:
            raise error
        return x

    with pytest.raises(GraphCaptureError, match=r"batch of 4.*\(1\).*\(2\).*\(3\).*\(4\)") as caught:
        runner_of(step).capture()
    assert caught.value.batch_size == 4
    assert caught.value.__cause__ is error


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (lambda x, slots: (x, 3), r"output\[1\] is int: a Python value would be frozen"),
        (lambda x, slots: {"a": x, "b": None}, r"output\['b'\] is NoneType"),
        (lambda x, slots: x if len(x) > 1 else (x,), "structure must not depend"),
        (lambda x, slots: x.new_zeros(len(x), len(x)), "one dimension at most may grow"),
        (lambda x, slots: x.new_zeros(len(x) ** 2, 3), "the same number of rows for each request"),
        (lambda x, slots: x.double() if len(x) == 4 else x, r"float64 at a batch of 4"),
    ],
    ids=["int", "none", "structure", "two-dims", "square", "dtype"],
)
def test_results_that_cannot_be_stored_are_refused(step: Any, message: str) -> None:
    with pytest.raises(GraphCaptureError, match=message):
        runner_of(step).capture()


def test_returning_the_state_itself_is_refused() -> None:
    class ReturnsCache(ToyStep):
        def __call__(self, x: Tensor, slots: Tensor) -> Any:
            return super().__call__(x, slots), self.cache

    with pytest.raises(GraphCaptureError, match=r"output\[1\] is memory of state 'cache'"):
        runner_of(ReturnsCache()).capture()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fallback": "compile"}, 'must be "eager" or None'),
        ({"example_inputs": {"clone": torch.zeros(8)}}, "cannot be called 'clone'"),
        ({"example_inputs": {}}, "example_inputs is empty"),
        ({"batch_sizes": ()}, "batch_sizes is empty"),
    ],
    ids=["fallback", "clone", "no-inputs", "no-sizes"],
)
def test_construction_refuses_what_cannot_work(options: dict[str, Any], message: str) -> None:
    settings: dict[str, Any] = {"batch_sizes": (8,), "example_inputs": example(8)}
    settings |= {"batch_dims": {"x": 0, "slots": 0}} | options
    with pytest.raises(ValueError, match=message):
        GraphRunner(ToyStep(), **settings)


def test_default_random_inputs_keep_the_rows_of_one_request_together_and_use_none_twice() -> None:
    slots = torch.randperm(SLOTS)[:16]
    runner = GraphRunner(
        lambda x, slots, table: x,
        batch_sizes=[8],
        example_inputs={"x": torch.randn(8, 2) * 3 + 5, "slots": slots, "table": slots[::2].clone()},
        batch_dims={"x": 0, "slots": 0, "table": 0},
    )
    assert isinstance(runner.make_inputs, RandomInputs)
    drawn = runner.make_inputs(5, torch.Generator().manual_seed(3))
    pairs = drawn["slots"].view(5, 2)
    assert torch.equal(pairs[:, 0], drawn["table"])
    assert len(set(drawn["slots"].tolist())) == 10
    assert {tuple(pair) for pair in pairs.tolist()} <= {tuple(pair) for pair in slots.view(8, 2).tolist()}
    assert drawn["x"].shape == (5, 2)


def test_an_empty_input_is_verified_without_a_warning() -> None:
    inputs = {"x": torch.randn(4, 2), "none": torch.zeros(4, 0)}
    runner = GraphRunner(
        lambda x, none: x * 2, batch_sizes=[1, 4], example_inputs=inputs, batch_dims={"x": 0, "none": 0}
    )
    report = runner.capture().verification
    assert report is not None
    assert report.ok
