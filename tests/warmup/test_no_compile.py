"""no_compile(): what it catches, names and leaves alone. Triton's own calls are in test_guard.py's terms."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from capture import (
    CompileEvent,
    CompileForbiddenError,
    CompileWarning,
    CompileWatch,
    WarmupManager,
    WarmupSpec,
    guard,
    install_from_environment,
    no_compile,
    register_build_source,
)
from capture.cli import main
from tests.warmup import toys

REPOSITORY = Path(__file__).resolve().parents[2]


def square(x: torch.Tensor) -> torch.Tensor:
    return x * x


@pytest.fixture
def compiled() -> Iterator[Callable[..., torch.Tensor]]:
    torch._dynamo.reset()
    yield torch.compile(square, backend="eager", dynamic=False)
    torch._dynamo.reset()


@pytest.fixture
def build(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Announces a build of a registered kind."""
    monkeypatch.setattr(guard, "_SOURCES", dict(guard._SOURCES))
    reports: list[Callable[[CompileEvent], None]] = []

    def attach(report: Callable[[CompileEvent], None]) -> Callable[[], None]:
        reports.append(report)
        return lambda: reports.remove(report)

    def announce(name: str = "module_mla", cached: bool = False) -> None:
        for report in list(reports):
            report(CompileEvent("aiter", name, 42.0, cached, "abc123"))

    register_build_source("aiter", "sys", attach)
    return announce


def test_a_build_of_a_registered_kind_is_raised_with_name_key_and_seconds(build: Callable[..., None]) -> None:
    with (
        no_compile() as seal,
        pytest.raises(CompileForbiddenError, match=r"aiter of module_mla \(abc123\) took 42.000 s"),
    ):
        build()
    (event,) = seal.events
    assert (event.kind, event.name, event.key, event.seconds) == ("aiter", "module_mla", "abc123", 42.0)


def test_the_stack_and_the_message_lead_to_the_caller(build: Callable[..., None]) -> None:
    def the_serving_loop() -> None:
        build()

    with no_compile(), pytest.raises(CompileForbiddenError, match="in the_serving_loop") as caught:
        the_serving_loop()
    assert any("the_serving_loop" in entry for entry in caught.value.event.stack)


def test_a_load_from_a_cache_is_no_compilation(build: Callable[..., None]) -> None:
    with no_compile() as seal:
        build(cached=True)
    assert not seal.events


def test_warn_warns_and_goes_on(build: Callable[..., None]) -> None:
    with no_compile("warn") as seal, pytest.warns(CompileWarning, match="aiter of module_mla"):
        build()
    assert len(seal.events) == 1


def test_record_lists_and_sums_up(build: Callable[..., None]) -> None:
    with no_compile("record") as seal:
        build("first")
        build("second")
    build("after")
    assert [event.name for event in seal.events] == ["first", "second"]
    assert seal.summary().count("\n") == 1


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(ValueError, match="mode must be raise, warn, record, got 'panic'"):
        no_compile("panic")  # type: ignore[arg-type]


def test_dynamo_is_stopped_before_it_traces_and_its_function_named(compiled: Callable[..., torch.Tensor]) -> None:
    with no_compile() as seal, pytest.raises(CompileForbiddenError, match=r"dynamo of square \[\d+/\d+\]"):
        compiled(torch.ones(3))
    assert [event.kind for event in seal.events] == ["dynamo"]
    assert torch.equal(compiled(torch.full((3,), 2.0)), torch.full((3,), 4.0))


def test_a_recompilation_is_caught_where_a_warm_shape_is_not(compiled: Callable[..., torch.Tensor]) -> None:
    compiled(torch.ones(3))
    with no_compile() as seal:
        compiled(torch.zeros(3))
        with pytest.raises(CompileForbiddenError, match="square"):
            compiled(torch.ones(4))
    assert len(seal.events) == 1


def test_a_recorded_recompilation_has_its_seconds(compiled: Callable[..., torch.Tensor]) -> None:
    with no_compile("record") as seal:
        compiled(torch.ones(3))
    (event,) = seal.events
    assert event.name.startswith("square [")
    assert event.seconds > 0


def test_a_compilation_in_another_thread_is_raised_there(compiled: Callable[..., torch.Tensor]) -> None:
    errors: list[BaseException] = []

    def serve() -> None:
        try:
            compiled(torch.ones(3))
        except BaseException as error:
            errors.append(error)

    with no_compile() as seal:
        thread = threading.Thread(target=serve)
        thread.start()
        thread.join()
    assert [type(error) for error in errors] == [CompileForbiddenError]
    assert len(seal.events) == 1


def test_a_sealed_call_runs_no_line_of_the_guard(compiled: Callable[..., torch.Tensor]) -> None:
    x = torch.ones(3)
    compiled(x)
    ran = []

    def profile(frame: Any, event: str, argument: Any) -> None:
        if Path(frame.f_code.co_filename).parent.name == "capture":
            ran.append(frame.f_code.co_name)

    with no_compile():
        sys.setprofile(profile)
        try:
            for _ in range(3):
                compiled(x)
        finally:
            sys.setprofile(None)
    assert not ran


class FakeGraph:
    def capture_begin(self) -> None:
        self.began = True


