from __future__ import annotations

import json
import multiprocessing
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from tests.warmup import toys

_OURS = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "AITER_JIT_DIR", "MLA_WARMUP_CACHE", "TOY_LOG")


@pytest.fixture(autouse=True)
def own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test begins without cache variables, and leaves none behind."""
    for name in _OURS:
        monkeypatch.setenv(name, "")  # recorded, so that what a run sets is undone
        monkeypatch.delenv(name)


@pytest.fixture(autouse=True)
def threads_of_other_tests_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor's, once a test has compiled, last as long as the process, which then is not forked."""
    before, count = threading.active_count() - 1, threading.active_count
    monkeypatch.setattr(threading, "active_count", lambda: count() - before)


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """The root of an empty cache."""
    return tmp_path / "cache"


@pytest.fixture
def own_cache(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the cache of the commands that the test runs."""
    monkeypatch.setenv("MLA_WARMUP_CACHE", str(cache))


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
    """What the toy units did so far, without process ids."""
    path = tmp_path / "log"
    monkeypatch.setenv("TOY_LOG", str(path))

    def read() -> list[str]:
        return [line.split(" ", 1)[1] for line in path.read_text().splitlines()] if path.exists() else []

    return read


@dataclass
class Command:
    """``mla-warmup`` running in a process of its own."""

    process: BaseProcess
    output: Path

    def finish(self) -> tuple[dict[str, Any], str]:
        """Its report and what it wrote to stderr, once it ended well."""
        self.process.join(120)
        errors = self.output.with_suffix(".err").read_text()
        assert self.process.exitcode == 0, errors
        return json.loads(self.output.read_text()), errors


@pytest.fixture
def start(cache: Path, tmp_path: Path) -> Iterator[Callable[..., Command]]:
    """Starts ``mla-warmup``; what still runs at the end is killed.

    The processes are forked from one that has imported torch: eight imports at once would take too long.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "rich.table", "capture.cli", "capture.warmup", "tests.warmup.toys"])
    commands: list[Command] = []

    def run(*arguments: str, **environment: str) -> Command:
        output = tmp_path / f"process-{len(commands)}.json"
        variables = {"MLA_WARMUP_CACHE": str(cache), **environment}
        process = context.Process(target=toys.command, args=(arguments, variables, str(output)))
        process.start()
        commands.append(Command(process, output))
        return commands[-1]

    yield run
    for command in commands:
        command.process.kill()
        command.process.join()
        command.process.close()
