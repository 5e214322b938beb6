from __future__ import annotations

import importlib
import importlib.util
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from capture import CompileEvent, CompileWatch, guard, register_build_source

REPOSITORY = Path(__file__).resolve().parents[2]


@dataclass
class Times:
    total: int = 2_000_000  # microseconds, as Triton has them


@pytest.fixture
def triton(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Stands in for ``triton.knobs``; ``compile`` announces a kernel as Triton does."""
    compilation = SimpleNamespace(listener=None)
    knobs = ModuleType("triton.knobs")
    knobs.compilation = compilation  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "triton.knobs", knobs)

    def compile(name: str, cache_hit: bool) -> None:
        if compilation.listener is not None:
            compilation.listener(
                src=None, metadata={"name": name}, metadata_group={}, times=Times(), cache_hit=cache_hit
            )

    return SimpleNamespace(compilation=compilation, compile=compile)


@pytest.fixture
def sources(monkeypatch: pytest.MonkeyPatch) -> None:
    """Registrations of a test end with it."""
    monkeypatch.setattr(guard, "_SOURCES", dict(guard._SOURCES))


def test_triton_compilations_are_named_timed_and_told_from_cache_hits(triton: SimpleNamespace) -> None:
    with CompileWatch() as watch:
        triton.compile("decode", False)
        triton.compile("merge", True)
    assert watch.events == [
        CompileEvent("triton", "decode", 2.0, False),
        CompileEvent("triton", "merge", 2.0, True),
    ]
    assert watch.compiled == 1


def test_the_users_own_listener_still_hears_and_is_put_back(triton: SimpleNamespace) -> None:
    heard: list[Any] = []

    def listener(**event: Any) -> None:
        heard.append(event["metadata"]["name"])

    triton.compilation.listener = listener
    with CompileWatch():
        triton.compile("decode", False)
    assert heard == ["decode"]
    assert triton.compilation.listener is listener


def test_a_listener_that_chained_to_ours_stays_and_ours_falls_silent(triton: SimpleNamespace) -> None:
    with CompileWatch() as watch:
        ours = triton.compilation.listener
        triton.compilation.listener = theirs = lambda **event: ours(**event)
    triton.compile("later", False)
    assert triton.compilation.listener is theirs
    assert not watch.events


def test_watches_nest(triton: SimpleNamespace) -> None:
    with CompileWatch() as outer:
        with CompileWatch() as inner:
            triton.compile("decode", False)
        triton.compile("merge", False)
    assert (inner.compiled, outer.compiled) == (1, 2)


def test_a_backend_names_its_own_kind_of_build(sources: None) -> None:
    report: list[Callable[[CompileEvent], None]] = []

    def attach(tell: Callable[[CompileEvent], None]) -> Callable[[], None]:
        report.append(tell)
        return report.clear

    register_build_source("aiter", "sys", attach)
    with CompileWatch() as watch:
        report[0](CompileEvent("aiter", "module_mla", 42.0, False))
    assert watch.compiled == 1
    assert watch.events[0].name == "module_mla"
    assert not report


@pytest.fixture
def late_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    (tmp_path / "late_builder.py").write_text("hooks = []\ndef build(name):\n    for hook in hooks: hook(name)\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield "late_builder"
    sys.modules.pop("late_builder", None)


def test_a_source_is_attached_when_its_module_is_imported(sources: None, late_module: str) -> None:
    def attach(report: Callable[[CompileEvent], None]) -> Callable[[], None]:
        hooks = sys.modules[late_module].hooks
        hooks.append(lambda name: report(CompileEvent("late", name, 0.0, False)))
        return hooks.clear

    register_build_source("late", late_module, attach)
    path_before = list(sys.meta_path)
    with CompileWatch() as watch:
        assert late_module not in sys.modules
        module = importlib.import_module(late_module)
        module.build("first")
    module.build("after")
    assert [event.name for event in watch.events] == ["first"]
    assert sys.meta_path == path_before
    assert module.__spec__ is not None
    assert module.__spec__.loader is module.__loader__


def test_nested_watches_both_hear_of_a_module_imported_late(sources: None, late_module: str) -> None:
    attached: list[str] = []

    def attach(report: Callable[[CompileEvent], None]) -> Callable[[], None]:
        attached.append("once more")
        report(CompileEvent("late", "a build", 1.0, False))
        return lambda: None

    register_build_source("late", late_module, attach)
    with CompileWatch() as outer, CompileWatch() as inner:
        importlib.util.find_spec(late_module)  # looking for it is not importing it
        assert not attached
        importlib.import_module(late_module)
    assert (len(attached), outer.compiled, inner.compiled) == (2, 1, 1)


def test_what_is_executed_after_the_watch_is_not_attached(sources: None, late_module: str) -> None:
    register_build_source("late", late_module, lambda report: pytest.fail("attached"))
    with CompileWatch():
        spec = importlib.util.find_spec(late_module)
    assert spec is not None
    assert spec.loader is not None
    spec.loader.exec_module(importlib.util.module_from_spec(spec))


def test_an_attachment_that_ends_after_the_watch_is_undone(sources: None, late_module: str) -> None:
    undone: list[str] = []
    watch = CompileWatch()

    def attach(report: Callable[[CompileEvent], None]) -> Callable[[], None]:
        watch.__exit__(None, None, None)  # as by another thread
        report(CompileEvent("late", "a build", 1.0, False))
        return lambda: undone.append(late_module)

    register_build_source("late", late_module, attach)
    watch.__enter__()
    importlib.import_module(late_module)
    assert (undone, watch.events) == ([late_module], [])


def test_a_watch_waits_for_a_thread_that_is_importing_what_it_watches(
    sources: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = SimpleNamespace(begun=threading.Event(), go_on=threading.Event())
    monkeypatch.setitem(sys.modules, "import_gate", gate)
    (tmp_path / "half_there.py").write_text(
        "import import_gate\nimport_gate.begun.set()\nimport_gate.go_on.wait(30)\nhooks = []\n"
    )
    monkeypatch.syspath_prepend(tmp_path)

    def attach(report: Callable[[CompileEvent], None]) -> Callable[[], None]:
        return sys.modules["half_there"].hooks.clear  # type: ignore[no-any-return]

    register_build_source("half", "half_there", attach)
    importing = threading.Thread(target=importlib.import_module, args=("half_there",))
    importing.start()
    try:
        assert gate.begun.wait(30)
        threading.Timer(0.05, gate.go_on.set).start()
        with CompileWatch():
            assert hasattr(sys.modules["half_there"], "hooks")
    finally:
        gate.go_on.set()
        importing.join(30)
        sys.modules.pop("half_there", None)


def test_a_watch_that_cannot_attach_leaves_nothing_attached(sources: None) -> None:
    attached: list[str] = []

    def attach(report: Callable[[CompileEvent], None]) -> Callable[[], None]:
        attached.append("first")
        return attached.clear

    def broken(report: Callable[[CompileEvent], None]) -> Callable[[], None]:
        raise AttributeError("hooks")

    register_build_source("first", "sys", attach)
    register_build_source("second", "os", broken)
    path_before = list(sys.meta_path)
    with pytest.raises(AttributeError, match="hooks"), CompileWatch():
        pass
    assert (attached, sys.meta_path) == ([], path_before)


def test_a_module_that_is_never_imported_costs_nothing(sources: None, late_module: str) -> None:
    register_build_source("late", late_module, lambda report: pytest.fail("attached"))
    with CompileWatch() as watch:
        pass
    assert not watch.events
    assert late_module not in sys.modules


def python(program: str) -> str:
    command = [sys.executable, "-c", textwrap.dedent(program)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_watching_imports_no_compiler() -> None:
    loaded = python("""
        import sys
        from capture import CompileWatch
        with CompileWatch():
            import torch
        print([name for name in ("torch._dynamo", "torch._inductor", "triton") if name in sys.modules])
    """)
    assert loaded == "[]"


def test_a_traced_function_is_named_and_no_build(tmp_path: Path) -> None:
    import torch

    def square(x: torch.Tensor) -> torch.Tensor:
        return x * x

    with CompileWatch() as watch:
        torch.compile(square, backend="eager")(torch.ones(3))
    assert [event.kind for event in watch.events] == ["dynamo"]
    assert watch.events[0].name.startswith("square [")
    assert watch.compiled == 0
    torch._dynamo.reset()


def test_what_torch_counts_becomes_events(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch._dynamo.callback as callback
    import torch._inductor.config as config
    from torch._dynamo.utils import counters

    monkeypatch.setitem(counters, "inductor", type(counters["inductor"])(fxgraph_cache_hit=5))
    monkeypatch.setitem(counters, "aot_autograd", type(counters["aot_autograd"])())
    with CompileWatch() as watch:
        with callback.callback_handler.install_callbacks(callback.CallbackTrigger.DYNAMO, "9/9"):
            counters["inductor"]["fxgraph_cache_miss"] += 1
            counters["inductor"]["fxgraph_cache_bypass"] += 1
            counters["aot_autograd"]["autograd_cache_hit"] += 1
        counters["inductor"].clear()  # as a user may
        counters["inductor"]["fxgraph_cache_hit"] += 1
        compilation = callback.callback_handler.install_callbacks(callback.CallbackTrigger.DYNAMO, "9/10")
        with config.patch(force_disable_caches=True), compilation:
            counters["aot_autograd"]["total"] += 1
    found = [(event.kind, event.name, event.cached) for event in watch.events]
    assert found == [
        ("dynamo", "9/9", False),
        ("aot_autograd", "9/9", True),
        ("inductor", "9/9", False),
        ("inductor", "9/9 (bypass)", False),
        ("inductor", "(outside of torch.compile)", True),
        ("dynamo", "9/10", False),
        ("inductor", "9/10 (cache off)", False),
    ]
    assert watch.compiled == 3
