"""Each surprise of captured graphs, and the way round it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from recorded_graph import RecordedGraph
from torch import Tensor
from toy_step import WIDTH, ToyStep, example, runner_of

from capture import GraphCaptureError, GraphRunner, VerificationError


@pytest.fixture(autouse=True)
def _recorded_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("capture.runner.EagerGraph", RecordedGraph)


def captured(step: Any, **options: Any) -> GraphRunner:
    runner = runner_of(step, **options)
    runner.capture(verify=False)
    return runner


def double(x: Tensor, slots: Tensor) -> Tensor:
    return x * 2


def test_next_call_overwrites_what_the_last_returned_unless_cloned() -> None:
    runner = captured(double)
    first, second = example(3), example(3)
    view, copy = runner(**first), runner(**first, clone=True)
    runner(**second)
    assert torch.equal(view, second["x"] * 2)
    assert torch.equal(copy, first["x"] * 2)


def test_call_of_another_batch_size_overwrites_it_too() -> None:
    runner = captured(double)
    view = runner(**example(3))
    other = example(7)
    runner(**other)
    assert torch.equal(view, other["x"][:3] * 2)


def test_output_fed_back_as_the_next_input_is_read_before_it_is_overwritten() -> None:
    runner = captured(double)
    inputs = example(3)
    out = runner(**inputs)
    out = runner(x=out, slots=inputs["slots"])
    assert torch.equal(out, inputs["x"] * 4)


def test_output_that_is_a_view_of_an_input_is_copied_out() -> None:
    runner = captured(lambda x, slots: x[:, :2])
    inputs = example(3)
    out = runner(**inputs)
    runner.static_inputs.poison()
    assert torch.equal(out, inputs["x"][:, :2])


def test_caller_may_reuse_its_input_tensors_at_once() -> None:
    runner = captured(double)
    inputs = example(3)
    wanted = inputs["x"] * 2
    out = runner(**inputs)
    inputs["x"].zero_()
    assert torch.equal(out, wanted)


def test_rows_of_an_earlier_larger_batch_do_not_leak_into_the_pads() -> None:
    runner = captured(lambda x, slots: x.sum(0, keepdim=True).expand_as(x))
    runner(**example(8))
    inputs = example(5)
    torch.testing.assert_close(runner(**inputs)[0], inputs["x"].sum(0))


def test_python_number_is_frozen_where_a_tensor_is_read_anew() -> None:
    scale, scale_tensor = [2.0], torch.tensor(2.0)
    frozen = captured(lambda x, slots: x * scale[0])
    read = captured(lambda x, slots: x * scale_tensor)
    scale[0] = 5.0
    scale_tensor.fill_(5.0)
    inputs = example(2)
    assert torch.equal(frozen(**inputs), inputs["x"] * 2)
    assert torch.equal(read(**inputs), inputs["x"] * 5)


def test_weights_may_change_in_place_but_not_be_replaced() -> None:
    layer = torch.nn.Linear(WIDTH, WIDTH)
    runner = captured(lambda x, slots: layer(x))
    inputs = example(3)
    with torch.no_grad():
        layer.weight.mul_(3)
        changed = layer(inputs["x"])
        torch.testing.assert_close(runner(**inputs), changed)
        layer.weight = torch.nn.Parameter(layer.weight * 2)
    torch.testing.assert_close(runner(**inputs), changed)


def test_replaced_state_stays_alive_for_the_graphs_that_point_to_it() -> None:
    step = ToyStep()
    runner = captured(step)
    captured_cache = step.cache
    step.cache = torch.zeros_like(step.cache)
    runner(**example(3))
    assert captured_cache.any()
    assert not step.cache.any()


@pytest.mark.parametrize(
    "step",
    [
        lambda x, slots: x * x.max().item(),
        lambda x, slots: x if x.sum() > 0 else -x,
        lambda x, slots: x * len(x.nonzero()),
        lambda x, slots: x * int(slots[0]),
    ],
    ids=["item", "bool", "nonzero", "int"],
)
def test_reading_a_value_on_the_host_names_the_step_and_the_cause(step: Any) -> None:
    def decode_step(x: Tensor, slots: Tensor) -> Tensor:
        return step(x, slots)

    with pytest.raises(GraphCaptureError, match=r"decode_step for a batch of 8 failed: .*capturing") as caught:
        runner_of(decode_step).capture()
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert caught.value.batch_size == 8


def test_pad_value_that_is_a_live_slot_lets_the_warm_up_write_there() -> None:
    step = ToyStep()
    step.cache.fill_(1)
    captured(step, pad_values={"slots": 0})
    assert not step.cache[0].any()


def test_branch_on_the_batch_size_is_taken_by_the_bucket_and_not_by_the_call() -> None:
    def step(x: Tensor, slots: Tensor) -> Tensor:
        return x * 2 if len(x) > 4 else x * 3

    runner = captured(step, batch_sizes=(8,))
    inputs = example(2)
    assert torch.equal(runner(**inputs), inputs["x"] * 2)
    with pytest.raises(VerificationError, match="eager with pad rows differs from eager without"):
        runner_of(step, batch_sizes=(8,)).capture()


def test_python_side_effects_happen_at_warm_up_and_capture_only_where_a_tensor_counts_replays() -> None:
    calls, replays = [], torch.zeros((), dtype=torch.int64)

    def step(x: Tensor, slots: Tensor) -> Tensor:
        calls.append(len(x))
        replays.add_(1)
        return x * 2

    runner = captured(step, batch_sizes=(8,), state={"replays": replays})
    ran, counted = len(calls), int(replays)
    for _ in range(5):
        runner(**example(3))
    assert len(calls) == ran
    assert int(replays) == counted + 5


def test_metadata_must_be_advanced_in_place_since_a_new_tensor_is_not_read() -> None:
    lengths = {"rebound": torch.zeros(1), "in place": torch.zeros(1)}
    runners = {name: captured(lambda x, slots, name=name: x + lengths[name]) for name in lengths}
    lengths["rebound"] = lengths["rebound"] + 1
    lengths["in place"].add_(1)
    inputs = example(2)
    assert torch.equal(runners["rebound"](**inputs), inputs["x"])
    assert torch.equal(runners["in place"](**inputs), inputs["x"] + 1)


def test_module_flags_are_those_of_the_capture() -> None:
    layer = torch.nn.Dropout(0.5).eval()
    runner = captured(lambda x, slots: layer(x))
    layer.train()
    inputs = example(8)
    assert torch.equal(runner(**inputs), inputs["x"])


def test_copy_of_a_module_is_not_what_its_graphs_read() -> None:
    layer = torch.nn.Linear(WIDTH, WIDTH)
    runner = captured(lambda x, slots: layer(x))
    copied = copy.deepcopy(layer)
    inputs = example(2)
    wanted = layer(inputs["x"])
    with torch.no_grad():
        copied.weight.zero_()
    torch.testing.assert_close(runner(**inputs), wanted.detach())


def test_nan_of_a_pad_row_is_reported_though_no_live_row_has_it() -> None:
    def step(x: Tensor, slots: Tensor) -> Tensor:
        return x / (slots >= 0)[:, None]

    assert captured(step)(**example(3)).isfinite().all()
    with pytest.raises(VerificationError, match="pad rows of output hold NaN"):
        runner_of(step).capture()


def test_nested_modules_with_hooks_run_them_at_capture_only() -> None:
    ran = []
    model = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH)))
    model[1][0].register_forward_hook(lambda *_: ran.append(1))
    runner = captured(lambda x, slots: model(x))
    hooks = len(ran)
    inputs = example(5)
    out = runner(**inputs)
    assert len(ran) == hooks
    torch.testing.assert_close(out, model(inputs["x"]).detach())
