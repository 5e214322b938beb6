"""What tells of compilations: how Triton, torch.compile, autotuning and graph captures are listened to.

Each ``attach_*`` function starts reporting events to its argument and returns what stops it. The module that it
listens to has been imported then; nothing here imports Triton, Dynamo or Inductor.
"""

from __future__ import annotations

import functools
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Any

__all__ = [
    "Attach",
    "CompileEvent",
    "attach_capture",
    "attach_dynamo_start",
    "attach_inductor_autotune",
    "attach_torch",
    "attach_triton",
    "attach_triton_autotune",
    "report_calls",
]

_TRACING = frozenset({"dynamo", "aot_autograd"})


@dataclass(frozen=True)
class CompileEvent:
    """One compilation, or one that a cache spared.

    Attributes:
        kind: ``triton``, ``inductor``, ``aot_autograd``, ``dynamo``, or a registered source's name; under
            :func:`capture.guard.no_compile` also ``autotune`` and ``capture``.
        name: the kernel or function.
        seconds: how long it took; for torch.compile's kinds, the whole compilation that it was part of.
        cached: a cache had it.
        key: what tells it from others of its name: the kernel's hash, the compile id, the configuration.
        stack: where it happened, outermost first; only under :func:`capture.guard.no_compile`.
    """

    kind: str
    name: str
    seconds: float
    cached: bool
    key: str = ""
    stack: tuple[str, ...] = ()

    @property
    def is_build(self) -> bool:
        """Whether code was generated. Tracing (``dynamo``, ``aot_autograd``) does not: every process traces
        again, and an Inductor build behind it is an event of its own.
        """
        return not self.cached and self.kind not in _TRACING


Attach = Callable[[Callable[[CompileEvent], None]], Callable[[], None]]
"""Starts reporting events to its argument; returns what stops it."""


def attach_triton(report: Callable[[CompileEvent], None]) -> Callable[[], None]:
    compilation: Any = sys.modules["triton.knobs"].compilation
    users = compilation.listener
    listening = True

    def listener(*, src: Any, metadata: Any, metadata_group: Any, times: Any, cache_hit: bool) -> None:
        if users is not None:
            users(src=src, metadata=metadata, metadata_group=metadata_group, times=times, cache_hit=cache_hit)
        if listening:
            key = str(metadata.get("hash", ""))
            report(CompileEvent("triton", str(metadata["name"]), times.total / 1e6, cache_hit, key))

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
            self._report(CompileEvent("dynamo", _named(args.compile_id), seconds, False, str(args.compile_id)))
        self._flush(_named(args.compile_id), seconds, str(args.compile_id))

    def _flush(self, name: str, seconds: float, key: str = "") -> None:
        before, self._counted = self._counted, self._count()
        # Fewer than before: somebody cleared torch's counters.
        rises = [now - then if now >= then else now for now, then in zip(self._counted, before, strict=True)]
        asked = 0
        for (kind, counter, cached), rise in zip(_TORCH_COUNTERS, rises, strict=False):
            asked += rise if kind == "inductor" else 0
            label = f"{name} (bypass)" if counter.endswith("bypass") else name
            for _ in range(rise):
                self._report(CompileEvent(kind, label, seconds, cached, key))
        if not asked and _inductor_cache_is_off():
            for _ in range(rises[-1]):
                self._report(CompileEvent("inductor", f"{name} (cache off)", seconds, False, key))

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


def attach_torch(report: Callable[[CompileEvent], None]) -> Callable[[], None]:
    return _TorchCompile(report).detach


def attach_dynamo_start(report: Callable[[CompileEvent], None]) -> Callable[[], None]:
    """Report a compilation before it begins: only there may a callback of torch raise."""

    def start(args: Any) -> None:
        if args.callback_trigger.name in ("DYNAMO", "LAZY_BACKWARD"):
            report(CompileEvent("dynamo", _named(args.compile_id), 0.0, False, str(args.compile_id)))

    handler: Any = sys.modules["torch._dynamo.callback"].callback_handler
    handler.register_start_callback(start)
    return lambda: handler.remove_start_callback(start)


