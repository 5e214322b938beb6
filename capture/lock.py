"""One builder per cache directory: a file lock whose wait is bounded and visible.

Locks are flock's, which some network file systems lack or only pretend to have: both are noticed and said.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from capture.errors import CacheAccessError, CacheLockTimeout

if TYPE_CHECKING:
    from filelock import FileLock

__all__ = ["BuildLock", "rank_of_process"]

_RANKS = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")


class BuildLock:
    """An exclusive lock on ``path``: free again when its holder exits or is killed, re-entrant in one object.

    The lock file is never unlinked: a process that waits on an unlinked file would share its lock with
    nobody. Who holds it is written into a sidecar ``<path>.owner``, for the waiters' messages only.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._owner_path = path.with_name(path.name + ".owner")

    @cached_property
    def _lock(self) -> FileLock:
        """Made when first needed: a warm start takes no lock, and should not wait for the import."""
        from filelock import FileLock

        return FileLock(self._path, mode=0o600)

    @contextmanager
    def hold(self, timeout: float, say: Callable[[str], None], *, interval: float = 10.0) -> Iterator[None]:
        """Hold the lock; a wait tells ``say`` who holds it, at once and every ``interval`` seconds.

        Raises:
            CacheLockTimeout: the lock was not free within ``timeout`` seconds.
            CacheAccessError: the lock file cannot be made (a read-only cache).
        """
        self._acquire(timeout, say, interval)
        outermost = self._lock.lock_counter == 1
        try:
            if outermost:
                self._check_that_it_excludes(say)
                self._owner_path.write_text(json.dumps(_this_process()))
            yield
        finally:
            if outermost:
                with suppress(OSError):
                    self._owner_path.unlink()
            self._lock.release()

    def _acquire(self, timeout: float, say: Callable[[str], None], interval: float) -> None:
        from filelock import Timeout

        start = time.monotonic()
        patience = 0.0
        while True:
            try:
                with warnings.catch_warnings():
                    warnings.filterwarnings("ignore", message="flock not supported")  # the check after it is ours
                    self._lock.acquire(timeout=patience)
                return
            except Timeout:
                pass
            except NotImplementedError as error:
                raise self._no_locks() from error
            except OSError as error:
                raise CacheAccessError(
                    f"cannot lock {self._path} ({error.strerror or error}); something has to be built or set "
                    "aside, which needs a cache directory that can be written: choose another with "
                    "--cache-dir, $MLA_WARMUP_CACHE or WarmupManager(cache_dir=...)"
                ) from error
            waited = time.monotonic() - start
            if waited >= timeout:
                raise CacheLockTimeout(
                    f"waited {waited:.0f} s for {self._holder()} on {self._path}; "
                    "wait longer (lock_timeout), or end that process if it hangs: its lock goes with it"
                )
            say(f"waiting for {self._holder()} on {self._path} ({waited:.0f} s of at most {timeout:.0f} s)")
            patience = min(interval, timeout - waited)

    def _check_that_it_excludes(self, say: Callable[[str], None]) -> None:
        """The lock is held: a second holder must be kept out, by flock and not by what stands in for it."""
        descriptor = os.open(self._path, os.O_RDWR)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise self._no_locks() from error
        else:
            say(
                f"the file system of {self._path} gives one lock to two holders: processes may build the same thing at "
                "once; use a local directory, and `mla-warmup pull` to fill it"
            )
        finally:
            os.close(descriptor)

    def _no_locks(self) -> CacheAccessError:
        return CacheAccessError(
            f"the file system of {self._path} has no file locks (flock); choose a local directory with --cache-dir, "
            "$MLA_WARMUP_CACHE or WarmupManager(cache_dir=...), and `mla-warmup pull` to fill it"
        )

    def _owner(self) -> dict[str, object]:
        with suppress(OSError, ValueError):
            owner = json.loads(self._owner_path.read_text())
            if isinstance(owner, dict):
                return owner
        return {}

    def _holder(self) -> str:
        owner = self._owner()
        if not owner:
            return "another process"
        rank = f"rank {owner['rank']}, " if owner.get("rank") is not None else ""
        return f"{rank}pid {owner.get('pid')} of host {owner.get('host')}"


def _this_process() -> dict[str, Any]:
    return {"pid": os.getpid(), "host": socket.gethostname(), "rank": rank_of_process()}


def rank_of_process() -> str | None:
    """The rank that a launcher (torchrun, Slurm, Open MPI) gave this process, for messages only."""
    return next((os.environ[name] for name in _RANKS if os.environ.get(name)), None)
