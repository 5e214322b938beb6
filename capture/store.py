"""The cache directory: its layout, who may use it, what is in it, and how damage is found and set aside.

    <root>/<digest>.lock            held while something is built; never unlinked
    <root>/<digest>/manifest.json   what is here, written last
                   /inductor/ triton/ aiter/ packages/     the payload
                   /quarantine/<time>/...                  what was damaged or half-built, moved here

A cache is code: torch, Triton and AITER unpickle and load what they find. So a directory is used only if
nobody else can write to it, and every file is compared with the manifest before anything is loaded.
"""

from __future__ import annotations

import hashlib
import os
import stat
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path

from capture.errors import CacheAccessError, CacheCorruptError
from capture.fingerprint import Fingerprint
from capture.lock import BuildLock
from capture.manifest import PAYLOAD, FileRecord, Manifest, UnitRecord, fsync_directories, write_durably
from capture.overlay import make_overlay, needs_overlay
from capture.relocate import is_group, located, portable

__all__ = ["CacheCheck", "CacheStore", "cache_root", "check_access"]

_VARIABLES = {
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TRITON_CACHE_DIR": "triton",
    "AITER_JIT_DIR": "aiter",
}
_MANIFEST = "manifest.json"
_applied: dict[str, str] = {}  # what this process set: not a user's setting


def cache_root(cache_dir: str | os.PathLike[str] | None = None) -> Path:
    """``cache_dir``, else ``$MLA_WARMUP_CACHE``, else the user's cache directory. Nothing is created.

    Raises:
        CacheAccessError: that is below a home directory, and the user has none.
    """
    chosen = cache_dir or os.environ.get("MLA_WARMUP_CACHE")
    try:
        if not chosen:
            import platformdirs

            chosen = platformdirs.user_cache_dir("mla-ops", appauthor=False)
        return Path(chosen).expanduser().absolute()
    except RuntimeError as error:
        raise CacheAccessError(
            f"there is no home directory ({error}); choose a cache directory by its whole path with --cache-dir, "
            "$MLA_WARMUP_CACHE or WarmupManager(cache_dir=...)"
        ) from error


def check_access(directory: Path) -> None:
    """Refuse a directory that somebody else could put code into.

    Raises:
        CacheAccessError: ``directory`` is not a directory, is owned by neither the caller nor root, or can be
            written by its group or by everybody.
    """
    try:
        status = directory.stat()
    except OSError as error:
        raise CacheAccessError(f"cannot use the cache directory {directory}: {error.strerror}") from error
    if not stat.S_ISDIR(status.st_mode):
        raise CacheAccessError(f"{directory} is not a directory; move it away or choose another cache directory")
    if status.st_uid not in (os.geteuid(), 0):
        raise CacheAccessError(
            f"{directory} is owned by user {status.st_uid}, not by you ({os.geteuid()}) or root; a cache is "
            "code that is loaded into your process: choose a directory of your own (--cache-dir or "
            "$MLA_WARMUP_CACHE), or chown it"
        )
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise CacheAccessError(
            f"{directory} can be written by others (mode {stat.S_IMODE(status.st_mode):04o}); a cache is "
            f"code that is loaded into your process: chmod go-w {directory}, after a look at what is in it"
        )


@dataclass(frozen=True)
class CacheCheck:
    """What a full check of one cache directory found.

    Attributes:
        manifest: what should be there.
        damaged: relative path -> what is wrong with it ("missing", "size ...", "sha256 ...").
        intact: keys of the units whose files are all as the manifest says.
        broken: keys of the units that lost a file.
        moved: sound files that hold paths of another directory; see :mod:`capture.relocate`.
    """

    manifest: Manifest
    damaged: Mapping[str, str]
    intact: frozenset[str]
    broken: frozenset[str]
    moved: frozenset[str] = frozenset()

    def state_of(self, key: str) -> str:
        """``hit``, ``damaged`` or ``missing``."""
        return "hit" if key in self.intact else "damaged" if key in self.broken else "missing"


