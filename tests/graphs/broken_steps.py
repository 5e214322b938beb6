"""Steps with one planted bug each, and what verify() says of it: the bugs that serving engines have had.

The correct step is toy_step.ToyStep.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping

import torch
from torch import Tensor
from toy_step import SLOTS, WIDTH, ToyStep, make_inputs


def poison_unused(cache: Tensor, slots: Tensor) -> None:
    unused = torch.ones(SLOTS, dtype=torch.bool)
    unused[slots] = False
    cache[unused] = torch.nan


class FreezesHostValue(ToyStep):
    """Reads a Python number that changes from step to step."""

    length = 0

    def inputs(self, batch_size: int, generator: torch.Generator) -> dict[str, Tensor]:
        self.length += 1
        return make_inputs(batch_size, generator)

    def __call__(self, x: Tensor, slots: Tensor) -> Tensor:
        return super().__call__(x, slots) * self.length


class RebindsMetadata(ToyStep):
    """Its metadata is a new tensor for each step instead of one that is written in place."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.ones(1)

    def inputs(self, batch_size: int, generator: torch.Generator) -> dict[str, Tensor]:
        self.scale = torch.rand(1, generator=generator)
        return make_inputs(batch_size, generator)

    def __call__(self, x: Tensor, slots: Tensor) -> Tensor:
        return super().__call__(x, slots) * self.scale


class CachesMetadataByShape(ToyStep):
    """Computes metadata from the first inputs of a batch size and keeps it."""

    def __init__(self) -> None:
        super().__init__()
        self.offsets: dict[int, Tensor] = {}

    def __call__(self, x: Tensor, slots: Tensor) -> Tensor:
        offset = self.offsets.setdefault(len(x), slots.clone())
        return super().__call__(x, slots) + offset[:, None]


class PadsWriteSlotZero(ToyStep):
    def write(self, x: Tensor, slots: Tensor) -> None:
        super().write(x, slots.clamp_min(0))


class WritesToItsInput(ToyStep):
    def __call__(self, x: Tensor, slots: Tensor) -> Tensor:
        super().__call__(x, slots)
        return x.mul_(2)


class ForgetsTheLastRow(ToyStep):
    def __init__(self) -> None:
        super().__init__()
        self.out = torch.zeros(8, WIDTH)

    def __call__(self, x: Tensor, slots: Tensor) -> Tensor:
        out = self.out[: len(x)]
        out[: max(1, len(x) - 1)].copy_(super().__call__(x, slots)[: max(1, len(x) - 1)])
        return out


class ScratchOfASmallerMaximum(ToyStep):
    """Scratch for 4 requests: the rows of requests 4..7 fall on those of 0..3."""

    def __init__(self) -> None:
        super().__init__()
        self.scratch = torch.zeros(4, WIDTH)

    def __call__(self, x: Tensor, slots: Tensor) -> Tensor:
        out = super().__call__(x, slots)
        for start in range(0, len(out), 4):
            part = out[start : start + 4]
            self.scratch[: len(part)].copy_(part)
        return self.scratch.repeat(2, 1)[: len(x)]


class MixesRows(ToyStep):
    """Quantizes by the maximum over the batch, pads included."""

    def __call__(self, x: Tensor, slots: Tensor) -> Tensor:
        return super().__call__(x, slots) / x.abs().max()


class WritesWrongSlot(ToyStep):
    """Finds its slot from the end of the batch, where the pads are."""

    def write(self, x: Tensor, slots: Tensor) -> None:
        super().write(x, torch.where(slots >= 0, (slots + len(slots)) % SLOTS, slots))


class WritesWrongValue(ToyStep):
    """Leaves in the cache what depends on the number of rows; its result is right."""

    def __call__(self, x: Tensor, slots: Tensor) -> Tensor:
        out = super().__call__(x, slots)
        super().write(x * len(x), slots)
        return out


