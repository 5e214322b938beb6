"""One run of a warm-up plan, phase by phase."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from capture.errors import CacheError, CacheLockTimeout
from capture.filesystem import describe_filesystem
from capture.guard import CompileWatch
from capture.kernels import prebuilt_kernels
from capture.process import builds_in_process, import_seconds, on_device
from capture.progress import Heartbeat
from capture.report import PHASES, BucketRow, PhaseRow, SpanRow, UnitRow, WarmupReport
from capture.store import CacheCheck
from capture.units import Unit, UnitResult, VerifyUnit
from capture.workers import BuiltKernel, KernelWorkers

if TYPE_CHECKING:
    from capture.warmup import WarmupPlan

__all__ = ["Run"]

_log = logging.getLogger(__name__)
_RECORD_PATIENCE = 5.0
_LOST = {"failed": "failed", "skipped": "was skipped"}  # the states of units that others cannot build on


class Run:
    """The state of one run. The steps of :meth:`execute` are its phases.

    Args:
        workers: forked, and waiting for their work; None: there are none.
        ahead: Triton directories of kernels that were built ahead, each file of them sound.
        notes: for the report.
    """

    def __init__(
        self,
        plan: WarmupPlan,
        beat: Heartbeat,
        lock_timeout: float,
        prove_again: bool,
        workers: KernelWorkers | None,
        ahead: Sequence[Path],
        notes: Iterable[str],
    ) -> None:
        self._spec = plan.spec
        self._store = plan.store
        self._ahead = ahead
        self._beat = beat
        self._lock_timeout = lock_timeout
        self._prove_again = prove_again
        self._workers = workers
        self._compiled_by_workers = 0
        imported = import_seconds()
        self._origin = time.monotonic() - imported
        self._spans = [SpanRow("import", 0.0, round(imported, 4))] if imported else []
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._seconds["import"] = imported
        self._notes = list(notes)
        self._quarantined: list[str] = []
        self._rows: dict[str, UnitRow] = {}
        self._buckets: dict[tuple[str, int], BucketRow] = {}
        self._cold = False
        self._proofs = [unit.key for unit in plan.spec.units if isinstance(unit, VerifyUnit) and not unit.persistent]

    def execute(self) -> None:
        units = self._spec.ordered()
        with ExitStack() as stack:
            self._notes += stack.enter_context(builds_in_process())
            with self._phase("kernels"):
                check = self._open()
                stack.enter_context(prebuilt_kernels(self._ahead))
            persistent = [unit for unit in units if unit.persistent]
            with ExitStack() as building:
                if self._workers is not None and not _has(check, persistent):
                    self._start_workers(self._workers, building)
                with self._phase("context"):
                    stack.enter_context(on_device(self._spec.device))
                with self._phase("weights"), CompileWatch() as watch:
                    self._tag_torch_keys()
                    resources = self._spec.setup()
                if early := ", ".join(event.name for event in watch.events if event.is_build):
                    self._notes.append(f"setup compiled {early} before the cache's kernels were loaded")
                if not _has(check, persistent):
                    check = self._build(persistent, resources)
            self._run_units(persistent, resources, check)
            if any(row.state == "built" for row in self._rows.values()):
                check = self._store.check()  # which has no proof any more
            transient = [unit for unit in units if not unit.persistent]
            self._run_units(transient, resources, check)
            self._record_outcomes(transient, check)

    def _open(self) -> CacheCheck:
        """Check the cache, set damage aside before anything can load it, point the compilers at the cache."""
        store = self._store
        if note := describe_filesystem(store.root):
            self._notes.append(note)
        if not store.directory.exists():
            store.prepare()  # else the first compiler makes it, with a mode of its own choosing
        check = store.check()
        self._cold = check.intact.isdisjoint(unit.key for unit in self._spec.units)
        if check.damaged:
            with store.hold(self._lock_timeout, self._beat.say):
                self._set_aside(store.repair(store.check()))
                check = store.check()
        self._notes += store.apply_environment(check)
        return check

    def _start_workers(self, workers: KernelWorkers, building: ExitStack) -> None:
        """Under the lock until the end of ``building``; if another process has it, that one builds."""
        self._store.prepare()
        try:
            building.enter_context(self._store.hold(0.0, lambda line: None))
        except CacheLockTimeout:
            return
        check = self._store.check()
        workers.start([unit.key for unit in self._spec.units if unit.key not in check.intact])

    def report(self, compiled: int) -> WarmupReport:
        fields = self._store.fingerprint.fields
        target = self._spec.target
        device = (
            {"type": "none", "name": target, "arch": target}
            if target
            else {"type": fields["device"], "name": fields["device_name"], "arch": fields["arch"]}
        )
        return WarmupReport(
            fingerprint=self._store.fingerprint,
            device=device,
            backend=self._spec.backend,
            phases=tuple(PhaseRow(name, round(seconds, 4)) for name, seconds in self._seconds.items()),
            spans=tuple(self._spans),
            units=tuple(self._rows[unit.key] for unit in self._spec.ordered()),
            buckets=tuple(self._buckets[key] for key in sorted(self._buckets)),
            compiled=compiled + self._compiled_by_workers,
            seconds=round(time.monotonic() - self._origin, 4),
            cold=self._cold,
            notes=tuple(self._notes),
            quarantined=tuple(self._quarantined),
            environment={name: os.environ[name] for name in self._store.environment() if name in os.environ},
        )

    def _build(self, units: Sequence[Unit], resources: Any) -> CacheCheck:
        """Under the lock: set leftovers aside and build what is missing, unless another process just did."""
        self._store.prepare()
        with ExitStack() as stack:
            with self._phase("kernels"):
                stack.enter_context(self._store.hold(self._lock_timeout, self._beat.say))
                check = self._store.check()
            if _has(check, units):
                return check
            self._set_aside(self._store.repair(check))
            self._run_units(units, resources, check)
            return self._store.check()

    def _run_units(self, units: Sequence[Unit], resources: Any, check: CacheCheck) -> None:
        for unit in units:
            if unit.key not in self._rows:
                with self._phase(unit.phase):
                    self._rows[unit.key] = self._run_unit(unit, resources, check)

    def _run_unit(self, unit: Unit, resources: Any, check: CacheCheck) -> UnitRow:
        lost = [f"{key}, which {what}" for key in unit.needs if (what := _LOST.get(self._rows[key].state))]
        if lost:
            self._beat.done(f"skipped: {unit.key}", unit.cost)
            return self._row(unit, "skipped", time.monotonic(), reason=f"needs {'; '.join(lost)}")
        self._beat.unit(unit.phase, unit.key)
        known = unit.key in check.intact
        delivered = None if known else self._delivered(unit)
        start = time.monotonic()
        with CompileWatch() as watch, _offered(delivered):
            make = unit.load if known and not self._must_prove(unit, check) else unit.build
            reason, origin = self._attempt(make, resources)
            if reason and known and unit.persistent:
                known = False
                reason, origin = self._rebuild(unit, resources, reason)
        if reason:
            row = self._row(unit, "failed", start, reason=reason)
        elif known and watch.compiled == 0:
            row = self._row(unit, "hit", start, check.manifest.units[unit.key].bytes, origin)
        elif delivered and watch.compiled == 0:
            row = self._row(unit, "built", delivered.start, reason=delivered.origin)
            row = replace(row, seconds=round(delivered.seconds, 4), worker=delivered.worker)
        else:
            names = ", ".join(event.name for event in watch.events if event.is_build)
            if known:
                origin = f"cached, yet compiled {names}"
            elif names and not unit.persistent:  # which keeps no files: each of these belongs to a unit of its own
                origin = f"compiled {names}"
            row = self._row(unit, "built", start, reason=origin)
        if unit.persistent and (row.state != "hit" or origin):
            row = self._settle(unit, row)
        self._beat.done(f"{row.state}: {unit.key} ({row.seconds:.1f} s)", unit.cost)
        return row

    def _delivered(self, unit: Unit) -> BuiltKernel | None:
        """What a worker has built for this unit; waits for it."""
        built = self._workers.wait_for(unit.key) if self._workers is not None else None
        if isinstance(built, str):
            self._notes.append(f"{built}; {unit.key} is built in this process")
            return None
        if built is not None:
            self._compiled_by_workers += built.compiled
        return built

    def _must_prove(self, unit: Unit, check: CacheCheck) -> bool:
        """Whether a proof on record does not count.

        It was asked for again, this process made something anew, or captured a batch size that was never proved.
        """
        return isinstance(unit, VerifyUnit) and (
            self._prove_again
            or any(row.state != "hit" for row in self._rows.values())
            or any(size not in check.manifest.units[unit.key].proved for size in self._sizes(unit))
        )

    def _sizes(self, unit: VerifyUnit, *, verified: bool = False) -> set[int]:
        """The batch sizes that this process captured for ``unit``, or of them those that it verified."""
        buckets = (bucket for (runner, _), bucket in self._buckets.items() if runner == unit.graphs)
        return {bucket.batch_size for bucket in buckets if bucket.verified or not verified}

    def _attempt(self, make: Callable[[Any], UnitResult | None], resources: Any) -> tuple[str, str]:
        """Call ``make``; why it failed, or "", and where its files came from."""
        try:
            result = make(resources) or UnitResult()
        except (Exception, SystemExit) as error:  # a build script that exits must not end the server
            _log.debug("a unit failed", exc_info=True)
            return f"{type(error).__name__}: {error}", ""
        self._buckets |= {(bucket.runner, bucket.batch_size): bucket for bucket in result.buckets}
        for graph, trials in result.verified.items():
            if graph in self._buckets:
                self._buckets[graph] = replace(self._buckets[graph], verified=True, trials=trials)
        return "", result.origin

    def _rebuild(self, unit: Unit, resources: Any, reason: str) -> tuple[str, str]:
        """The files are what was written, yet they do not load: build once more, as :meth:`_attempt`."""
        try:
            with self._store.hold(self._lock_timeout, self._beat.say):
                self._set_aside([f"{unit.key} did not load ({reason}); building it again"])
                self._set_aside(self._store.set_aside_unit(unit.key))
                return self._attempt(unit.build, resources)
        except (CacheError, OSError) as error:
            return f"{reason}; building it again is impossible: {error}", ""

    def _settle(self, unit: Unit, row: UnitRow) -> UnitRow:
        """Enter what was built into the manifest at once, so that a kill loses only the unit in work."""
        try:
            with self._store.hold(self._lock_timeout, self._beat.say):
                if row.state == "failed":
                    self._set_aside(self._store.set_aside_strays())
                    return row
                record = self._store.record(unit.key, unit.kind, row.seconds, void=self._proofs)
                return replace(row, bytes=record.bytes)
        except (CacheError, OSError) as error:
            self._notes.append(f"{unit.key} could not be entered into the cache: {error}")
            return row

    def _record_outcomes(self, units: Sequence[Unit], check: CacheCheck) -> None:
        """Enter which units without files succeeded, and take the record of those away that failed.

        A success only shortens later starts, so it is not worth a wait. A failure is: with the record of an earlier
        success the next start would not look closely.
        """
        failed = {unit.key for unit in units if self._rows[unit.key].state == "failed"}
        proved: dict[str, set[int]] = {}
        for unit in units:
            sizes = self._sizes(unit, verified=True) if isinstance(unit, VerifyUnit) else set()
            if unit.key in check.intact:
                sizes.difference_update(check.manifest.units[unit.key].proved)
            if self._rows[unit.key].state in ("built", "hit") and (sizes or unit.key not in check.intact):
                proved[unit.key] = sizes
        if not failed and not proved:
            return
        patience = self._lock_timeout if failed & check.intact else _RECORD_PATIENCE
        try:
            self._store.prepare()
            with self._store.hold(patience, self._beat.say):
                self._store.forget(failed)
                for key, sizes in proved.items():
                    row = self._rows[key]
                    self._store.record(key, row.kind, row.seconds, adopt=False, proved=sizes)
        except (CacheError, OSError) as error:
            self._notes += [f"{key} failed, but stays on record: {error}" for key in sorted(failed & check.intact)]

    def _row(self, unit: Unit, state: str, begun: float, size: int = 0, reason: str = "") -> UnitRow:
        seconds, start = time.monotonic() - begun, begun - self._origin
        return UnitRow(unit.kind, unit.key, state, round(seconds, 4), size, reason, round(start, 4), unit.phase)

    def _set_aside(self, lines: Sequence[str]) -> None:
        self._quarantined += lines
        for line in lines:
            self._beat.say(f"set aside: {line}")

    def _tag_torch_keys(self) -> None:
        tag = self._spec.cache_key_tag
        if not tag:
            return
        import torch.compiler.config as config

        tags = [part for part in (config.cache_key_tag or "").split("|") if part]
        if tag not in tags:
            config.cache_key_tag = "|".join([*tags, tag])

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        self._beat.phase(name)
        start = time.monotonic()
        try:
            yield
        finally:
            seconds = time.monotonic() - start
            self._seconds[name] += seconds
            self._spans.append(SpanRow(name, round(start - self._origin, 4), round(seconds, 4)))


def _offered(built: BuiltKernel | None) -> AbstractContextManager[None]:
    return nullcontext() if built is None else prebuilt_kernels([built.directory])


def _has(check: CacheCheck, units: Sequence[Unit]) -> bool:
    return all(unit.key in check.intact for unit in units)
