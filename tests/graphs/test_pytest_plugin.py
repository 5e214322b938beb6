"""The plugin, in test suites of its own."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

REPOSITORY = Path(__file__).resolve().parents[2]

STEP = """
    import torch
    from capture import GraphRunner

    scale = [2.0]

    def step(x):
        return x * scale[0]

    OPTIONS = dict(batch_sizes=(1, 4), example_inputs={"x": torch.randn(4, 3)}, batch_dims={"x": 0})
"""


@pytest.fixture
def suite(pytester: pytest.Pytester) -> pytest.Pytester:
    pytester.makepyfile(steps=STEP)
    pytester.syspathinsert()
    return pytester


def run(suite: pytest.Pytester, test: str, *options: str) -> pytest.RunResult:
    suite.makepyfile(test)
    return suite.runpytest("-p", "capture.pytest_plugin", "-p", "no:cacheprovider", *options)


def test_a_correct_step_passes_and_gives_its_report(suite: pytest.Pytester) -> None:
    test = """
        from steps import OPTIONS, step

        def test_step(capture_verify):
            report = capture_verify(step, **OPTIONS)
            assert report.ok
            assert all(len(bucket.fillings) == 7 for bucket in report.buckets)
    """
    run(suite, test, "--capture-trials=7").assert_outcomes(passed=1)


def test_a_wrong_step_fails_with_the_seed_that_repeats_it(suite: pytest.Pytester) -> None:
    test = """
        from steps import OPTIONS

        def test_mixes_rows(capture_verify):
            capture_verify(lambda x: x / x.abs().max(), **OPTIONS)
    """
    result = run(suite, test, "--capture-seed=12")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["captured graphs differ from eager (--capture-seed=12):", "*bucket 4, 1 live*"])


def test_a_runner_of_the_tests_own_is_taken_and_closed_unless_it_was_captured(suite: pytest.Pytester) -> None:
    test = """
        import pytest
        from capture import CaptureError, GraphRunner
        from steps import OPTIONS, step

        captured, fresh = GraphRunner(step, **OPTIONS), GraphRunner(step, **OPTIONS)
        captured.capture(verify=False)

        def test_first(capture_verify):
            capture_verify(captured)
            capture_verify(fresh)

        def test_second():
            assert captured.captured == (1, 4)
            with pytest.raises(CaptureError, match="closed"):
                fresh.moved()
    """
    run(suite, test).assert_outcomes(passed=2)


def test_a_compilation_after_the_seal_fails_the_test_and_only_that(
    suite: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    test = """
        import torch

        square = torch.compile(lambda x: x * x, backend="eager", dynamic=False)

        def test_recompiles(seal_compilation):
            square(torch.ones(3))
            seal_compilation()
            square(torch.zeros(3))
            square(torch.ones(4))

        def test_after():
            square(torch.ones(5))
            torch._dynamo.reset()
    """
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    suite.makepyfile(test)
    result = suite.runpytest_subprocess("-p", "capture.pytest_plugin")  # Dynamo cannot be imported twice
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["*CompileForbiddenError: dynamo of <lambda>*"])


def test_the_plugin_imports_no_torch_by_itself() -> None:
    program = "import sys, capture.pytest_plugin; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_pytest_finds_the_plugin_where_the_package_is_installed() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
    assert project["project"]["entry-points"]["pytest11"] == {"capture.pytest_plugin": "capture.pytest_plugin"}
