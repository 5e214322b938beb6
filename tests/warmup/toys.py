"""Toy specifications: units that write small files instead of compiling, and one real torch.compile unit."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from capture import BuildOptions, CompiledFunctionUnit, Unit, UnitResult, WarmupSpec
from capture.cli import main
from capture.report import BucketRow


@dataclass(frozen=True, kw_only=True)
class FileUnit(Unit):
    """Writes files below the directory that an environment variable names, as a compiler would."""

    variable: str = "TRITON_CACHE_DIR"
    files: tuple[str, ...] = ("kernel.bin", "kernel.json")
    seconds: float = 0.0
    kind: str = "kernel"
    phase: Any = "kernels"

    def build(self, resources: Any) -> None:
        note(f"build {self.key}")
        for name in self.files:
            path = Path(os.environ[self.variable]) / self.key / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(f"{self.key}/{name}".encode() * 100)
            time.sleep(self.seconds)

    def load(self, resources: Any) -> None:
        note(f"load {self.key}")
        for name in self.files:
            (Path(os.environ[self.variable]) / self.key / name).read_bytes()


@dataclass(frozen=True, kw_only=True)
class CallUnit(Unit):
    """Calls a function; the result says what it did."""

    call: Callable[[], UnitResult | None]
    kind: str = "toy"
    phase: Any = "compile"
    persistent: bool = False

    def build(self, resources: Any) -> UnitResult | None:
        note(f"build {self.key}")
        return self.call()


def note(line: str) -> None:
    """Append to the file that $TOY_LOG names: what was done, by which process."""
    if log := os.environ.get("TOY_LOG"):
        with open(log, "a") as file:
            file.write(f"{os.getpid()} {line}\n")


def toy_spec(*units: Unit, **fields: Any) -> WarmupSpec:
    return WarmupSpec("toy", "cpu", ("toy", "the only one"), fields, setup=lambda: None, units=units)


def kernels(count: int = 3, seconds: float = 0.0) -> tuple[FileUnit, ...]:
    return tuple(FileUnit(key=f"kernel-{index}", seconds=seconds) for index in range(count))


def factory(options: BuildOptions) -> WarmupSpec:
    """``--model tests.warmup.toys:factory``: three kernels, and a "graph" for each batch size."""
    rows = tuple(BucketRow(size, 0.001, 0, True, "toy") for size in options.batch_sizes)
    graphs = CallUnit(key="graphs", call=lambda: UnitResult(buckets=rows), phase="capture", kind="graph")
    return toy_spec(*kernels(), graphs, dtype=options.dtype, page_size=options.page_size)


def slow(options: BuildOptions) -> WarmupSpec:
    """Eight kernels of eight files each that take about 0.3 s together."""
    names = tuple(f"file-{index}" for index in range(8))
    return toy_spec(*(FileUnit(key=f"slow-{index}", files=names, seconds=0.005) for index in range(8)))


def failing(options: BuildOptions) -> WarmupSpec:
    """A kernel whose build script exits, between two good ones."""
    first, second = kernels(2)
    return toy_spec(first, CallUnit(key="exits", call=lambda: exit(3), phase="kernels", persistent=True), second)


def command(arguments: tuple[str, ...], environment: dict[str, str], output: str) -> None:
    """``mla-warmup`` in this (new) process: stdout to ``output``, stderr beside it."""
    os.environ.update(environment)
    if os.environ.get("TOY_READ_ONLY"):
        os.access = lambda path, mode, **options: not mode & os.W_OK  # root may write anywhere
    with open(output, "w") as sys.stdout, open(Path(output).with_suffix(".err"), "w") as sys.stderr:
        code = main(arguments)
    os._exit(code)


def not_a_spec(options: BuildOptions) -> str:
    return "no"


def compiled(options: BuildOptions) -> WarmupSpec:
    """One function under torch.compile."""

    def setup() -> Any:
        import torch

        def double_relu(x: torch.Tensor) -> torch.Tensor:
            return torch.relu(x) * 2 + 1

        return torch.compile(double_relu, fullgraph=True)

    def call(function: Any) -> None:
        import torch

        torch.testing.assert_close(function(torch.full((16,), -1.0)), torch.ones(16))

    unit = CompiledFunctionUnit(key="double_relu", call=call)
    return WarmupSpec("compiled", "cpu", ("inductor", "the only one"), {}, setup, (unit,))
