"""The state of a step in a proof: set, kept, and what two runs left in it compared."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from capture.tolerance import as_integers, changed_bits, distance, within_rounding

__all__ = ["clones", "copy_", "difference", "new_nan", "one_sided", "randomize", "redraw", "unravel"]


def clones(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in tensors.items()}


def copy_(targets: Mapping[str, Tensor], sources: Mapping[str, Tensor]) -> None:
    """As integers: a copy of narrow floats passes through fp32 on a GPU, and gives every NaN the same bits."""
    if targets:
        pairs = [(as_integers(tensor), as_integers(sources[name])) for name, tensor in targets.items()]
        torch._foreach_copy_([target for target, _ in pairs], [source for _, source in pairs])


def randomize(state: Mapping[str, Tensor], saved: Mapping[str, Tensor], generator: torch.Generator) -> None:
    """Fill floating tensors with finite random values, and others with what they had."""
    for name, tensor in state.items():
        if tensor.dtype.is_floating_point:
            _fill(tensor, generator)
        else:
            tensor.copy_(saved[name])


def redraw(tensor: Tensor, places: Tensor, generator: torch.Generator) -> None:
    """Give the elements ``places [n]``, in row-major order, of a floating tensor other random values."""
    values = torch.empty(places.numel(), dtype=tensor.dtype, device=tensor.device)
    _fill(values, generator)
    as_integers(tensor).put_(places, as_integers(values))


def difference(before: Tensor, tensor: Tensor, wanted: Tensor) -> tuple[str, Tensor]:
    """What a replay left wrong in one tensor of the state, or "", and the places that are in doubt.

    Bits are compared everywhere, values where either has changed one: a step changes few rows of a large cache.

    Returns:
        The reason, where ``{eager}`` stands for what it is compared with, and ``[n]`` int64 places in row-major
        order that only one of the two changed, but to about what the other has there. One may have hit the old
        value by chance, common in 16 bits and fewer, and the other missed it by its rounding; or one wrote nothing.
    """
    changes, wanted_changes = changed_bits(tensor, before), changed_bits(wanted, before)
    places = (changes | wanted_changes).nonzero()[:, 0]
    values, expected = (t.contiguous().view(-1)[places] for t in (tensor, wanted))
    close = within_rounding(values, expected)
    one_only = changes[places] != wanted_changes[places]
    wrong = places[one_only & ~close]
    doubtful = places[one_only & close] if tensor.dtype.is_floating_point else places[:0]
    if len(wrong):
        return one_sided(wrong, tensor.shape, by_replay=bool(changes[wrong[0]])), doubtful
    written = wanted_changes[places]
    found = distance(values[written], expected[written], None)
    return "" if found.ok else f"was written with other values: {found.reason}", doubtful


def one_sided(places: Tensor, shape: torch.Size, *, by_replay: bool) -> str:
    """What is wrong with ``places [n]`` that one side alone changed, the first of them the replay or eager."""
    by = "the replay only" if by_replay else "eager only"
    return (
        f"differs in {len(places)} of {shape.numel()} elements from what {{eager}} leaves; the first, "
        f"{unravel(int(places[0]), shape)}, was changed by {by}"
    )


def new_nan(state: Mapping[str, Tensor], before: Mapping[str, Tensor] | None = None) -> list[str]:
    """The names of the tensors that hold a NaN, where it was not there ``before``; waits for the device once."""
    flags = {}
    for name, tensor in state.items():
        if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
            nan = tensor.isnan().reshape(-1)
            flags[name] = (nan if before is None else nan & changed_bits(tensor, before[name])).any()
    if not flags:
        return []
    device = next(iter(flags.values())).device
    found = torch.stack([flag.to(device) for flag in flags.values()]).tolist()
    return [name for name, nan in zip(flags, found, strict=True) if nan]


def unravel(flat: int, shape: torch.Size) -> tuple[int, ...]:
    index = []
    for size in reversed(shape):
        flat, rest = divmod(flat, size)
        index.append(rest)
    return tuple(reversed(index))


def _fill(tensor: Tensor, generator: torch.Generator) -> None:
    if tensor.element_size() == 1:
        tensor.view(torch.uint8).random_(0, 0x70, generator=generator)  # finite in every fp8 format
    else:
        tensor.normal_(generator=generator)
