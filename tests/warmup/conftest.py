from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
_OURS = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "AITER_JIT_DIR", "MLA_WARMUP_CACHE", "TOY_LOG")


@pytest.fixture(autouse=True)
def own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test begins without cache variables, and leaves none behind."""
    for name in _OURS:
        monkeypatch.setenv(name, "")  # recorded, so that what a run sets is undone
        monkeypatch.delenv(name)


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """The root of an empty cache."""
    return tmp_path / "cache"


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
    """What the toy units did so far, without process ids."""
    path = tmp_path / "log"
    monkeypatch.setenv("TOY_LOG", str(path))

    def read() -> list[str]:
        return [line.split(" ", 1)[1] for line in path.read_text().splitlines()] if path.exists() else []

    return read


Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(cache: Path) -> Iterator[Start]:
    """Starts ``mla-warmup`` in a process of its own; what is still running at the end is killed."""
    processes: list[subprocess.Popen[str]] = []

    def run(*arguments: str, **environment: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "capture.cli", *arguments]
        variables = {"OMP_NUM_THREADS": "1", **os.environ, "MLA_WARMUP_CACHE": str(cache), **environment}
        process = subprocess.Popen(
            command,
            cwd=REPOSITORY,
            env=variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        processes.append(process)
        return process

    yield run
    for process in processes:
        process.kill()
        process.communicate()
