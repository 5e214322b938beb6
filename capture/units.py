"""What there is to warm up: units of work, and the specification that lists them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, get_args

from capture.fingerprint import JSON, require_target
from capture.report import BucketRow

if TYPE_CHECKING:
    from capture.runner import GraphRunner

__all__ = [
    "BuildOptions",
    "CompiledFunctionUnit",
    "GraphCaptureUnit",
    "Phase",
    "Unit",
    "UnitResult",
    "VerifyUnit",
    "WarmupSpec",
]

Phase = Literal["kernels", "compile", "capture", "verify"]
_ORDER: tuple[Phase, ...] = get_args(Phase)


@dataclass(frozen=True)
class BuildOptions:
    """What a specification is made for; the options of ``mla-warmup``.

    Attributes:
        batch_sizes: buckets, in requests.
        query_len: query tokens of each request in one decode step.
        dtype, kv_dtype: names of torch dtypes; None: the cache holds ``dtype``.
        page_size: tokens of one page of the cache.
        tp: tensor-parallel ranks; the heads of one rank are the model's divided by it.
        backend: ``auto``, or the backend that must serve.
        device: where the step runs, as torch names it.
        layers: how many layers to build; None: all of them.
        max_seq_len: longest sequence, in tokens.
        compile: whether blocks are compiled; False captures a step as its ops are, and imports no compiler; None
            compiles them only where that makes a faster step.
        target: build kernels for this architecture (``sm_90``, ``gfx942``), whatever is in this machine.
    """

    batch_sizes: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    query_len: int = 1
    dtype: str = "bfloat16"
    kv_dtype: str | None = None
    page_size: int = 64
    tp: int = 1
    backend: str = "auto"
    device: str = "cpu"
    layers: int | None = None
    max_seq_len: int = 8192
    compile: bool | None = None
    target: str | None = None

    def __post_init__(self) -> None:
        numbers = {"query_len": self.query_len, "page_size": self.page_size, "tp": self.tp}
        numbers |= {"max_seq_len": self.max_seq_len, "layers": 1 if self.layers is None else self.layers}
        for name, value in numbers.items():
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if not self.batch_sizes or min(self.batch_sizes) < 1:
            raise ValueError(f"batch_sizes must be positive numbers, got {self.batch_sizes}")
        if self.max_seq_len < self.query_len:
            raise ValueError(f"max_seq_len must be at least query_len={self.query_len}, got {self.max_seq_len}")
        if self.target is not None:
            require_target(self.target)


@dataclass(frozen=True)
class UnitResult:
    """What a unit did, beyond having succeeded.

    Attributes:
        buckets: the graphs that it captured.
        verified: ``(runner, batch_size)`` of the graphs that it proved right -> with how many inputs.
        origin: for the report, one phrase: where its files came from, if this process only put them into place.
    """

    buckets: tuple[BucketRow, ...] = ()
    verified: Mapping[tuple[str, int], int] = field(default_factory=dict)
    origin: str = ""


@dataclass(frozen=True, kw_only=True)
class Unit(ABC):
    """One piece of a warm-up. It fails by raising; the other units go on.

    Attributes:
        kind: what it makes, such as "kernel" or "graph".
        key: readable, stable over processes, unique in its specification.
        phase: where its time is counted; units run phase by phase.
        cost: a guess in seconds when cold, for the progress bar.
        persistent: its result is files in the cache. Otherwise (graphs cannot be stored) it is done again in
            every process, and its record only says that it succeeded before.
        needs: keys of units without which it is skipped.
    """

    kind: str
    key: str
    phase: Phase
    cost: float = 1.0
    persistent: bool = True
    needs: tuple[str, ...] = ()

    @abstractmethod
    def build(self, resources: Any) -> UnitResult | None:
        """Make it from what the specification's ``setup`` returned, leaving files in the cache."""

    def load(self, resources: Any) -> UnitResult | None:
        """Make it in a process whose cache has those files; by default the same call, now served by them."""
        return self.build(resources)


