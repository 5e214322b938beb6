"""Static buffers: filling, padding, checks, poison."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from capture import BatchDim, InputMismatchError
from capture.buffers import StaticBuffers, poison_

CPU = torch.device("cpu")


def make_buffers(**changes: Any) -> StaticBuffers:
    """Largest batch 4, two query tokens a request."""
    settings: dict[str, Any] = {
        "example_inputs": {
            "x": torch.zeros(8, 3),
            "indptr": torch.zeros(5, dtype=torch.int32),
            "positions": torch.zeros(3, 4, dtype=torch.int64),
            "scale": torch.full((2,), 5.0),
        },
        "batch_dims": {"x": 0, "indptr": BatchDim(0, extra=1), "positions": 1, "scale": None},
        "pad_values": {"indptr": "last", "positions": -1},
        "max_batch_size": 4,
        "device": CPU,
    }
    return StaticBuffers(**(settings | changes))


def make_inputs(batch_size: int) -> dict[str, Tensor]:
    return {
        "x": torch.randn(2 * batch_size, 3),
        "indptr": torch.arange(batch_size + 1, dtype=torch.int32) * 7,
        "positions": torch.randint(0, 9, (3, batch_size)),
        "scale": torch.randn(2),
    }


@pytest.mark.parametrize(("batch_size", "bucket"), [(1, 1), (1, 4), (2, 3), (4, 4)])
def test_fill_writes_live_rows_and_pads_the_rest(batch_size: int, bucket: int) -> None:
    buffers, inputs = make_buffers(), make_inputs(batch_size)
    buffers.poison()
    buffers.fill(inputs, buffers.check(inputs), bucket)
    views, pads = buffers.views(bucket), bucket - batch_size
    assert torch.equal(views["x"], torch.cat([inputs["x"], torch.zeros(2 * pads, 3)]))
    assert torch.equal(views["indptr"], torch.cat([inputs["indptr"], inputs["indptr"][-1:].expand(pads)]))
    assert torch.equal(views["positions"], torch.cat([inputs["positions"], torch.full((3, pads), -1)], 1))
    assert torch.equal(views["scale"], inputs["scale"])


def test_every_view_is_contiguous_and_starts_at_the_same_address() -> None:
    buffers = make_buffers()
    for name, largest in buffers.views(4).items():
        for bucket in (1, 2, 3):
            view = buffers.views(bucket)[name]
            assert view.is_contiguous()
            assert view.data_ptr() == largest.data_ptr()


def test_fill_reads_inputs_that_are_not_contiguous() -> None:
    buffers, inputs = make_buffers(), make_inputs(2)
    inputs["x"] = torch.randn(3, 4).T
    inputs["positions"] = torch.randint(0, 9, (2, 3)).T
    buffers.fill(inputs, buffers.check(inputs), 4)
    assert torch.equal(buffers.views(4)["x"][:4], inputs["x"])
    assert torch.equal(buffers.views(4)["positions"][:, :2], inputs["positions"])


def test_fill_reads_inputs_that_require_grad_without_recording_it() -> None:
    buffers, inputs = make_buffers(), make_inputs(2)
    inputs["x"].requires_grad_()
    buffers.fill(inputs, 2, 4)
    assert not buffers.views(4)["x"].requires_grad


def test_pad_all_makes_every_row_a_pad_row() -> None:
    buffers, inputs = make_buffers(), make_inputs(4)
    buffers.fill(inputs, 4, 4)
    buffers.pad_all(4)
    views = buffers.views(4)
    assert not views["x"].any()
    assert not views["indptr"].any()
    assert (views["positions"] == -1).all()
    assert torch.equal(views["scale"], inputs["scale"])


def test_input_without_batch_dimension_starts_as_its_example() -> None:
    assert (make_buffers().views(2)["scale"] == 5).all()


def test_poison_shows_in_every_buffer() -> None:
    buffers = make_buffers()
    buffers.poison()
    views = buffers.views(4)
    assert views["x"].isnan().all()
    assert (views["indptr"] == torch.iinfo(torch.int32).max).all()


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16, torch.uint8, torch.bool], ids=str)
def test_poison_fills_every_dtype(dtype: torch.dtype) -> None:
    tensor = torch.zeros(3).to(dtype)
    poison_(tensor)
    values = tensor.float()
    assert values.isnan().all() or (values == values.new_tensor(1 if dtype is torch.bool else 255)).all()


def test_poisoned_pads_spare_live_rows_integers_and_declared_values() -> None:
    buffers, inputs = make_buffers(pad_values={"positions": -1, "indptr": "last"}), make_inputs(2)
    buffers.fill(inputs, 2, 4)
    buffers.poison_pads(2, 4)
    views = buffers.views(4)
    assert torch.equal(views["x"][:4], inputs["x"])
    assert views["x"][4:].isnan().all()
    assert (views["positions"][:, 2:] == -1).all()
    declared = make_buffers(pad_values={"x": 1.0})
    declared.fill(inputs, 2, 4)
    declared.poison_pads(2, 4)
    assert (declared.views(4)["x"][4:] == 1).all()


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        (
            "x",
            torch.zeros(4, 3, dtype=torch.float16),
            r"'x' must have dtype torch.float32 .* got torch.float16",
        ),
        (
            "x",
            torch.zeros(4, 5),
            r"'x' must have shape \(4, 3\) .* got \(4, 5\); at capture it was \[2\*B, 3\]",
        ),
        ("x", torch.zeros(5, 3), r"'x' must have 2\*B rows along dim 0 .* got 5"),
        ("x", torch.zeros(0, 3), r"at least 1, got 0"),
        ("x", torch.zeros(4), r"'x' must have as many dimensions .* got shape \(4,\)"),
        ("x", [1.0], r"'x' must be a tensor, got list"),
        ("x", torch.zeros(4, 3, device="meta"), r"'x' must be on cpu as at capture, got meta"),
        ("scale", 2.0, r"'scale' must be a tensor, got float"),
        (
            "positions",
            torch.zeros(3, 3, dtype=torch.int64),
            r"'positions' .* \(3, 2\) for a batch of 2 .*'x'",
        ),
        ("indptr", torch.zeros(4, dtype=torch.int32), r"'indptr' .* \(3,\) .* \[B\+1\]"),
    ],
    ids=["dtype", "width", "odd-rows", "empty", "rank", "list", "device", "float", "rows", "indptr"],
)
def test_mismatch_names_the_input_and_says_from_what_to_what(name: str, value: Any, message: str) -> None:
    inputs = make_inputs(2) | {name: value}
    with pytest.raises(InputMismatchError, match=message):
        make_buffers().check(inputs)


def test_wrong_names_are_listed() -> None:
    inputs = make_inputs(2)
    inputs["y"] = inputs.pop("x")
    with pytest.raises(InputMismatchError, match=r"missing \['x'\], unknown \['y'\]"):
        make_buffers().check(inputs)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_dims": {"x": 0}}, "must name every input"),
        ({"pad_values": {"y": 0}}, "names no input"),
        (
            {"batch_dims": dict.fromkeys(["x", "indptr", "positions", "scale"])},
            "no input has a batch dimension",
        ),
        ({"pad_values": {"positions": float("nan")}}, "pad value of 'positions', nan, is no torch.int64"),
        ({"pad_values": {"positions": 0.5}}, "pad value of 'positions', 0.5, is no torch.int64"),
        ({"pad_values": {"positions": 2**63}}, "pad value of 'positions', 9223372036854775808, is no torch.int64"),
        ({"pad_values": {"x": "first"}}, "pad value of 'x', 'first', is no torch.float32"),
        ({"max_batch_size": 3}, "no multiple of the largest batch size 3"),
        ({"batch_dims": {"x": 2, "indptr": None, "positions": 1, "scale": None}}, "no dim 2"),
        (
            {"batch_dims": {"x": BatchDim(0, 3), "indptr": 0, "positions": 1, "scale": None}},
            "must have 12 rows",
        ),
    ],
    ids=[
        "names",
        "pad-name",
        "no-batch",
        "pad-nan",
        "pad-fraction",
        "pad-large",
        "pad-word",
        "multiple",
        "dim",
        "declared",
    ],
)
def test_examples_that_do_not_fit_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_buffers(**changes)


def test_batch_dim_refuses_negative_numbers() -> None:
    with pytest.raises(ValueError, match="dim >= 0"):
        BatchDim(-1)
