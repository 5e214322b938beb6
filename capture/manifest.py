"""The manifest of a cache directory: which units it has, which files they own, what each file must be."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from capture.errors import CacheCorruptError
from capture.fingerprint import JSON

__all__ = ["PAYLOAD", "FileRecord", "Manifest", "UnitRecord", "fsync_directories", "write_durably"]

PAYLOAD = ("inductor", "triton", "aiter", "packages")
"""The directories of an entry that hold files of units."""

_SCHEMA = 1


@dataclass(frozen=True)
class FileRecord:
    """What a file must be: its size in bytes and its sha256 (hexadecimal)."""

    size: int
    sha256: str


@dataclass(frozen=True)
class UnitRecord:
    """One unit that was built: how long it took, and the files (relative paths) that came of it.

    Attributes:
        proved: of a proof, the batch sizes whose graphs were proved in full.
    """

    kind: str
    seconds: float
    bytes: int
    files: tuple[str, ...]
    proved: tuple[int, ...] = ()


@dataclass
class Manifest:
    """The contents of ``manifest.json``, which carries its own sha256: a changed byte is noticed anywhere."""

    fields: Mapping[str, JSON]
    units: dict[str, UnitRecord] = field(default_factory=dict)
    files: dict[str, FileRecord] = field(default_factory=dict)

    def render(self) -> bytes:
        """The manifest as bytes: the same contents give the same bytes."""
        body = {
            "schema": _SCHEMA,
            "fingerprint": self.fields,
            "units": {key: _render_unit(unit) for key, unit in self.units.items()},
            "files": {path: asdict(record) for path, record in self.files.items()},
        }
        return _dump({**body, "sha256": hashlib.sha256(_dump(body)).hexdigest()})

    @classmethod
    def parse(cls, data: bytes) -> Manifest:
        """The manifest that ``data`` holds.

        Raises:
            CacheCorruptError: ``data`` is not, byte for byte, what :meth:`render` writes.
        """
        try:
            raw = json.loads(data)
            units = {key: _parse_unit(unit) for key, unit in raw["units"].items()}
            files = {path: FileRecord(**record) for path, record in raw["files"].items()}
            manifest = cls(raw["fingerprint"], units, files)
            _check_paths(files)
            same = manifest.render() == data
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise CacheCorruptError(f"the manifest cannot be read ({type(error).__name__}: {error})") from None
        if not same:
            raise CacheCorruptError("the manifest is not what was written (its own checksum differs)")
        return manifest

    def drop(self, keys: Iterable[str]) -> set[str]:
        """Forget units; return the files that no other unit owns, which are forgotten too."""
        dropped = [self.units.pop(key) for key in keys if key in self.units]
        kept = {path for unit in self.units.values() for path in unit.files}
        orphans = {path for unit in dropped for path in unit.files} - kept
        for path in orphans:
            self.files.pop(path, None)
        return orphans


def write_durably(path: Path, data: bytes) -> None:
    """Replace ``path`` by ``data`` so that a crash at any moment leaves the old or the new contents."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise
    fsync_directories([path.parent])


def fsync_directories(directories: Iterable[Path]) -> None:
    """Make the names in ``directories`` durable."""
    for directory in directories:
        descriptor = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _render_unit(unit: UnitRecord) -> dict[str, Any]:
    raw = asdict(unit)
    if not unit.proved:
        del raw["proved"]  # so that what has no proof is, byte for byte, as it was before there was this field
    return raw


def _parse_unit(raw: Mapping[str, Any]) -> UnitRecord:
    sizes = tuple(map(int, raw.get("proved", ())))
    return UnitRecord(**{**raw, "files": tuple(raw["files"]), "proved": sizes})


def _check_paths(paths: Iterable[str]) -> None:
    for path in paths:
        if path.startswith("/") or ".." in path.split("/"):
            raise ValueError(f"path {path!r} leaves the cache directory")


def _dump(value: object) -> bytes:
    return (json.dumps(value, indent=1, sort_keys=True) + "\n").encode()
