"""Which compilations happened in this process: counted, named and timed.

:class:`CompileWatch` listens to *build sources*: Triton and torch.compile, and whatever a backend registers
with :func:`register_build_source`. A source is attached when its module is imported, or at once if it is
already there; watching itself never imports Triton, Dynamo or Inductor. :func:`no_compile` forbids compilations.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import traceback as traceback_module
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType, TracebackType
from typing import Literal, get_args

from capture.compile_sources import (
    Attach,
    CompileEvent,
    attach_capture,
    attach_dynamo_start,
    attach_inductor_autotune,
    attach_torch,
    attach_triton,
    attach_triton_autotune,
)
from capture.errors import CompileForbiddenError

__all__ = [
    "ENVIRONMENT_VARIABLE",
    "Attach",
    "CompileEvent",
    "CompileWarning",
    "CompileWatch",
    "Mode",
    "Seal",
    "install_from_environment",
    "mode_from_environment",
    "no_compile",
    "register_build_source",
]


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


class _Attachment:
    """Reports the events of ``sources`` until it is closed: now, or once a source's module is imported."""

    def __init__(self, sources: Iterable[_Source], report: Callable[[CompileEvent], None]) -> None:
        self._report = report
        self._detach: list[Callable[[], None]] = []
        self._closed = threading.Event()
        self._lock = threading.Lock()
        groups: dict[str, list[Attach]] = {}
        for source in sources:
            groups.setdefault(source.module, []).append(source.attach)
        self._finder = _AfterImport({module: self._attach_all(group) for module, group in groups.items()})
        sys.meta_path.insert(0, self._finder)  # before the look at sys.modules: an import may begin at any moment
        try:
            for module in groups:
                if _is_imported(module):
                    self._finder.run(module)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        with self._lock:
            if self._closed.is_set():
                return
            self._closed.set()
        sys.meta_path.remove(self._finder)
        while self._detach:
            self._detach.pop()()

    def _attach(self, attach: Attach) -> None:
        if self._closed.is_set():  # a module that was found before may be executed later
            return
        # Not under the lock: it may import, and so wait for a thread whose import waits for the lock.
        detach = attach(self._tell)
        with self._lock:
            if not self._closed.is_set():
                self._detach.append(detach)
                return
        detach()

    def _tell(self, event: CompileEvent) -> None:
        if not self._closed.is_set():
            self._report(event)

    def _attach_all(self, group: Sequence[Attach]) -> Callable[[], None]:
        def run() -> None:
            for attach in group:
                self._attach(attach)

        return run


def _is_imported(module: str) -> bool:
    """Waits for another thread that is importing it: until then it lacks what there is to attach to."""
    if getattr(getattr(sys.modules.get(module), "__spec__", None), "_initializing", False):
        with suppress(Exception):  # the import fails, which is that thread's affair
            import_module(module)
    return module in sys.modules


class CompileWatch:
    """Context manager that lists what was compiled inside of it.

    Attributes:
        events: in the order in which they ended.
    """

    def __init__(self) -> None:
        self.events: list[CompileEvent] = []
        self._attachment: _Attachment | None = None

    @property
    def compiled(self) -> int:
        """Real compilations so far: what no cache had."""
        return sum(event.is_build for event in self.events)

    def __enter__(self) -> CompileWatch:
        self._attachment = _Attachment(_SOURCES.values(), self.events.append)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._attachment is not None
        self._attachment.close()


Mode = Literal["raise", "warn", "record"]


