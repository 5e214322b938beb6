"""Static buffers: the memory that a captured graph reads and writes, at addresses that never change.

The runner owns them. A call copies the caller's tensors in; it never hands the caller's memory to a
graph. Each is allocated once, at the largest batch size. A bucket's view is the head of that memory in
the bucket's own shape: contiguous whatever the batch dimension is, and every bucket starts at the same
address.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from capture.errors import InputMismatchError

__all__ = ["BatchDim", "PadValue", "Slab", "StaticBuffers", "poison_"]

PadValue = float | Literal["last"]


@dataclass(frozen=True, slots=True)
class BatchDim:
    """How one tensor grows with the batch: it has ``multiple * batch_size + extra`` rows along ``dim``.

    ``multiple`` is the query length for a tensor with a row per token; ``extra=1`` fits an indptr.
    """

    dim: int
    multiple: int = 1
    extra: int = 0

    def __post_init__(self) -> None:
        if self.dim < 0 or self.multiple < 1 or self.extra < 0:
            raise ValueError(f"BatchDim needs dim >= 0, multiple >= 1 and extra >= 0, got {self}")

    def rows(self, batch_size: int) -> int:
        return self.multiple * batch_size + self.extra


class Slab:
    """One static tensor, allocated at the largest batch size; read as the view of a bucket.

    Args:
        name: what messages call it.
        shape: its shape at ``max_batch_size``.
        batch_dim: how it grows with the batch; None: it does not, every view is the whole.
    """

    def __init__(
        self,
        name: str,
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        batch_dim: BatchDim | None,
    ) -> None:
        self.name = name
        self.shape = torch.Size(shape)
        self.batch_dim = batch_dim
        with torch.inference_mode(False):  # an inference tensor could not be filled outside inference mode
            self.flat = torch.zeros(self.shape.numel(), dtype=dtype, device=device)

    def shape_at(self, batch_size: int) -> torch.Size:
        if self.batch_dim is None:
            return self.shape
        shape = list(self.shape)
        shape[self.batch_dim.dim] = self.batch_dim.rows(batch_size)
        return torch.Size(shape)

    def view(self, batch_size: int) -> Tensor:
        """The contiguous tensor that the graph of this bucket reads or writes."""
        shape = self.shape_at(batch_size)
        return self.flat[: shape.numel()].view(shape)

    def live(self, bucket: int, batch_size: int) -> Tensor:
        """The rows of the bucket's view that carry requests: the first."""
        view = self.view(bucket)
        if self.batch_dim is None:
            return view
        return view.narrow(self.batch_dim.dim, 0, self.batch_dim.rows(batch_size))

    def pads(self, bucket: int, batch_size: int) -> Tensor | None:
        """The rows of the bucket's view after the live ones; None if there are none."""
        if self.batch_dim is None or batch_size == bucket:
            return None
        start = self.batch_dim.rows(batch_size)
        return self.view(bucket).narrow(self.batch_dim.dim, start, self.batch_dim.rows(bucket) - start)


@dataclass(frozen=True, slots=True)
class _Fill:
    """The copies of one (bucket, batch size), one group for each dtype: a group is one device launch."""

    groups: tuple[tuple[list[Tensor], list[int], list[Tensor]], ...]  # targets; inputs by position; constants
    repeats: tuple[tuple[Tensor, Tensor], ...]  # pad rows and the last live row, expanded to them

    def run(self, values: Sequence[Tensor]) -> None:
        for targets, positions, constants in self.groups:
            torch._foreach_copy_(targets, [values[i] for i in positions] + constants)
        for pads, last in self.repeats:
            pads.copy_(last)


