"""Bundles: one entry of the cache as one file that moves between machines, named by its digest.

A bundle is code: what unpacks it will load it into its processes. So :func:`unpack` and :func:`pull` take the
digest that came with it over a channel you trust, and open nothing before the digest holds.

Places are fsspec URLs: a path, ``s3://``, ``gs://``, ``http://`` (to read) and whatever else is installed.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from capture.archive import read_archive, write_archive
from capture.errors import BundleError, CacheAccessError, CacheCorruptError
from capture.fingerprint import JSON, Fingerprint, environment_fields, target_fields
from capture.lock import BuildLock
from capture.manifest import write_durably
from capture.store import CacheStore, cache_root, check_access

__all__ = ["DEFAULT_MAX_BYTES", "Bundle", "bundle_name", "pack", "parse_digest", "pull", "push", "unpack"]

DEFAULT_MAX_BYTES = 32 * 2**30
"""What a bundle may unpack to, unless the caller says otherwise."""

_CHUNK = 2**20


@dataclass(frozen=True)
class Bundle:
    """A bundle that was packed or unpacked.

    Attributes:
        url: where it is.
        digest: ``sha256:`` and 64 hexadecimal digits of the whole file.
        bytes: its size.
        entry: name of the entry of the cache: the fingerprint's digest.
        units: keys of the units in it.
        taken: those that :func:`unpack` took; the others were in the cache already.
    """

    url: str
    digest: str
    bytes: int
    entry: str
    units: tuple[str, ...]
    taken: tuple[str, ...] = ()


def pack(directory: Path, url: str) -> Bundle:
    """Write the entry ``directory`` of a cache to ``url`` as one ``.tar.zst``. The same entry gives the same digest.

    Raises:
        BundleError: there is nothing to pack, or ``url`` cannot be written.
        CacheCorruptError: a file of the entry is not what its manifest says.
        CacheAccessError: the entry is another user's; see :func:`capture.store.check_access`.
    """
    store = CacheStore.of(directory)
    manifest = store.check().manifest
    if not manifest.units:
        raise BundleError(f"{directory} has no unit; build it first")
    with tempfile.TemporaryFile() as file:
        write_archive(directory, manifest, file)
        size = file.tell()
        file.seek(0)
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        file.seek(0)
        _upload(file, url)
    return Bundle(url, f"sha256:{digest}", size, directory.name, tuple(manifest.units))


def unpack(
    url: str,
    *,
    digest: str,
    cache_dir: str | os.PathLike[str] | None = None,
    device: str | None = None,
    elsewhere: bool = False,
    max_bytes: int = DEFAULT_MAX_BYTES,
    lock_timeout: float = 3600.0,
    say: Callable[[str], None] = lambda line: None,
) -> Bundle:
    """Add the bundle at ``url`` to the cache. What the cache has already stays; many processes may call this at once.

    Args:
        digest: ``sha256:...``, as :func:`pack` returned it.
        cache_dir: the cache's root; by default ``$MLA_WARMUP_CACHE``, else the user's cache directory.
        device: the device that the bundle must fit; by default ``cuda`` if there is one, else ``cpu``.
        elsewhere: the cache is filled for another machine, such as in the build of an image: fit no device.
        max_bytes: refuse a bundle that is larger, packed or unpacked.
        lock_timeout: seconds to wait for another process that fills the same entry.
        say: told whom this process waits for.

    Raises:
        ValueError: ``digest`` is no digest.
        BundleError: another digest; a bundle of another machine or version (the message names the fields); too
            large; or not what :func:`pack` writes. The cache is as it was.
        CacheAccessError, CacheLockTimeout: as :meth:`capture.warmup.WarmupManager.run`.
    """
    expected = parse_digest(digest)
    root = cache_root(cache_dir)
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise CacheAccessError(f"cannot make {root} ({error.strerror}); choose another cache directory") from error
    check_access(root)
    name = f"incoming-{expected[:20]}"
    with BuildLock(root / f"{name}.lock").hold(lock_timeout, say):
        staging = root / name
        try:
            if done := _receipt(root, expected):
                if not elsewhere:
                    _refuse_foreign(CacheStore.of(root / done.entry).fingerprint.fields, device)
                return done
            shutil.rmtree(staging, ignore_errors=True)  # of a process that was killed
            staging.mkdir(mode=0o700)
            size = _download(url, staging / "bundle.tar.zst", expected, max_bytes)
            with open(staging / "bundle.tar.zst", "rb") as file:
                manifest = read_archive(file, staging, min(max_bytes, _free(root)))
            if not elsewhere:
                _refuse_foreign(manifest.fields, device)
            store = CacheStore(root, Fingerprint(manifest.fields))
            store.prepare()
            with store.hold(lock_timeout, say):
                taken = store.adopt(staging, manifest)
        except BundleError as error:
            raise BundleError(f"{url} is refused: {error}") from error
        finally:
            shutil.rmtree(staging, ignore_errors=True)
        entry = store.directory.name
        bundle = Bundle(url, f"sha256:{expected}", size, entry, tuple(manifest.units), tuple(taken))
        write_durably(_receipt_path(root, expected), json.dumps(asdict(bundle)).encode())
    return bundle


def push(directory: Path, base_url: str) -> Bundle:
    """:func:`pack` into the folder ``base_url``, which is made, under the name by which :func:`pull` finds it."""
    url = bundle_name(base_url, directory.name)
    if (local := _local_path(url)) is not None:
        with suppress(OSError):  # then the bundle cannot be written, which says why
            local.parent.mkdir(exist_ok=True)  # never its parents too: they may be a volume that is not mounted
    return pack(directory, url)


def pull(base_url: str, entry: str, **options: Any) -> Bundle:
    """:func:`unpack` the bundle of ``entry`` (a fingerprint's digest) from the folder ``base_url``."""
    return unpack(bundle_name(base_url, entry), **options)


def bundle_name(base_url: str, entry: str) -> str:
    """Where in the folder ``base_url`` the bundle of ``entry`` is."""
    return f"{base_url.rstrip('/')}/{entry}.tar.zst"


def parse_digest(digest: str) -> str:
    """The hexadecimal digits of ``sha256:...``, in lower case.

    Raises:
        ValueError: it is no digest.
    """
    match = re.fullmatch(r"sha256:([0-9a-f]{64})", digest.lower())
    if not match:
        raise ValueError(f'digest must be "sha256:" and 64 hexadecimal digits, as pack printed it, got {digest!r}')
    return match[1]


def _refuse_foreign(fields: Mapping[str, JSON], device: str | None) -> None:
    """Refuse a bundle whose environment fields are not this machine's."""
    if device is None:
        import torch

        device = "cuda" if torch.cuda.is_available() else "cpu"
    ours = environment_fields(device)
    if "target" in fields:
        ours = target_fields(str(ours["arch"]))
    theirs: dict[str, JSON] = {key: fields[key] for key in fields if key in ours or key.startswith("env.")}
    differences = Fingerprint(ours).diff(Fingerprint(theirs))
    if differences:
        named = "; ".join(f"{name} is {mine!r} here and {other!r} there" for name, mine, other in differences)
        raise BundleError(f"it was made for another machine or version ({named})")


def _receipt_path(root: Path, digest: str) -> Path:
    return root / f"bundle-{digest[:20]}.json"


def _receipt(root: Path, digest: str) -> Bundle | None:
    """What an earlier call unpacked, if all of it is in the cache still."""
    try:
        raw = json.loads(_receipt_path(root, digest).read_bytes())
        bundle = Bundle(**{**raw, "units": tuple(raw["units"]), "taken": ()})
        whole = CacheStore.of(root / bundle.entry).check().intact.issuperset(bundle.units)
    except (OSError, ValueError, TypeError, KeyError, CacheCorruptError):
        return None
    return bundle if whole and bundle.digest == f"sha256:{digest}" else None


def _download(url: str, path: Path, expected: str, max_bytes: int) -> int:
    digest, size = hashlib.sha256(), 0
    try:
        with _open(url, "rb") as source, open(path, "xb") as file:
            while chunk := source.read(_CHUNK):
                size += len(chunk)
                if size > max_bytes:
                    raise BundleError(f"it is larger than the limit of {max_bytes} bytes; raise max_bytes (--max-size)")
                digest.update(chunk)
                file.write(chunk)
    except (OSError, ValueError, ImportError) as error:
        raise BundleError(f"it cannot be fetched ({type(error).__name__}: {error})") from error
    if digest.hexdigest() != expected:
        raise BundleError(f"its digest is sha256:{digest.hexdigest()}, not sha256:{expected}; nothing of it was opened")
    return size


def _upload(file: IO[bytes], url: str) -> None:
    """A local file is replaced at once; a device or a pipe is written to; other file systems have their own ways."""
    part: Path | None = None
    try:
        local = _local_path(url)
        replaced = None if local is None or _is_special(local) else Path(os.path.realpath(local))
        part = None if replaced is None else replaced.with_name(f".{replaced.name}.{os.getpid()}.tmp")
        with _open(url, "wb") if part is None else open(part, "wb") as target:
            shutil.copyfileobj(file, target, _CHUNK)
            target.flush()
        if replaced is not None and part is not None:
            os.replace(part, replaced)
    except (OSError, ValueError, ImportError, NotImplementedError) as error:
        if part is not None:
            part.unlink(missing_ok=True)
        reason = str(error) or "fsspec cannot write there"
        raise BundleError(f"{url} cannot be written ({type(error).__name__}: {reason})") from error


def _is_special(path: Path) -> bool:
    """Whether ``path`` is, or leads to, something that a new file must not take the place of."""
    return path.exists() and not path.is_file()


def _local_path(url: str) -> Path | None:
    scheme, separator, rest = url.partition("://")
    if not separator:
        return Path(os.path.expanduser(url)).absolute()
    return Path(rest) if scheme in ("file", "local") else None


def _open(url: str, mode: str) -> Any:
    if (local := _local_path(url)) is not None:
        return open(local, mode)
    import fsspec

    return fsspec.open(url, mode)


def _free(root: Path) -> int:
    return shutil.disk_usage(root).free
