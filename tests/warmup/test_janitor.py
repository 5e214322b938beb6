"""Removing entries of a cache: which, and what killed processes left of them."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from capture import CacheStore, WarmupManager, WarmupSpec, janitor
from capture.janitor import CachedEntry, clean, entries
from tests.warmup.toys import FileUnit, kernels, toy_spec

SPEC = toy_spec(*kernels(2))


def warm_up(cache: Path, spec: WarmupSpec) -> None:
    manager = WarmupManager(cache)
    manager.run(manager.plan(spec), progress=False)


def age(entry: Path, seconds: float) -> None:
    moment = (entry / "manifest.json").stat().st_mtime - seconds
    os.utime(entry / "manifest.json", (moment, moment))


@pytest.fixture
def three(cache: Path) -> list[Path]:
    """Three entries, the oldest first: three days, two days and one day."""
    made = []
    for days in (3, 2, 1):
        spec = toy_spec(FileUnit(key="kernel"), days=days)
        warm_up(cache, spec)
        made.append(WarmupManager(cache).plan(spec).directory)
        age(made[-1], days * 86400.0)
    return made


def test_clean_removes_what_is_old(cache: Path, three: list[Path]) -> None:
    assert {entry.path for entry in clean(cache, older_than=1.5 * 86400)} == set(three[:2])
    assert [entry.path for entry in entries(cache)] == three[2:]


def test_clean_removes_the_oldest_until_the_rest_fits(cache: Path, three: list[Path]) -> None:
    size = max(entry.bytes for entry in entries(cache))
    assert [entry.path for entry in clean(cache, max_size=size * 2)] == three[:1]


def test_what_is_older_than_an_entry_that_is_too_large_goes_too(cache: Path, three: list[Path]) -> None:
    oldest, middle, youngest = three
    (middle / "packages/large").write_bytes(bytes(100_000))
    assert [entry.path for entry in clean(cache, max_size=50_000)] == [middle, oldest]
    assert youngest.exists()


def test_clean_all_leaves_locks_and_strangers(cache: Path, three: list[Path]) -> None:
    (cache / "notes.txt").write_text("mine")
    clean(cache, all=True)
    assert not entries(cache)
    assert {path.suffix for path in cache.iterdir()} == {".lock", ".txt"}


def test_a_dry_clean_removes_nothing(cache: Path, three: list[Path]) -> None:
    before = set(cache.rglob("*"))
    assert len(clean(cache, all=True, dry_run=True)) == 3
    assert set(cache.rglob("*")) == before


def test_clean_leaves_what_is_being_built(cache: Path, three: list[Path]) -> None:
    store = CacheStore(cache, WarmupManager(cache).plan(toy_spec(FileUnit(key="kernel"), days=3)).fingerprint)
    with store.hold(0.0, print):
        assert {entry.path for entry in clean(cache, all=True)} == set(three[1:])
    assert three[0].exists()


def test_what_another_clean_removed_meanwhile_is_left_out(
    cache: Path, three: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    matching = janitor._matching

    def listed_and_then_removed(root: Path, pattern: str) -> list[CachedEntry]:
        found = matching(root, pattern)
        monkeypatch.undo()
        clean(root, older_than=2.5 * 86400)
        return found

    monkeypatch.setattr(janitor, "_matching", listed_and_then_removed)
    assert {entry.path for entry in clean(cache, all=True)} == set(three[1:])


@pytest.mark.parametrize("name", ["0" * 20, f"removed-{'0' * 20}-4711"], ids=["entry", "left by a killed clean"])
@pytest.mark.parametrize("there", [True, False], ids=["whole", "dangling"])
def test_of_a_linked_entry_the_link_is_removed(name: str, there: bool, cache: Path, tmp_path: Path) -> None:
    warm_up(cache, SPEC)
    link, target = cache / name, tmp_path / "elsewhere"
    if there:
        target.mkdir()
    link.symlink_to(target)
    assert link in {entry.path for entry in clean(cache, all=True)}
    assert not os.path.lexists(link)
    assert target.exists() == there


def test_a_clock_that_went_back_makes_nothing_old(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    warm_up(cache, SPEC)
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() - 10 * 86400)
    assert clean(cache, older_than=86400.0) == []
    assert len(entries(cache)) == 1


def test_what_a_killed_unpack_left_is_cleaned(cache: Path) -> None:
    warm_up(cache, SPEC)
    left = cache / f"incoming-{'0' * 20}"
    left.mkdir()
    (left / "bundle.tar.zst").write_text("half")
    os.utime(left, (0, 0))
    assert [entry.path for entry in clean(cache, older_than=3600.0)] == [left]
    assert len(entries(cache)) == 1


@pytest.mark.parametrize("name", ["0" * 20, f"incoming-{'0' * 20}"], ids=["entry", "unpack"])
def test_what_a_killed_clean_left_is_cleaned(cache: Path, name: str) -> None:
    warm_up(cache, SPEC)
    left = cache / f"removed-{name}-4711"
    left.mkdir()
    (left / "half").write_text("half")
    assert left in {entry.path for entry in clean(cache, all=True)}
    assert {path.suffix for path in cache.iterdir()} == {".lock"}


def test_what_a_killed_clean_of_the_same_process_id_left_is_in_nobodys_way(cache: Path) -> None:
    """In a container the process id is often the same."""
    warm_up(cache, SPEC)
    (entry,) = entries(cache)
    left = cache / f"removed-{entry.path.name}-{os.getpid()}"
    left.mkdir()
    (left / "half").write_text("half")
    os.utime(left, (0, 0))
    assert {removed.path for removed in clean(cache, all=True)} == {entry.path, left}


def test_clean_goes_on_where_a_compilers_file_vanishes(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    warm_up(cache, SPEC)
    (size,) = (entry.bytes for entry in entries(cache))
    walk = os.walk
    monkeypatch.setattr(os, "walk", lambda top: ((where, some, [*files, "gone"]) for where, some, files in walk(top)))
    assert [entry.bytes for entry in clean(cache, all=True, dry_run=True)] == [size]