class CacheStore:
    """One fingerprint's directory below ``root``. Making the object touches nothing."""

    def __init__(self, root: Path, fingerprint: Fingerprint) -> None:
        self.root = root
        self.fingerprint = fingerprint
        self.directory = root / fingerprint.digest
        self._place = self.directory
        self._lock = BuildLock(root / f"{fingerprint.digest}.lock")
        self._seen: dict[str, tuple[int, int, int]] = {}

    @classmethod
    def of(cls, directory: Path) -> CacheStore:
        """The store whose directory this is; its fingerprint comes from its manifest.

        Raises:
            CacheAccessError: as :func:`check_access`.
            CacheCorruptError: the manifest is not there or not sound, or is of another fingerprint.
        """
        check_access(directory)
        try:
            manifest = Manifest.parse((directory / _MANIFEST).read_bytes())
        except OSError as error:
            raise CacheCorruptError(f"{directory} has no manifest ({error.strerror}); build it first") from None
        store = cls(directory.parent, Fingerprint(manifest.fields))
        if store.directory != directory:
            raise CacheCorruptError(f"{directory} has the manifest of {store.directory.name}; it was renamed")
        return store

    def prepare(self) -> None:
        """Make the directories (mode 0700) unless they are there, and check who owns them.

        Raises:
            CacheAccessError: as :func:`check_access`, or the directory cannot be made.
        """
        try:
            for directory in (self.root, self.directory, *(self.directory / name for name in PAYLOAD)):
                if not directory.is_dir():
                    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise CacheAccessError(
                f"cannot make {directory} ({error.strerror}); choose another cache directory with "
                "--cache-dir, $MLA_WARMUP_CACHE or WarmupManager(cache_dir=...)"
            ) from error
        self._check_access()

    def check(self) -> CacheCheck:
        """Compare every file with the manifest (size, then sha256). Reads only; no lock.

        A file that this object has read before, and that was not touched since, is not read again.

        Raises:
            CacheAccessError: as :func:`check_access`, or the caller may not read the directory.
        """
        if self.root.is_dir() and not os.access(self.root, os.R_OK | os.X_OK):
            raise CacheAccessError(f"{self.root} cannot be read; its owner can allow it: chmod -R go+rX {self.root}")
        empty = Manifest(self.fingerprint.fields)
        if not self.directory.exists():
            return CacheCheck(empty, {}, frozenset(), frozenset())
        self._check_access()
        try:
            manifest = Manifest.parse((self.directory / _MANIFEST).read_bytes())
            self._check_fingerprint(manifest)
        except FileNotFoundError:
            return CacheCheck(empty, {}, frozenset(), frozenset())
        except (CacheCorruptError, OSError) as error:
            return CacheCheck(empty, {_MANIFEST: str(error)}, frozenset(), frozenset())
        with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
            verdicts = pool.map(self._examine, manifest.files, manifest.files.values())
            damaged = {path: verdict for path, verdict in zip(manifest.files, verdicts, strict=True) if verdict}
        broken = {key for key, unit in manifest.units.items() if not damaged.keys().isdisjoint(unit.files)}
        moved = frozenset(path for path in manifest.files.keys() - damaged.keys() if self._is_moved(path))
        return CacheCheck(manifest, damaged, frozenset(manifest.units.keys() - broken), frozenset(broken), moved)

    def hold(self, timeout: float, say: Callable[[str], None]) -> AbstractContextManager[None]:
        """The lock under which :meth:`repair`, :meth:`record` and builds happen; see :class:`BuildLock`."""
        return self._lock.hold(timeout, say)

    def repair(self, check: CacheCheck) -> list[str]:
        """Set aside damaged files, what broken units alone own, and files no manifest lists; under the lock.

        Returns:
            one line for each file that was set aside or is missing.
        """
        manifest = check.manifest
        orphans = manifest.drop(check.broken)
        reasons = dict.fromkeys(orphans, "belongs to a damaged unit")
        reasons |= dict.fromkeys(self._strays(manifest), "is in no manifest (left by an interrupted build)")
        reasons |= check.damaged
        lines = self._set_aside(reasons)
        if check.damaged:
            self._write(manifest)
        return lines

    def set_aside_unit(self, key: str) -> list[str]:
        """Forget unit ``key``, which did not load; set aside the files that it alone owns; under the lock."""
        manifest = self.check().manifest
        lines = self._set_aside(dict.fromkeys(manifest.drop([key]), "belongs to a unit that did not load"))
        self._write(manifest)
        return lines

    def set_aside_strays(self) -> list[str]:
        """Set aside the files that no manifest lists (a build failed); under the lock."""
        return self._set_aside(dict.fromkeys(self._strays(self._read()), "was left by a build that failed"))

    def forget(self, keys: Iterable[str]) -> None:
        """Take the records of units without files away, where there are any; under the lock."""
        manifest = self._read()
        if known := manifest.units.keys() & set(keys):
            manifest.drop(known)
            self._write(manifest)

    def record(
        self,
        key: str,
        kind: str,
        seconds: float,
        *,
        adopt: bool = True,
        proved: Iterable[int] = (),
        void: Iterable[str] = (),
    ) -> UnitRecord:
        """Enter unit ``key``; under the lock.

        Args:
            adopt: it owns every file that is new or changed.
            proved: batch sizes, beside those on record; see :class:`UnitRecord`.
            void: keys of units without files that it makes worthless: their records go.
        """
        manifest = self._read()
        manifest.drop(void)
        changed = [path for path, status in self._scan() if adopt and self._is_new(path, status, manifest)]
        records = {path: record for path in changed if (record := self._measure(path))}
        manifest.files.update(records)
        before = manifest.units.pop(key, None)
        kept = {path for path in (before.files if before else ()) if (self.directory / path).exists()}
        shared = {path for unit in manifest.units.values() for path in unit.files}
        for path in set(before.files if before else ()) - kept - shared:
            del manifest.files[path]  # its program removed it
        files = tuple(sorted({*records, *kept}))
        size = sum(manifest.files[path].size for path in files)
        sizes = tuple(sorted({*proved, *(before.proved if before else ())}))
        manifest.units[key] = UnitRecord(kind, round(seconds, 6), size, files, sizes)
        self._write(manifest)
        return manifest.units[key]

    def adopt(self, source: Path, manifest: Manifest) -> list[str]:
        """Take from ``source`` the files of the units that are not whole here; under the lock.

        Args:
            source: a directory on the same file system with every file of ``manifest``, durable and checked.

        Returns:
            the keys of those units.
        """
        check = self.check()
        self.repair(check)
        ours = self._read()
        taken = [key for key in manifest.units if key not in check.intact]
        for path in sorted({path for key in taken for path in manifest.units[key].files} - ours.files.keys()):
            target = self.directory / path
            target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            os.replace(source / path, target)
            fsync_directories([target.parent])
            ours.files[path] = manifest.files[path]
        ours.units |= {key: manifest.units[key] for key in taken}
        self._write(ours)
        self._relocate(self.check().moved)
        return taken

    @property
    def place(self) -> Path:
        """Where programs find the files: the directory, or its overlay."""
        return self._place

    def environment(self) -> dict[str, str]:
        """The variables that point torch, Triton and AITER at this directory, or at its overlay."""
        return {variable: str(self._place / name) for variable, name in _VARIABLES.items()}

    def apply_environment(self, check: CacheCheck) -> list[str]:
        """Set :meth:`environment`, but never over a user's own setting; return what a user should know.

        A directory that cannot be written is used through an overlay of the files that ``check`` found sound.

        Raises:
            CacheAccessError: neither can be written.
        """
        notes = []
        if needs_overlay(self.directory / name for name in PAYLOAD):
            self._place = make_overlay(self.directory, check.manifest.files.keys() - check.damaged.keys(), check.moved)
            notes.append(f"{self.directory} is read-only; what compilers write goes to {self._place} and is not kept")
        else:
            self._relocate(check.moved)
        for variable, value in self.environment().items():
            current = os.environ.get(variable)
            if current is None or current == _applied.get(variable) or Path(current).is_relative_to(self.root):
                _applied[variable] = os.environ[variable] = value
            elif variable == "TORCHINDUCTOR_CACHE_DIR" and _is_torch_default(current):
                _applied[variable] = os.environ[variable] = value
                notes.append(f"torch.compile had begun to use {current}; what it compiled before stays there")
            else:
                notes.append(f"{variable}={current} was set already and stays: its files are neither kept nor checked")
        return notes

    def _is_moved(self, path: str) -> bool:
        if not is_group(path):
            return False
        data = (self.directory / path).read_bytes()
        return data != located(data, (self.directory / path).parent)

    def _relocate(self, moved: Iterable[str]) -> None:
        """Needs no lock: each file is replaced at once, and every process writes the same."""
        for path in moved:
            file = self.directory / path
            data = located(file.read_bytes(), file.parent)
            try:
                write_durably(file, data)
            except FileNotFoundError:  # a build that just began has set aside what was half-written, this too
                write_durably(file, data)
            self._seen[path] = _identity(file.lstat())

    def _check_access(self) -> None:
        check_access(self.root)
        check_access(self.directory)

    def _check_fingerprint(self, manifest: Manifest) -> None:
        found = Fingerprint(manifest.fields)
        if found.digest != self.fingerprint.digest:
            names = ", ".join(name for name, _, _ in self.fingerprint.diff(found))
            raise CacheCorruptError(f"the manifest is of another fingerprint (it differs in: {names})")

    def _read(self) -> Manifest:
        path = self.directory / _MANIFEST
        return Manifest.parse(path.read_bytes()) if path.exists() else Manifest(self.fingerprint.fields)

    def _write(self, manifest: Manifest) -> None:
        write_durably(self.directory / _MANIFEST, manifest.render())

    def _examine(self, path: str, record: FileRecord) -> str:
        """What is wrong with the file, or ""."""
        try:
            status = (self.directory / path).lstat()
            if not stat.S_ISREG(status.st_mode):
                return "not a regular file"
            size = len(self._portable(path)) if is_group(path) else status.st_size
            if size != record.size:
                return f"size {size}, not {record.size}"
            if self._seen.get(path) != _identity(status) and self._sha256(path) != record.sha256:
                return f"sha256 differs from {record.sha256[:12]}..."
        except FileNotFoundError:
            return "missing"
        except OSError as error:
            return f"unreadable: {error.strerror}"
        self._seen[path] = _identity(status)
        return ""

    def _portable(self, path: str) -> bytes:
        return portable((self.directory / path).read_bytes())

    def _sha256(self, path: str) -> str:
        if is_group(path):
            return hashlib.sha256(self._portable(path)).hexdigest()
        with open(self.directory / path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    def _measure(self, path: str) -> FileRecord | None:
        """Make the file durable and describe it; None if it vanished (some compiler's temporary file)."""
        try:
            with open(self.directory / path, "rb") as file:
                os.fsync(file.fileno())
                status = os.fstat(file.fileno())
            size = len(self._portable(path)) if is_group(path) else status.st_size
            digest = self._sha256(path)
        except FileNotFoundError:
            return None
        fsync_directories([(self.directory / path).parent])
        self._seen[path] = _identity(status)
        return FileRecord(size, digest)

    def _scan(self) -> Iterator[tuple[str, os.stat_result]]:
        """Every payload file, lock files aside: those may be in use, and carry nothing."""
        for name in PAYLOAD:
            for parent, directories, files in os.walk(self.directory / name):
                directories[:] = [directory for directory in directories if directory != "locks"]
                for file in files:
                    if not file.endswith(".lock") and not file.startswith("lock_"):
                        path = os.path.join(parent, file)
                        try:
                            status = os.lstat(path)
                        except FileNotFoundError:  # some compiler's temporary file
                            continue
                        yield os.path.relpath(path, self.directory), status

    def _is_new(self, path: str, status: os.stat_result, manifest: Manifest) -> bool:
        if not stat.S_ISREG(status.st_mode) or path.endswith(".tmp"):
            return False
        return path not in manifest.files or self._seen.get(path) != _identity(status)

    def _strays(self, manifest: Manifest) -> list[str]:
        unfinished = [path.name for path in self.directory.glob(f".{_MANIFEST}.*.tmp")]
        return unfinished + [path for path, _ in self._scan() if path not in manifest.files]

    def _set_aside(self, reasons: Mapping[str, str]) -> list[str]:
        if not reasons:
            return []
        moment = time.strftime("%Y%m%dT%H%M%S") + f".{time.time_ns() % 10**9:09d}"
        quarantine = self.directory / "quarantine" / moment
        for path in sorted(reasons):
            if os.path.lexists(self.directory / path):
                (quarantine / path).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                with suppress(FileNotFoundError):  # it vanished since
                    os.replace(self.directory / path, quarantine / path)
            self._seen.pop(path, None)
        return [f"{path}: {reason}" for path, reason in sorted(reasons.items())]


def _identity(status: os.stat_result) -> tuple[int, int, int]:
    return status.st_mtime_ns, status.st_size, status.st_ino


def _is_torch_default(directory: str) -> bool:
    """Whether Inductor itself chose ``directory``: it writes its default into the environment."""
    module = sys.modules.get("torch._inductor.runtime.cache_dir_utils")
    return module is not None and directory == os.path.abspath(module.default_cache_dir())
