"""Removing old or large cache directories."""

from __future__ import annotations

import os
import re
import shutil
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from capture.errors import CacheAccessError, CacheLockTimeout
from capture.lock import BuildLock
from capture.store import check_access

__all__ = ["CachedEntry", "clean", "entries"]

_ENTRY = r"[0-9a-f]{20}"
_REMOVED = rf"removed-((?:incoming-)?{_ENTRY})-\d+"


@dataclass(frozen=True)
class CachedEntry:
    """One fingerprint's directory.

    Attributes:
        bytes: its size, quarantine included.
        age: seconds since something was built.
    """

    path: Path
    bytes: int
    age: float


def entries(root: Path) -> list[CachedEntry]:
    """The directories of a cache, the most lately built first."""
    if not root.is_dir():
        return []
    return [entry for entry in _matching(root, _ENTRY) if entry.path.is_dir()]


def clean(
    root: Path,
    *,
    older_than: float | None = None,
    max_size: int | None = None,
    all: bool = False,
    dry_run: bool = False,
) -> list[CachedEntry]:
    """Remove entries of a cache, and what killed processes left of them. One that a process is building stays.

    Of an entry that is a link the link is removed.

    Args:
        older_than: remove what was built more than so many seconds ago.
        max_size: then remove the oldest until the rest fits into so many bytes.
        all: remove every entry.

    Returns:
        what was removed, or with ``dry_run`` would be.

    Raises:
        CacheAccessError: ``root`` is not the caller's own; see :func:`capture.store.check_access`.
    """
    present = _matching(root, rf"(incoming-)?{_ENTRY}|{_REMOVED}") if root.is_dir() else []
    if not present:
        return []
    check_access(root)
    chosen = []
    total = 0
    for entry in present:
        total += entry.bytes  # those chosen too: what is older than one that does not fit goes before it
        too_old = older_than is not None and entry.age > older_than
        too_much = max_size is not None and total > max_size
        if all or too_old or too_much:
            chosen.append(entry)
    return chosen if dry_run else [entry for entry in chosen if _remove(root, entry.path)]


def _matching(root: Path, pattern: str) -> list[CachedEntry]:
    found = []
    for path in root.iterdir():
        if re.fullmatch(pattern, path.name) and (path.is_dir() or path.is_symlink()):
            with suppress(FileNotFoundError):  # another process removes it
                found.append(_entry(path))
    return sorted(found, key=lambda entry: (entry.age, entry.path))


def _remove(root: Path, path: Path) -> bool:
    left = re.fullmatch(_REMOVED, path.name)
    name = left[1] if left else path.name
    try:
        with BuildLock(root / f"{name}.lock").hold(0.0, lambda line: None):
            if not os.path.lexists(path):  # another clean was here before
                return False
            if path.is_symlink():  # what it leads to is not the cache's
                path.unlink()
                return True
            # Renamed first: a removal that is interrupted must not leave half of an entry behind.
            doomed = path if left else path.rename(root / f"removed-{name}-{time.time_ns()}")
            shutil.rmtree(doomed)
    except CacheLockTimeout:
        return False
    except OSError as error:
        raise CacheAccessError(f"cannot remove {path}: {error}") from error
    return True


def _entry(path: Path) -> CachedEntry:
    size = 0
    for parent, _, names in os.walk(path):
        for name in names:
            with suppress(FileNotFoundError):  # a compiler's temporary file
                size += os.lstat(os.path.join(parent, name)).st_size
    manifest = path / "manifest.json"
    built = (manifest if manifest.exists() else path).lstat().st_mtime  # also of a link that leads nowhere
    return CachedEntry(path, size, time.time() - built)
