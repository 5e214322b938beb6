"""Proof that captured graphs give what eager gives.

For each bucket, fresh random inputs at several fillings are run three ways from the same state: eager on
exactly the live rows, eager at the bucket's shape, and as a replay over poisoned static buffers. All
three must agree, the state must change in the same elements, and a second replay, after one of another
bucket, must repeat the first bit by bit. Pad rows that are made of pad values alone must not be NaN.

A step that was proved so before, and is captured again in a new process, can only have been captured wrongly:
``again=True`` runs each bucket eagerly at its own shape and as a replay, and asks for the same.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from capture.errors import CaptureError, VerificationError
from capture.state import clones, copy_, difference, new_nan, one_sided, randomize, redraw, unravel
from capture.tolerance import as_integers, changed_bits, differing, distance, same_bits

if TYPE_CHECKING:
    from capture.runner import GraphRunner

__all__ = ["BucketResult", "VerifyReport", "verify"]

# Runs from other values for places that one side alone changed: chance hits an old value of 8 bits again once in 100.
_REDRAWS = 3


@dataclass(frozen=True, slots=True)
class BucketResult:
    """What was found for one bucket.

    Attributes:
        fillings: how many requests were live in each trial.
        bitwise: every replay gave bit by bit what eager gives at the bucket's shape.
        max_error: the largest error of a row against eager on the live rows alone (``again``: at the bucket's shape),
            as in :class:`Distance`.
        failures: one readable line each; empty if the graph is right.
    """

    batch_size: int
    fillings: tuple[int, ...]
    bitwise: bool
    max_error: float
    failures: tuple[str, ...]

    @property
    def ok(self) -> bool:
        return not self.failures


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What :func:`verify` found, smallest bucket first.

    Attributes:
        seed: the generator's seed; the same seed gives the same trials.
    """

    buckets: tuple[BucketResult, ...]
    seconds: float
    seed: int

    @property
    def ok(self) -> bool:
        return all(bucket.ok for bucket in self.buckets)

    @property
    def failures(self) -> tuple[str, ...]:
        return tuple(failure for bucket in self.buckets for failure in bucket.failures)

    def raise_if_failed(self) -> None:
        """Raise VerificationError, which carries this report, unless every bucket is right."""
        if self.ok:
            return
        wrong = [str(bucket.batch_size) for bucket in self.buckets if not bucket.ok]
        shown = "\n  ".join(self.failures[:10])
        more = f"\n  and {len(self.failures) - 10} more" if len(self.failures) > 10 else ""
        raise VerificationError(
            self,
            f"captured graphs do not give what eager gives, batch sizes {', '.join(wrong)} "
            f"(seed {self.seed}):\n  {shown}{more}",
        )


def verify(
    runner: GraphRunner,
    *,
    trials: int = 3,
    poison: bool = True,
    again: bool = False,
    generator: torch.Generator | None = None,
    poison_state: Callable[[Mapping[str, Tensor]], None] | None = None,
) -> VerifyReport:
    """Prove every captured graph of ``runner`` against eager.

    Floating tensors of ``runner.state`` are filled with random values for each trial; all of ``state`` is
    as before afterwards. That takes room for three copies of it: for a large cache, name a slice that
    ``make_inputs`` stays in.

    Args:
        runner: captured.
        trials: fresh inputs for each bucket. The fillings 1, bucket - 1, bucket and a random one are
            always tried, whatever the number, unless ``again``: then each trial has a random one.
        poison: put NaN or the largest integer into static buffers before they are written, and NaN into
            the pad rows of floating inputs that declare no pad value.
        again: the same step was proved before: only compare replays with eager at the bucket's shape.
        generator: on the runner's device; a new one with a random seed if None.
        poison_state: see :class:`capture.runner.GraphRunner`; the runner's own if None.

    Raises:
        ValueError: ``trials`` is not positive.
        CaptureError: the runner is not captured.
    """
    if trials < 1:
        raise ValueError(f"trials must be at least 1, got {trials}")
    if not runner.captured:
        raise CaptureError("this runner is not captured; call capture(verify=False) first")
    start = time.perf_counter()
    if runner.device.type == "cuda":
        torch.cuda.synchronize(runner.device)  # a replay on another stream may still use the static buffers
    if generator is None:
        generator = torch.Generator(runner.device)
        generator.manual_seed(runner.ranks.first(generator.seed()))  # ranks run the same trials
    hook = poison_state or runner.poison_state
    saved = clones(runner.state)
    results = []
    try:
        with torch.no_grad():
            if again:
                randomize(runner.state, saved, generator)
            before = clones(runner.state) if again else {}
            for bucket in runner.captured:
                # Without the hook: eager at the same shape would read the same unused slots.
                trial = _Trials(runner, bucket, saved, poison, generator, None if again else hook)
                results.append(trial.run_again(trials, before) if again else trial.run(trials))
    finally:
        with torch.no_grad():
            copy_(runner.state, saved)
    return VerifyReport(tuple(results), time.perf_counter() - start, generator.initial_seed())


class _Trials:
    """The trials of one bucket."""

    def __init__(
        self,
        runner: GraphRunner,
        bucket: int,
        saved: Mapping[str, Tensor],
        poison: bool,
        generator: torch.Generator,
        poison_state: Callable[[Mapping[str, Tensor]], None] | None,
    ) -> None:
        self.runner, self.bucket, self.saved = runner, bucket, saved
        self.poison, self.generator, self.poison_state = poison, generator, poison_state
        self.outputs = runner.static_outputs
        self.bitwise, self.max_error = True, 0.0
        self.failures: list[str] = []

    def run(self, trials: int) -> BucketResult:
        bucket = self.bucket
        fillings = list(dict.fromkeys([bucket, 1, max(1, bucket - 1), self._draw()]))
        fillings += [self._draw() for _ in range(trials - len(fillings))]
        return self._run(fillings, self._trial)

    def run_again(self, trials: int, before: Mapping[str, Tensor]) -> BucketResult:
        """``before`` is the state that all trials of all buckets start from."""
        fillings = [self._draw() for _ in range(trials)]
        return self._run(fillings, partial(self._trial_again, before))

    def _run(self, fillings: Sequence[int], trial: Callable[[Mapping[str, Tensor], int, str], None]) -> BucketResult:
        for filling in fillings:
            inputs = dict(self.runner.make_inputs(filling, self.generator))
            size = self.runner.static_inputs.check(inputs)
            if size != filling:
                raise ValueError(f"make_inputs({filling}, generator) returned inputs of batch size {size}")
            where = f"bucket {self.bucket}, {filling} live"
            trial(inputs, filling, where)
            self.failures += [f"{where}: {name} is no longer at its captured address" for name in self.runner.moved()]
        return BucketResult(self.bucket, tuple(fillings), self.bitwise, self.max_error, tuple(self.failures))

    def _trial(self, inputs: Mapping[str, Tensor], filling: int, where: str) -> None:
        runner = self.runner
        before = self._begin(inputs)
        wanted = self._eager(inputs, filling, where)
        wanted_state = clones(runner.state)

        self._restart(before, inputs, filling)
        padded = self._eager(runner.static_inputs.views(self.bucket), filling, where)
        self._compare(padded, wanted, f"{where}: eager with pad rows differs from eager without")

        self._restart(before, inputs, filling)
        first = self._replay(filling, where)
        self.bitwise &= all(same_bits(a, b) for a, b in zip(first, padded, strict=True))
        self._compare(first, padded, f"{where}: replay differs from eager at the same shape")
        self.max_error = max(
            self.max_error,
            self._compare(first, wanted, f"{where}: replay differs from eager on the live rows"),
        )
        compared = "eager on the live rows"
        doubtful = self._compare_state(before, wanted_state, where, compared)
        for name in new_nan(runner.state, before):
            self.failures.append(f"{where}: state {name!r} was written with NaN")
        copy_(wanted_state, runner.state)
        if doubtful:
            self._settle(doubtful, before, inputs, filling, inputs, where, compared)

        self._check_pads(before, inputs, filling, where)
        self._replay_another_bucket()
        self._restart(before, inputs, filling)
        again = self._replay(filling, where)
        for slab, a, b in zip(self.outputs.slabs, again, first, strict=True):
            if not same_bits(a, b):
                row = _first_row(a, b, slab.batch_dim.dim if slab.batch_dim else None)
                self.failures.append(f"{where}: a second replay of the same inputs differs: {slab.name} row {row}")
        for name in differing(runner.state, wanted_state):
            self.failures.append(f"{where}: a second replay of the same inputs leaves another state {name!r}")

    def _trial_again(
        self, before: Mapping[str, Tensor], inputs: Mapping[str, Tensor], filling: int, where: str
    ) -> None:
        views = self.runner.static_inputs.views(self.bucket)
        self._restart(before, inputs, filling)
        wanted = self._eager(views, filling, where)
        wanted_state = clones(self.runner.state)
        self._restart(before, inputs, filling)
        got = self._replay(filling, where)
        if differing(dict(enumerate(got)), dict(enumerate(wanted))):
            self.bitwise = False
            error = self._compare(got, wanted, f"{where}: replay differs from eager at the same shape")
            self.max_error = max(self.max_error, error)
        else:  # the comparison finds it too
            names = dict(zip((slab.name for slab in self.outputs.slabs), got, strict=True))
            self.failures += [f"{where}: {name} holds NaN" for name in new_nan(names)]
        compared = "eager at the same shape"
        doubtful = self._compare_state(before, wanted_state, where, compared)
        if doubtful:
            self._settle(doubtful, before, inputs, filling, views, where, compared)

    def _begin(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Make the state that every run of a trial starts from; returns copies of it."""
        randomize(self.runner.state, self.saved, self.generator)
        self._poison(inputs)
        return clones(self.runner.state)

    def _restart(self, before: Mapping[str, Tensor], inputs: Mapping[str, Tensor], filling: int) -> None:
        copy_(self.runner.state, before)
        self._poison(inputs)  # what the hook overwrites besides the state
        self._fill(inputs, filling)

    def _poison(self, inputs: Mapping[str, Tensor]) -> None:
        if self.poison_state is not None:
            self.poison_state(inputs)

    def _fill(self, inputs: Mapping[str, Tensor], filling: int) -> None:
        static = self.runner.static_inputs
        if self.poison:
            static.poison()
            self.outputs.poison()
        static.fill(inputs, filling, self.bucket)
        if self.poison:
            static.poison_pads(filling, self.bucket)

    def _eager(self, inputs: Mapping[str, Tensor], filling: int, where: str) -> list[Tensor]:
        """The live rows of what the step itself returns, run on copies of ``inputs``."""
        copies = clones(inputs)
        output: Any = self.runner.step(**copies)
        leaves = [leaf.clone() for leaf in self.outputs.leaves_of(output, filling)]
        self._check_inputs(copies, inputs, f"{where}, eager")
        return leaves

    def _replay(self, filling: int, where: str) -> list[Tensor]:
        views = self.runner.static_inputs.views(self.bucket)
        copies = clones(views)
        self.runner.replay(self.bucket)
        self._check_inputs(views, copies, f"{where}, replay")
        return [leaf.clone() for leaf in self.outputs.live(self.bucket, filling)]

    def _check_pads(self, before: Mapping[str, Tensor], inputs: Mapping[str, Tensor], filling: int, where: str) -> None:
        """No NaN in pad rows made of pad values alone: what mixes rows after the step would spread it."""
        if filling == self.bucket:
            return
        copy_(self.runner.state, before)
        self._poison(inputs)
        self.outputs.poison()
        self.runner.static_inputs.fill(inputs, filling, self.bucket)
        self.runner.replay(self.bucket)
        for slab in self.outputs.slabs:
            pads = slab.pads(self.bucket, filling)
            if pads is None or not (pads.dtype.is_floating_point or pads.dtype.is_complex):
                continue
            if bool(pads.isnan().any()):
                self.failures.append(
                    f"{where}: pad rows of {slab.name} hold NaN, which an operation over all rows would spread"
                )

    def _replay_another_bucket(self) -> None:
        """With pad rows only: it overwrites what the graphs' shared memory still holds of this bucket."""
        runner = self.runner
        others = [size for size in runner.captured if size != self.bucket]
        if others:
            runner.static_inputs.pad_all(others[-1])
            runner.replay(others[-1])

    def _check_inputs(self, after: Mapping[str, Tensor], before: Mapping[str, Tensor], where: str) -> None:
        for name in differing(after, before):
            self.failures.append(f"{where}: the step wrote to its input {name!r}")

    def _compare(self, actual: list[Tensor], expected: list[Tensor], message: str) -> float:
        worst = 0.0
        for slab, a, e in zip(self.outputs.slabs, actual, expected, strict=True):
            found = distance(a, e, slab.batch_dim.dim if slab.batch_dim else None)
            worst = max(worst, found.error)
            if not found.ok:
                self.failures.append(f"{message}: {slab.name} row {found.row}: {found.reason}")
        return worst

    def _compare_state(
        self, before: Mapping[str, Tensor], wanted: Mapping[str, Tensor], where: str, eager: str
    ) -> dict[str, Tensor]:
        """Returns the places in doubt, for :meth:`_settle`."""
        state = self.runner.state
        doubtful = {}
        for name in differing(state, wanted):  # most often none: the rest waits for the device, tensor by tensor
            reason, places = difference(before[name], state[name], wanted[name])
            if reason:
                self.failures.append(f"{where}: state {name!r} {reason.format(eager=eager)}")
            elif len(places):
                doubtful[name] = places
        return doubtful

    def _settle(
        self,
        doubtful: dict[str, Tensor],
        before: Mapping[str, Tensor],
        inputs: Mapping[str, Tensor],
        filling: int,
        eager_inputs: Mapping[str, Tensor],
        where: str,
        eager: str,
    ) -> None:
        """Run from other old values at the places in doubt: what one side changes again, the other never wrote."""
        kept = {name: as_integers(before[name]).take(places) for name, places in doubtful.items()}
        still = {name: torch.ones_like(places, dtype=torch.bool) for name, places in doubtful.items()}
        for _ in range(_REDRAWS):
            for name, places in doubtful.items():
                redraw(before[name], places, self.generator)
            self._restart(before, inputs, filling)
            by_eager = self._changes(doubtful, lambda: self._eager(eager_inputs, filling, where))
            self._restart(before, inputs, filling)
            by_replay = self._changes(doubtful, lambda: self._replay(filling, where))
            for name, mask in still.items():
                mask &= by_eager[name] != by_replay[name]
            if not any(bool(mask.any()) for mask in still.values()):
                break
        for name, places in doubtful.items():
            as_integers(before[name]).put_(places, kept[name])
            wrong = still[name].nonzero()[:, 0]
            if len(wrong):
                reason = one_sided(places[wrong], before[name].shape, by_replay=bool(by_replay[name][wrong[0]]))
                self.failures.append(f"{where}: state {name!r} {reason.format(eager=eager)}")

    def _changes(self, places: Mapping[str, Tensor], run: Callable[[], object]) -> dict[str, Tensor]:
        """Which of ``places [n]`` a run changes, in bits: ``[n]`` bool."""
        state = {name: as_integers(tensor) for name, tensor in self.runner.state.items()}
        start = {name: state[name].take(at) for name, at in places.items()}
        run()
        return {name: state[name].take(at) != start[name] for name, at in places.items()}

    def _draw(self) -> int:
        """A filling."""
        device = self.generator.device
        return int(torch.randint(1, self.bucket + 1, (1,), generator=self.generator, device=device))


def _first_row(a: Tensor, b: Tensor, dim: int | None) -> int:
    if dim is None:
        return 0
    return unravel(int(changed_bits(a, b).int().argmax()), a.shape)[dim]
