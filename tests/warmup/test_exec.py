"""``mla-warmup exec``: a program over an entry of the cache."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from capture.execute import entry_of_command
from tests.warmup.command import REPOSITORY, handled, run

pytestmark = pytest.mark.usefixtures("own_cache")


def test_exec_says_that_its_command_comes_after_two_dashes(capsys: pytest.CaptureFixture[str]) -> None:
    assert "-- CMD" in run(capsys, "--help")[1]
    usage, _, about = run(capsys, "exec", "--help")[1].partition("\n\n")
    assert usage.endswith("-- CMD ...")
    assert about.startswith("Run a program, such as a server, over an entry: -- CMD.")
    code, _, err = run(capsys, "exec", "--keep", "vllm", "serve")
    assert code == 2
    assert "mla-warmup exec: error: unrecognized arguments: vllm serve; the command comes after --" in err


def test_exec_runs_a_program_in_the_environment_of_an_entry(cache: Path) -> None:
    program = "import os, sys; print(os.environ['TRITON_CACHE_DIR']); print(os.environ['VLLM_CACHE_ROOT']); sys.exit(7)"
    done = subprocess.run(
        [sys.executable, "-m", "capture.cli", "exec", "--device", "cpu", "--", sys.executable, "-c", program],
        cwd=REPOSITORY, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 7
    triton, vllm = map(Path, done.stdout.split())
    assert triton.parent.parent == cache
    assert vllm == triton.parent / "packages/vllm"


def test_an_exec_inside_of_another_has_every_place_in_its_own_entry(cache: Path) -> None:
    command = [sys.executable, "-m", "capture.cli", "exec", "--device", "cpu", "--label"]
    program = "import os; print(os.environ['TRITON_CACHE_DIR']); print(os.environ['VLLM_CACHE_ROOT'])"
    done = subprocess.run(
        [*command, "outer", "--", *command, "inner", "--", sys.executable, "-c", program],
        cwd=REPOSITORY, capture_output=True, text=True, check=True,
    )  # fmt: skip
    triton, vllm = map(Path, done.stdout.split())
    assert triton.parent == entry_of_command("inner", device="cpu").directory
    assert vllm == triton.parent / "packages/vllm"


def test_what_a_program_compiles_is_kept_and_checked(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program = "import os; open(os.environ['TRITON_CACHE_DIR'] + '/kernel', 'w').write('code')"
    arguments = ("exec", "--device", "cpu", "--label", "server", "--keep", "--", sys.executable, "-c", program)
    code, _, err = run(capsys, *arguments)
    assert code == 0
    assert "kept 1 file (" in err
    kernel = next(cache.glob("*/triton/kernel"))
    kernel.write_text("edoc")
    code, _, err = run(capsys, *arguments[:-1], "pass")
    assert code == 0
    assert "set aside: triton/kernel: sha256 differs" in err
    assert not kernel.exists()


def test_what_a_killed_program_left_is_not_kept(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program = "import os; open(os.environ['TRITON_CACHE_DIR'] + '/kernel', 'w').write('co'); os.kill(os.getpid(), 9)"
    arguments = ("exec", "--device", "cpu", "--label", "server", "--keep", "--", sys.executable, "-c", program)
    code, _, err = run(capsys, *arguments)
    assert code == 128 + 9
    assert "is not entered" in err


@contextmanager
def started(
    program: str, number: signal.Signals, action: signal.Handlers, said: str = "ready\n"
) -> Iterator[subprocess.Popen[str]]:
    """``exec --keep`` of ``program``, once it said so; ``action`` is what it inherits for a signal."""
    command = [sys.executable, "-m", "capture.cli", "exec", "--device", "cpu", "--label", "server", "--keep", "--"]
    with handled(number, action):
        server = subprocess.Popen(
            [*command, sys.executable, "-c", program],
            cwd=REPOSITORY,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,  # without a terminal, which would tell the server itself
        )
    with server:
        assert server.stdout is not None
        assert server.stdout.readline() == said
        yield server


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGHUP"])
def test_a_server_is_told_to_end_and_its_files_are_kept(name: str, cache: Path) -> None:
    program = f"""
