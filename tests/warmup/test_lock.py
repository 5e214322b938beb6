from __future__ import annotations

import errno
import fcntl
import json
import os
from pathlib import Path

import pytest

from capture import WarmupManager
from capture.errors import CacheAccessError, CacheLockTimeout
from capture.filesystem import describe_filesystem, filesystem_type
from capture.lock import BuildLock, rank_of_process
from capture.progress import ProgressEvent, line_progress
from tests.warmup.toys import kernels, toy_spec

LAUNCHERS = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in LAUNCHERS:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("name", LAUNCHERS)
def test_a_rank_comes_from_its_launcher(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert rank_of_process() is None
    monkeypatch.setenv(name, "3")
    assert rank_of_process() == "3"


def test_a_waiter_names_the_rank_that_builds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "5")
    said: list[str] = []
    with BuildLock(tmp_path / "lock").hold(0.0, said.append):
        monkeypatch.delenv("RANK")
        with pytest.raises(CacheLockTimeout, match=f"rank 5, pid {os.getpid()} of host"):
            BuildLock(tmp_path / "lock")._acquire(0.0, said.append, 1.0)


def test_progress_lines_name_the_rank(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "2")
    line_progress()(ProgressEvent("done", "built: a", 0.0, 1.0, 1.0))
    assert capsys.readouterr().err == "mla-warmup rank 2 [   1.0 s] built: a\n"


def test_a_lock_that_keeps_nobody_out_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(fcntl, "flock", lambda descriptor, operation: None)
    with BuildLock(tmp_path / "lock").hold(0.0, said.append):
        pass
    assert len(said) == 1
    assert "gives one lock to two holders" in said[0]


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK], ids=["ENOSYS", "ENOTSUP", "ENOLCK"])
def test_a_file_system_without_locks_is_refused(code: int, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(descriptor: int, operation: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", flock)
    manager = WarmupManager(cache)
    with pytest.raises(CacheAccessError, match=r"--cache-dir"):
        manager.run(manager.plan(toy_spec(*kernels(1))), progress=False)


def test_the_owner_is_only_a_message(tmp_path: Path) -> None:
    (tmp_path / "lock.owner").write_text(json.dumps({"pid": 1, "host": "gone"}))
    with BuildLock(tmp_path / "lock").hold(0.0, print):
        assert json.loads((tmp_path / "lock.owner").read_text())["pid"] == os.getpid()
    assert not (tmp_path / "lock.owner").exists()


MOUNTS = r"""22 1 0:21 / / rw - overlay overlay rw
30 22 0:30 / /data rw,relatime shared:1 - nfs4 server:/data rw
31 30 0:31 / /data/local rw - ext4 /dev/sda1 rw
32 22 0:32 / /with\040space rw - fuse.sshfs host: rw
33 22 0:33 / /dev/shm rw - tmpfs tmpfs rw
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/home/cache", "overlay"),
        ("/data", "nfs4"),
        ("/data/a/b", "nfs4"),
        ("/database", "overlay"),
        ("/data/local/cache", "ext4"),
        ("/with space/cache", "fuse.sshfs"),
    ],
)
def test_a_path_is_on_the_innermost_mount(path: str, kind: str, tmp_path: Path) -> None:
    (tmp_path / "mountinfo").write_text(MOUNTS)
    assert filesystem_type(Path(path), tmp_path / "mountinfo") == kind


def test_mount_points_may_have_any_name(tmp_path: Path) -> None:
    names = ("/latin\udce4", "/no-break\xa0space", "/line\u2028break")
    lines = [f"{30 + index} 22 0:30 / {name} rw - nfs4 server: rw\n" for index, name in enumerate(names)]
    (tmp_path / "mountinfo").write_bytes(os.fsencode("".join([MOUNTS, *lines])))
    for name in names:
        assert filesystem_type(Path(name, "cache"), tmp_path / "mountinfo") == "nfs4"
    assert filesystem_type(Path("/data"), tmp_path / "mountinfo") == "nfs4"


def test_a_network_file_system_is_described_and_a_local_one_is_not(tmp_path: Path) -> None:
    mounts = tmp_path / "mountinfo"
    mounts.write_text(MOUNTS)
    assert "network file system (nfs4)" in describe_filesystem(Path("/data/cache"), mounts)
    assert "network file system (fuse.sshfs)" in describe_filesystem(Path("/with space"), mounts)
    assert describe_filesystem(Path("/data/local"), mounts) == describe_filesystem(Path("/home"), mounts) == ""
    assert describe_filesystem(Path("/"), tmp_path / "missing") == ""


def test_a_cache_on_a_network_file_system_is_noted_in_the_report(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("capture.filesystem.filesystem_type", lambda path, mounts: "lustre")
    manager = WarmupManager(cache)
    report = manager.run(manager.plan(toy_spec(*kernels(1))), progress=False)
    assert [note for note in report.notes if "network file system (lustre)" in note]
    assert report.ok
