"""Seconds from process start to every batch size captured: ours cold and warm, beside what else there is.

    python -m benchmarks.first_run --device cuda [--layers 4,61] [--sizes 8,35] [--json]

Each row is a fresh process; ``ours`` also verifies every graph. Rows are printed as they come. The ways:

* ``floor``: import torch, open the device, make the weights (not what this package needs besides).
* ``ours``: :class:`capture.WarmupManager`, the tier that is its default on the device; ``ours compiled``: with the
  block under torch.compile.
* ``torch.compile dynamic``: the whole step compiled with a dynamic batch, a graph for each size captured by hand;
  ``static``: compiled for each size; ``mega-cache``: dynamic, over what ``torch.compiler.save_cache_artifacts`` kept.
* ``Hugging Face``: its DeepseekV3 with a static cache, ``torch.compile(mode="reduce-overhead")``, each size in turn;
  its MLP is 64 wide, so that attention is nearly all of it.

A row that takes longer than ``--row-timeout`` is ended and says so; what one cell of the grid could not do in time, a
larger one is not asked to. The floor and our warm start, which are compared, run ``--repeat`` times: each row is the
median, and says how far the others were. ``--budget`` bounds the whole: ours first, then the others, each of them the
smallest cell first; what Hugging Face's takes beyond that cell comes last. With ``--bytecode`` every row finds the
packages compiled to bytecode, as pip installs them, also where Python keeps none (``PYTHONDONTWRITEBYTECODE``).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

__all__ = ["OURS", "SIZES", "STARTED", "THEIRS", "main"]

OURS = ("floor", "ours cold", "ours warm")
THEIRS = (
    "ours compiled cold",
    "ours compiled warm",
    "torch.compile dynamic cold",
    "torch.compile dynamic warm",
    "mega-cache warm",
    "torch.compile static cold",
    "torch.compile static warm",
    "Hugging Face cold",
    "Hugging Face warm",
)
SIZES = {4: (1, 2, 4, 8), 8: (1, 2, 4, 8, 16, 32, 64, 128), 35: (1, 2, 4, *range(8, 257, 8))}
STARTED = "MLA_BENCHMARK_STARTED"
_PACKAGES = ("torch", "triton", "numpy", "sympy", "transformers", "filelock", "rich", "capture", "mla_ops")
_REPEATED = ("floor", "ours warm")
_NEEDS = {"mega-cache": "torch.compile dynamic"}  # whose cold row leaves what the warm one loads


@dataclass(frozen=True)
class _Cell:
    layers: int
    sizes: tuple[int, ...]

    def holds(self, other: _Cell) -> bool:
        """Whether this is at least as much work."""
        return self.layers >= other.layers and len(self.sizes) >= len(other.sizes)


def main() -> None:
    """Run the grid and print."""
    arguments = _arguments()
    cells = [_Cell(layers, sizes) for layers in arguments.layers for sizes in arguments.sizes]
    ways = [way for way in (*OURS, *THEIRS) if way in arguments.ways]
    order = [(cell, way) for cell in cells for way in ways]
    order.sort(key=lambda row: (row[1] in THEIRS) + (row[1].startswith("Hugging Face") and row[0] != cells[0]))
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        bench = _Bench(arguments, Path(folder))
        for cell, way in order:
            row = {"layers": cell.layers, "sizes": len(cell.sizes), "way": way, **bench.median_row(cell, way)}
            rows.append(row)
            print(_line(row), file=sys.stderr if arguments.json else sys.stdout, flush=True)
            if arguments.json:
                print(json.dumps(row), flush=True)
    if not arguments.json:
        _print_table(rows)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="deepseek-v3", help="a preset or a config.json")
    parser.add_argument("--layers", type=_numbers, default=(4, 61), help="default 4,61")
    parser.add_argument("--sizes", type=_sizes, default=(SIZES[8], SIZES[35]), help="how many: of 4, 8, 35 (8,35)")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--max-seq-len", type=int, default=8192)
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--ways", type=lambda text: text.split(","), default=[*OURS, *THEIRS], help="default: all")
    parser.add_argument("--row-timeout", type=float, default=60.0, metavar="N", help="seconds (60)")
    parser.add_argument("--budget", type=float, default=480.0, metavar="N", help="seconds for all rows (480)")
    parser.add_argument("--repeat", type=int, default=3, metavar="N", help="of the floor and of our warm start (3)")
    parser.add_argument("--bytecode", action="store_true", help="compile the packages to bytecode before all rows")
    parser.add_argument("--json", action="store_true", help="a JSON object for each row, on a line, as it comes")
    arguments = parser.parse_args()
    if arguments.repeat < 1:
        parser.error(f"--repeat must be at least 1, got {arguments.repeat}")
    if unknown := set(arguments.ways) - {*OURS, *THEIRS}:
        parser.error(f"--ways: no such way: {', '.join(sorted(unknown))}; there are {', '.join((*OURS, *THEIRS))}")
    return arguments


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(sorted(int(part) for part in text.split(",")))


def _sizes(text: str) -> tuple[tuple[int, ...], ...]:
    counts = _numbers(text)
    for count in counts:
        if count not in SIZES:
            raise argparse.ArgumentTypeError(f"must be of {', '.join(map(str, SIZES))}, got {count}")
    return tuple(SIZES[count] for count in counts)


class _Bench:
    """Runs rows, and knows which are not worth a process."""

    def __init__(self, arguments: argparse.Namespace, folder: Path) -> None:
        self._arguments = arguments
        self._folder = folder
        self._end = time.monotonic() + arguments.budget
        self._too_long: list[tuple[_Cell, str]] = []
        self._failed: dict[tuple[_Cell, str], str] = {}
        self._bytecode = _compile_packages(folder / "bytecode") if arguments.bytecode else {}
        self._child(_Cell(1, SIZES[4]), "floor", folder / "first", 600.0)  # reads packages from the disk: no row pays

    def median_row(self, cell: _Cell, way: str) -> dict[str, Any]:
        """:meth:`row`; of a way that is repeated the one between the others, with the fastest and the slowest."""
        rows = [self.row(cell, way) for _ in range(self._arguments.repeat if way in _REPEATED else 1)]
        done = sorted((row for row in rows if row["seconds"] is not None), key=lambda row: row["seconds"])
        if len(done) < 2:
            return done[0] if done else rows[-1]
        return done[(len(done) - 1) // 2] | {"range": (done[0]["seconds"], done[-1]["seconds"])}

    def row(self, cell: _Cell, way: str) -> dict[str, Any]:
        """The result, or ``{"seconds": None, "word": why there is none}``."""
        limit = self._arguments.row_timeout
        kind, _, state = way.rpartition(" ")
        needs = (cell, _NEEDS.get(kind, kind) + " cold")
        if state == "warm" and needs in self._failed:
            return _word(self._failed[needs])
        if any(before == way and cell.holds(smaller) for smaller, before in self._too_long):
            self._failed[cell, way] = "its cold start took too long"
            return _word(f"more than {limit:.0f} s, as with less work")
        left = self._end - time.monotonic()
        if left < min(limit, 10.0):
            self._failed[cell, way] = "its cold start was not run"
            return _word("not run: --budget is used up")
        name = _NEEDS.get(kind, kind).replace(" ", "-")  # Inductor's compiler calls do not quote it
        cache = self._folder / f"{cell.layers}-{len(cell.sizes)}" / name
        try:
            row = self._child(cell, way, cache, min(limit, left))
        except subprocess.TimeoutExpired as error:
            self._too_long.append((cell, way))
            self._failed[cell, way] = "its cold start took too long"
            return _word(f"more than {error.timeout:.0f} s")
        if "word" in row:
            self._failed[cell, way] = row["word"]
        return row

    def _child(self, cell: _Cell, way: str, cache: Path, limit: float) -> dict[str, Any]:
        """The row that a process of its own prints last; the process and all of its children end with it."""
        cache.mkdir(parents=True, exist_ok=True)
        inductor = "empty" if way.startswith("mega-cache") else "inductor"
        environment = {**os.environ, **self._bytecode, "MLA_WARMUP_CACHE": str(cache), STARTED: str(time.time())}
        if not way.startswith("ours"):
            environment |= {"TORCHINDUCTOR_CACHE_DIR": str(cache / inductor)}
        given = self._arguments
        options = {"model": given.model, "device": given.device, "dtype": given.dtype, "backend": given.backend}
        options |= {"max_seq_len": given.max_seq_len, "layers": cell.layers, "batch_sizes": cell.sizes}
        command = [
            sys.executable,
            "-m",
            "benchmarks.first_run_child",
            way,
            json.dumps(options),
            str(cache / "artifacts"),
        ]
        with tempfile.TemporaryFile("w+") as errors:
            child = subprocess.Popen(
                command, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True
            )
            try:
                out, _ = child.communicate(timeout=limit)
            finally:
                _end_session(child)
            if child.returncode:
                errors.seek(0)
                return _word(f"failed (exit status {child.returncode}): {_reason(errors.read())[:160]}")
        row: dict[str, Any] = json.loads(out.splitlines()[-1])
        return row


def _compile_packages(folder: Path) -> dict[str, str]:
    """Bytecode of what the rows import, in ``folder``; the environment that makes Python read it there."""
    environment = {"PYTHONPYCACHEPREFIX": str(folder), "PYTHONDONTWRITEBYTECODE": ""}
    found = [find_spec(name) for name in _PACKAGES]
    places = [place for spec in found if spec for place in spec.submodule_search_locations or []]
    command = [sys.executable, "-m", "compileall", "-q", "-j", "0", *places]
    # Some packages hold templates that are no Python: the exit status says nothing.
    subprocess.run(command, env={**os.environ, **environment}, stdout=subprocess.DEVNULL, check=False)
    return environment


def _end_session(child: subprocess.Popen[str]) -> None:
    """Compilers leave worker processes behind."""
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def _reason(errors: str) -> str:
    """The line of a traceback that names the exception; the last line where there is none."""
    lines = errors.strip().splitlines() or ["no message"]
    named = [line for line in lines if re.match(r"[\w.]+(Error|Exception|Unsupported|Interrupt)\b", line)]
    return (named or lines)[-1]


def _word(text: str) -> dict[str, Any]:
    return {"seconds": None, "word": text}


def _cells(row: dict[str, Any]) -> Iterator[str]:
    yield f"{row['layers']} layers, {row['sizes']} sizes"
    yield row["way"]
    spread = " ({:.2f} to {:.2f})".format(*row["range"]) if "range" in row else ""
    yield row["word"] if row["seconds"] is None else f"{row['seconds']:.2f}{spread}"
    yield str(row.get("compiled", ""))
    yield ", ".join(f"{size}: {us:,.0f}" for size, us in row.get("replay_us", {}).items())
    yield ", ".join(f"{name} {seconds:.2f}" for name, seconds in row.get("phases", {}).items() if seconds)


def _line(row: dict[str, Any]) -> str:
    return " | ".join(cell for cell in _cells(row) if cell)


def _print_table(rows: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("cell", "way", "seconds", "compiled", "replay us by batch size", "phases")
    for row in rows:
        table.add_row(*_cells(row))
    Console(width=200 if not sys.stdout.isatty() else None).print(table)


if __name__ == "__main__":
    main()
