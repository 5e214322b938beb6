"""Fresh random inputs for verification, where the caller brings no function that makes them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from capture.buffers import Slab

__all__ = ["MakeInputs", "RandomInputs"]

MakeInputs = Callable[[int, torch.Generator], Mapping[str, Tensor]]


class RandomInputs:
    """Makes inputs of any batch size that look like the example.

    Floating inputs are normal with the example's mean and standard deviation. Integer inputs are the rows
    of randomly chosen requests of the example, the same requests for each input and none twice, so that
    slots, positions and block tables that belong together stay together and no two requests share a slot.
    An integer input with extra rows (an indptr) is the example's head. An input without a batch dimension
    is the example's.

    Args:
        example_inputs: at the largest batch size.
        slabs: the static inputs, by name: how each grows with the batch.
        max_batch_size: the batch size of the example.
    """

    def __init__(self, example_inputs: Mapping[str, Tensor], slabs: Mapping[str, Slab], max_batch_size: int) -> None:
        self._slabs = slabs
        self._max_batch_size = max_batch_size
        self._kept: dict[str, Tensor] = {}
        self._moments: dict[str, tuple[float, float]] = {}
        for name, example in example_inputs.items():
            slab = slabs[name]
            if example.dtype.is_floating_point and slab.batch_dim is not None:
                self._moments[name] = _moments(example)
            else:
                self._kept[name] = example.detach().to(slab.flat.device, copy=True)

    def __call__(self, batch_size: int, generator: torch.Generator) -> dict[str, Tensor]:
        device = generator.device
        chosen = torch.randperm(self._max_batch_size, generator=generator, device=device)[:batch_size]
        inputs = {}
        for name, slab in self._slabs.items():
            if name in self._moments:
                mean, std = self._moments[name]
                noise = torch.randn(slab.shape_at(batch_size), generator=generator, device=device)
                inputs[name] = (noise * std + mean).to(slab.flat.device, slab.flat.dtype)
            else:
                inputs[name] = self._draw(slab, self._kept[name], chosen.to(slab.flat.device))
        return inputs

    def _draw(self, slab: Slab, example: Tensor, chosen: Tensor) -> Tensor:
        if slab.batch_dim is None:
            return example.clone()
        dim, multiple = slab.batch_dim.dim, slab.batch_dim.multiple
        if slab.batch_dim.extra:
            return example.narrow(dim, 0, slab.batch_dim.rows(len(chosen))).clone()
        offsets = torch.arange(multiple, device=chosen.device)
        return example.index_select(dim, (chosen[:, None] * multiple + offsets).flatten())


def _moments(example: Tensor) -> tuple[float, float]:
    if not example.numel():
        return 0.0, 1.0
    values: Any = example.detach().float()
    mean, std = float(values.mean()), float(values.std(correction=0))
    return (mean if math.isfinite(mean) else 0.0), (std if math.isfinite(std) and std > 0 else 1.0)