class WritesOnlyTheFirstTime(ToyStep):
    """A Python flag decides at capture that nothing is left to write."""

    def __init__(self) -> None:
        super().__init__()
        self.written = 0

    def inputs(self, batch_size: int, generator: torch.Generator) -> dict[str, Tensor]:
        self.written = 0
        return make_inputs(batch_size, generator)

    def write(self, x: Tensor, slots: Tensor) -> None:
        if self.written < 3:
            self.written += 1
            super().write(x, slots)

    def read(self, x: Tensor, slots: Tensor) -> Tensor:
        return x + 1


class Accumulates(ToyStep):
    """Adds to scratch that nobody clears."""

    def __init__(self) -> None:
        super().__init__()
        self.sums = torch.zeros(8, WIDTH)

    def __call__(self, x: Tensor, slots: Tensor) -> Tensor:
        return self.sums[: len(x)].add_(super().__call__(x, slots)).clone()


class IsRandom(ToyStep):
    def __call__(self, x: Tensor, slots: Tensor) -> Tensor:
        return super().__call__(x, slots) + 1e-6 * torch.rand_like(x)


class GivesNaN(ToyStep):
    def __call__(self, x: Tensor, slots: Tensor) -> Tensor:
        out = super().__call__(x, slots)
        return torch.where(torch.arange(len(x))[:, None] == len(x) - 1, torch.nan, out)


class ReadsUnusedSlots(ToyStep):
    """Sums over the whole cache with weight 0 on what is not its own."""

    def read(self, x: Tensor, slots: Tensor) -> Tensor:
        weights = (torch.arange(SLOTS) == slots[:, None]).float()
        return weights @ self.cache + x

    def poison(self, inputs: Mapping[str, Tensor]) -> None:
        poison_unused(self.cache, inputs["slots"])


class ReadsPageMinusOne(ToyStep):
    """Takes a pad row's slot of -1 for an index: it reads the last slot, whoever's that is."""

    def read(self, x: Tensor, slots: Tensor) -> Tensor:
        return self.cache[slots]

    def poison(self, inputs: Mapping[str, Tensor]) -> None:
        poison_unused(self.cache, inputs["slots"])


class ReturnsItsInput(ToyStep):
    """Reuses the memory of an input for its result."""

    def __call__(self, x: Tensor, slots: Tensor) -> Tensor:
        return x.copy_(super().__call__(x, slots))


class LagsBehindItsSideStream(ToyStep):
    """Nothing waits for the side work, so a step reads what the work of the step before left."""

    def __init__(self) -> None:
        super().__init__()
        self.side = torch.zeros(8, WIDTH)

    def __call__(self, x: Tensor, slots: Tensor) -> Tensor:
        out = super().__call__(x, slots) + self.side[: len(x)]
        self.side[: len(x)].copy_(x * 0.5)
        return out


class SplitsByCaptureLengths(ToyStep):
    """Plans its splits on the host: those of the lengths at capture cover no longer request."""

    longest = 1

    def inputs(self, batch_size: int, generator: torch.Generator) -> dict[str, Tensor]:
        inputs = make_inputs(batch_size, generator)
        self.longest = 2 + int(inputs["slots"].max()) % (WIDTH - 1)
        return inputs

    def read(self, x: Tensor, slots: Tensor) -> Tensor:
        rows = super().read(x, slots)
        return torch.cat([rows[:, : self.longest], torch.zeros(len(x), WIDTH - self.longest)], 1)


