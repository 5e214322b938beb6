"""Which file system a cache lies on, because locks and renames are worth less on some."""

from __future__ import annotations

import os
import re
from pathlib import Path

__all__ = ["describe_filesystem", "filesystem_type"]

_NETWORK = frozenset(
    (
        "9p",
        "afs",
        "beegfs",
        "ceph",
        "cifs",
        "fuse",
        "glusterfs",
        "gpfs",
        "lustre",
        "ncpfs",
        "nfs",
        "nfs4",
        "smb3",
        "smbfs",
    )
)
_MOUNTS = Path("/proc/self/mountinfo")


def filesystem_type(path: Path, mounts: Path = _MOUNTS) -> str:
    """The type of the file system that ``path`` (or its nearest parent that exists) is on; "" if unknown."""
    try:
        lines = os.fsdecode(mounts.read_bytes()).rstrip("\n").split("\n")  # of any bytes and blanks but those escaped
    except OSError:
        return ""
    place = os.path.realpath(path)
    best, kind = -1, ""
    for line in lines:
        mounted, _, described = line.partition(" - ")
        point = re.sub(r"\\(\d{3})", lambda code: chr(int(code[1], 8)), mounted.split(" ")[4])
        inside = place == point or place.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= best:  # a later mount on the same point hides the earlier
            best, kind = len(point), described.split(" ")[0]
    return kind


def describe_filesystem(path: Path, mounts: Path = _MOUNTS) -> str:
    """What a user of a cache on a network file system should know; "" on a local one."""
    kind = filesystem_type(path, mounts)
    if kind.split(".")[0] not in _NETWORK:
        return ""
    return (
        f"{path} is on a network file system ({kind}), where file locks may not exclude other hosts and every file is "
        "read over the network: keep the cache on a local disk and bring it there with `mla-warmup pull`"
    )
