"""Kernels built in worker processes: what they deliver is used, and what they do not is built anyway."""

from __future__ import annotations

import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from capture import CacheLockTimeout, CompileWatch, KernelBuildUnit, WarmupManager, WarmupReport, WarmupSpec
from capture.workers import KernelWorkers, _fork
from tests.warmup import kernel_toy
from tests.warmup.command import handled

HERE = os.getpid()
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


@pytest.fixture(autouse=True)
def four_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")  # unset, Triton 3.9 warns that its default will change
    monkeypatch.setattr("capture.workers.usable_cores", lambda: 4)


def units(before: Callable[[], object] = lambda: None, count: int = 4) -> tuple[KernelBuildUnit, ...]:
    """Kernels of rising cost; ``before`` is called before each compilation."""

    def build(dtype: torch.dtype) -> None:
        before()
        kernel_toy.launch(dtype)

    return tuple(
        KernelBuildUnit(key=str(dtype), compile=partial(build, dtype), target="gfx942", cost=index + 1.0)
        for index, dtype in enumerate(DTYPES[:count])
    )


def in_a_worker_only(action: Callable[[], object]) -> Callable[[], object]:
    return lambda: action() if os.getpid() != HERE else None


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def runs(process: str) -> bool:
    """Whether a process is there, and not only its exit status."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def run(cache: Path, made: tuple[KernelBuildUnit, ...], **options: object) -> tuple[WarmupReport, int]:
    """The report, and compilations in this process."""
    spec = WarmupSpec("toy", "cpu", ("triton", "toy"), {"toy": 1}, lambda: None, made, target="gfx942")
    manager = WarmupManager(cache, **options)  # type: ignore[arg-type]
    with CompileWatch() as watch:
        report = manager.run(manager.plan(spec), progress=False)
    return report, watch.compiled


def test_workers_compile_every_kernel_once_and_this_process_none(cache: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"

    def note() -> None:
        with open(log, "a") as file:
            file.write(f"{os.getpid()}\n")

    cold, compiled_here = run(cache, units(in_a_worker_only(note)))
    assert (cold.compiled, compiled_here) == (4, 0)
    assert [unit.state for unit in cold.units] == ["built"] * 4
    assert all(unit.worker is not None and unit.seconds > 0 and unit.bytes > 0 for unit in cold.units)
    assert len(log.read_text().split()) == 4
    warm, compiled_here = run(cache, units())
    assert (warm.compiled, compiled_here) == (0, 0)
    assert [(unit.state, unit.worker) for unit in warm.units] == [("hit", None)] * 4
    assert not warm.quarantined


def test_each_of_several_workers_takes_a_kernel(cache: Path) -> None:
    report, _ = run(cache, units(in_a_worker_only(lambda: time.sleep(0.3))))
    assert len({unit.worker for unit in report.units}) == 4


def test_the_costliest_kernel_is_begun_first(cache: Path) -> None:
    report, _ = run(cache, units(in_a_worker_only(lambda: time.sleep(0.1))), workers=2)
    begun = sorted(report.units, key=lambda unit: unit.start)
    assert {unit.key for unit in begun[:2]} == {str(dtype) for dtype in DTYPES[2:]}


def test_what_a_killed_worker_had_begun_is_built_here(cache: Path) -> None:
    report, compiled_here = run(cache, units(in_a_worker_only(lambda: os.kill(os.getpid(), signal.SIGKILL))))
    assert report.ok
    assert (report.compiled, compiled_here) == (4, 4)
    assert [unit.worker for unit in report.units] == [None] * 4
    assert all(note.startswith(("a worker died", "no worker is left")) for note in report.notes)
    assert len(report.notes) == 4
    assert run(cache, units())[0].compiled == 0


def test_a_worker_that_hangs_is_given_up(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("capture.workers._PATIENCE", 0.2)
    report, compiled_here = run(cache, units(in_a_worker_only(lambda: time.sleep(60)), count=2))
    assert report.ok
    assert (report.compiled, compiled_here) == (2, 2)
    assert "a worker took longer than" in report.notes[0]


def test_a_kernel_that_cannot_be_compiled_fails_once_and_alone(cache: Path) -> None:
    def fail() -> None:
        raise RuntimeError("no such instruction")

    bad = KernelBuildUnit(key="bad", compile=fail, target="gfx942")
    report, _ = run(cache, (*units(count=2), bad))
    assert [unit.state for unit in report.units] == ["built", "built", "failed"]
    assert report.units[2].reason == "RuntimeError: no such instruction"
    assert report.compiled == 2


@pytest.mark.parametrize("cores", [1, 4])
def test_one_core_forks_nothing(cores: int, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("capture.workers.usable_cores", lambda: cores)
    report, compiled_here = run(cache, units(count=2))
    assert (report.compiled, compiled_here) == ((2, 2) if cores == 1 else (2, 0))
    assert not report.notes


def test_workers_can_be_switched_off(cache: Path) -> None:
    assert run(cache, units(count=2), workers=0)[1] == 2


def test_a_process_with_other_threads_is_not_forked_and_says_so(cache: Path) -> None:
    done = threading.Event()
    thread = threading.Thread(target=done.wait)
    thread.start()
    try:
        report, compiled_here = run(cache, units(count=2))
    finally:
        done.set()
        thread.join()
    assert compiled_here == 2
    assert "this process has other threads (1) and is not forked" in report.notes[0]


def test_without_room_for_workers_kernels_are_built_here(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forks = iter([os.fork])

    def fork() -> int:
        for real in forks:
            return real()
        raise BlockingIOError("no more processes")

    monkeypatch.setattr("capture.workers._fork", fork)
    report, compiled_here = run(cache, units(count=2))
    assert compiled_here == 2
    assert "worker processes cannot be made (no more processes)" in report.notes[0]


def test_a_worker_whose_parent_is_killed_ends_with_its_kernel(tmp_path: Path) -> None:
    log = tmp_path / "log"

    def note() -> None:
        with open(log, "a") as file:
            file.write(f"{os.getpid()}\n")
        time.sleep(0.3)

    parent = _fork()
    if parent == 0:
        workers = KernelWorkers(units(note), "gfx942", 2)
        workers.start([str(dtype) for dtype in DTYPES])
        time.sleep(60)
    wait_until(lambda: log.exists() and len(log.read_text().split()) == 2)
    os.kill(parent, signal.SIGKILL)
    os.waitpid(parent, 0)
    begun = log.read_text().split()
    wait_until(lambda: not any(map(runs, begun)))
    assert len(log.read_text().split()) == 2


def test_while_another_process_builds_the_workers_do_nothing(cache: Path, tmp_path: Path) -> None:
    made = units(in_a_worker_only((tmp_path / "log").touch), count=2)
    spec = WarmupSpec("toy", "cpu", ("triton", "toy"), {"toy": 1}, lambda: None, made, target="gfx942")
    other = WarmupManager(cache).plan(spec).store
    other.prepare()
    with other.hold(0.0, print), pytest.raises(CacheLockTimeout):
        run(cache, made, lock_timeout=0.1)
    assert not (tmp_path / "log").exists()


def test_nothing_is_left_of_the_workers(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with KernelWorkers(units(), "gfx942", 3) as workers:
        workers.start([unit.key for unit in units()])
        processes = [worker.pid for worker in workers._workers]
        assert list(tmp_path.glob("kernel-workers-*"))
    assert not list(tmp_path.glob("kernel-workers-*"))
    for process in processes:
        with pytest.raises(ProcessLookupError):
            os.kill(process, 0)


def test_what_a_compiler_leaves_where_it_is_ended_goes_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    log = tmp_path / "log"

    def leave() -> None:
        log.write_text(tempfile.mkdtemp())
        time.sleep(60)

    with KernelWorkers(units(leave, count=1), "gfx942", 1) as workers:
        workers.start([str(DTYPES[0])])
        wait_until(lambda: log.exists() and bool(log.read_text()))
    assert [path.name for path in tmp_path.iterdir()] == ["log"]


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_a_signal_ends_a_worker_without_its_parents_handler(name: str, tmp_path: Path) -> None:
    number, log = signal.Signals[name], tmp_path / "log"
    with handled(number, lambda *arguments: log.touch()), KernelWorkers(units(), "gfx942", 1) as workers:
        (worker,) = workers._workers
        os.kill(worker.pid, number)
        wait_until(lambda: not runs(str(worker.pid)))
        _, status = os.waitpid(worker.pid, 0)
    assert os.WTERMSIG(status) == number
    assert not log.exists()