class FakeCapture:
    def __init__(self, graph: FakeGraph) -> None:
        self.cuda_graph = graph

    def __enter__(self) -> None:
        self.cuda_graph.capture_begin()


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stands in for ``torch.cuda.graphs``, which can capture nothing here."""
    monkeypatch.setattr(torch.cuda.graphs, "CUDAGraph", FakeGraph)
    monkeypatch.setattr(torch.cuda.graphs, "graph", FakeCapture)


def test_a_capture_is_stopped_before_it_begins(graphs: None) -> None:
    graph = FakeGraph()
    with no_compile(), pytest.raises(CompileForbiddenError, match="capture of CUDA graph"):
        graph.capture_begin()
    assert not hasattr(graph, "began")
    graph.capture_begin()


def test_a_capture_by_the_context_manager_is_one_event(graphs: None) -> None:
    graph = FakeGraph()
    with no_compile("record") as seal:
        FakeCapture(graph).__enter__()
    assert [event.kind for event in seal.events] == ["capture"]
    assert graph.began


def test_a_warm_ups_own_watch_ignores_captures(graphs: None) -> None:
    with CompileWatch() as watch:
        FakeGraph().capture_begin()
    assert not watch.events


def fake_module(monkeypatch: pytest.MonkeyPatch, name: str, **members: Any) -> None:
    module = ModuleType(name)
    vars(module).update(members)
    monkeypatch.setitem(sys.modules, name, module)


def test_a_timing_by_tritons_autotuner_names_kernel_and_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    class Autotuner:
        base_fn = SimpleNamespace(__name__="decode_kernel")

        def _bench(self, *args: Any, config: str, **meta: Any) -> float:
            return 1.5

    before = Autotuner._bench
    fake_module(monkeypatch, "triton.runtime.autotuner", Autotuner=Autotuner)
    with no_compile("record") as seal:
        assert Autotuner()._bench(config="BLOCK=64") == 1.5
    assert [(event.kind, event.name, event.key) for event in seal.events] == [("autotune", "decode_kernel", "BLOCK=64")]
    assert Autotuner._bench is before


def test_the_autotuners_have_the_methods_that_are_watched() -> None:
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    autotuner = pytest.importorskip("triton.runtime.autotuner")
    assert callable(autotuner.Autotuner._bench)
    assert callable(CachingAutotuner.benchmark_all_configs)


def sealed_process(mode: str, program: str) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": "", "PYTHONPATH": str(REPOSITORY), "MLA_NO_COMPILE": mode, "HOME": "/nonexistent"}
    command = [sys.executable, "-c", textwrap.dedent(program)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


SERVER = """
    import sys
    from capture import CompileEvent, guard, install_from_environment, register_build_source
    reports = []
    register_build_source("aiter", "sys", lambda report: reports.append(report) or reports.clear)
    seal = install_from_environment()
    assert install_from_environment() is seal
    for report in reports:
        report(CompileEvent("aiter", "module_mla", 1.0, False))
    print("torch" in sys.modules)
"""


@pytest.mark.parametrize(
    ("mode", "code", "said"),
    [
        ("raise", 1, "CompileForbiddenError: aiter of module_mla"),
        ("warn", 0, "CompileWarning: aiter of module_mla"),
        ("record", 0, "aiter of module_mla took 1.000 s after the warm-up"),
        ("", 0, ""),
        ("yes", 1, "MLA_NO_COMPILE must be raise, warn, record or unset, got 'yes'"),
    ],
)
def test_the_environment_seals_a_server_without_importing_torch(mode: str, code: int, said: str) -> None:
    done = sealed_process(mode, SERVER)
    assert done.returncode == code
    assert said in done.stderr
    assert bool(done.stderr) == bool(said)
    assert code or done.stdout == "False\n"


def test_nothing_is_installed_where_the_variable_is_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(guard.ENVIRONMENT_VARIABLE, raising=False)
    assert install_from_environment() is None


def test_a_warm_up_seals_its_process_when_it_is_done(
    monkeypatch: pytest.MonkeyPatch, cache: Path, log: Callable[[], list[str]], build: Callable[..., None]
) -> None:
    monkeypatch.setenv(guard.ENVIRONMENT_VARIABLE, "warn")
    monkeypatch.setattr(guard, "_installed", None)
    unit = toys.CallUnit(key="module", call=build)
    manager = WarmupManager(cache)
    spec = WarmupSpec(name="toy", device="cpu", backend=("toy", ""), fields={}, setup=lambda: None, units=(unit,))
    manager.run(manager.plan(spec), False)
    seal = guard._installed
    assert seal is not None
    try:
        assert not seal.events
        with pytest.warns(CompileWarning, match="aiter of module_mla"):
            build()
    finally:
        seal.close()


def test_a_mode_that_there_is_not_is_refused_before_anything_is_built(
    monkeypatch: pytest.MonkeyPatch, cache: Path, log: Callable[[], list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(guard.ENVIRONMENT_VARIABLE, "1")
    monkeypatch.setattr(guard, "_installed", None)
    manager = WarmupManager(cache)
    with pytest.raises(ValueError, match="MLA_NO_COMPILE must be"):
        manager.run(manager.plan(toys.toy_spec(*toys.kernels(1))), False)
    assert log() == []
    arguments = ("build", "--model", "tests.warmup.toys:factory", "--device", "cpu", "--cache-dir", str(cache))
    assert main(arguments) == 2
    assert capsys.readouterr().err == "mla-warmup: MLA_NO_COMPILE must be raise, warn, record or unset, got '1'\n"
