"""What ``mla-warmup`` does where a signal asks it to end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from capture.endings import Ended, orderly_ends
from tests.warmup.command import REPOSITORY, handled

pytestmark = pytest.mark.usefixtures("own_cache")
HELD = """
import pathlib, tempfile, time
from tests.warmup.toys import CallUnit, toy_spec

def hold():
    with tempfile.TemporaryDirectory():
        pathlib.Path("begun").touch()
        time.sleep(60)

def swallow():
    for _ in range(3):
        try:
            hold()
        except BaseException:  # as an extension module does that clears errors while it is imported
            pass

def clean_up():
    try:
        hold()
    finally:
        time.sleep(0.5)
        pathlib.Path("cleaned").touch()

def clean_up_for_long():
    try:
        hold()
    finally:
        pathlib.Path("cleaning").touch()
        time.sleep(60)

def factory(options):
    call = globals()[pathlib.Path("call").read_text()]
    return toy_spec(CallUnit(key="held", call=call, phase="kernels", persistent=True))
"""
SIGNALS = pytest.mark.parametrize(
    ("name", "said"), [("SIGINT", "interrupted"), *((n, f"ended by {n}") for n in ("SIGTERM", "SIGHUP"))]
)


def start_held(folder: Path, call: str, *, verb: str = "build") -> subprocess.Popen[str]:
    """The command over a unit that runs a function of ``HELD``."""
    (folder / "held.py").write_text(HELD)
    (folder / "call").write_text(call)
    (folder / "temporary").mkdir()
    with ExitStack() as stack:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            stack.enter_context(handled(number, signal.SIG_DFL))  # not ignored, as in a job in the background
        return subprocess.Popen(
            [sys.executable, "-m", "capture.cli", verb, "--model", "held:factory", "--device", "cpu", "--quiet"],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY), "TMPDIR": str(folder / "temporary")},
            stderr=subprocess.PIPE,
            text=True,
        )


def wait_for(file: Path, process: subprocess.Popen[str]) -> None:
    while not file.exists():
        assert process.poll() is None
        time.sleep(0.05)


def signalled(folder: Path, call: str, name: str, *, verb: str = "build") -> tuple[int, str]:
    """The status and the errors of a command that got the signal once its unit had begun."""
    with start_held(folder, call, verb=verb) as process:
        wait_for(folder / "begun", process)
        process.send_signal(signal.Signals[name])
        _, errors = process.communicate(timeout=30)
    return process.returncode, errors


@pytest.mark.parametrize("verb", ["build", "bench"])
@SIGNALS
def test_an_end_by_a_signal_is_said_in_a_line_and_leaves_nothing_behind(
    verb: str, name: str, said: str, tmp_path: Path
) -> None:
    status, errors = signalled(tmp_path, "hold", name, verb=verb)
    assert (status, errors) == (128 + signal.Signals[name], f"mla-warmup: {said}\n")
    assert not list((tmp_path / "temporary").iterdir())


@SIGNALS
def test_an_end_by_a_signal_is_heeded_where_code_of_others_swallows_it(name: str, said: str, tmp_path: Path) -> None:
    status, errors = signalled(tmp_path, "swallow", name)
    assert (status, errors) == (128 + signal.Signals[name], f"mla-warmup: {said}\n")


@SIGNALS
def test_cleaning_up_after_a_signal_is_not_cut_short(name: str, said: str, tmp_path: Path) -> None:
    status, errors = signalled(tmp_path, "clean_up", name)
    assert (status, errors) == (128 + signal.Signals[name], f"mla-warmup: {said}\n")
    assert (tmp_path / "cleaned").exists()


@pytest.mark.parametrize(("name", "status"), [("SIGINT", 130), ("SIGTERM", -15), ("SIGHUP", -1)])
def test_a_second_signal_ends_a_command_that_is_cleaning_up(name: str, status: int, tmp_path: Path) -> None:
    number = signal.Signals[name]
    with start_held(tmp_path, "clean_up_for_long") as process:
        for state in ("begun", "cleaning"):
            wait_for(tmp_path / state, process)
            process.send_signal(number)
        process.communicate(timeout=30)
    assert process.returncode == status


def swallow() -> None:
    with suppress(Ended):
        signal.raise_signal(signal.SIGTERM)


def make_another_error_of_it() -> None:
    try:
        signal.raise_signal(signal.SIGTERM)
    except Ended as ended:
        raise OSError("a file could not be read") from ended


@pytest.mark.parametrize("command", [swallow, make_another_error_of_it])
def test_a_signal_that_was_swallowed_to_the_end_is_heeded_there(command: Callable[[], None]) -> None:
    with handled(signal.SIGTERM, signal.SIG_DFL), pytest.raises(Ended) as caught, orderly_ends():
        command()
    assert caught.value.signal == signal.SIGTERM


def test_handlers_are_afterwards_as_they_were_before() -> None:
    with handled(signal.SIGTERM, signal.SIG_DFL), handled(signal.SIGINT, signal.default_int_handler):
        with pytest.raises(Ended), orderly_ends():
            signal.raise_signal(signal.SIGTERM)
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("action", [signal.SIG_IGN, lambda number, frame: None], ids=["ignored", "a handler"])
def test_a_signal_that_is_ignored_or_has_a_handler_ends_nothing(action: signal.Handlers) -> None:
    with handled(signal.SIGHUP, action), orderly_ends():
        signal.raise_signal(signal.SIGHUP)


def test_a_signal_during_the_import_of_torch_is_heeded_once_torch_is_imported(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("import signal\nsignal.raise_signal(signal.SIGTERM)\nready = True\n")
    program = (
        "import sys, time\n"
        "from capture.endings import Ended, orderly_ends\n"
        "try:\n"
        "    with orderly_ends():\n"
        "        import torch\n"
        "        time.sleep(60)\n"
        "except Ended:\n"
        "    sys.exit(0 if torch.ready else 1)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(tmp_path), str(REPOSITORY)))}
    with handled(signal.SIGTERM, signal.SIG_DFL):
        done = subprocess.run([sys.executable, "-c", program], env=environment, timeout=30)
    assert done.returncode == 0