class RecyclesMetadata(ToyStep):
    """An LRU cache owns the metadata: an eviction frees what a graph still points to, and it is used anew."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: OrderedDict[int, Tensor] = OrderedDict()

    def metadata(self, batch_size: int) -> Tensor:
        if batch_size not in self.kept:
            _, freed = self.kept.popitem(last=False) if len(self.kept) == 3 else (0, torch.empty(1))
            self.kept[batch_size] = freed.fill_(batch_size)
        return self.kept[batch_size]

    def __call__(self, x: Tensor, slots: Tensor) -> Tensor:
        return super().__call__(x, slots) + self.metadata(len(x)) / len(x)


class DividesByTheLength(ToyStep):
    """A request without rows is 0 / 0: NaN in a row that nobody asked for, until something mixes rows."""

    def read(self, x: Tensor, slots: Tensor) -> Tensor:
        lengths = (slots >= 0).float()[:, None]
        return super().read(x, slots) / lengths


class LeavesPadsUnwritten(ToyStep):
    """The kernel returns early for a row without work."""

    def read(self, x: Tensor, slots: Tensor) -> Tensor:
        unwritten = torch.full_like(x, torch.nan)
        return torch.where(slots[:, None] >= 0, super().read(x, slots), unwritten)


class StopsAtTheLiveCount(ToyStep):
    """Two notions of batch size: a Python number of live requests beside the shapes."""

    live = 1

    def inputs(self, batch_size: int, generator: torch.Generator) -> dict[str, Tensor]:
        self.live = batch_size
        return make_inputs(batch_size, generator)

    def read(self, x: Tensor, slots: Tensor) -> Tensor:
        rows = super().read(x, slots)
        return torch.where(torch.arange(len(x))[:, None] < self.live, rows, 0)


class UpdatesTheEagerBuffer(ToyStep):
    """Has a buffer for eager steps and one for graphs, and the update writes the eager one."""

    def __init__(self) -> None:
        super().__init__()
        self.buffers = {"eager": torch.zeros(1), "graph": torch.zeros(1)}
        self.use = "graph"

    def inputs(self, batch_size: int, generator: torch.Generator) -> dict[str, Tensor]:
        self.use = "eager"
        self.buffers["eager"].uniform_(generator=generator)
        return make_inputs(batch_size, generator)

    def __call__(self, x: Tensor, slots: Tensor) -> Tensor:
        return super().__call__(x, slots) + self.buffers[self.use]


class CountsPads(ToyStep):
    """Advances a counter for every row of the bucket."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = torch.zeros(1, dtype=torch.int64)

    @property
    def state(self) -> dict[str, Tensor]:
        return {"cache": self.cache, "steps": self.steps}

    def __call__(self, x: Tensor, slots: Tensor) -> Tensor:
        self.steps.add_(len(x))
        return super().__call__(x, slots)


BROKEN = {
    FreezesHostValue: "replay differs from eager at the same shape",
    RebindsMetadata: "replay differs from eager at the same shape",
    CachesMetadataByShape: "differs from eager",
    PadsWriteSlotZero: r"state 'cache' differs .* first, \(0, 0\), was changed by the replay only",
    WritesToItsInput: "the step wrote to its input 'x'",
    ForgetsTheLastRow: "replay differs from eager on the live rows",
    ScratchOfASmallerMaximum: r"bucket 8, 1 live: replay differs from eager on the live rows: output row 0",
    MixesRows: "eager with pad rows differs from eager without",
    WritesWrongSlot: r"state 'cache' differs in \d+ of \d+ elements",
    WritesWrongValue: "state 'cache' was written with other values",
    WritesOnlyTheFirstTime: "changed by eager only",
    Accumulates: "a second replay of the same inputs differs: output row 0",
    IsRandom: "a second replay of the same inputs differs",
    GivesNaN: r"output row \d: NaN",
    ReadsUnusedSlots: "NaN",
    ReadsPageMinusOne: "pad rows of output hold NaN",
    ReturnsItsInput: "the step wrote to its input 'x'",
    LagsBehindItsSideStream: "a second replay of the same inputs differs",
    SplitsByCaptureLengths: "replay differs from eager at the same shape",
    RecyclesMetadata: "replay differs from eager",
    DividesByTheLength: "pad rows of output hold NaN",
    LeavesPadsUnwritten: "pad rows of output hold NaN",
    StopsAtTheLiveCount: "replay differs from eager",
    UpdatesTheEagerBuffer: "replay differs from eager at the same shape",
    CountsPads: "state 'steps' was written with other values",
}
"""Broken step to the line that names its bug."""
