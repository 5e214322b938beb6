from __future__ import annotations

import errno
import json
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from capture import CacheStore, Fingerprint, WarmupManager, WarmupReport, WarmupSpec
from capture.errors import CacheAccessError, CacheCorruptError
from capture.manifest import FileRecord, Manifest, UnitRecord, write_durably
from capture.store import cache_root
from tests.warmup.toys import FileUnit, kernels, toy_spec

SPEC = toy_spec(*kernels(2))
FILES = [f"triton/kernel-{unit}/kernel.{kind}" for unit in range(2) for kind in ("bin", "json")]


def warm_up(cache: Path, spec: WarmupSpec = SPEC) -> WarmupReport:
    manager = WarmupManager(cache)
    return manager.run(manager.plan(spec), progress=False)


def states(report: WarmupReport) -> list[str]:
    return [unit.state for unit in report.units]


def directory(cache: Path) -> Path:
    return WarmupManager(cache).plan(SPEC).directory


def snapshot(root: Path) -> dict[str, tuple[int, int, int]]:
    found = {}
    for path in root.rglob("*"):
        status = path.lstat()
        found[str(path)] = (status.st_mtime_ns, status.st_ctime_ns, status.st_size)
    return found


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x10
    path.write_bytes(data)


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def link(path: Path) -> None:
    copy = path.with_suffix(".elsewhere")
    path.rename(copy)
    path.symlink_to(copy)


