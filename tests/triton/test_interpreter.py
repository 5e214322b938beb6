"""Without a GPU: the tests of the kernels, each file in a process that has Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

FILES = (
    "test_cache.py",
    "test_decode.py",
    "test_fused_layer.py",
    "test_layer_kernels.py",
    "test_plan_kernel.py",
    "test_ragged.py",
    "test_triton_ops.py",
    "test_prefill.py",
)


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU the files run as they are")
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="this is the process with the interpreter")
@pytest.mark.parametrize("file", FILES)
def test_under_the_interpreter(file: str) -> None:
    run = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-x",
            "-m",
            "not gpu",
            "-p",
            "no:cacheprovider",
            str(Path(__file__).with_name(file)),
        ],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-1000:]
    assert " passed" in run.stdout
    assert "skipped" not in run.stdout