class StaticBuffers:
    """The static inputs of a runner.

    Args:
        example_inputs: tensors at the largest batch size; only shape and dtype are used, and the values
            of those without a batch dimension.
        batch_dims: for each input how it grows with the batch: a :class:`BatchDim`, a plain dimension (the
            rows per request follow from the example), or None for an input without a batch dimension.
        max_batch_size: the batch size of ``example_inputs``.
        pad_values: what pad rows hold, by name, 0 if not named; "last" repeats the last live row (an
            indptr), and is 0 where no row is live.

    Raises:
        ValueError: names differ, no input has a batch dimension, an example does not fit its batch
            dimension, or a pad value its dtype.
    """

    def __init__(
        self,
        example_inputs: Mapping[str, Tensor],
        batch_dims: Mapping[str, int | BatchDim | None],
        *,
        max_batch_size: int,
        device: torch.device,
        pad_values: Mapping[str, PadValue] | None = None,
    ) -> None:
        if example_inputs.keys() != batch_dims.keys():
            raise ValueError(
                f"batch_dims must name every input, {sorted(example_inputs)}, but names {sorted(batch_dims)}"
            )
        self.pad_values = dict(pad_values or {})
        if unknown := self.pad_values.keys() - example_inputs.keys():
            raise ValueError(f"pad_values names no input: {sorted(unknown)}; inputs are {sorted(example_inputs)}")
        self.device = device
        self.max_batch_size = max_batch_size
        self.slabs: dict[str, Slab] = {}
        for name, example in example_inputs.items():
            dim = _batch_dim(name, example, batch_dims[name], max_batch_size)
            self.slabs[name] = Slab(name, example.shape, example.dtype, device, dim)
            if name in self.pad_values and not _can_hold(example.dtype, self.pad_values[name]):
                raise ValueError(
                    f"the pad value of {name!r}, {self.pad_values[name]!r}, is no {example.dtype}; give a number that "
                    'it can hold, or "last"'
                )
        lead = next((slab for slab in self.slabs.values() if slab.batch_dim is not None), None)
        if lead is None:
            raise ValueError("no input has a batch dimension; name one in batch_dims")
        self._lead = lead
        self._names = self.slabs.keys()
        self._shapes: dict[int, tuple[tuple[str, torch.Size, torch.dtype], ...]] = {}
        self._fills: dict[tuple[int, int], _Fill] = {}
        self._constants = {
            name: torch.full_like(slab.flat, self._pad_constant(name))
            for name, slab in self.slabs.items()
            if slab.batch_dim is not None and self.pad_values.get(name) != "last"
        }
        with torch.no_grad():
            for name, example in example_inputs.items():
                if self.slabs[name].batch_dim is None:
                    self.slabs[name].view(max_batch_size).copy_(example)
        self.pad_all(max_batch_size)

    def views(self, batch_size: int) -> dict[str, Tensor]:
        """The static inputs of one bucket, by name: what the captured step is called with."""
        return {name: slab.view(batch_size) for name, slab in self.slabs.items()}

    def check(self, inputs: Mapping[str, Tensor]) -> int:
        """The batch size of ``inputs``, which fit the static buffers in name, shape, dtype and device.

        Raises:
            InputMismatchError: they do not; the message names the input.
        """
        if inputs.keys() != self._names:
            raise InputMismatchError(_name_mismatch(inputs.keys(), self._names))
        batch_size = self._batch_size(inputs[self._lead.name])
        expected = self._shapes.get(batch_size)
        if expected is None:
            expected = tuple((s.name, s.shape_at(batch_size), s.flat.dtype) for s in self.slabs.values())
            self._shapes[batch_size] = expected
        device = self.device
        for name, shape, dtype in expected:
            value = inputs[name]
            if (
                not isinstance(value, Tensor)
                or value.dtype is not dtype
                or value.shape != shape
                or value.device != device
            ):
                raise InputMismatchError(self._mismatch(name, value, shape, batch_size))
        return batch_size

    def fill(self, inputs: Mapping[str, Tensor], batch_size: int, bucket: int) -> None:
        """Write checked ``inputs`` into the first rows of the bucket's views and pad values into the rest.

        Device copies on the current stream, one launch for each dtype; no host synchronization.
        """
        fill = self._fills.get((bucket, batch_size))
        if fill is None:
            fill = self._fills[bucket, batch_size] = self._plan_fill(bucket, batch_size)
        values = [inputs[name] for name in self._names]
        if torch.is_grad_enabled():  # entering no_grad costs more than a copy; a server is in it already
            with torch.no_grad():
                fill.run(values)
        else:
            fill.run(values)

    def pad_all(self, bucket: int) -> None:
        """Make every row of the bucket a pad row. Inputs without a batch dimension keep what they hold."""
        with torch.no_grad():
            for slab in self.slabs.values():
                if slab.batch_dim is not None:
                    slab.view(bucket).fill_(self._pad_constant(slab.name))

    def poison(self) -> None:
        """Fill the static inputs with what no step may read: NaN, or the largest integer.

        Inputs without a batch dimension too; the next :meth:`fill` writes every row of its bucket.
        """
        for slab in self.slabs.values():
            poison_(slab.flat)

    def poison_pads(self, batch_size: int, bucket: int) -> None:
        """Put NaN into the pad rows of floating inputs for which no pad value was declared.

        A declared pad value is a promise that the step may rely on, and integer pads index memory: both stay.
        """
        for slab in self.slabs.values():
            pads = slab.pads(bucket, batch_size)
            if pads is not None and pads.dtype.is_floating_point and slab.name not in self.pad_values:
                poison_(pads)

    def _pad_constant(self, name: str) -> float:
        value = self.pad_values.get(name, 0)
        return 0 if value == "last" else value

    def _plan_fill(self, bucket: int, batch_size: int) -> _Fill:
        groups: dict[torch.dtype, tuple[list[Tensor], list[int], list[Tensor]]] = {}
        constants: dict[torch.dtype, list[Tensor]] = {}
        repeats = []
        for position, slab in enumerate(self.slabs.values()):
            targets, positions, _ = groups.setdefault(slab.flat.dtype, ([], [], []))
            live = slab.live(bucket, batch_size)
            targets.append(live)
            positions.append(position)
            pads = slab.pads(bucket, batch_size)
            if pads is None or slab.batch_dim is None:
                continue
            if self.pad_values.get(slab.name) == "last":
                dim = slab.batch_dim.dim
                repeats.append((pads, live.narrow(dim, live.shape[dim] - 1, 1).expand_as(pads)))
            else:
                constant = self._constants[slab.name][: pads.numel()].view(pads.shape)
                constants.setdefault(slab.flat.dtype, []).append(constant)
                groups[slab.flat.dtype][2].append(pads)
        return _Fill(
            groups=tuple(
                (targets + pads, positions, constants.get(dtype, []))
                for dtype, (targets, positions, pads) in groups.items()
            ),
            repeats=tuple(repeats),
        )

    def _batch_size(self, value: Tensor) -> int:
        """Read off the first batched input; its other properties are checked with the rest."""
        slab, batch_dim = self._lead, self._lead.batch_dim
        assert batch_dim is not None
        if not isinstance(value, Tensor):
            raise InputMismatchError(f"input {slab.name!r} must be a tensor, got {type(value).__name__}")
        if value.dim() != len(slab.shape):
            raise InputMismatchError(
                f"input {slab.name!r} must have as many dimensions as at capture, "
                f"{_shape_text(slab)}, got shape {tuple(value.shape)}"
            )
        rows = value.shape[batch_dim.dim]
        batch_size, rest = divmod(rows - batch_dim.extra, batch_dim.multiple)
        if rest or batch_size < 1:
            raise InputMismatchError(
                f"input {slab.name!r} must have {_rows_text(batch_dim)} rows along dim {batch_dim.dim} for a "
                f"batch of at least 1, got {rows}"
            )
        return batch_size

    def _mismatch(self, name: str, value: object, shape: torch.Size, batch_size: int) -> str:
        slab = self.slabs[name]
        if not isinstance(value, Tensor):
            return f"input {name!r} must be a tensor, got {type(value).__name__}"
        if value.shape != shape:
            return (
                f"input {name!r} must have shape {tuple(shape)} for a batch of {batch_size} (read off "
                f"{self._lead.name!r}), got {tuple(value.shape)}; at capture it was {_shape_text(slab)}"
            )
        if value.dtype is not slab.flat.dtype:
            return (
                f"input {name!r} must have dtype {slab.flat.dtype} as at capture, got {value.dtype}; "
                f"use {name}.to({slab.flat.dtype})"
            )
        return (
            f'input {name!r} must be on {self.device} as at capture, got {value.device}; use {name}.to("{self.device}")'
        )


