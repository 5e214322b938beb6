"""Static outputs: where a captured step leaves its results.

The step's own result tensors are copied here inside the graph and dropped, so that their memory serves the
next, smaller graph of the pool, and every bucket's results lie at one address.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from capture.buffers import BatchDim, Slab, poison_
from capture.errors import GraphCaptureError

__all__ = ["OutputShapes", "StaticOutputs"]


@dataclass(frozen=True)
class OutputShapes:
    """What one run of the step returned: its structure, and shape, dtype and device of each tensor."""

    batch_size: int
    spec: pytree.TreeSpec
    names: tuple[str, ...]
    tensors: tuple[tuple[torch.Size, torch.dtype, torch.device], ...]

    @classmethod
    def of(cls, output: Any, batch_size: int, state: Mapping[str, Tensor]) -> OutputShapes:
        """Describe ``output``.

        Raises:
            GraphCaptureError: a leaf is no tensor (its value would be frozen at capture), or is memory of
                ``state``.
        """
        paths, spec = pytree.tree_flatten_with_path(output)
        storages = {tensor.untyped_storage().data_ptr(): name for name, tensor in state.items()}
        names, tensors = [], []
        for path, leaf in paths:
            name = f"output{pytree.keystr(path)}"
            if not isinstance(leaf, Tensor):
                raise GraphCaptureError(
                    batch_size,
                    f"the step must return tensors only, but {name} is {type(leaf).__name__}: a Python value "
                    "would be frozen at capture; return a tensor, or leave it out",
                )
            owner = storages.get(leaf.untyped_storage().data_ptr())
            if owner is not None and leaf.numel():
                raise GraphCaptureError(
                    batch_size,
                    f"{name} is memory of state {owner!r}: each replay would copy it to the static outputs; "
                    "leave it out, the caller has it already",
                )
            names.append(name)
            tensors.append((leaf.shape, leaf.dtype, leaf.device))
        return cls(batch_size, spec, tuple(names), tuple(tensors))


class StaticOutputs:
    """The static outputs of a runner, allocated at the largest batch size.

    Args:
        largest: what the step returned at the largest batch size.
        other: what it returned at another batch size; the dimension that differs is the batch dimension.
            None if the largest is 1, where no call is padded.

    Raises:
        GraphCaptureError: structure or dtype depends on the batch size, or a shape is not linear in it.
    """

    def __init__(self, largest: OutputShapes, other: OutputShapes | None) -> None:
        self.spec = largest.spec
        self._is_tensor = largest.spec.is_leaf()
        self.slabs: list[Slab] = []
        if other is not None:
            _check_structure(largest.spec, other)
        for index, (name, (shape, dtype, device)) in enumerate(zip(largest.names, largest.tensors, strict=True)):
            dim = None if other is None else _infer_dim(name, largest, other, index)
            self.slabs.append(Slab(name, shape, dtype, device, dim))

    def check(self, shapes: OutputShapes) -> None:
        """Raise GraphCaptureError unless the step's result at a further batch size fits these buffers."""
        _check_structure(self.spec, shapes)
        for slab, (shape, dtype, _) in zip(self.slabs, shapes.tensors, strict=True):
            expected = slab.shape_at(shapes.batch_size)
            if shape != expected or dtype is not slab.flat.dtype:
                raise GraphCaptureError(
                    shapes.batch_size,
                    f"{slab.name} is {tuple(shape)} {dtype} at a batch of {shapes.batch_size}; by the other "
                    f"sizes it should be {tuple(expected)} {slab.flat.dtype}",
                )

    def store(self, output: Any, bucket: int) -> None:
        """Copy one result of the step into the bucket's views: the last thing that a graph does."""
        for slab, leaf in zip(self.slabs, pytree.tree_leaves(output), strict=True):
            slab.view(bucket).copy_(leaf)

    def live(self, bucket: int, batch_size: int) -> list[Tensor]:
        """The rows of each output that belong to the first ``batch_size`` requests."""
        return [slab.live(bucket, batch_size) for slab in self.slabs]

    def unflatten(self, leaves: list[Tensor]) -> Any:
        """``leaves`` in the structure that the step returns."""
        return leaves[0] if self._is_tensor else pytree.tree_unflatten(leaves, self.spec)

    def leaves_of(self, output: Any, batch_size: int) -> list[Tensor]:
        """The first ``batch_size`` requests' rows of a result that the step itself returned."""
        leaves: Sequence[Tensor] = pytree.tree_leaves(output)
        return [
            leaf if slab.batch_dim is None else leaf.narrow(slab.batch_dim.dim, 0, slab.batch_dim.rows(batch_size))
            for slab, leaf in zip(self.slabs, leaves, strict=True)
        ]

    def poison(self) -> None:
        """Fill all with NaN or the largest integer: what a replay leaves unwritten then shows."""
        for slab in self.slabs:
            poison_(slab.flat)


def _check_structure(spec: pytree.TreeSpec, other: OutputShapes) -> None:
    if other.spec != spec:
        raise GraphCaptureError(
            other.batch_size,
            f"the step returns {other.spec} at a batch of {other.batch_size}, but {spec} at the largest; "
            "the structure must not depend on the batch size",
        )


def _infer_dim(name: str, largest: OutputShapes, other: OutputShapes, index: int) -> BatchDim | None:
    """How an output grows with the batch, from its shapes at two batch sizes."""
    shape, small = largest.tensors[index][0], other.tensors[index][0]
    message = (
        f"{name} is {tuple(shape)} at a batch of {largest.batch_size}, {tuple(small)} at {other.batch_size}; "
        "one dimension at most may grow, by the same number of rows for each request"
    )
    if len(shape) != len(small):
        raise GraphCaptureError(largest.batch_size, message)
    differing = [dim for dim, (a, b) in enumerate(zip(shape, small, strict=True)) if a != b]
    if not differing:
        return None
    if len(differing) > 1:
        raise GraphCaptureError(largest.batch_size, message)
    (dim,) = differing
    multiple, rest = divmod(shape[dim] - small[dim], largest.batch_size - other.batch_size)
    extra = shape[dim] - multiple * largest.batch_size
    if rest or multiple < 1 or extra < 0:
        raise GraphCaptureError(largest.batch_size, message)
    return BatchDim(dim, multiple, extra)
