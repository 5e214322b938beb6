"""What goes wrong around a cache: kills, full disks, clocks, versions."""

from __future__ import annotations

import errno
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from capture import WarmupManager, WarmupReport
from capture import warmup as warmup_module
from capture.bundle import pack, unpack
from capture.errors import BundleError, CacheAccessError
from capture.fingerprint import environment_fields
from capture.janitor import entries
from capture.units import BuildOptions
from tests.warmup import toys
from tests.warmup.conftest import Command
from tests.warmup.toys import CallUnit, kernels, toy_spec

SPEC = toy_spec(*kernels(2))
FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
KILLS = 50 if os.environ.get("MLA_OPS_LONG_TESTS") else 4


def warm_up(cache: Path, spec: object = SPEC) -> WarmupReport:
    manager = WarmupManager(cache)
    return manager.run(manager.plan(spec), progress=False)  # type: ignore[arg-type]


def states(report: WarmupReport) -> list[str]:
    return [unit.state for unit in report.units]


@pytest.mark.parametrize("attempt", range(KILLS))
def test_a_kill_at_any_moment_leaves_nothing_corrupt(
    attempt: int, start: Callable[..., Command], cache: Path, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    doomed = start("build", "--model", "tests.warmup.toys:slow", "--device", "cpu", "--json", TOY_LOG=str(log))
    deadline = time.monotonic() + 60
    while not log.exists():  # its imports are over
        assert time.monotonic() < deadline
        time.sleep(0.001)
    time.sleep(random.uniform(0, 0.4))
    doomed.process.kill()
    doomed.process.join()
    assert doomed.process.exitcode in (0, -signal.SIGKILL)
    plan = WarmupManager(cache).plan(toys.slow(BuildOptions()))
    assert not plan.damaged
    assert warm_up(cache, toys.slow(BuildOptions())).ok
    again = warm_up(cache, toys.slow(BuildOptions()))
    assert set(states(again)) == {"hit"}
    files = {path.read_bytes() for path in (plan.directory / "triton").rglob("file-*")}
    assert files == {f"slow-{unit}/file-{index}".encode() * 100 for unit in range(8) for index in range(8)}


@pytest.mark.parametrize("write", range(8))
def test_a_disk_that_is_full_at_any_write_loses_only_what_could_not_be_written(
    write: int, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = write
    sync = os.fsync

    def full_after(descriptor: int) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise FULL
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", full_after)
    report = warm_up(cache)
    assert report.ok  # what was built works in this process, though the cache could not keep it
    assert [note for note in report.notes if "No space left on device" in note]
    monkeypatch.undo()
    assert not WarmupManager(cache).plan(SPEC).damaged
    assert warm_up(cache).ok
    assert states(warm_up(cache)) == ["hit", "hit"]


def test_a_build_on_a_full_disk_fails_by_name_and_the_next_completes(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write_bytes(path: Path, data: bytes) -> int:
        raise FULL

    with monkeypatch.context() as full:
        full.setattr(Path, "write_bytes", write_bytes)
        report = warm_up(cache)
    assert states(report) == ["failed", "failed"]
    assert all("No space left on device" in unit.reason for unit in report.units)
    assert states(warm_up(cache)) == ["built", "built"]


@pytest.mark.parametrize("jump", [-10 * 365 * 86400, 10 * 365 * 86400], ids=["backwards", "forwards"])
def test_a_clock_that_jumps_costs_nothing(jump: int, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    warm_up(cache)
    now, now_ns = time.time, time.time_ns
    monkeypatch.setattr(time, "time", lambda: now() + jump)
    monkeypatch.setattr(time, "time_ns", lambda: now_ns() + jump * 10**9)
    assert states(warm_up(cache)) == ["hit", "hit"]
    (WarmupManager(cache).plan(SPEC).directory / "triton/kernel-0/kernel.bin").write_text("damaged")
    assert states(warm_up(cache)) == ["built", "hit"]


def test_files_from_the_future_are_as_good_as_others(cache: Path) -> None:
    warm_up(cache)
    for path in cache.rglob("*"):
        os.utime(path, (2**32, 2**32))
    assert states(warm_up(cache)) == ["hit", "hit"]


def test_two_versions_share_a_directory_and_nothing_in_it(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = warm_up(cache)
    fields = {**environment_fields("cpu"), "mla_ops": "0.0.1"}
    with monkeypatch.context() as older:
        older.setattr(warmup_module, "environment_fields", lambda device: fields)
        theirs = warm_up(cache)
        assert states(theirs) == ["built", "built"]
        assert states(warm_up(cache)) == ["hit", "hit"]
    assert ours.fingerprint.diff(theirs.fingerprint)[0][0] == "mla_ops"
    assert states(warm_up(cache)) == ["hit", "hit"]
    assert len(entries(cache)) == 2


def test_a_manifest_of_a_later_version_is_not_guessed_at(cache: Path) -> None:
    warm_up(cache)
    path = WarmupManager(cache).plan(SPEC).directory / "manifest.json"
    path.write_bytes(path.read_bytes().replace(b'"schema": 1', b'"schema": 2'))
    report = warm_up(cache)
    assert states(report) == ["built", "built"]
    assert [line for line in report.quarantined if line.startswith("manifest.json: ")]


def test_another_users_entry_is_refused_with_what_to_do(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    warm_up(cache)
    owner = cache.stat().st_uid
    if owner == 0:
        os.chown(WarmupManager(cache).plan(SPEC).directory, 12345, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    with pytest.raises(CacheAccessError, match=r"is owned by user .* choose a directory of your own"):
        warm_up(cache)


@pytest.mark.parametrize("sync", range(0, 12, 2))
def test_an_unpack_that_fails_at_any_write_can_be_repeated(
    sync: int, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    warm_up(cache)
    bundle = pack(WarmupManager(cache).plan(SPEC).directory, str(tmp_path / "bundle"))
    other, left, real = tmp_path / "other", sync, os.fsync

    def full_after(descriptor: int) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise FULL
        real(descriptor)

    with monkeypatch.context() as full:
        full.setattr(os, "fsync", full_after)
        with pytest.raises((BundleError, OSError), match="No space left on device"):
            unpack(bundle.url, digest=bundle.digest, cache_dir=other, device="cpu")
    unpack(bundle.url, digest=bundle.digest, cache_dir=other, device="cpu")
    assert states(warm_up(other)) == ["hit", "hit"]


@pytest.mark.parametrize("phase", ["kernels", "capture"])
def test_a_manifest_that_is_damaged_during_a_build_costs_no_warm_up(phase: Any, cache: Path) -> None:
    def damage() -> None:
        (manifest,) = cache.glob("*/manifest.json")
        manifest.write_bytes(manifest.read_bytes()[:-9])

    first, last = kernels(2)
    unit = CallUnit(key="damage", call=damage, phase=phase, persistent=phase == "kernels")
    manager = WarmupManager(cache)
    report = manager.run(manager.plan(toy_spec(first, unit, last)), progress=False)
    assert [row.state for row in report.units] == ["built"] * 3
    again = manager.run(manager.plan(toy_spec(first, last)), progress=False)
    assert again.ok
    assert again.quarantined
