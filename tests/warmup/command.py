"""``mla-warmup``, called in this process, and what a process that is started inherits for a signal."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from capture.cli import main

REPOSITORY = Path(__file__).resolve().parents[2]


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(arguments)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@contextmanager
def handled(number: signal.Signals, action: signal.Handlers | Callable[..., object]) -> Iterator[None]:
    """``action`` is what this process does at a signal, and what its children inherit."""
    before = signal.signal(number, action)
    try:
        yield
    finally:
        signal.signal(number, before)


def run_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, Any]:
    code, out, _ = run(capsys, *arguments, "--json")
    return code, json.loads(out)
