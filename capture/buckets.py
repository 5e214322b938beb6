"""Which batch sizes to capture, and which of them a call replays. Pure Python: imports no torch.

A *bucket* is a batch size, counted in requests, for which a graph exists; a call is padded to the smallest
bucket that fits. More buckets pad less and cost more: each one is a capture at start-up and a graph
object in device memory for good.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

__all__ = [
    "PaddingWaste",
    "check_batch_sizes",
    "choose_batch_sizes",
    "default_batch_sizes",
    "padding_waste",
    "smallest_fit",
]


@dataclass(frozen=True, slots=True)
class PaddingWaste:
    """What padding costs over a histogram of batch sizes.

    Attributes:
        live_rows: rows that carry a request, over all calls that a bucket covers.
        padded_rows: rows that were added to reach the bucket.
        uncovered_calls: calls above the largest bucket; their rows are in neither count.
    """

    live_rows: int
    padded_rows: int
    uncovered_calls: int

    @property
    def fraction(self) -> float:
        """Share of all replayed rows that are padding, 0 to 1."""
        rows = self.live_rows + self.padded_rows
        return self.padded_rows / rows if rows else 0.0


def default_batch_sizes(max_batch_size: int) -> tuple[int, ...]:
    """Batch sizes to capture where nothing is known of the traffic, up to ``max_batch_size`` itself.

    1, 2, 4, 8, then every 8 to 64, every 16 to 256, every 32 above: 31 graphs for 512. The serving engines
    choose alike (vLLM steps by 8 to 256, SGLang by 8 to 160, ATOM by 16 to 512). Ours keeps the
    fine steps where a padded row weighs most: from 32 requests on, under a fifth of the rows are padding,
    and a decode step, bound by reading weights and cache, hardly pays for those.

    Raises:
        ValueError: ``max_batch_size`` is not positive.
    """
    (largest,) = check_batch_sizes([max_batch_size])
    steps = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, largest, 32)]
    return (*(size for size in steps if size < largest), largest)


def check_batch_sizes(batch_sizes: Iterable[int]) -> tuple[int, ...]:
    """The sizes, ascending and each once.

    Raises:
        ValueError: there are none, or one is not a positive int.
    """
    sizes = tuple(batch_sizes)
    if not sizes:
        raise ValueError("batch_sizes is empty; give at least one size, e.g. default_batch_sizes(64)")
    for size in sizes:
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ValueError(f"a batch size must be a positive int, got {size!r}")
    return tuple(sorted(set(sizes)))


def smallest_fit(batch_sizes: Sequence[int], n: int) -> int | None:
    """The smallest of ``batch_sizes`` (ascending) that holds ``n`` requests; None if none does."""
    index = bisect_left(batch_sizes, n)
    return batch_sizes[index] if index < len(batch_sizes) else None


def choose_batch_sizes(
    histogram: Mapping[int, int],
    max_graphs: int,
    memory_budget: int | None = None,
    bytes_per_graph: int | None = None,
    shared_bytes: int = 0,
) -> tuple[int, ...]:
    """The at most ``max_graphs`` batch sizes that pad the fewest rows over ``histogram``, ascending.

    The largest batch size that was seen is always among them. The choice is exact: dynamic programming over
    the sizes seen, since the best buckets lie on them.

    Args:
        histogram: calls seen by batch size.
        max_graphs: most graphs to capture.
        memory_budget: bytes that all graphs together may take; needs ``bytes_per_graph``.
        bytes_per_graph: bytes that each graph adds, the ``memory.graph`` of a bucket of a :class:`CaptureReport`.
        shared_bytes: bytes that all graphs share, the ``memory.pool`` of the largest bucket.

    Raises:
        ValueError: nothing was seen, a count is negative, or not one graph is allowed.
    """
    sizes, counts = _seen(histogram)
    limit = max_graphs
    if (memory_budget is None) != (bytes_per_graph is None):
        raise ValueError("memory_budget and bytes_per_graph go together; give both or neither")
    if memory_budget is not None and bytes_per_graph is not None:
        if bytes_per_graph < 1:
            raise ValueError(f"bytes_per_graph must be positive, got {bytes_per_graph}")
        limit = min(limit, (memory_budget - shared_bytes) // bytes_per_graph)
    if limit < 1:
        raise ValueError(
            f"not one graph is allowed: max_graphs={max_graphs}, memory_budget={memory_budget}, "
            f"bytes_per_graph={bytes_per_graph}, shared_bytes={shared_bytes}; raise the limit, or run without graphs"
        )
    return _partition(sizes, counts, min(limit, len(sizes)))


def padding_waste(histogram: Mapping[int, int], batch_sizes: Iterable[int]) -> PaddingWaste:
    """What padding to ``batch_sizes`` costs over ``histogram`` (calls by batch size)."""
    buckets = check_batch_sizes(batch_sizes)
    live = padded = uncovered = 0
    for size, count in zip(*_seen(histogram), strict=True):
        bucket = smallest_fit(buckets, size)
        if bucket is None:
            uncovered += count
        else:
            live += size * count
            padded += (bucket - size) * count
    return PaddingWaste(live, padded, uncovered)


def _seen(histogram: Mapping[int, int]) -> tuple[list[int], list[int]]:
    """Sizes, ascending, that were seen at least once, and how often."""
    if any(count < 0 for count in histogram.values()):
        raise ValueError("a count of the histogram is negative")
    seen = {size: count for size, count in histogram.items() if count}
    if not seen:
        raise ValueError("the histogram has no calls; use default_batch_sizes instead")
    sizes = check_batch_sizes(seen)
    return list(sizes), [seen[size] for size in sizes]


def _partition(sizes: list[int], counts: list[int], groups: int) -> tuple[int, ...]:
    """Cut ``sizes`` into ``groups`` runs, each padded to its last, with the fewest padded rows.

    waste[k][j] = min over i of waste[k - 1][i] + cost(i, j), where run (i, j] is padded to sizes[j - 1].
    The cost obeys the quadrangle inequality, so the best i is bounded by its neighbours' (Knuth 1971):
    O(n (n + groups)).
    """
    n = len(sizes)
    calls, rows = [0], [0]
    for size, count in zip(sizes, counts, strict=True):
        calls.append(calls[-1] + count)
        rows.append(rows[-1] + size * count)

    def cost(i: int, j: int) -> int:
        return sizes[j - 1] * (calls[j] - calls[i]) - (rows[j] - rows[i])

    waste = [cost(0, j) if j else 0 for j in range(n + 1)]
    cuts = [[0] * (n + 1)]
    for k in range(2, groups + 1):
        row, cut = [0] * (n + 1), [0] * (n + 1)
        for j in range(n, k - 1, -1):
            low = max(k - 1, cuts[-1][j])
            high = min(j - 1, cut[j + 1] if j < n else n)
            row[j], cut[j] = min((waste[i] + cost(i, j), i) for i in range(low, high + 1))
        waste = row
        cuts.append(cut)

    chosen, j = [], n
    for cut in reversed(cuts):
        chosen.append(sizes[j - 1])
        j = cut[j]
    return tuple(reversed(chosen))
