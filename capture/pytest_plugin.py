"""Pytest plugin: prove your own captured steps, and that nothing compiles after their warm-up.

Loaded by pytest where this package is installed (entry point ``pytest11``). Imports torch when a fixture is used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from capture.guard import Mode, Seal
    from capture.runner import GraphRunner
    from capture.verification import VerifyReport

__all__ = ["capture_verify", "pytest_addoption", "seal_compilation"]


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("capture", "verification of captured graphs")
    group.addoption("--capture-trials", type=int, default=3, metavar="N", help="fresh inputs per bucket (default: 3)")
    group.addoption("--capture-seed", type=int, metavar="SEED", help="repeat the trials of a seed that a failure named")


@pytest.fixture
def capture_verify(pytestconfig: pytest.Config) -> Iterator[Callable[..., VerifyReport]]:
    """A function that captures a step, proves every graph, and fails the test with the report if one is wrong.

    ``capture_verify(runner)`` takes a :class:`capture.GraphRunner`, captured or not;
    ``capture_verify(step, batch_sizes=..., example_inputs=..., batch_dims=...)`` makes one. Returns the
    :class:`capture.VerifyReport`. Runners are closed when the test ends, unless the test brought them captured.
    """
    from capture.runner import GraphRunner
    from capture.verification import verify

    opened: list[GraphRunner] = []

    def prove(step: Any, **options: Any) -> VerifyReport:
        import torch

        runner = step if isinstance(step, GraphRunner) else GraphRunner(step, **options)
        if not runner.captured:
            opened.append(runner)
            runner.capture(verify=False)
        generator = None
        if (seed := pytestconfig.getoption("--capture-seed")) is not None:
            generator = torch.Generator(runner.device).manual_seed(seed)
        report = verify(runner, trials=pytestconfig.getoption("--capture-trials"), generator=generator)
        if not report.ok:
            lines = "\n  ".join(report.failures)
            pytest.fail(f"captured graphs differ from eager (--capture-seed={report.seed}):\n  {lines}", pytrace=False)
        return report

    yield prove
    for runner in opened:
        runner.close()


@pytest.fixture
def seal_compilation() -> Iterator[Callable[..., Seal]]:
    """A function to call after the warm-up: from then to the end of the test a compilation raises.

    ``seal_compilation(mode="raise")`` returns the :class:`capture.Seal`.
    """
    from capture.guard import no_compile

    seals: list[Seal] = []

    def seal(mode: Mode = "raise") -> Seal:
        seals.append(no_compile(mode).__enter__())
        return seals[-1]

    yield seal
    while seals:
        seals.pop().close()
