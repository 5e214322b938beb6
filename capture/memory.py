"""What graphs cost in device memory, and how many of them fit a budget.

All graphs of a runner share the pool that the largest one makes; each adds a graph object, which the driver keeps
outside of torch's allocator. So the largest graph alone tells what any number of them will take.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from capture.buckets import choose_batch_sizes
from capture.errors import GraphCaptureError

if TYPE_CHECKING:
    from capture.verification import VerifyReport

__all__ = ["CaptureReport", "CapturedBucket", "Memory", "MemoryMeter", "fit_budget"]


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of device memory.

    Attributes:
        pool: growth of what torch's allocator holds.
        graph: what else the driver lost: the graph object, kernels loaded on the way. Another process on the
            device disturbs it.
    """

    pool: int
    graph: int

    @property
    def total(self) -> int:
        return self.pool + self.graph


class MemoryMeter:
    """Measures what is taken between its making and :meth:`taken`; zeros on a device that has no graphs."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free, self._reserved = self._read()

    def taken(self) -> Memory:
        free, reserved = self._read()
        pool = max(0, reserved - self._reserved)
        return Memory(pool, max(0, self._free - free - pool))

    def _read(self) -> tuple[int, int]:
        if self._device.type != "cuda":
            return 0, 0
        return torch.cuda.mem_get_info(self._device)[0], torch.cuda.memory_reserved(self._device)


@dataclass(frozen=True, slots=True)
class CapturedBucket:
    """One captured batch size.

    Attributes:
        capture_seconds: warm-up and capture of this size.
        memory: what the capture took.
        verified: the graph was proved against eager.
    """

    batch_size: int
    capture_seconds: float
    memory: Memory
    verified: bool

    @property
    def memory_bytes(self) -> int:
        """Pool and graph together; 0 on the CPU."""
        return self.memory.total


@dataclass(frozen=True, slots=True)
class CaptureReport:
    """What :meth:`GraphRunner.capture` did.

    Attributes:
        buckets: largest batch size first.
        seconds: wall time of all of it, verification included.
        verification: None if it was not asked for.
        estimated_bytes: what all batch sizes that were asked for would take, by the largest one alone.
        dropped: batch sizes that the memory budget left out, ascending; their calls use the next larger one.
    """

    buckets: tuple[CapturedBucket, ...]
    seconds: float
    verification: VerifyReport | None
    estimated_bytes: int
    dropped: tuple[int, ...]


def fit_budget(batch_sizes: Sequence[int], largest: Memory, budget: int | None) -> tuple[int, ...]:
    """The batch sizes to capture within ``budget`` bytes, given what the graph of the largest took.

    Those that pad the fewest rows if each size is called equally often, the largest always among them.

    Raises:
        GraphCaptureError: the largest alone is over the budget.
    """
    if budget is None:
        return tuple(batch_sizes)
    if largest.total > budget:
        raise GraphCaptureError(
            batch_sizes[-1],
            f"the graph of the largest batch size, {batch_sizes[-1]}, takes {largest.total:,} bytes, over the "
            f"memory_budget of {budget:,}; raise it, or capture a smaller largest batch size with "
            'fallback="eager"',
        )
    if not largest.graph:
        return tuple(batch_sizes)
    return choose_batch_sizes(
        dict.fromkeys(batch_sizes, 1),
        len(batch_sizes),
        memory_budget=budget,
        bytes_per_graph=largest.graph,
        shared_bytes=largest.pool,
    )
