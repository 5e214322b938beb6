"""A launch reaches Triton once per specialisation, and then goes straight to what Triton compiled."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton

from mla_ops.backends.triton import launch as module
from mla_ops.backends.triton.launch import BoundLaunch, Launch, bound_stream


class FakeKernel:
    """Stands in for a JITFunction: counts what it is asked to compile; what it compiled records its launches."""

    def __init__(self) -> None:
        names = ("x", "scale", "count", "stride", "BLOCK")
        self.params = [SimpleNamespace(name=name, do_not_specialize=name in ("scale", "count")) for name in names]
        self.compiled = 0
        self.launches: list[tuple[Any, tuple[Any, ...]]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def run(**arguments: Any) -> FakeCompiled:
            self.compiled += 1
            return FakeCompiled(self)

        return run


class FakeCompiled:
    function, packed_metadata = "function", "metadata"

    def __init__(self, kernel: FakeKernel) -> None:
        self.kernel = kernel

    def run(self, *arguments: Any) -> None:
        self.kernel.launches.append((arguments[:3], arguments[3:]))

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *values: self.kernel.launches.append((grid, values))


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> FakeKernel:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(module, "_COMPILED", {})
    return FakeKernel()


def launch(kernel: FakeKernel, grid: tuple[int, ...] = (2,), **changes: Any) -> Launch:
    arguments = {"BLOCK": 16, "x": torch.zeros(64), "scale": 0.5, "count": 3, "stride": 8, **changes}
    return Launch(kernel, grid, arguments, {"num_warps": 4})


def run(kernel: FakeKernel, grid: tuple[int, ...] = (2,), **changes: Any) -> None:
    launch(kernel, grid, **changes).run()


def test_the_second_launch_goes_to_the_compiled_kernel_with_its_arguments_in_order(kernel: FakeKernel) -> None:
    x = torch.zeros(64)
    run(kernel)
    run(kernel, (5, 2), x=x, scale=0.25, count=9)
    assert kernel.compiled == 1
    ((grid, values),) = kernel.launches
    assert grid == (5, 2, 1)
    assert values[0] is x
    assert values[1:] == (0.25, 9, 8, 16)


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"x": torch.zeros(64)[1:]}, id="pointer not of 16 bytes"),
        pytest.param({"x": torch.zeros(64, dtype=torch.float16)}, id="dtype"),
        pytest.param({"x": None}, id="argument left out"),
        pytest.param({"stride": 16}, id="divisibility of an integer"),
        pytest.param({"BLOCK": 32}, id="constant"),
        pytest.param({"count": 2**31}, id="64-bit integer"),
    ],
)
def test_what_triton_specialises_to_is_told_apart(kernel: FakeKernel, changes: dict[str, Any]) -> None:
    run(kernel)
    run(kernel, **changes)
    assert kernel.compiled == 2


@pytest.mark.parametrize("changes", [{"scale": 7.0}, {"count": 1}, {"count": 16}], ids=str)
def test_what_changes_from_step_to_step_is_not(kernel: FakeKernel, changes: dict[str, Any]) -> None:
    run(kernel)
    run(kernel, **changes)
    assert kernel.compiled == 1


def test_a_bound_launch_gives_what_was_compiled_the_addresses_it_points_to_and_the_scalars_of_before(
    kernel: FakeKernel,
) -> None:
    first = launch(kernel, (5, 2))
    bound = BoundLaunch(first, first.run(), ("other", "x"))
    bound(77, (1000, 2000))
    assert kernel.launches == [((5, 2, 1), (77, "function", "metadata", None, None, None, 2000, 0.5, 3, 8, 16))]


def test_a_bound_launch_keeps_a_pointer_that_was_left_out(kernel: FakeKernel) -> None:
    first = launch(kernel, x=None)
    BoundLaunch(first, first.run(), ("x", "other"))(77, (None, 2000))
    assert kernel.launches[0][1][6:] == (None, 0.5, 3, 8, 16)


def test_a_launch_over_what_the_caller_has_no_address_for_is_not_bound(kernel: FakeKernel) -> None:
    with pytest.raises(KeyError, match="x"):
        BoundLaunch(launch(kernel), FakeCompiled(kernel), ("other",))


@pytest.fixture
def stream_7(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 7, raising=False)


def test_bound_launches_go_to_the_current_stream(stream_7: None) -> None:
    assert bound_stream(0) == 7


def test_bound_launches_do_not_go_to_a_device_that_is_not_current(stream_7: None) -> None:
    assert bound_stream(1) is None


@pytest.mark.parametrize("hook", ["launch_enter_hook", "launch_exit_hook"])
def test_bound_launches_do_not_go_past_a_launch_hook(stream_7: None, hook: str) -> None:
    def watch(metadata: Any) -> None: ...

    chain = getattr(triton.knobs.runtime, hook)
    chain.add(watch)
    try:
        assert bound_stream(0) is None
    finally:
        chain.remove(watch)
    assert bound_stream(0) == 7
