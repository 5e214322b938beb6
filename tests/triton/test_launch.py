"""A launch reaches Triton once per specialisation, and then goes straight to what Triton compiled."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mla_ops.backends.triton import launch as module
from mla_ops.backends.triton.launch import Launch


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
    def __init__(self, kernel: FakeKernel) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *values: self.kernel.launches.append((grid, values))


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> FakeKernel:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(module, "_COMPILED", {})
    return FakeKernel()


def run(kernel: FakeKernel, grid: tuple[int, ...] = (2,), **changes: Any) -> None:
    arguments = {"BLOCK": 16, "x": torch.zeros(64), "scale": 0.5, "count": 3, "stride": 8, **changes}
    Launch(kernel, grid, arguments, {"num_warps": 4}).run()


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