def _named(compile_id: object) -> str:
    """``function [id]``. Torch hands its callbacks the id only; the code object is on the stack, if anywhere."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "_compile" and frame.f_globals.get("__name__") == "torch._dynamo.convert_frame":
            return f"{frame.f_locals['code'].co_name} [{compile_id}]"
        frame = frame.f_back
    return str(compile_id)


def attach_triton_autotune(report: Callable[[CompileEvent], None]) -> Callable[[], None]:
    """Report each configuration that ``triton.autotune`` times."""

    def event(args: tuple[Any, ...], kwargs: dict[str, Any], seconds: float) -> CompileEvent:
        kernel = args[0].base_fn
        name = str(getattr(kernel, "__name__", kernel))
        return CompileEvent("autotune", name, seconds, False, str(kwargs.get("config", "")))

    return report_calls(sys.modules["triton.runtime.autotuner"].Autotuner, "_bench", event, report)


def attach_inductor_autotune(report: Callable[[CompileEvent], None]) -> Callable[[], None]:
    """Report each kernel whose configurations Inductor times."""

    def event(args: tuple[Any, ...], kwargs: dict[str, Any], seconds: float) -> CompileEvent:
        tuner = args[0]
        name = str(getattr(tuner.fn, "__name__", tuner.fn))
        return CompileEvent("autotune", name, seconds, False, f"configurations: {len(tuner.launchers)}")

    owner = sys.modules["torch._inductor.runtime.triton_heuristics"].CachingAutotuner
    return report_calls(owner, "benchmark_all_configs", event, report)


def report_calls(
    owner: Any,
    name: str,
    event: Callable[[tuple[Any, ...], dict[str, Any], float], CompileEvent],
    report: Callable[[CompileEvent], None],
) -> Callable[[], None]:
    """Report ``event(args, kwargs, seconds)`` after each call of ``owner.name``; returns what undoes that.

    Args:
        owner: a module or a class.
        name: of a function of it.
        event: makes the event; of a method the object is the first of ``args``.
        report: is told.
    """
    inner = getattr(owner, name)

    @functools.wraps(inner)
    def timed(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        result = inner(*args, **kwargs)
        report(event(args, kwargs, time.perf_counter() - start))
        return result

    setattr(owner, name, timed)
    return lambda: _unwrap(owner, name, timed, inner)


def _unwrap(owner: Any, method: str, ours: Any, inner: Any) -> None:
    if getattr(owner, method) is ours:  # else somebody wrapped ours in turn
        setattr(owner, method, inner)


def attach_capture(report: Callable[[CompileEvent], None]) -> Callable[[], None]:
    """Report a graph capture before it begins: to raise inside of it would leave the stream capturing.

    Of ``torch.cuda.graph`` before it enters its stream, which it would never leave.
    """
    graphs: Any = sys.modules["torch.cuda.graphs"]
    begin, enter = graphs.CUDAGraph.capture_begin, graphs.graph.__enter__
    entering = threading.local()

    def announce(graph: Any) -> None:
        report(CompileEvent("capture", "CUDA graph", 0.0, False, hex(id(graph))))

    @functools.wraps(begin)
    def capture_begin(self: Any, *args: Any, **kwargs: Any) -> None:
        if not getattr(entering, "told", False):
            announce(self)
        begin(self, *args, **kwargs)

    @functools.wraps(enter)
    def __enter__(self: Any) -> None:
        announce(self.cuda_graph)
        entering.told = True
        try:
            enter(self)
        finally:
            entering.told = False

    graphs.CUDAGraph.capture_begin = capture_begin
    graphs.graph.__enter__ = __enter__

    def detach() -> None:
        _unwrap(graphs.CUDAGraph, "capture_begin", capture_begin, begin)
        _unwrap(graphs.graph, "__enter__", __enter__, enter)

    return detach
