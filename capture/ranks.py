"""Ranks that capture together, because their steps hold collectives.

A collective hangs where one rank runs it and another does not, so all ranks capture the same batch sizes, verify
the same trials, and learn of each other's failures before any of them leaves.
"""

from __future__ import annotations

from typing import Any

from capture.errors import CaptureError, GraphCaptureError

__all__ = ["Ranks"]


class Ranks:
    """The ranks of a process group; of one process where there is none.

    Args:
        group: a ``torch.distributed`` process group, or None.
    """

    def __init__(self, group: Any = None) -> None:
        self._group = group

    def same(self, name: str, value: object) -> None:
        """Check that ``value`` is the same on every rank; all of them raise if not.

        Raises:
            CaptureError: it differs; names the ranks and their values.
        """
        values = self._gather(value)
        if any(other != values[0] for other in values):
            shown = "; ".join(f"rank {rank}: {other}" for rank, other in enumerate(values))
            raise CaptureError(f"{name} must be the same on every rank of the group, got {shown}")

    def first(self, value: int) -> int:
        """Rank 0's ``value``."""
        first: int = self._gather(value)[0]
        return first

    def largest(self, value: int) -> int:
        """The largest ``value`` of any rank."""
        return int(max(self._gather(value)))

    def agree(self, error: Exception | None, bucket: int) -> None:
        """Raise on every rank if any of them brings an error: its own there, a GraphCaptureError elsewhere."""
        errors = self._gather(None if error is None else f"{type(error).__name__}: {error}")
        if error is not None:
            raise error
        for rank, message in enumerate(errors):
            if message is not None:
                raise GraphCaptureError(bucket, f"rank {rank} failed, so no rank keeps its graphs: {message}")

    def _gather(self, value: Any) -> list[Any]:
        if self._group is None:
            return [value]
        import torch.distributed as dist

        values: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(values, value, group=self._group)
        return values
