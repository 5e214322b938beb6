"""``mla-warmup``: stdout holds the data that was asked for, and nothing else."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

import pytest

from tests.warmup.command import REPOSITORY, run

pytestmark = pytest.mark.usefixtures("own_cache")
TOY = ("--model", "tests.warmup.toys:factory", "--device", "cpu", "--batch-sizes", "4,1")


@pytest.mark.parametrize("json", [(), ("--json",)], ids=["digest", "json"])
def test_a_bundle_on_stdout_is_whole_and_its_digest_goes_to_stderr(
    json: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(capsys, "build", *TOY, "--quiet")
    (tmp_path / "stdout").symlink_to("/proc/self/fd/1")  # as /dev/stdout, which must survive a test that fails
    command = [sys.executable, "-m", "capture.cli", "pack", str(tmp_path / "stdout"), *TOY, *json]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, check=True)
    assert f"sha256:{hashlib.sha256(done.stdout).hexdigest()}" in done.stderr.decode()
