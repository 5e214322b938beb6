"""A writable view of a cache that cannot be written.

Inductor and AITER open lock files beside what they load, so not even a complete cache loads from a read-only
directory. An overlay is a private temporary directory with a link to each verified file. What a compiler
writes lands there, and goes when the process ends.
"""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from collections.abc import Collection, Iterable
from pathlib import Path

from capture.errors import CacheAccessError
from capture.relocate import located

__all__ = ["make_overlay", "needs_overlay"]


def needs_overlay(directories: Iterable[Path]) -> bool:
    """Whether one of ``directories`` is there and cannot be written."""
    return any(directory.exists() and not os.access(directory, os.W_OK) for directory in directories)


def make_overlay(directory: Path, files: Iterable[str], moved: Collection[str] = ()) -> Path:
    """A new directory with links to ``files`` (relative to ``directory``), removed when this process exits.

    Those of ``moved`` (see :mod:`capture.relocate`) are copies that name files in ``directory``.

    Raises:
        CacheAccessError: the temporary directory cannot be written either.
    """
    try:
        overlay = Path(tempfile.mkdtemp(prefix="mla-warmup-"))
        atexit.register(_remove, overlay, os.getpid())
        for file in files:
            link = overlay / file
            link.parent.mkdir(parents=True, exist_ok=True)
            if file in moved:
                link.write_bytes(located((directory / file).read_bytes(), (directory / file).parent))
            else:
                link.symlink_to(directory / file)
    except OSError as error:
        raise CacheAccessError(
            f"{directory} is read-only, and so is the temporary directory ({error}); compilers need a place "
            "for their lock files: set TMPDIR to a directory that can be written"
        ) from error
    return overlay


def _remove(overlay: Path, maker: int) -> None:
    if os.getpid() == maker:  # a forked child inherits the registration, not the directory
        shutil.rmtree(overlay, ignore_errors=True)
