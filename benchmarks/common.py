"""What the benchmarks share: graph-replayed timing, the measured ceilings of the device, tables."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["Ceilings", "measure", "measure_ceilings", "measure_host", "print_table", "relative_error"]

Ceilings = dict[str, float]

_CALLS_IN_GRAPH = 8


def measure(calls: Sequence[Callable[[], Any]], replays: int = 20) -> float:
    """Median microseconds of one call, all ``calls`` captured into one graph, several times if few, and replayed.

    So the launch of the graph, some ten microseconds, is no part of a call's time. Give one call per input set, and so
    many sets that together they exceed the last-level cache: a call then finds nothing of its own input there, as in a
    model whose other layers ran in between.
    """
    calls = list(calls) * -(-_CALLS_IN_GRAPH // len(calls))
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call()
        calls[0]()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times: list[float] = []
    for _ in range(replays + 3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / len(calls))
    return statistics.median(times[3:])


def measure_host(call: Callable[[], Any], repeats: int = 100) -> float:
    """Median microseconds of host time from an eager call to its last launch; the device is idle at each start."""
    times: list[float] = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        times.append((time.perf_counter() - start) * 1e6)
    torch.cuda.synchronize()
    return statistics.median(times)


def measure_ceilings() -> Ceilings:
    """Bytes per second of a device copy (read and written) and FLOP per second of a bf16 product, both measured."""
    source = torch.randn(1 << 30, dtype=torch.bfloat16, device="cuda")
    target = torch.empty_like(source)
    copy = measure([lambda: torch.neg(source, out=target)], 10)
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    product = torch.empty_like(a)
    matmul = measure([lambda: torch.mm(a, a, out=product)], 10)
    return {"bytes_per_s": 2 * source.nbytes / copy * 1e6, "flop_per_s": 2 * 8192**3 / matmul * 1e6}


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Norm of the difference over the norm of the expected; NaN is carried through."""
    return float((actual.double() - expected).norm() / expected.norm())


def print_table(rows: Sequence[dict[str, Any]]) -> None:
    """Rows as aligned columns, numbers to four digits."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    text = [[_cell(row.get(name)) for name in columns] for row in rows]
    widths = [max(len(name), *(len(line[i]) for line in text)) for i, name in enumerate(columns)]
    for line in [columns, *text]:
        print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)), flush=True)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
