"""The step that the tests capture: a toy decode step with a slot-addressed cache, and its runner."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from capture import GraphRunner

SLOTS = 64
WIDTH = 8


class ToyStep:
    """Writes one row per request into a cache and reads it back.

    ``step(x [B, WIDTH], slots [B])``: a slot of -1 writes nothing and gives a zero row.
    """

    def __init__(self, device: torch.device | str | None = None, dtype: torch.dtype = torch.float32) -> None:
        self.cache = torch.zeros(SLOTS, WIDTH, dtype=dtype, device=device)
        self.weight = torch.randn(WIDTH, WIDTH, device=device).to(dtype) / WIDTH**0.5

    def __call__(self, x: Tensor, slots: Tensor) -> Any:
        self.write(x, slots)
        return self.read(x, slots)

    def write(self, x: Tensor, slots: Tensor) -> None:
        write_rows(self.cache, x @ self.weight, slots)

    def read(self, x: Tensor, slots: Tensor) -> Tensor:
        rows = self.cache[slots.clamp_min(0)] + x
        return rows.masked_fill(slots[:, None] < 0, 0)


def write_rows(cache: Tensor, rows: Tensor, slots: Tensor) -> None:
    """``cache[slot] = row`` but for slots below 0, without a data-dependent shape: safe in a capture."""
    hits = torch.arange(len(cache), device=cache.device)[:, None] == slots  # [SLOTS, B]
    written = hits.any(1)
    source = hits.int().argmax(1)
    cache.copy_(torch.where(written[:, None], rows[source], cache))


def example(
    batch_size: int, device: torch.device | str | None = None, dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    return {
        "x": torch.randn(batch_size, WIDTH, device=device).to(dtype),
        "slots": torch.randperm(SLOTS, device=device)[:batch_size],
    }


def runner_of(
    step: Callable[..., Any],
    batch_sizes: tuple[int, ...] = (1, 4, 8),
    *,
    state: Mapping[str, Tensor] | None = None,
    **options: Any,
) -> GraphRunner:
    """A runner of a step with the toy step's inputs; its cache is the state."""
    cache = getattr(step, "cache", None)
    if state is None and cache is not None:
        state = {"cache": cache}
    device = cache.device if cache is not None else None
    dtype = cache.dtype if cache is not None else torch.float32
    settings: dict[str, Any] = {
        "example_inputs": example(max(batch_sizes), device, dtype),
        "batch_dims": {"x": 0, "slots": 0},
        "pad_values": {"slots": -1},
    }
    return GraphRunner(step, batch_sizes=batch_sizes, state=state, **(settings | options))


def make_inputs(batch_size: int, generator: torch.Generator) -> dict[str, Tensor]:
    return {
        "x": torch.randn(batch_size, WIDTH, generator=generator),
        "slots": torch.randperm(SLOTS, generator=generator)[:batch_size],
    }