DAMAGE = {
    "flipped": flip,
    "truncated": truncate,
    "removed": Path.unlink,
    "emptied": lambda path: os.truncate(path, 0),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
@pytest.mark.parametrize("name", FILES)
def test_a_damaged_file_is_set_aside_and_its_unit_alone_built_again(
    name: str, damage: Callable[[Path], None], cache: Path
) -> None:
    warm_up(cache)
    path = directory(cache) / name
    good = path.read_bytes()
    damage(path)
    bad = path.read_bytes() if path.exists() else None

    report = warm_up(cache)

    lost = int(name.split("/")[1].removeprefix("kernel-"))
    assert states(report) == ["built" if unit == lost else "hit" for unit in range(2)]
    assert any(line.startswith(f"{name}: ") for line in report.quarantined)
    assert path.read_bytes() == good
    kept = [file.read_bytes() for file in directory(cache).glob(f"quarantine/*/{name}")]
    assert kept == ([] if bad is None else [bad])
    assert states(warm_up(cache)) == ["hit", "hit"]


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_without_a_sound_manifest_nothing_is_trusted(damage: Callable[[Path], None], cache: Path) -> None:
    warm_up(cache)
    damage(directory(cache) / "manifest.json")
    report = warm_up(cache)
    assert states(report) == ["built", "built"]
    assert {line.split(":")[0] for line in report.quarantined} >= set(FILES)
    assert states(warm_up(cache)) == ["hit", "hit"]


def test_every_flipped_byte_of_the_manifest_is_noticed() -> None:
    unit = UnitRecord("kernel", 0.25, 3, ("triton/a",))
    data = Manifest({"torch": "2"}, {"a": unit}, {"triton/a": FileRecord(3, "ab" * 32)}).render()
    assert Manifest.parse(data).units == {"a": unit}
    for position in range(len(data)):
        changed = bytearray(data)
        changed[position] ^= 0x01
        with pytest.raises(CacheCorruptError):
            Manifest.parse(bytes(changed))


@pytest.mark.parametrize("path", ["/etc/passwd", "../other/file", "triton/../../x"])
def test_a_manifest_cannot_name_files_outside_of_its_directory(path: str) -> None:
    data = Manifest({}, {}, {path: FileRecord(0, "")}).render()
    with pytest.raises(CacheCorruptError, match="leaves the cache directory"):
        Manifest.parse(data)


def test_a_manifest_of_another_fingerprint_is_not_used(cache: Path) -> None:
    warm_up(cache)
    other = toy_spec(*kernels(2), dtype="float16")
    directory(cache).rename(WarmupManager(cache).plan(other).directory)
    report = warm_up(cache, other)
    assert states(report) == ["built", "built"]
    assert "another fingerprint (it differs in: dtype)" in "".join(report.quarantined)


def test_a_link_in_place_of_a_file_is_damage(cache: Path) -> None:
    warm_up(cache)
    link(directory(cache) / FILES[0])
    assert WarmupManager(cache).plan(SPEC).damaged == {FILES[0]: "not a regular file"}


def test_a_file_of_two_units_survives_the_loss_of_one(cache: Path) -> None:
    store = CacheStore(cache, Fingerprint({"toy": 1}))
    store.prepare()
    (store.directory / "triton/shared").write_text("shared")
    store.record("first", "kernel", 0.0)
    (store.directory / "triton/shared").write_text("shared, appended to by the second")
    (store.directory / "triton/own").write_text("own")
    assert store.record("second", "kernel", 0.0).files == ("triton/own", "triton/shared")
    (store.directory / "triton/own").unlink()
    check = store.check()
    assert (check.intact, check.broken) == ({"first"}, {"second"})
    store.repair(check)
    assert (store.directory / "triton/shared").exists()
    assert store.check().intact == {"first"}


def test_leftovers_are_set_aside_before_a_build_and_only_then(cache: Path) -> None:
    warm_up(cache)
    stray = directory(cache) / "triton/half/kernel.bin"
    stray.parent.mkdir()
    stray.write_text("half")
    assert not warm_up(cache).quarantined
    assert stray.exists()
    report = warm_up(cache, toy_spec(*kernels(3)))
    assert [line.split(":")[0] for line in report.quarantined] == ["triton/half/kernel.bin"]
    assert not stray.exists()


def test_lock_files_of_compilers_are_left_alone(cache: Path) -> None:
    warm_up(cache)
    locks = [directory(cache) / name for name in ("inductor/locks/a.lock", "triton/b.lock", "aiter/build/lock_c")]
    for path in locks:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    assert not warm_up(cache, toy_spec(*kernels(3))).quarantined
    assert all(path.exists() for path in locks)


def test_a_warm_start_writes_nothing_and_needs_no_lock(cache: Path) -> None:
    warm_up(cache)
    lock = next(cache.glob("*.lock"))
    lock.unlink()
    before = snapshot(cache)
    assert states(warm_up(cache)) == ["hit", "hit"]
    assert snapshot(cache) == before


def refuse_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Root may write anywhere, so a test cannot rely on modes alone."""
    monkeypatch.setattr(os, "access", lambda path, mode: not mode & os.W_OK)


def test_a_read_only_cache_loads_what_was_checked_and_stays_as_it_is(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    warm_up(cache)
    (directory(cache) / "triton/stray").write_text("unchecked")
    before = snapshot(cache)
    refuse_writes(monkeypatch)
    report = warm_up(cache)
    assert states(report) == ["hit", "hit"]
    place = Path(report.environment["TRITON_CACHE_DIR"])
    assert not place.is_relative_to(cache)
    assert sorted(str(path.relative_to(place.parent)) for path in place.rglob("kernel.*")) == FILES
    assert not (place / "stray").exists()
    assert [line for line in report.notes if "is read-only" in line]
    assert snapshot(cache) == before


def test_an_overlay_goes_when_the_process_that_made_it_ends(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("payload")
    program = "import pathlib, sys; from capture.overlay import make_overlay as make; import os\n"
    program += "place = make(pathlib.Path(sys.argv[1]), ['file']); print(place, flush=True)\n"
    program += "if not os.fork(): sys.exit()\n"
    program += "os.wait(); print((place / 'file').read_text())"
    command = [sys.executable, "-c", program, str(tmp_path)]
    place, payload = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert payload == "payload"
    assert not Path(place).exists()
    assert (tmp_path / "file").exists()


def test_what_is_missing_from_a_read_only_cache_is_an_error_with_a_remedy(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    warm_up(cache)
    refuse_writes(monkeypatch)

    def read_only(*arguments: Any, **options: Any) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr("filelock.FileLock.acquire", read_only)
    with pytest.raises(CacheAccessError, match=r"cannot lock .*choose another with --cache-dir"):
        warm_up(cache, toy_spec(*kernels(3)))


def test_modes_of_a_read_only_cache_are_enough(cache: Path) -> None:
    warm_up(cache)
    paths = [cache, *cache.rglob("*")]
    for path in paths:
        path.chmod(path.stat().st_mode & ~0o222)
    try:
        assert states(warm_up(cache)) == ["hit", "hit"]
    finally:
        for path in paths:
            path.chmod(path.stat().st_mode | stat.S_IWUSR)


def test_a_copied_cache_is_warm_at_its_new_place(cache: Path, tmp_path: Path) -> None:
    warm_up(cache)
    cache.rename(tmp_path / "elsewhere")
    assert states(warm_up(tmp_path / "elsewhere")) == ["hit", "hit"]


def test_a_build_beside_a_start_over_a_copied_cache_does_not_end_it(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The build sets unlisted files aside, and with them what the start is writing."""
    group = toy_spec(FileUnit(key="kernel", files=("__grp__kernel.json",)))
    warm_up(cache, group)
    (listed,) = cache.glob("*/triton/kernel/__grp__kernel.json")
    store = CacheStore(cache, WarmupManager(cache).plan(group).fingerprint)
    listed.write_text(json.dumps({"child_paths": {"kernel.bin": str(listed.with_name("kernel.bin"))}}))
    with store.hold(1.0, print):
        store.check()
        store.record("kernel", "kernel", 1.0)
    shutil.copytree(cache, tmp_path / "copy")
    builder = CacheStore(tmp_path / "copy", store.fingerprint)
    replace, builds = os.replace, ["one"]

    def replace_after_a_build(source: Any, target: Any) -> None:
        if builds and Path(target).name == "__grp__kernel.json":
            builds.clear()
            assert builder.repair(builder.check())
        replace(source, target)

    monkeypatch.setattr(os, "replace", replace_after_a_build)
    report = warm_up(tmp_path / "copy", group)
    assert (states(report), builds) == (["hit"], [])
    (moved,) = (tmp_path / "copy").glob("*/triton/kernel/__grp__kernel.json")
    assert json.loads(moved.read_text())["child_paths"] == {"kernel.bin": str(moved.with_name("kernel.bin"))}


def test_directories_are_the_owners_alone(cache: Path) -> None:
    old = os.umask(0o002)
    try:
        warm_up(cache)
    finally:
        os.umask(old)
    made = (cache, directory(cache), *(directory(cache) / name for name in ("inductor", "triton", "aiter")))
    assert {stat.S_IMODE(path.stat().st_mode) for path in made} == {0o700}


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o702], ids=oct)
@pytest.mark.parametrize("below", [False, True], ids=["root", "entry"])
def test_a_directory_that_others_can_write_is_refused(mode: int, below: bool, cache: Path) -> None:
    warm_up(cache)
    (directory(cache) if below else cache).chmod(mode)
    with pytest.raises(CacheAccessError, match=r"can be written by others .* chmod go-w"):
        WarmupManager(cache).plan(SPEC)


