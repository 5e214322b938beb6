"""How a device graph is recorded and ordered; fakes record the device's calls. Real ones: *_gpu.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from toy_step import ToyStep, example, runner_of

from capture.graphs import DeviceGraph


class FakeGraph:
    """Stands in for torch.cuda.CUDAGraph; its first capture_end fails if asked."""

    log: list[Any]
    end_fails = False

    def capture_begin(self, **options: Any) -> None:
        self.log.append(("begin", options))

    def capture_end(self) -> None:
        self.log.append("end")
        if type(self).end_fails and self.log.count("end") < 3:
            raise RuntimeError("capture invalidated")

    def replay(self) -> None:
        self.log.append("replay")

    def reset(self) -> None:
        self.log.append("reset")


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    calls: list[Any] = []
    monkeypatch.setattr(FakeGraph, "log", calls, raising=False)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", FakeGraph)
    return calls


def test_capture_lets_other_threads_synchronize_and_uses_the_pool(log: list[Any]) -> None:
    graph = DeviceGraph(lambda: log.append("body"), pool=(0, 7))
    graph.replay()
    graph.reset()
    options = {"pool": (0, 7), "capture_error_mode": "thread_local"}
    assert log == [("begin", options), "body", "end", "replay", "reset"]


def test_failed_body_ends_the_capture_and_frees_the_graph(log: list[Any]) -> None:
    def body() -> None:
        raise ValueError("planted")

    with pytest.raises(ValueError, match="planted"):
        DeviceGraph(body, pool=(0, 7))
    assert log[1:] == ["end", "reset"]


def test_capture_that_the_driver_refuses_to_end_is_closed_for_torch_too(
    log: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stream:
        def synchronize(self) -> None:
            log.append("synchronize")

    zeros = torch.zeros
    monkeypatch.setattr(FakeGraph, "end_fails", True)
    monkeypatch.setattr(torch, "zeros", lambda *shape, device: zeros(*shape))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    for name in ("_cuda_endAllocateToPool", "_cuda_releasePool"):
        call = lambda device, pool, name=name: log.append((name, device, pool))  # noqa: E731
        monkeypatch.setattr(torch._C, name, call, raising=False)

    with pytest.raises(RuntimeError, match="capture invalidated"):
        DeviceGraph(lambda: None, pool=(0, 7))
    assert log[1:5] == [
        "end",
        "end",
        ("_cuda_endAllocateToPool", 3, (0, 7)),
        ("_cuda_releasePool", 3, (0, 7)),
    ]
    assert log[5:] == ["synchronize", ("begin", {"capture_error_mode": "thread_local"}), "end", "reset"]


def test_call_waits_for_the_stream_of_the_last_call_if_it_is_another(monkeypatch: pytest.MonkeyPatch) -> None:
    waits = []

    class Stream:
        def __init__(self, name: str) -> None:
            self.name = name

        def wait_stream(self, other: Stream) -> None:
            waits.append((self.name, other.name))

    runner = runner_of(ToyStep())
    runner.capture(verify=False)
    runner._on_device = True
    first, second = Stream("first"), Stream("second")
    for stream in (first, first, second, second, first):
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device, stream=stream: stream)
        runner(**example(3))
    assert waits == [("second", "first"), ("first", "second")]
