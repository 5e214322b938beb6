"""Warming a process up: build what the cache lacks, load what it has, capture and verify, and report all of
it.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from capture.filesystem import describe_filesystem
from capture.fingerprint import Fingerprint, environment_fields, target_fields
from capture.guard import CompileWatch, install_from_environment
from capture.kernels import KernelBuildUnit, prebuilt_kernels
from capture.process import builds_in_process, import_seconds, make_context
from capture.progress import Heartbeat, Progress, line_progress, rich_progress
from capture.report import PHASES, BucketRow, PhaseRow, SpanRow, UnitRow, WarmupReport
from capture.store import CacheCheck, CacheStore, cache_root
from capture.units import (
    BuildOptions,
    CompiledFunctionUnit,
    GraphCaptureUnit,
    Unit,
    UnitResult,
    VerifyUnit,
    WarmupSpec,
)

__all__ = [
    "BuildOptions",
    "CompiledFunctionUnit",
    "GraphCaptureUnit",
    "KernelBuildUnit",
    "PlannedUnit",
    "Unit",
    "UnitResult",
    "VerifyUnit",
    "WarmupManager",
    "WarmupPlan",
    "WarmupSpec",
]

_log = logging.getLogger(__name__)
_RECORD_PATIENCE = 5.0


@dataclass(frozen=True)
class PlannedUnit:
    """A unit and whether the cache has it: ``hit``, ``missing`` or ``damaged``."""

    unit: Unit
    state: str


@dataclass(frozen=True)
class WarmupPlan:
    """Every unit of a specification in the order in which it runs, and what the cache has.

    Attributes:
        damaged: relative path -> what is wrong with it.
        ahead: where kernels are that were built for this device by a machine without it (``build --target``).
    """

    spec: WarmupSpec
    store: CacheStore
    units: tuple[PlannedUnit, ...]
    damaged: Mapping[str, str]
    ahead: CacheStore | None = None

    @property
    def fingerprint(self) -> Fingerprint:
        """What the cached files depend on."""
        return self.store.fingerprint

    @property
    def directory(self) -> Path:
        """Where they are."""
        return self.store.directory


class WarmupManager:
    """Warms processes up from one cache.

    Args:
        cache_dir: the cache's root; by default ``$MLA_WARMUP_CACHE``, else the user's cache directory.
        lock_timeout: seconds to wait for another process that builds the same.
        heartbeat: longest silence of the progress output, in seconds.
    """

    def __init__(
        self,
        cache_dir: str | os.PathLike[str] | None = None,
        *,
        lock_timeout: float = 3600.0,
        heartbeat: float = 10.0,
    ) -> None:
        self.root = cache_root(cache_dir)
        self.lock_timeout = lock_timeout
        self.heartbeat = heartbeat

    def plan(self, spec: WarmupSpec) -> WarmupPlan:
        """Compare ``spec`` with the cache. Runs no unit and no setup, writes nothing; reads the cached files.

        Raises:
            ValueError: a field of ``spec`` has the name of an environment field.
            CacheAccessError: the cache is not the caller's own; see :func:`capture.store.check_access`.
        """
        environment = target_fields(spec.target) if spec.target else environment_fields(spec.device)
        if clash := environment.keys() & spec.fields.keys():
            raise ValueError(f"spec.fields has {sorted(clash)}, which are environment fields; rename them")
        fingerprint = Fingerprint({**environment, **spec.fields})
        store = CacheStore(self.root, fingerprint)
        check = store.check()
        units = tuple(PlannedUnit(unit, check.state_of(unit.key)) for unit in spec.ordered())
        ahead = None
        if not spec.target:
            built_ahead = Fingerprint({**target_fields(str(environment["arch"])), **spec.fields})
            ahead = CacheStore(self.root, built_ahead)
        return WarmupPlan(spec, store, units, check.damaged, ahead)

    def run(self, plan: WarmupPlan, progress: bool | Progress = True, *, prove_again: bool = False) -> WarmupReport:
        """Do the plan. Units that fail are in the report; the others go on.

        Environment variables point torch, Triton and AITER at the cache; they stay set for the process. If
        ``MLA_NO_COMPILE`` is set, compilations are caught from then on (:func:`capture.install_from_environment`).

        Args:
            progress: True: a bar on a terminal, else lines on stderr, at least one every ``heartbeat``
                seconds. False: silence. Or a callback.
            prove_again: verify in full what the cache says was proved before; see :class:`VerifyUnit`.

        Raises:
            CacheAccessError: something must be built and the cache cannot be written, or is another's.
            CacheLockTimeout: another process kept the lock for longer than ``lock_timeout``.
            Exception: whatever ``setup`` of the specification raises.
        """
        total = sum(planned.unit.cost for planned in plan.units)
        with ExitStack() as stack:
            show = stack.enter_context(_shown(progress))
            beat = stack.enter_context(Heartbeat(show, total, self.heartbeat))
            watch = stack.enter_context(CompileWatch())
            run = _Run(plan, beat, self.lock_timeout, prove_again)
            run.execute()
        install_from_environment()
        return run.report(watch.compiled)


class _Run:
    """The state of one run. The steps of :meth:`execute` are its phases."""

    def __init__(self, plan: WarmupPlan, beat: Heartbeat, lock_timeout: float, prove_again: bool) -> None:
        self._spec = plan.spec
        self._store = plan.store
        self._ahead = plan.ahead
        self._beat = beat
        self._lock_timeout = lock_timeout
        self._prove_again = prove_again
        imported = import_seconds()
        self._origin = time.monotonic() - imported
        self._spans = [SpanRow("import", 0.0, round(imported, 4))] if imported else []
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._seconds["import"] = imported
        self._notes: list[str] = []
        self._quarantined: list[str] = []
        self._rows: dict[str, UnitRow] = {}
        self._buckets: dict[tuple[str, int], BucketRow] = {}
        self._cold = False

    def execute(self) -> None:
        units = self._spec.ordered()
        with ExitStack() as stack:
            self._notes += stack.enter_context(builds_in_process())
            with self._phase("kernels"):
                check = self._open()
                stack.enter_context(prebuilt_kernels(self._kernels_built_ahead(check)))
            with self._phase("context"):
                make_context(self._spec.device)
            with self._phase("weights"):
                self._tag_torch_keys()
                resources = self._spec.setup()
            persistent = [unit for unit in units if unit.persistent]
            if not _has(check, persistent):
                check = self._build(persistent, resources)
            self._run_units(persistent, resources, check)
            transient = [unit for unit in units if not unit.persistent]
            self._run_units(transient, resources, check)
            self._record_successes(transient, check)

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

    def _kernels_built_ahead(self, check: CacheCheck) -> list[Path]:
        """Their Triton directory, if some kernel is missing here and each of its files is sound."""
        missing = [unit for unit in self._spec.units if unit.key not in check.intact]
        if self._ahead is None or not any(isinstance(unit, KernelBuildUnit) for unit in missing):
            return []
        found = self._ahead.check()
        if found.damaged:
            self._notes.append(f"{self._ahead.directory} is damaged and not used: {', '.join(sorted(found.damaged))}")
        return [self._ahead.directory / "triton"] if found.intact and not found.damaged else []

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
            compiled=compiled,
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
        lost = [key for key in unit.needs if self._rows[key].state in ("failed", "skipped")]
        if lost:
            return self._row(unit, "skipped", time.monotonic(), reason=f"needs {', '.join(lost)}, which failed")
        self._beat.unit(unit.phase, unit.key)
        known = unit.key in check.intact
        start = time.monotonic()
        with CompileWatch() as watch:
            make = unit.load if known and not self._must_prove(unit) else unit.build
            reason, origin = self._attempt(make, resources)
            if reason and known and unit.persistent:
                known = False
                reason, origin = self._rebuild(unit, resources, reason)
        seconds = time.monotonic() - start
        if reason:
            row = self._row(unit, "failed", start, reason=reason)
        elif known and watch.compiled == 0:
            row = self._row(unit, "hit", start, check.manifest.units[unit.key].bytes, origin)
        else:
            names = ", ".join(event.name for event in watch.events if event.is_build)
            if known:
                origin = f"cached, yet compiled {names}"
            elif (
                names and not unit.persistent
            ):  # such a unit keeps no files: each of these belongs to a unit of its own
                origin = f"compiled {names}"
            row = self._row(unit, "built", start, reason=origin)
        if unit.persistent and (row.state != "hit" or origin):
            row = self._settle(unit, row)
        self._beat.done(f"{row.state}: {unit.key} ({seconds:.1f} s)", unit.cost)
        return row

    def _must_prove(self, unit: Unit) -> bool:
        """Whether a proof on record does not count: as asked for, or because this process made something anew."""
        return isinstance(unit, VerifyUnit) and (
            self._prove_again or any(row.state != "hit" for row in self._rows.values())
        )

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
        except OSError as error:
            return f"{reason}; building it again is impossible: {error}", ""

    def _settle(self, unit: Unit, row: UnitRow) -> UnitRow:
        """Enter what was built into the manifest at once, so that a kill loses only the unit in work."""
        try:
            with self._store.hold(self._lock_timeout, self._beat.say):
                if row.state == "failed":
                    self._set_aside(self._store.set_aside_strays())
                    return row
                return replace(row, bytes=self._store.record(unit.key, unit.kind, row.seconds).bytes)
        except OSError as error:
            self._notes.append(f"{unit.key} could not be entered into the cache: {error}")
            return row

    def _record_successes(self, units: Sequence[Unit], check: CacheCheck) -> None:
        """Enter that units without files succeeded. It only serves later reports: not worth a wait."""
        rows = [self._rows[unit.key] for unit in units if unit.key not in check.intact]
        if not any(row.state == "built" for row in rows):
            return
        with suppress(OSError):
            self._store.prepare()
            with self._store.hold(_RECORD_PATIENCE, self._beat.say):
                for row in rows:
                    if row.state == "built":
                        self._store.record(row.key, row.kind, row.seconds, adopt=False)

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


def _has(check: CacheCheck, units: Sequence[Unit]) -> bool:
    return all(unit.key in check.intact for unit in units)


@contextmanager
def _shown(progress: bool | Progress) -> Iterator[Progress]:
    if callable(progress):
        yield progress
    elif not progress:
        yield lambda event: None
    elif sys.stderr.isatty():
        with rich_progress() as show:
            yield show
    else:
        yield line_progress()