def test_a_directory_of_another_user_is_refused(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    warm_up(cache)
    owner = cache.stat().st_uid
    if owner == 0:
        os.chown(cache, 12345, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    with pytest.raises(CacheAccessError, match="is owned by user"):
        WarmupManager(cache).plan(SPEC)


def test_roots_directory_is_trusted_by_others(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    warm_up(cache)
    if cache.stat().st_uid != 0:
        pytest.skip("needs files that root owns: an image's cache")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert states(warm_up(cache)) == ["hit", "hit"]


def test_a_directory_that_cannot_be_read_is_refused(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    warm_up(cache)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(CacheAccessError, match=r"cannot be read; .* chmod -R go\+rX"):
        WarmupManager(cache).plan(SPEC)


def test_a_file_in_the_directorys_place_is_refused(cache: Path) -> None:
    cache.write_text("")
    with pytest.raises(CacheAccessError, match=r"cannot make|not a directory"):
        warm_up(cache)


def test_the_environment_points_the_compilers_at_the_cache(cache: Path) -> None:
    warm_up(cache)
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(directory(cache) / "inductor")
    assert os.environ["TRITON_CACHE_DIR"] == str(directory(cache) / "triton")
    assert os.environ["AITER_JIT_DIR"] == str(directory(cache) / "aiter")


def test_a_users_own_setting_wins_and_is_reported(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "mine"))
    report = warm_up(cache)
    assert report.environment["TRITON_CACHE_DIR"] == str(tmp_path / "mine")
    assert any(line.startswith(f"TRITON_CACHE_DIR={tmp_path / 'mine'} was set already") for line in report.notes)
    assert (tmp_path / "mine/kernel-0/kernel.bin").exists()


def test_a_second_fingerprint_in_one_process_gets_its_own_directories(cache: Path) -> None:
    warm_up(cache)
    other = toy_spec(*kernels(2), dtype="float16")
    report = warm_up(cache, other)
    assert not report.notes
    assert os.environ["TRITON_CACHE_DIR"] == str(WarmupManager(cache).plan(other).directory / "triton")


def test_the_root_is_chosen_by_argument_then_variable_then_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    assert cache_root() == tmp_path / "user/mla-ops"
    monkeypatch.setenv("MLA_WARMUP_CACHE", str(tmp_path / "variable"))
    assert cache_root() == tmp_path / "variable"
    assert cache_root(tmp_path / "argument") == tmp_path / "argument"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("chosen", [None, "~/cache"])
def test_without_a_home_directory_the_remedy_is_said(chosen: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as for the user of a container that no passwd file knows."""
    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 2**31 - 7)
    with pytest.raises(CacheAccessError, match="MLA_WARMUP_CACHE"):
        cache_root(chosen)


def test_a_failed_write_keeps_the_old_contents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "manifest.json"
    write_durably(path, b"old")

    def no_space(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", no_space)
    with pytest.raises(OSError, match="No space"):
        write_durably(path, b"new")
    assert [file.name for file in tmp_path.iterdir()] == ["manifest.json"]
    assert path.read_bytes() == b"old"


def test_an_unfinished_manifest_is_set_aside(cache: Path) -> None:
    warm_up(cache)
    (directory(cache) / ".manifest.json.abc.tmp").write_text("half")
    report = warm_up(cache, toy_spec(*kernels(3)))
    assert [line.split(":")[0] for line in report.quarantined] == [".manifest.json.abc.tmp"]


def test_a_temporary_file_that_vanishes_meanwhile_is_no_error(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = CacheStore(cache, Fingerprint({}))
    store.prepare()
    (store.directory / "triton/kernel").write_text("code")
    walk = os.walk
    monkeypatch.setattr(os, "walk", lambda top: ((where, some, ["gone", *files]) for where, some, files in walk(top)))
    assert store.record("unit", "kernel", 1.0).files == ("triton/kernel",)
    (store.directory / "triton/stray").write_text("half")
    assert [line.split(":")[0] for line in store.set_aside_strays()] == ["triton/stray"]


def test_a_sound_file_is_read_once_by_one_store(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    warm_up(cache)
    store = CacheStore(cache, WarmupManager(cache).plan(SPEC).fingerprint)
    read: list[str] = []
    hash_file = store._sha256
    monkeypatch.setattr(store, "_sha256", lambda path: read.append(path) or hash_file(path))
    store.check()
    flip(directory(cache) / FILES[0])
    assert store.check().damaged.keys() == {FILES[0]}
    assert sorted(read) == sorted([*FILES, FILES[0]])