import os, signal, sys
signal.signal(signal.{name}, lambda *arguments: sys.exit(0))
open(os.environ["TRITON_CACHE_DIR"] + "/kernel", "w").write("code")
print("ready", flush=True)
signal.alarm(60)
signal.pause()
"""
    with started(program, signal.Signals[name], signal.SIG_DFL) as server:
        server.send_signal(signal.Signals[name])
        _, errors = server.communicate(timeout=90)
    assert (server.returncode, "kept 1 file (" in errors) == (0, True), errors
    assert list(cache.glob("*/triton/kernel"))


def test_a_signal_that_is_ignored_stays_so_for_the_program() -> None:
    """As under ``nohup``."""
    program = """
import signal
print("ready", signal.getsignal(signal.SIGHUP).name, flush=True)
"""
    with started(program, signal.SIGHUP, signal.SIG_IGN, "ready SIG_IGN\n") as server:
        assert server.wait(60) == 0


@pytest.mark.parametrize("keep", [(), ("--keep",)], ids=["become", "keep"])
def test_what_python_ignores_is_not_ignored_in_the_program(keep: tuple[str, ...]) -> None:
    program = ("grep", "SigIgn", "/proc/self/status")
    done = subprocess.run(
        [sys.executable, "-m", "capture.cli", "exec", "--device", "cpu", *keep, "--", *program],
        cwd=REPOSITORY, capture_output=True, text=True, check=True,
    )  # fmt: skip
    ignored = int(done.stdout.split()[1], 16)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        assert not ignored & 1 << (number - 1)


def test_the_exit_status_is_the_programs_also_if_nothing_can_be_kept(capsys: pytest.CaptureFixture[str]) -> None:
    program = "import os, sys; os.chmod(os.path.dirname(os.environ['TRITON_CACHE_DIR']), 0o777); sys.exit(3)"
    arguments = ("exec", "--device", "cpu", "--label", "server", "--keep", "--", sys.executable, "-c", program)
    code, _, err = run(capsys, *arguments)
    assert code == 3
    assert "is not entered into the cache: " in err
    assert "can be written by others" in err


def test_a_read_only_cache_keeps_nothing_of_a_program(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ("exec", "--device", "cpu", "--label", "server", "--keep", "--", sys.executable, "-c", "pass")
    assert run(capsys, *arguments)[0] == 0
    monkeypatch.setattr(os, "access", lambda path, mode: not mode & os.W_OK)
    code, _, err = run(capsys, *arguments)
    assert (code, "nothing is entered" in err) == (0, True)


def test_the_links_to_a_read_only_cache_go_with_the_program(tmp_path: Path) -> None:
    program = """
import os, sys
os.access = lambda path, mode, **options: not mode & os.W_OK  # root may write anywhere
from capture.cli import main
show = "import os, sys; print(os.path.isdir(os.path.dirname(os.environ['TRITON_CACHE_DIR']))); sys.exit(7)"
sys.exit(main(["exec", "--device", "cpu", "--label", "server", "--", sys.executable, "-c", show]))
"""
    entry_of_command("server", device="cpu").prepare()
    (tmp_path / "temporary").mkdir()
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=REPOSITORY, env={**os.environ, "TMPDIR": str(tmp_path / "temporary")},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (7, "True\n"), done.stderr
    assert not list((tmp_path / "temporary").glob("mla-warmup-*"))


@pytest.mark.parametrize("keep", [(), ("--keep",)], ids=["become", "keep"])
def test_a_program_that_is_not_there_is_named_and_makes_no_entry(
    keep: tuple[str, ...], cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = run(capsys, "exec", "--device", "cpu", *keep, "--", "no-such-program", "--port", "1")
    assert (code, err) == (2, "mla-warmup: there is no program no-such-program\n")
    assert not cache.exists()
