"""Which compilations happened in this process: counted, named and timed.

:class:`CompileWatch` listens to *build sources*: Triton and torch.compile, and whatever a backend registers
with :func:`register_build_source`. A source is attached when its module is imported, or at once if it is
already there; watching itself never imports Triton, Dynamo or Inductor.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType, TracebackType
from typing import Any

__all__ = ["Attach", "CompileEvent", "CompileWatch", "register_build_source"]

_TRACING = frozenset({"dynamo", "aot_autograd"})


@dataclass(frozen=True)
class CompileEvent:
    """One compilation, or one that a cache spared.

    Attributes:
        kind: ``triton``, ``inductor``, ``aot_autograd``, ``dynamo``, or a registered source's name.
        name: the kernel or function.
        seconds: how long it took; for torch.compile's kinds, the whole compilation that it was part of.
        cached: a cache had it.
    """

    kind: str
    name: str
    seconds: float
    cached: bool

    @property
    def is_build(self) -> bool:
        """Whether code was generated. Tracing (``dynamo``, ``aot_autograd``) does not: every process traces
        again, and an Inductor build behind it is an event of its own.
        """
        return not self.cached and self.kind not in _TRACING


Attach = Callable[[Callable[[CompileEvent], None]], Callable[[], None]]
"""Starts reporting events to its argument; returns what stops it."""


@dataclass(frozen=True)
class _Source:
    module: str
    attach: Attach


_SOURCES: dict[str, _Source] = {}


def register_build_source(kind: str, module: str, attach: Attach) -> None:
    """Let a backend name its own kind of build; registering a kind again replaces it.

    Args:
        kind: the ``kind`` of its events.
        module: the module without which no such build can happen; ``attach`` is called once it is imported.
        attach: called with the function to report events to; returns a function that undoes the attachment.
    """
    _SOURCES[kind] = _Source(module, attach)


class CompileWatch:
    """Context manager that lists what was compiled inside of it.

    Attributes:
        events: in the order in which they ended.
    """

    def __init__(self) -> None:
        self.events: list[CompileEvent] = []
        self._detach: list[Callable[[], None]] = []
        self._finder: _AfterImport | None = None

    @property
    def compiled(self) -> int:
        """Real compilations so far: what no cache had."""
        return sum(event.is_build for event in self.events)

    def __enter__(self) -> CompileWatch:
        later: dict[str, list[Attach]] = {}
        for source in _SOURCES.values():
            if source.module in sys.modules:
                self._attach(source.attach)
            else:
                later.setdefault(source.module, []).append(source.attach)
        if later:
            self._finder = _AfterImport({module: self._attach_all(group) for module, group in later.items()})
            sys.meta_path.insert(0, self._finder)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._finder is not None:
            sys.meta_path.remove(self._finder)
            self._finder = None
        while self._detach:
            self._detach.pop()()
        self.events[:] = _with_function_names(self.events)

    def _attach(self, attach: Attach) -> None:
        self._detach.append(attach(self.events.append))

    def _attach_all(self, group: Sequence[Attach]) -> Callable[[], None]:
        def run() -> None:
            for attach in group:
                self._attach(attach)

        return run


class _AfterImport(MetaPathFinder):
    """Calls a function once after a module of that name was executed."""

    def __init__(self, actions: dict[str, Callable[[], None]]) -> None:
        self._actions = actions
        self._finding: set[str] = set()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        # Watches nest: the finder of another one, asked below, asks this one in turn
        if fullname not in self._actions or fullname in self._finding:
            return None
        self._finding.add(fullname)
        try:
            for finder in list(sys.meta_path):
                spec = None if finder is self else finder.find_spec(fullname, path, target)
                if spec is not None and spec.loader is not None:
                    spec.loader = _Loader(spec.loader, lambda: self._run(fullname))
                    return spec
        finally:
            self._finding.discard(fullname)
        return None

    def _run(self, fullname: str) -> None:
        action = self._actions.pop(fullname, None)
        if action is not None:
            action()


class _Loader(Loader):
    def __init__(self, inner: Loader, action: Callable[[], None]) -> None:
        self._inner = inner
        self._action = action

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._inner
        if module.__spec__ is not None:
            module.__spec__.loader = self._inner
        self._inner.exec_module(module)
        self._action()


def _attach_triton(report: Callable[[CompileEvent], None]) -> Callable[[], None]:
    compilation: Any = sys.modules["triton.knobs"].compilation
    users = compilation.listener
    listening = True

    def listener(*, src: Any, metadata: Any, metadata_group: Any, times: Any, cache_hit: bool) -> None:
        if users is not None:
            users(src=src, metadata=metadata, metadata_group=metadata_group, times=times, cache_hit=cache_hit)
        if listening:
            report(CompileEvent("triton", str(metadata["name"]), times.total / 1e6, cache_hit))

    def detach() -> None:
        nonlocal listening
        listening = False  # whoever chained to us meanwhile still calls us
        if compilation.listener is listener:
            compilation.listener = users

    compilation.listener = listener
    return detach


# torch counts hits, misses and bypasses of both caches; a bypass is a graph that no cache will ever hold.
_TORCH_COUNTERS = (
    ("aot_autograd", "autograd_cache_hit", True),
    ("aot_autograd", "autograd_cache_miss", False),
    ("aot_autograd", "autograd_cache_bypass", False),
    ("inductor", "fxgraph_cache_hit", True),
    ("inductor", "fxgraph_cache_miss", False),
    ("inductor", "fxgraph_cache_bypass", False),
)


class _TorchCompile:
    """Turns what torch counted during one compilation into events."""

    def __init__(self, report: Callable[[CompileEvent], None]) -> None:
        self._report = report
        self._handler: Any = sys.modules["torch._dynamo.callback"].callback_handler
        self._counted = self._count()
        self._begun = time.monotonic()
        self._handler.register_start_callback(self._start)
        self._handler.register_end_callback(self._end)

    def detach(self) -> None:
        self._handler.remove_start_callback(self._start)
        self._handler.remove_end_callback(self._end)
        self._flush("(outside of torch.compile)", 0.0)

    def _start(self, args: Any) -> None:
        self._flush("(outside of torch.compile)", 0.0)
        self._begun = time.monotonic()

    def _end(self, args: Any) -> None:
        seconds = time.monotonic() - self._begun
        if args.callback_trigger.name in ("DYNAMO", "LAZY_BACKWARD"):
            self._report(CompileEvent("dynamo", str(args.compile_id), seconds, False))
        self._flush(str(args.compile_id), seconds)

    def _flush(self, name: str, seconds: float) -> None:
        before, self._counted = self._counted, self._count()
        # Fewer than before: somebody cleared torch's counters.
        rises = [now - then if now >= then else now for now, then in zip(self._counted, before, strict=True)]
        asked = 0
        for (kind, counter, cached), rise in zip(_TORCH_COUNTERS, rises, strict=False):
            asked += rise if kind == "inductor" else 0
            label = f"{name} (bypass)" if counter.endswith("bypass") else name
            for _ in range(rise):
                self._report(CompileEvent(kind, label, seconds, cached))
        if not asked and _inductor_cache_is_off():
            for _ in range(rises[-1]):
                self._report(CompileEvent("inductor", f"{name} (cache off)", seconds, False))

    @staticmethod
    def _count() -> tuple[int, ...]:
        """:data:`_TORCH_COUNTERS`, then how many graphs were compiled at all."""
        utils = sys.modules.get("torch._dynamo.utils")
        if utils is None:
            return (0,) * (len(_TORCH_COUNTERS) + 1)
        counted = (utils.counters[kind][counter] for kind, counter, _ in _TORCH_COUNTERS)
        return *map(int, counted), int(utils.counters["aot_autograd"]["total"])


def _inductor_cache_is_off() -> bool:
    """With its cache off, Inductor counts neither hits nor misses."""
    config = sys.modules.get("torch._inductor.config")
    if config is None:
        return False
    return bool(config.force_disable_caches or not (config.fx_graph_cache or config.fx_graph_remote_cache))


def _attach_torch(report: Callable[[CompileEvent], None]) -> Callable[[], None]:
    return _TorchCompile(report).detach


def _with_function_names(events: Sequence[CompileEvent]) -> list[CompileEvent]:
    """Add the function's name to torch's compile ids ("0/0"): torch knows it only after the compilation."""
    utils = sys.modules.get("torch._dynamo.utils")
    if utils is None:
        return list(events)
    names = {str(metrics.compile_id): metrics.co_name for metrics in utils.get_compilation_metrics()}
    return [
        replace(event, name=f"{names[event.name.split()[0]]} [{event.name}]")
        if event.kind in ("dynamo", "aot_autograd", "inductor") and names.get(event.name.split()[0])
        else event
        for event in events
    ]


register_build_source("triton", "triton.knobs", _attach_triton)
register_build_source("torch.compile", "torch._dynamo.callback", _attach_torch)
