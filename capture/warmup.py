"""Warming a process up: build what the cache lacks, load what it has, capture and verify, and report all of it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from capture.fingerprint import Fingerprint, environment_fields, target_fields
from capture.guard import CompileWatch, install_from_environment, mode_from_environment
from capture.kernels import KernelBuildUnit
from capture.process import read_triton_key
from capture.progress import Heartbeat, Progress, shown
from capture.report import WarmupReport
from capture.run import Run
from capture.store import CacheStore, cache_root
from capture.units import (
    BuildOptions,
    CompiledFunctionUnit,
    GraphCaptureUnit,
    Unit,
    UnitResult,
    VerifyUnit,
    WarmupSpec,
)
from capture.workers import KernelWorkers

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
        workers: processes that build kernels side by side, at most; None: one for each core; below 2, kernels are built
            in this process.
    """

    def __init__(
        self,
        cache_dir: str | os.PathLike[str] | None = None,
        *,
        lock_timeout: float = 3600.0,
        heartbeat: float = 10.0,
        workers: int | None = None,
    ) -> None:
        self.root = cache_root(cache_dir)
        self.lock_timeout = lock_timeout
        self.heartbeat = heartbeat
        self.workers = workers

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
        if any(isinstance(unit, KernelBuildUnit) for unit in spec.units):
            read_triton_key()
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
            ValueError: ``MLA_NO_COMPILE`` holds no mode; nothing was built.
            CacheAccessError: something must be built and the cache cannot be written, or is another's.
            CacheLockTimeout: another process kept the lock for longer than ``lock_timeout``.
            Exception: whatever ``setup`` of the specification raises.
        """
        mode_from_environment()  # what is wrong with it shows before a build, not after
        total = sum(planned.unit.cost for planned in plan.units)
        with ExitStack() as stack:
            ahead, notes = _kernels_built_ahead(plan)
            workers, note = self._workers(plan, ahead)  # before there are threads
            if workers is not None:
                stack.enter_context(workers)
            show = stack.enter_context(shown(progress))
            beat = stack.enter_context(Heartbeat(show, total, self.heartbeat))
            watch = stack.enter_context(CompileWatch())
            run = Run(plan, beat, self.lock_timeout, prove_again, workers, ahead, [*notes, *filter(None, [note])])
            run.execute()
        install_from_environment()
        return run.report(watch.compiled)

    def _workers(self, plan: WarmupPlan, ahead: Sequence[Path]) -> tuple[KernelWorkers | None, str]:
        """Processes for the kernels that the cache lacks, and why there are none where they would have helped."""
        missing = [planned.unit for planned in plan.units if planned.state != "hit"]
        arch = str(plan.fingerprint.fields.get("arch", "")).split(":")[0]
        return KernelWorkers.of(missing, arch, self.workers, ahead)


def _kernels_built_ahead(plan: WarmupPlan) -> tuple[list[Path], list[str]]:
    """Their Triton directory, if the cache lacks some kernel and each of these files is sound; and a note if not."""
    lacks = any(isinstance(planned.unit, KernelBuildUnit) and planned.state != "hit" for planned in plan.units)
    if plan.ahead is None or not lacks:
        return [], []
    found = plan.ahead.check()
    if found.damaged:
        damaged = ", ".join(sorted(found.damaged))
        return [], [f"{plan.ahead.directory} is damaged and not used: {damaged}"]
    return ([plan.ahead.directory / "triton"] if found.intact else []), []
