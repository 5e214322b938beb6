"""Triton's group files, which hold absolute paths: the one thing in a cache that does not survive a move.

``triton/<key>/__grp__<kernel>.json`` names the files of a kernel by absolute path, and Triton compiles again if one
of them is not there. All of them lie beside the group file. So a cache compares such a file without the
directories, and writes its own directory into it where it was moved.
"""

from __future__ import annotations

import json
from pathlib import Path, PurePosixPath

__all__ = ["is_group", "located", "portable"]


def is_group(path: str) -> bool:
    """Whether ``path`` names a group file."""
    name = PurePosixPath(path).name
    return name.startswith("__grp__") and name.endswith(".json")


def portable(data: bytes) -> bytes:
    """The contents of a group file with file names in place of paths; ``data`` itself if it is none."""
    return _with_directory(data, None)


def located(data: bytes, directory: Path) -> bytes:
    """The contents of a group file with paths in ``directory``; ``data`` itself if it is none."""
    return _with_directory(data, directory)


def _with_directory(data: bytes, directory: Path | None) -> bytes:
    try:
        children = json.loads(data)["child_paths"]
        names = {child: PurePosixPath(path).name for child, path in children.items()}
    except (ValueError, TypeError, KeyError, AttributeError):
        return data
    paths = {child: name if directory is None else str(directory / name) for child, name in names.items()}
    return json.dumps({"child_paths": paths}).encode()
