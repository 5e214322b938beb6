"""Running another program, such as an inference server, over an entry of the cache."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from capture.errors import CacheError
from capture.fingerprint import Fingerprint, environment_fields
from capture.process import ENDINGS
from capture.store import CacheStore, cache_root

__all__ = ["SERVER_VARIABLES", "entry_of_command", "execute", "run_and_keep"]

SERVER_VARIABLES: Mapping[str, str] = {
    "VLLM_CACHE_ROOT": "packages/vllm",
    "SGLANG_DG_CACHE_DIR": "packages/deep_gemm",
    "FLASHINFER_WORKSPACE_BASE": "packages/flashinfer",
    "AITER_ROOT_DIR": "packages/aiter",
}
"""Where servers keep what they compile, besides what torch, Triton and AITER keep: variable -> place in the entry."""

_PATIENCE = 60.0


def entry_of_command(
    label: str, *, cache_dir: str | os.PathLike[str] | None = None, device: str | None = None
) -> CacheStore:
    """The entry for a program that is not described by a specification: one for each label and machine.

    Raises:
        ValueError: ``label`` is not a plain word.
    """
    if not re.fullmatch(r"[A-Za-z0-9][\w.+-]*", label):
        raise ValueError(f"the label must be letters, digits, '.', '_', '+' or '-', got {label!r}")
    if device is None:
        import torch

        device = "cuda" if torch.cuda.is_available() else "cpu"
    fingerprint = Fingerprint({**environment_fields(device), "command": label})
    return CacheStore(cache_root(cache_dir), fingerprint)


def execute(store: CacheStore, command: Sequence[str], say: Callable[[str], None]) -> int:
    """Become ``command``, with the environment of the entry: checked, made if it is not there.

    Over a read-only cache ``command`` is run as a child instead: its overlay must go after it, and not stay for good.

    Returns:
        of a child, the exit status as :func:`run_and_keep` returns it.

    Raises:
        CacheAccessError: the entry cannot be used.
        OSError: there is no such program.
    """
    environment = _prepare(store, say)
    if store.place == store.directory:
        # What Python ignores is as a program expects it, and as subprocess leaves it: yes ends with head
        with _handled(dict.fromkeys((signal.SIGPIPE, signal.SIGXFSZ), signal.SIG_DFL)):
            os.execvpe(command[0], list(command), environment)
    return _code(_run(command, environment))


def run_and_keep(store: CacheStore, command: Sequence[str], label: str, say: Callable[[str], None]) -> int:
    """Run ``command`` as a child in the environment of the entry, then enter the files that it left as one unit.

    Signals to end are passed on, so that a server is stopped as ever. What a program left that any other signal ended
    is not entered: a crash, or a kill.

    Returns:
        the exit status of ``command``; 128 + the signal, where one ended it.
    """
    begun = time.monotonic()
    environment = _prepare(store, say)
    status = _run(command, environment)
    code = _code(status)
    if status < 0 and -status not in ENDINGS:
        say(f"{command[0]} was ended by signal {-status}: what it left is not entered into the cache")
        return code
    if store.place != store.directory:
        say(f"{store.directory} is read-only: nothing is entered into the cache")
        return code
    try:
        with store.hold(_PATIENCE, say):
            store.check()  # so that only what is new or changed is entered
            record = store.record(f"command {label}", "command", time.monotonic() - begun)
    except (CacheError, OSError) as error:
        say(f"what {command[0]} left is not entered into the cache: {error}")
        return code
    files = "1 file" if len(record.files) == 1 else f"{len(record.files)} files"
    say(f"kept {files} ({record.bytes} bytes) in {store.directory}")
    return code


@contextmanager
def _handled(handlers: Mapping[signal.Signals, Any]) -> Iterator[None]:
    """Signals have these handlers, and afterwards those that they had before."""
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _run(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """The status of ``command``, run as a child that gets the signals to end that this process gets."""
    early: list[int] = []
    process: subprocess.Popen[bytes] | None = None

    def forward(number: int, frame: object) -> None:
        if number == signal.SIGINT and _is_in_foreground():
            return  # the terminal sends it to the child as well
        if process is None:
            early.append(number)
        else:
            process.send_signal(number)

    # Under nohup a signal is ignored, by the child too: a handler here would end that.
    heeded = [number for number in ENDINGS if signal.getsignal(number) != signal.SIG_IGN]
    with _handled(dict.fromkeys(heeded, forward)):
        process = subprocess.Popen(command, env=environment)
        for number in early:
            process.send_signal(number)
        return process.wait()


def _code(status: int) -> int:
    return status if status >= 0 else 128 - status


def _is_in_foreground() -> bool:
    """Whether a terminal's keys signal this process, and with it all of its group."""
    try:
        terminal = os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY)
    except OSError:
        return False
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    except OSError:
        return False
    finally:
        os.close(terminal)


def _prepare(store: CacheStore, say: Callable[[str], None]) -> dict[str, str]:
    """The environment for a program over the entry, whose damaged files were set aside."""
    if not store.directory.exists():
        store.prepare()
    check = store.check()
    if check.damaged:
        with store.hold(_PATIENCE, say):
            for line in store.repair(store.check()):
                say(f"set aside: {line}")
            check = store.check()
    for note in store.apply_environment(check):
        say(f"note: {note}")
    places = {name: str(store.place / place) for name, place in SERVER_VARIABLES.items()}
    # A place below the root is an outer exec's, of another entry, and not the user's choice.
    ours = {name for name in places if Path(os.environ.get(name, store.root)).is_relative_to(store.root)}
    return {**os.environ, **{name: places[name] for name in ours}}
