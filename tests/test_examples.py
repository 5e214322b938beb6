"""The README's commands and code, and every example, run."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.warmup.test_mla_spec import CONFIG

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()


def run(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "2", "HOME": str(folder)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("example", sorted(path.name for path in (ROOT / "examples").glob("*.py")))
def test_example_runs(example: str, tmp_path: Path) -> None:
    said = run([sys.executable, str(ROOT / "examples" / example)], tmp_path).stdout
    assert said
    assert " object at 0x" not in said


def test_readme_code_runs(tmp_path: Path) -> None:
    (code,) = blocks("python")
    run([sys.executable, "-W", "error", "-c", code], tmp_path)


def test_readme_set_up_is_two_targets_of_the_makefile() -> None:
    targets = re.findall(r"^make (\w+)", blocks("sh")[0], flags=re.MULTILINE)
    assert targets == ["demo", "test"]
    makefile = (ROOT / "Makefile").read_text()
    assert all(re.search(rf"^{target}:", makefile, flags=re.MULTILINE) for target in targets)


def test_ci_runs_the_test_command_of_the_readme() -> None:
    assert "make test" in (ROOT / ".ci" / "run").read_text()


def test_readme_warm_up_commands_run(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    for line in blocks("sh")[1].splitlines():
        program, *arguments = shlex.split(line, comments=True)
        assert program == "mla-warmup"
        more = ["--device", "cpu", "--dtype", "float32", "--max-seq-len", "64", "--cache-dir", str(tmp_path / "cache")]
        more += ["--no-compile"]  # what compiling does here, tests/warmup shows
        assert run([sys.executable, "-m", "capture.cli", *arguments, *more], tmp_path).stdout
