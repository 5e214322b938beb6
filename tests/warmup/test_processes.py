"""Several processes on one cache, killed processes, and a real compiler in fresh processes."""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from capture import WarmupManager
from capture.bundle import pack, unpack
from capture.units import BuildOptions
from tests.warmup import toys
from tests.warmup.conftest import Command

LONG = bool(os.environ.get("MLA_OPS_LONG_TESTS"))
WHY = "long: set MLA_OPS_LONG_TESTS=1"
Start = Callable[..., Command]
SLOW = ("--model", "tests.warmup.toys:slow", "--device", "cpu", "--json")
COMPILED = ("--model", "tests.warmup.toys:compiled", "--device", "cpu", "--json")


def states(report: dict[str, Any]) -> Counter[str]:
    return Counter(unit["state"] for unit in report["units"])


@pytest.mark.parametrize("count", [8, pytest.param(64, marks=pytest.mark.skipif(not LONG, reason=WHY))])
def test_of_many_processes_on_an_empty_cache_one_builds(count: int, start: Start, tmp_path: Path) -> None:
    log = tmp_path / "log"
    processes = [start("build", *SLOW, TOY_LOG=str(log), RANK=str(rank)) for rank in range(count)]
    reports = [process.finish() for process in processes]
    builders = {line.split()[0] for line in log.read_text().splitlines() if " build " in line}
    assert len(builders) == 1
    assert sorted(states(report)["built"] for report, _ in reports) == [0] * (count - 1) + [8]
    assert not any(report["quarantined"] for report, _ in reports)


@pytest.mark.parametrize("attempt", range(4))
def test_a_killed_builder_loses_only_the_unit_in_work(attempt: int, start: Start, cache: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    doomed = start("build", *SLOW, TOY_LOG=str(log))
    units = random.randrange(1, 8)
    deadline = time.monotonic() + 60
    while not (log.exists() and log.read_text().count("build") >= units):
        assert time.monotonic() < deadline
        time.sleep(0.002)
    time.sleep(random.uniform(0, 0.04))
    doomed.process.kill()
    doomed.process.join()
    assert doomed.process.exitcode == -signal.SIGKILL

    manager = WarmupManager(cache)
    report = manager.run(manager.plan(toys.slow(BuildOptions())), progress=False)

    assert report.ok
    assert sum(unit.state == "hit" for unit in report.units) >= units - 1
    plan = manager.plan(toys.slow(BuildOptions()))
    assert not plan.damaged
    assert {planned.state for planned in plan.units} == {"hit"}
    files = {path.read_bytes() for path in (plan.directory / "triton").rglob("file-*")}
    assert files == {f"slow-{unit}/file-{index}".encode() * 100 for unit in range(8) for index in range(8)}


def test_torch_compile_is_cold_once_and_warm_in_the_next_process(start: Start, cache: Path) -> None:
    environment = {"TORCHINDUCTOR_VEC_ISA_OK": "1"}  # the probe of the processor would take seconds
    cold, _ = start("build", *COMPILED, **environment).finish()
    files = {path: path.stat().st_mtime_ns for path in cache.rglob("*") if path.is_file() and path.suffix != ".lock"}
    warm, _ = start("build", *COMPILED, **environment).finish()
    assert (cold["cold"], cold["compiled"], states(cold)) == (True, 1, {"built": 1})
    assert (warm["cold"], warm["compiled"], states(warm)) == (False, 0, {"hit": 1})
    assert cold["units"][0]["bytes"] > 0
    assert files == {path: path.stat().st_mtime_ns for path in files}
    elsewhere, _ = start("build", *COMPILED, TOY_READ_ONLY="1", **environment).finish()
    assert (elsewhere["compiled"], states(elsewhere)) == (0, {"hit": 1})
    assert [line for line in elsewhere["notes"] if "is read-only" in line]


def test_a_triton_kernel_is_compiled_once_for_all_processes(start: Start, cache: Path) -> None:
    pytest.importorskip("triton")
    arguments = ("build", "--model", "tests.warmup.triton_toy:factory", "--device", "cpu", "--json")
    environment = {"TRITON_DEFAULT_FP_FUSION": "1"}  # unset, Triton 3.9 warns that its default will change
    cold, _ = start(*arguments, **environment).finish()
    warm, _ = start(*arguments, **environment).finish()
    assert (cold["compiled"], states(cold)) == (1, {"built": 1})
    assert (warm["compiled"], states(warm)) == (0, {"hit": 1})
    assert list(cache.glob("*/triton/*/add_one.hsaco"))


def test_of_many_processes_that_unpack_a_bundle_one_does(cache: Path, tmp_path: Path) -> None:
    manager = WarmupManager(cache)
    manager.run(manager.plan(toys.slow(BuildOptions())), progress=False)
    bundle = pack(manager.plan(toys.slow(BuildOptions())).directory, str(tmp_path / "bundle"))
    other = tmp_path / "other"
    with ThreadPoolExecutor(8) as pool:
        runs = [pool.submit(unpack, bundle.url, digest=bundle.digest, cache_dir=other, device="cpu") for _ in range(8)]
        taken = sorted(len(run.result().taken) for run in runs)
    assert taken == [0] * 7 + [8]