@dataclass(frozen=True, kw_only=True)
class CompiledFunctionUnit(Unit):
    """The first call of a ``torch.compile``'d function.

    Attributes:
        call: calls the compiled function with representative arguments, once per specialization.
    """

    call: Callable[[Any], object]
    kind: str = "compiled"
    phase: Phase = "compile"
    cost: float = 5.0

    def build(self, resources: Any) -> None:
        self.call(resources)


@dataclass(frozen=True, kw_only=True)
class GraphCaptureUnit(Unit):
    """All buckets of one runner: they share a memory pool, and the largest must be captured first.

    Attributes:
        runner: picks the runner, not captured yet, from the resources.
    """

    runner: Callable[[Any], GraphRunner]
    kind: str = "graph"
    phase: Phase = "capture"
    persistent: bool = False

    def build(self, resources: Any) -> UnitResult:
        report = self.runner(resources).capture(verify=False)  # a VerifyUnit's time is its own
        return UnitResult(
            buckets=tuple(
                BucketRow(row.batch_size, row.capture_seconds, row.memory_bytes, False, self.key)
                for row in report.buckets
            )
        )


@dataclass(frozen=True, kw_only=True)
class VerifyUnit(Unit):
    """Proof of every graph of a captured runner against eager.

    Where the cache has it on record for each batch size, the same step was proved on such a device under the same
    fingerprint: a load only compares each graph with eager at its own shape, on one input (``verify(again=True)``). A
    proof that fails is on record no more.

    Attributes:
        graphs: key of the :class:`GraphCaptureUnit` that captured it.
        runner: picks the runner from the resources.
        trials: fresh inputs for each bucket.
    """

    graphs: str
    runner: Callable[[Any], GraphRunner]
    trials: int = 3
    kind: str = "verify"
    phase: Phase = "verify"
    persistent: bool = False
    needs: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "needs", (self.graphs,))

    def build(self, resources: Any) -> UnitResult:
        return self._prove(resources, self.trials, again=False)

    def load(self, resources: Any) -> UnitResult:
        return self._prove(resources, 1, again=True)

    def _prove(self, resources: Any, trials: int, again: bool) -> UnitResult:
        from capture.verification import verify

        report = verify(self.runner(resources), trials=trials, again=again)
        report.raise_if_failed()
        tried = {(self.graphs, bucket.batch_size): len(bucket.fillings) for bucket in report.buckets}
        origin = "proved before: one input for each graph, at the graph's shape" if again else ""
        return UnitResult(verified=tried, origin=origin)


@dataclass(frozen=True)
class WarmupSpec:
    """What to warm up. Everything but ``setup`` is known without touching the device.

    Attributes:
        name: for humans; not in the fingerprint.
        device: where it runs, as torch names it.
        backend: its name and why it was chosen.
        fields: what the cached files depend on besides the environment: model dimensions, dtypes, op schemas.
        setup: makes modules and loads weights; its result is what units get as ``resources``.
        units: all of the work.
        target: the units build for this architecture and run nothing: their files are another machine's.
        cache_key_tag: appended to ``torch.compiler.config.cache_key_tag``, for what torch's own keys miss.

    Raises:
        ValueError: two units have the same key, or a unit needs one that does not run before it.
    """

    name: str
    device: str
    backend: tuple[str, str]
    fields: Mapping[str, JSON]
    setup: Callable[[], Any]
    units: tuple[Unit, ...]
    target: str | None = None
    cache_key_tag: str | None = None

    def __post_init__(self) -> None:
        seen: set[str] = set()
        for unit in self.ordered():
            if unit.key in seen:
                raise ValueError(f"two units have the key {unit.key!r}; a key must name one unit")
            if missing := set(unit.needs) - seen:
                raise ValueError(f"unit {unit.key!r} needs {sorted(missing)}, which no earlier unit makes")
            seen.add(unit.key)

    def ordered(self) -> tuple[Unit, ...]:
        """The units in the order in which they run: persistent ones first, then by phase, then as listed."""
        return tuple(sorted(self.units, key=lambda unit: (not unit.persistent, _ORDER.index(unit.phase))))
