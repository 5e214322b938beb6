"""Bundles that no honest program would write."""

from __future__ import annotations

import hashlib
import io
import tarfile
from collections.abc import Callable, Mapping
from pathlib import Path

import zstandard

from capture.manifest import FileRecord, Manifest, UnitRecord

Member = tuple[tarfile.TarInfo, bytes]


def member(name: str, data: bytes = b"", kind: bytes = tarfile.REGTYPE, link: str = "") -> Member:
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.size = kind, link, len(data)
    return info, data


def manifest_of(files: Mapping[str, bytes], fields: Mapping[str, object]) -> Manifest:
    records = {path: FileRecord(len(data), hashlib.sha256(data).hexdigest()) for path, data in files.items()}
    return Manifest(dict(fields), {"unit": UnitRecord("kernel", 1.0, 1, tuple(sorted(files)))}, records)  # type: ignore[arg-type]


def archive(*members: Member, compress: Callable[[bytes], bytes] | None = None) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for info, data in members:
            tar.addfile(info, io.BytesIO(data))
    return (compress or zstandard.ZstdCompressor().compress)(buffer.getvalue())


def place(path: Path, data: bytes) -> tuple[str, str]:
    """Write a bundle; its URL and its digest, which holds: only what is inside is bad."""
    path.write_bytes(data)
    return str(path), f"sha256:{hashlib.sha256(data).hexdigest()}"
