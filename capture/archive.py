"""The file format of a bundle: one zstandard-compressed tar of a manifest and the files that it lists.

The same entry gives the same bytes. The reader knows nothing but regular files in the order of the manifest: a
member of any other kind, name or size ends it, and nothing is ever extracted by a name of the archive's choosing.
"""

from __future__ import annotations

import hashlib
import io
import os
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from capture.errors import BundleError, CacheCorruptError
from capture.manifest import PAYLOAD, FileRecord, Manifest
from capture.relocate import is_group, portable

__all__ = ["read_archive", "write_archive"]

_MANIFEST = "manifest.json"
_LEVEL = 9
_CHUNK = 2**20
_LARGEST_MANIFEST = 64 * 2**20
_LARGEST_HEADER = 2**20
_LARGEST_WINDOW = 2**27


def write_archive(directory: Path, manifest: Manifest, target: IO[bytes]) -> None:
    """Write the files of ``manifest``, which lie in ``directory``, to ``target``.

    Raises:
        BundleError: a file has a name that :func:`read_archive` refuses.
        CacheCorruptError: a file is not what the manifest says.
    """
    import zstandard

    _check_names(manifest)

    with (
        zstandard.ZstdCompressor(level=_LEVEL).stream_writer(target, closefd=False) as packed,
        tarfile.open(fileobj=packed, mode="w|", format=tarfile.PAX_FORMAT) as tar,
    ):
        rendered = manifest.render()
        tar.addfile(_member(_MANIFEST, len(rendered)), io.BytesIO(rendered))
        for path, record in sorted(manifest.files.items()):
            with _opened(directory / path) as file:
                content = _Hashed(file)
                try:
                    tar.addfile(_member(path, record.size), content)  # type: ignore[arg-type]
                except OSError as error:
                    raise CacheCorruptError(f"{path} changed while it was packed ({error}); try again") from error
            if content.sha256 != record.sha256:
                raise CacheCorruptError(f"{path} is not what the manifest says; `mla-warmup build` repairs the cache")


def read_archive(source: IO[bytes], target: Path, max_bytes: int) -> Manifest:
    """Unpack ``source`` into the empty directory ``target``; every file is checked and durable.

    Raises:
        BundleError: anything but what :func:`write_archive` writes, or more than ``max_bytes`` bytes.
    """
    import zstandard

    unpacked = zstandard.ZstdDecompressor(max_window_size=_LARGEST_WINDOW).stream_reader(source, closefd=False)
    reader = _Limited(unpacked)
    try:
        reader.allow(_LARGEST_HEADER)
        with tarfile.open(fileobj=reader, mode="r|", errorlevel=2, ignore_zeros=False) as tar:
            manifest = _read_manifest(tar, reader)
            _check(manifest, max_bytes)
            for path, record in sorted(manifest.files.items()):
                _extract(tar, reader, path, record, target)
            if (extra := tar.next()) is not None:
                raise BundleError(f"it has {extra.name!r}, which its manifest does not list")
    except (tarfile.TarError, zstandard.ZstdError, CacheCorruptError, EOFError) as error:
        raise BundleError(f"it cannot be read ({type(error).__name__}: {error})") from error
    return manifest


def _read_manifest(tar: tarfile.TarFile, reader: _Limited) -> Manifest:
    member = _next(tar, reader, _MANIFEST)
    if member.size > _LARGEST_MANIFEST:
        raise BundleError(f"its manifest is of {member.size} bytes, more than {_LARGEST_MANIFEST}")
    reader.allow(member.size)
    with _content(tar, member) as file:
        return Manifest.parse(file.read())


def _check_names(manifest: Manifest) -> None:
    for path in manifest.files:
        plain = path.isprintable() and path == os.path.normpath(path)
        if not plain or path.split("/")[0] not in PAYLOAD or "/" not in path:
            raise BundleError(f"its manifest lists {path!r}, which is no place for a cached file")


def _check(manifest: Manifest, max_bytes: int) -> None:
    _check_names(manifest)
    if any(record.size < 0 for record in manifest.files.values()):
        raise BundleError("its manifest has a negative size")
    size = sum(record.size for record in manifest.files.values())
    if size > max_bytes:
        raise BundleError(
            f"it unpacks to {size} bytes, more than the limit of {max_bytes}, which is max_bytes (--max-size) or what "
            "is free on the disk: raise the one or free the other"
        )
    unlisted = {path for unit in manifest.units.values() for path in unit.files} - manifest.files.keys()
    if unlisted:
        raise BundleError(f"units own files that it does not list: {sorted(unlisted)[:3]}")


def _extract(tar: tarfile.TarFile, reader: _Limited, path: str, record: FileRecord, target: Path) -> None:
    member = _next(tar, reader, path)
    if member.size != record.size:
        raise BundleError(f"{path} is of {member.size} bytes, its manifest says {record.size}")
    reader.allow(member.size)
    digest = hashlib.sha256()
    try:
        (target / path).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _content(tar, member) as source, open(target / path, "xb") as file:
            while chunk := source.read(_CHUNK):
                digest.update(chunk)
                file.write(chunk)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise BundleError(f"{path} cannot be written: {error.strerror or error}") from error
    if digest.hexdigest() != record.sha256:
        raise BundleError(f"{path} is not what its manifest says (sha256)")


def _next(tar: tarfile.TarFile, reader: _Limited, name: str) -> tarfile.TarInfo:
    reader.allow(_LARGEST_HEADER)
    member = tar.next()
    if member is None:
        raise BundleError(f"{name} is missing")
    if member.type != tarfile.REGTYPE or member.sparse is not None:
        raise BundleError(f"{member.name!r} is not a regular file: links and devices are refused")
    if member.name != name:
        raise BundleError(f"it has {member.name!r} where its manifest lists {name!r}")
    return member


@contextmanager
def _content(tar: tarfile.TarFile, member: tarfile.TarInfo) -> Iterator[IO[bytes]]:
    file = tar.extractfile(member)
    assert file is not None  # a regular file
    with file:
        yield file


def _member(name: str, size: int) -> tarfile.TarInfo:
    """No time, owner or mode of this machine: equal contents are equal bytes."""
    member = tarfile.TarInfo(name)
    member.size, member.mode = size, 0o600
    return member


@contextmanager
def _opened(path: Path) -> Iterator[IO[bytes]]:
    try:
        if is_group(str(path)):
            yield io.BytesIO(portable(path.read_bytes()))
        else:
            with open(path, "rb") as file:
                yield file
    except FileNotFoundError as error:
        raise CacheCorruptError(f"{path} is missing; `mla-warmup build` repairs the cache") from error


class _Hashed:
    """Hashes what is read through it."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._digest = hashlib.sha256()

    def read(self, size: int) -> bytes:
        data = self._file.read(size)
        self._digest.update(data)
        return data

    @property
    def sha256(self) -> str:
        return self._digest.hexdigest()


class _Limited(io.RawIOBase):
    """Hands out only as many bytes as were allowed: a few bytes may unpack to terabytes."""

    def __init__(self, source: IO[bytes]) -> None:
        self._source = source
        self._left = 0

    def allow(self, count: int) -> None:
        self._left += count

    def read(self, size: int = -1, /) -> bytes:
        data = self._source.read(size if size >= 0 else self._left + 1)
        self._left -= len(data)
        if self._left < 0:
            raise BundleError("it unpacks to more than its manifest says")
        return data