class Seal:
    """What :func:`no_compile` returns: a context manager, closed by ``close()`` too.

    Attributes:
        mode: what happens to a compilation.
        events: those that were caught, of every thread, with their stacks.
    """

    def __init__(self, mode: Mode) -> None:
        if mode not in get_args(Mode):
            raise ValueError(f"mode must be {', '.join(get_args(Mode))}, got {mode!r}")
        self.mode = mode
        self.events: list[CompileEvent] = []
        self._attachment: _Attachment | None = None

    def __enter__(self) -> Seal:
        sources = dict(_SOURCES) | _SEAL_SOURCES
        if self.mode == "raise":
            sources["torch.compile"] = _Source("torch._dynamo.callback", attach_dynamo_start)
        self._attachment = _Attachment(sources.values(), self._catch)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Catch no more. Harmless when called twice."""
        if self._attachment is not None:
            self._attachment.close()
            self._attachment = None

    def summary(self) -> str:
        """One line for each event; "" if there were none."""
        return "\n".join(map(_line, self.events))

    def _catch(self, event: CompileEvent) -> None:
        if event.cached or event.kind == "aot_autograd":  # a part of the dynamo event beside it
            return
        event = replace(event, stack=tuple(traceback_module.format_stack(sys._getframe(1))))
        self.events.append(event)
        if self.mode == "raise":
            raise CompileForbiddenError(event, f"{_line(event)}\n{_WAY_OUT}\nIt happened at:\n{_callers(event)}")
        if self.mode == "warn":
            warnings.warn(f"{_line(event)}\n{_callers(event)}", CompileWarning, stacklevel=3)


def no_compile(mode: Mode = "raise") -> Seal:
    """Catch every compilation: after a warm-up there should be none.

    Caught are Triton compilations, compilations by Dynamo (and by Inductor behind it), timings of an autotuner,
    graph captures, and the kinds that backends register with :func:`register_build_source`; loads from a cache are not.
    All threads are watched. Listening costs nothing until something compiles: every hook is in a compiler.

    Args:
        mode: "raise" raises :class:`capture.errors.CompileForbiddenError` in the thread that compiles: torch.compile
            and captures before they begin, the rest when it is done. "warn" warns with :class:`CompileWarning`.
            "record" only lists.

    Returns:
        A context manager; its ``events`` have name, key, seconds (0 for what had not begun) and stack.

    Raises:
        ValueError: no such mode.
    """
    return Seal(mode)


def mode_from_environment() -> Mode | None:
    """What ``MLA_NO_COMPILE`` says; None: it is not set.

    Raises:
        ValueError: it holds something else.
    """
    mode = os.environ.get(ENVIRONMENT_VARIABLE, "")
    for known in get_args(Mode):
        if mode == known:
            return known  # type: ignore[no-any-return]
    if mode:
        raise ValueError(f"{ENVIRONMENT_VARIABLE} must be {', '.join(get_args(Mode))} or unset, got {mode!r}")
    return None


def install_from_environment() -> Seal | None:
    """Seal the process for good if ``MLA_NO_COMPILE`` is ``raise``, ``warn`` or ``record``.

    Call it where the warm-up ends; :meth:`capture.WarmupManager.run` does. A second call returns the first one's
    seal. In mode "record" what was caught is printed to stderr when the process ends.

    Raises:
        ValueError: the variable holds something else.
    """
    global _installed
    mode = mode_from_environment()
    if mode is None or _installed is not None:
        return _installed
    _installed = seal = no_compile(mode).__enter__()
    if mode == "record":
        atexit.register(lambda: print(seal.summary() or "no compilation after the warm-up", file=sys.stderr))
    return seal


class CompileWarning(UserWarning):
    """Something was compiled under ``no_compile("warn")``."""


ENVIRONMENT_VARIABLE = "MLA_NO_COMPILE"
_installed: Seal | None = None
_WAY_OUT = (
    "Warm it up before: call the step once with every shape and dtype that it will meet, inside the warm-up; or "
    'set the mode to "warn" or "record" to go on.'
)


def _line(event: CompileEvent) -> str:
    key = f" ({event.key})" if event.key and event.key not in event.name else ""
    took = f" took {event.seconds:.3f} s" if event.seconds else ""
    return f"{event.kind} of {event.name}{key}{took} after the warm-up"


def _callers(event: CompileEvent) -> str:
    """The innermost frames of the stack that are neither a compiler's nor ours."""
    theirs = [entry for entry in event.stack if not any(name in entry for name in _MACHINERY)]
    return "".join((theirs or list(event.stack))[-3:]).rstrip()


_MACHINERY = (*(f"{os.sep}{name}{os.sep}" for name in ("torch", "triton", "capture")), f"{os.sep}contextlib.py")


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
                    spec.loader = _Loader(spec.loader, lambda: self.run(fullname))
                    return spec
        finally:
            self._finding.discard(fullname)
        return None

    def run(self, fullname: str) -> None:
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


register_build_source("triton", "triton.knobs", attach_triton)
register_build_source("torch.compile", "torch._dynamo.callback", attach_torch)

_SEAL_SOURCES = {
    "autotune of triton": _Source("triton.runtime.autotuner", attach_triton_autotune),
    "autotune of inductor": _Source("torch._inductor.runtime.triton_heuristics", attach_inductor_autotune),
    "capture": _Source("torch.cuda.graphs", attach_capture),
}
"""Watched under a seal only: a warm-up captures and may tune."""
