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

from capture.fingerprint import Fingerprint, environment_fields
from capture.guard import CompileWatch, install_from_environment
from capture.progress import Heartbeat, Progress, line_progress, rich_progress
from capture.report import PHASES, BucketRow, PhaseRow, UnitRow, WarmupReport
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
    "PlannedUnit",
    "Unit",
    "UnitResult",
    "VerifyUnit",
    "WarmupManager",
    "WarmupPlan",
    "WarmupSpec",
]

_log = logging.getLogger(__name__)
_IMPORTED = time.monotonic()
_first_run = True
_RECORD_PATIENCE = 5.0
_CACHE_SWITCHES = {
    "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1",
    "TORCHINDUCTOR_FX_GRAPH_CACHE": "0",
    "TORCHINDUCTOR_AUTOGRAD_CACHE": "0",
    "TRITON_ALWAYS_COMPILE": "1",
}


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
    """

    spec: WarmupSpec
    store: CacheStore
    units: tuple[PlannedUnit, ...]
    damaged: Mapping[str, str]

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
        environment = environment_fields(spec.device)
        if clash := environment.keys() & spec.fields.keys():
            raise ValueError(f"spec.fields has {sorted(clash)}, which are environment fields; rename them")
        fingerprint = Fingerprint({**environment, **spec.fields})
        store = CacheStore(self.root, fingerprint)
        check = store.check()
        units = tuple(PlannedUnit(unit, check.state_of(unit.key)) for unit in spec.ordered())
        return WarmupPlan(spec, store, units, check.damaged)

    def run(self, plan: WarmupPlan, progress: bool | Progress = True) -> WarmupReport:
        """Do the plan. Units that fail are in the report; the others go on.

        Environment variables point torch, Triton and AITER at the cache; they stay set for the process. If
        ``MLA_NO_COMPILE`` is set, compilations are caught from then on (:func:`capture.install_from_environment`).

        Args:
            progress: True: a bar on a terminal, else lines on stderr, at least one every ``heartbeat``
                seconds. False: silence. Or a callback.

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
            run = _Run(plan, beat, self.lock_timeout)
            run.execute()
        install_from_environment()
        return run.report(watch.compiled)


class _Run:
    """The state of one run. The steps of :meth:`execute` are its phases."""

    def __init__(self, plan: WarmupPlan, beat: Heartbeat, lock_timeout: float) -> None:
        self._spec = plan.spec
        self._store = plan.store
        self._beat = beat
        self._lock_timeout = lock_timeout
        self._begun = time.monotonic()
        self._import_seconds = _import_seconds()
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._seconds["import"] = self._import_seconds
        self._notes: list[str] = []
        self._quarantined: list[str] = []
        self._rows: dict[str, UnitRow] = {}
        self._buckets: dict[tuple[str, int], BucketRow] = {}
        self._cold = False

    def execute(self) -> None:
        units = self._spec.ordered()
        with _builds_in_process() as notes:
            self._notes += notes
            with self._phase("kernels"):
                check = self._open()
            with self._phase("context"):
                _make_context(self._spec.device)
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

    def report(self, compiled: int) -> WarmupReport:
        fields = self._store.fingerprint.fields
        return WarmupReport(
            fingerprint=self._store.fingerprint,
            device={"type": fields["device"], "name": fields["device_name"], "arch": fields["arch"]},
            backend=self._spec.backend,
            phases=tuple(PhaseRow(name, round(seconds, 4)) for name, seconds in self._seconds.items()),
            units=tuple(self._rows[unit.key] for unit in self._spec.ordered()),
            buckets=tuple(self._buckets[key] for key in sorted(self._buckets)),
            compiled=compiled,
            seconds=round(self._import_seconds + time.monotonic() - self._begun, 4),
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
            return self._row(unit, "skipped", 0.0, reason=f"needs {', '.join(lost)}, which failed")
        self._beat.unit(unit.phase, unit.key)
        known = unit.key in check.intact
        start = time.monotonic()
        with CompileWatch() as watch:
            reason = self._attempt(unit.load if known else unit.build, resources)
            if reason and known and unit.persistent:
                known, reason = False, self._rebuild(unit, resources, reason)
        seconds = time.monotonic() - start
        if reason:
            row = self._row(unit, "failed", seconds, reason=reason)
        elif known and watch.compiled == 0:
            row = self._row(unit, "hit", seconds, check.manifest.units[unit.key].bytes)
        else:
            names = ", ".join(event.name for event in watch.events if event.is_build)
            row = self._row(unit, "built", seconds, reason=f"cached, yet compiled {names}" if known else "")
        if unit.persistent and row.state != "hit":
            row = self._settle(unit, row)
        self._beat.done(f"{row.state}: {unit.key} ({seconds:.1f} s)", unit.cost)
        return row

    def _attempt(self, make: Callable[[Any], UnitResult | None], resources: Any) -> str:
        """Call ``make``; why it failed, or ""."""
        try:
            result = make(resources) or UnitResult()
        except (Exception, SystemExit) as error:  # a build script that exits must not end the server
            _log.debug("a unit failed", exc_info=True)
            return f"{type(error).__name__}: {error}"
        self._buckets |= {(bucket.runner, bucket.batch_size): bucket for bucket in result.buckets}
        for graph in result.verified:
            if graph in self._buckets:
                self._buckets[graph] = replace(self._buckets[graph], verified=True)
        return ""

    def _rebuild(self, unit: Unit, resources: Any, reason: str) -> str:
        """The files are what was written, yet they do not load: build once more. Why that failed, or ""."""
        try:
            with self._store.hold(self._lock_timeout, self._beat.say):
                self._set_aside([f"{unit.key} did not load ({reason}); building it again"])
                self._set_aside(self._store.set_aside_unit(unit.key))
                return self._attempt(unit.build, resources)
        except OSError as error:
            return f"{reason}; building it again is impossible: {error}"

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

    def _row(self, unit: Unit, state: str, seconds: float, size: int = 0, reason: str = "") -> UnitRow:
        return UnitRow(unit.kind, unit.key, state, round(seconds, 4), size, reason)

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
            self._seconds[name] += time.monotonic() - start


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


@contextmanager
def _builds_in_process() -> Iterator[list[str]]:
    """Inductor compiles in this process, unless the user chose otherwise; yields what weakens the cache.

    Builds in worker processes would be neither counted nor named, and would go on writing into the cache
    after a kill of this process.
    """
    notes = [
        f"{name}={value} is set: a cache of torch or Triton is off, and a warm start compiles again"
        for name, value in _CACHE_SWITCHES.items()
        if os.environ.get(name) == value
    ]
    threads = "TORCHINDUCTOR_COMPILE_THREADS"
    inductor = sys.modules.get("torch._inductor.config")
    if threads in os.environ:
        yield notes
    elif inductor is not None:
        with inductor.patch(compile_threads=1):
            yield notes
    else:
        os.environ[threads] = "1"
        try:
            yield notes
        finally:
            os.environ.pop(threads, None)


def _make_context(device: str) -> None:
    import torch

    if torch.device(device).type == "cuda":
        torch.zeros(1, device=device)
        torch.cuda.synchronize(device)


def _import_seconds() -> float:
    """Seconds from process start to the first warm-up of this process; 0 for the later ones."""
    global _first_run
    if not _first_run:
        return 0.0
    _first_run = False
    try:
        stat = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        started = int(stat[19]) / os.sysconf("SC_CLK_TCK")
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - started)
    except (OSError, ValueError, IndexError):
        return time.monotonic() - _IMPORTED  # no procfs: from the import of this module