def poison_(tensor: Tensor) -> None:
    """Overwrite with a value that shows wherever it is read: NaN, the largest integer, True."""
    with torch.no_grad():
        if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
            tensor.fill_(math.nan)
        elif tensor.dtype is torch.bool:
            tensor.fill_(True)
        else:
            tensor.fill_(torch.iinfo(tensor.dtype).max)


def _can_hold(dtype: torch.dtype, value: object) -> bool:
    """Whether pad rows of ``dtype`` can hold ``value`` as it is: torch would cut 0.5 to 0, and wrap -1 to 255."""
    if value == "last":
        return True
    if not isinstance(value, int | float):
        return dtype.is_complex and isinstance(value, complex)
    if dtype.is_floating_point or dtype.is_complex:
        return not math.isfinite(value) or abs(value) <= torch.finfo(dtype).max
    if dtype is torch.bool:
        return value in (0, 1)
    limits = torch.iinfo(dtype)
    return limits.min <= value <= limits.max and value == int(value)


def _batch_dim(name: str, example: Tensor, declared: int | BatchDim | None, max_batch_size: int) -> BatchDim | None:
    if declared is None:
        return None
    dim = declared.dim if isinstance(declared, BatchDim) else declared
    if not 0 <= dim < example.dim():
        raise ValueError(f"input {name!r} has no dim {dim}: its example has shape {tuple(example.shape)}")
    rows = example.shape[dim]
    if isinstance(declared, BatchDim):
        if declared.rows(max_batch_size) != rows:
            raise ValueError(
                f"the example of {name!r} must have {declared.rows(max_batch_size)} rows along dim {dim} "
                f"({_rows_text(declared)} at the largest batch size, {max_batch_size}), got {rows}"
            )
        return declared
    multiple, rest = divmod(rows, max_batch_size)
    if rest or not multiple:
        raise ValueError(
            f"the example of {name!r} has size {rows} along dim {dim}, no multiple of the largest batch "
            f"size {max_batch_size}; give the example at that size, or a BatchDim with multiple and extra"
        )
    return BatchDim(dim, multiple)


def _name_mismatch(got: AbstractSet[str], expected: AbstractSet[str]) -> str:
    parts = []
    if missing := expected - got:
        parts.append(f"missing {sorted(missing)}")
    if unknown := got - expected:
        parts.append(f"unknown {sorted(unknown)}")
    return f"inputs must be {sorted(expected)} as at capture: {', '.join(parts)}"


def _shape_text(slab: Slab) -> str:
    dims = [str(size) for size in slab.shape]
    if slab.batch_dim is not None:
        dims[slab.batch_dim.dim] = _rows_text(slab.batch_dim)
    return f"[{', '.join(dims)}]"


def _rows_text(batch_dim: BatchDim) -> str:
    text = "B" if batch_dim.multiple == 1 else f"{batch_dim.multiple}*B"
    return text if not batch_dim.extra else f"{text}+{batch_dim.extra}"
