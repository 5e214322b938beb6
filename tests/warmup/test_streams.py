"""``mla-warmup``: stdout holds the data that was asked for, and nothing else."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from capture.report import WarmupReport
from tests.warmup.command import REPOSITORY, run

pytestmark = pytest.mark.usefixtures("own_cache")
TOY = ("--model", "tests.warmup.toys:factory", "--device", "cpu", "--batch-sizes", "4,1")


@pytest.mark.parametrize("form", [(), ("--json",)], ids=["digest", "json"])
def test_a_bundle_on_stdout_is_whole_and_its_digest_goes_to_stderr(
    form: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(capsys, "build", *TOY, "--quiet")
    (tmp_path / "stdout").symlink_to("/proc/self/fd/1")  # as /dev/stdout, which must survive a test that fails
    command = [sys.executable, "-m", "capture.cli", "pack", str(tmp_path / "stdout"), *TOY, *form]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, check=True)
    assert f"sha256:{hashlib.sha256(done.stdout).hexdigest()}" in done.stderr.decode()


CHATTY = """
import ctypes, subprocess, sys
from tests.warmup.toys import CallUnit, toy_spec

def chat(where):
    subprocess.run(["echo", "program of", where])
    ctypes.CDLL(None).puts(f"C of {where}".encode())
    print("Python of", where, file=sys.__stdout__)

def factory(options):
    chat("factory")
    return toy_spec(CallUnit(key="unit", call=lambda: chat("unit"), phase="kernels", persistent=True))
"""


def test_what_a_program_or_c_code_of_a_model_prints_is_no_data(tmp_path: Path) -> None:
    (tmp_path / "chatty.py").write_text(CHATTY)
    done = subprocess.run(
        [sys.executable, "-m", "capture.cli", "build", "--model", "chatty:factory", "--device", "cpu", "--json"],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(REPOSITORY)}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert WarmupReport.from_json(json.loads(done.stdout)).ok
    said = {f"{who} of {where}" for who in ("program", "C", "Python") for where in ("factory", "unit")}
    assert said <= set(done.stderr.splitlines())


def test_with_stdout_closed_a_build_still_succeeds(tmp_path: Path) -> None:
    command = f"{sys.executable} -m capture.cli build {' '.join(TOY)} --quiet >&-"
    assert subprocess.run(["sh", "-c", command], cwd=REPOSITORY, check=False).returncode == 0
