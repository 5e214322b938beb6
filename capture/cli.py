"""``mla-warmup``: build, inspect, verify, move and clean the warm-up cache, and run programs over it.

Importing this module, and so ``--help``, imports neither torch nor rich. Data goes to stdout, the rest to
stderr.
"""

from __future__ import annotations

import argparse
import io
import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from capture import cli_cache, cli_run
from capture.cli_support import (
    UsageError,
    add_model_options,
    count,
    device,
    duration,
    make_plan,
    positive,
    print_json,
    print_rich,
    printing_to_stderr,
    show_plan,
    size,
    write_json,
)
from capture.endings import Ended, orderly_ends
from capture.errors import CaptureError

if TYPE_CHECKING:
    from capture.warmup import WarmupManager, WarmupPlan

__all__ = ["main"]

_DONE, _FAILED, _USAGE, _ENDED = 0, 1, 2, 128


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``mla-warmup`` with ``argv`` (default: the process's).

    Returns:
        0 done, 1 failed, 2 wrong usage, 128 + its number where a signal ended it (130 interrupted).
    """
    if sys.stderr is None:  # closed: else messages would go to stdout, and a file of the cache would get its number
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # as stderr: a path may hold any byte
    given = list(sys.argv[1:] if argv is None else argv)
    split = given.index("--") if "--" in given else len(given)
    try:
        arguments, unknown = _parser().parse_known_args(given[:split])
        if unknown:
            hint = "; the command comes after --" if arguments.command is cli_run.run_program else ""
            arguments.parser.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
    except SystemExit as exit:  # argparse has printed the help or what is wrong
        return _DONE if exit.code in (None, 0) else _USAGE
    arguments.program = given[split + 1 :]
    command: Callable[[argparse.Namespace], int] = arguments.command
    try:
        if arguments.program and command is not cli_run.run_program:
            raise UsageError("only `exec` takes a command after --")
        with orderly_ends():
            return command(arguments)
    except UsageError as error:
        print(f"mla-warmup: {error}", file=sys.stderr)
        return _USAGE
    except (CaptureError, OSError) as error:
        print(f"mla-warmup: {type(error).__name__}: {error}", file=sys.stderr)
        if os.environ.get("MLA_WARMUP_TRACEBACK"):
            raise
        return _FAILED
    except KeyboardInterrupt:
        print("mla-warmup: interrupted", file=sys.stderr)
        return _ENDED + signal.SIGINT
    except Ended as ended:
        said = "interrupted" if ended.signal == signal.SIGINT else f"ended by {ended.signal.name}"
        print(f"mla-warmup: {said}", file=sys.stderr)
        return _ENDED + ended.signal
    except Exception:  # a bug, ours or of the user's factory, keeps its traceback
        traceback.print_exc()
        return _FAILED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mla-warmup",
        description="Build kernels and compiled graphs once, keep them in a checked cache, start warm.",
        epilog="Exit status: 0 done, 1 failed, 2 wrong usage, 128 + N ended by signal N (130 interrupted). "
        "MLA_WARMUP_TRACEBACK=1 shows the traceback of a failure.",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_verbs_over_a_model(commands)
    _add_verbs_over_the_cache(commands)
    doctor = _add(commands, "doctor", _doctor, "say what this machine has, what it can serve and what to do")
    doctor.add_argument("--json", action="store_true", help="one JSON document on stdout")
    report = _add(commands, "report", cli_run.report, "show saved reports, several side by side")
    report.add_argument("files", nargs="+", metavar="FILE", help="what `build --json` wrote")
    report.add_argument("--html", metavar="FILE", help="write a page with the reports as waterfalls side by side")
    report.add_argument("--trace", metavar="FILE", help="write a trace for chrome://tracing or ui.perfetto.dev")
    return parser


def _add_verbs_over_a_model(commands: Any) -> None:
    build = _add(commands, "build", _build, "build what the cache lacks, load the rest, capture and verify")
    status = _add(commands, "status", _status, "list every unit and whether the cache has it")
    verify = _add(commands, "verify", _verify, "check the cache's files, then every graph against eager")
    explain = _add(commands, "explain", cli_cache.explain_miss, "name the fields that made a miss")
    bench = _add(commands, "bench", cli_run.bench, "repeat cold and warm starts in fresh processes")
    for command in (build, status, verify, explain, bench):
        add_model_options(command)
    for command in (build, status, verify, explain):
        _add_common(command)
    build.add_argument("--dry-run", action="store_true", help="only say what would be done")
    build.add_argument("--trace", metavar="FILE", help="write a trace for chrome://tracing or ui.perfetto.dev")
    build.add_argument(
        "--workers", type=count, metavar="N", help="processes that build kernels (default: one a core; 0: this one)"
    )
    for command in (build, verify, bench):
        command.add_argument("--quiet", action="store_true", help="no progress, and no table")
    bench.add_argument("--json", action="store_true", help="one JSON document on stdout")
    bench.add_argument("--repeat", type=positive, default=3, metavar="N", help="starts of each kind (default 3)")


def _add_verbs_over_the_cache(commands: Any) -> None:
    clean = _add(commands, "clean", cli_cache.clean_cache, "remove old or large entries of the cache")
    clean.add_argument("--older-than", type=duration, metavar="AGE", help="built longer ago, such as 12h or 7d")
    clean.add_argument("--max-size", type=size, metavar="SIZE", help="the oldest, until the rest fits: 500M, 10G")
    clean.add_argument("--all", action="store_true", help="every entry")
    clean.add_argument("--dry-run", action="store_true", help="only say what would be removed")
    pack = _add(commands, "pack", cli_cache.pack_entry, "write an entry of the cache to one file")
    pack.add_argument("url", metavar="FILE", help="a path or fsspec URL, usually *.tar.zst")
    unpack = _add(commands, "unpack", cli_cache.unpack_bundle, "add a file of `pack` to the cache")
    unpack.add_argument("url", metavar="FILE", help="a path or fsspec URL")
    push = _add(commands, "push", cli_cache.push_entry, "pack an entry into a folder, named by its fingerprint")
    push.add_argument("url", metavar="FOLDER", help="a path or fsspec URL, such as s3://bucket/caches")
    pull = _add(commands, "pull", cli_cache.pull_entry, "add an entry to the cache from such a folder")
    pull.add_argument("url", metavar="FOLDER", help="as for push, or http://")
    for command in (unpack, pull):
        command.add_argument("--digest", required=True, help="sha256:..., as pack or push printed it")
        command.add_argument("--elsewhere", action="store_true", help="for another machine (an image): fit no device")
        command.add_argument("--max-size", type=size, metavar="SIZE", help="refuse a larger bundle (default 32G)")
    unpack.add_argument(
        "--device", type=device, help="that the bundle must fit (default: cuda if there is one, else cpu)"
    )
    program = _add(commands, "exec", cli_run.run_program, "run a program, such as a server, over an entry: -- CMD")
    program.add_argument("--label", help="name of the entry (default: the program's name)")
    program.add_argument("--keep", action="store_true", help="enter what the program compiled into the cache")
    for command in (pack, push, pull, program):
        add_model_options(command, required=False)
    for command in (pack, push, pull):
        command.add_argument("--entry", metavar="DIGEST", help="an entry's name or its beginning, in place of --model")
    for command in (clean, pack, unpack, push, pull):
        _add_common(command)
    _add_cache_dir(program)
    program.usage = f"{program.prog} [options] -- CMD ..."


def _add_common(command: argparse.ArgumentParser) -> None:
    _add_cache_dir(command)
    command.add_argument("--json", action="store_true", help="one JSON document on stdout")


def _add_cache_dir(command: argparse.ArgumentParser) -> None:
    command.add_argument("--cache-dir", help="default: $MLA_WARMUP_CACHE, else the user's cache directory")


def _add(commands: Any, name: str, run: Callable[[argparse.Namespace], int], help: str) -> argparse.ArgumentParser:
    command: argparse.ArgumentParser = commands.add_parser(name, help=help, description=f"{help[0].upper()}{help[1:]}.")
    command.set_defaults(command=run, parser=command)
    return command


def _build(arguments: argparse.Namespace) -> int:
    manager, plan = make_plan(arguments)
    if arguments.dry_run:
        show_plan(plan, arguments.json)
        return _DONE
    return _run(manager, plan, arguments)


def _status(arguments: argparse.Namespace) -> int:
    _, plan = make_plan(arguments)
    show_plan(plan, arguments.json)
    return _DONE


def _verify(arguments: argparse.Namespace) -> int:
    manager, plan = make_plan(arguments)
    for path, reason in plan.damaged.items():
        print(f"mla-warmup: damaged: {path}: {reason}", file=sys.stderr)
    lacking = [planned for planned in plan.units if planned.unit.persistent and planned.state != "hit"]
    for planned in lacking:
        print(f"mla-warmup: {planned.state}: {planned.unit.key}", file=sys.stderr)
    if plan.damaged or lacking:
        print("mla-warmup: the cache is not whole; `mla-warmup build` completes it", file=sys.stderr)
        if arguments.json:
            show_plan(plan, as_json=True)
        return _FAILED
    return _run(manager, plan, arguments, prove_again=True)


def _run(manager: WarmupManager, plan: WarmupPlan, arguments: argparse.Namespace, *, prove_again: bool = False) -> int:
    from capture.guard import mode_from_environment

    try:
        mode_from_environment()
    except ValueError as error:
        raise UsageError(str(error)) from None
    with printing_to_stderr():
        report = manager.run(plan, progress=not arguments.quiet, prove_again=prove_again)
    if arguments.json:
        print_json(report.to_json())
    elif not arguments.quiet:
        print_rich(report.render())
    for unit in report.units:
        if unit.state in ("failed", "skipped"):
            print(f"mla-warmup: {unit.state}: {unit.key}: {unit.reason}", file=sys.stderr)
    if getattr(arguments, "trace", None):
        from capture.trace import chrome_trace

        write_json(arguments.trace, chrome_trace([report]))
    return _DONE if report.ok else _FAILED


def _doctor(arguments: argparse.Namespace) -> int:
    from mla_ops.doctor import diagnose

    diagnosis = diagnose()
    if arguments.json:
        print_json(diagnosis.to_json())
    else:
        print(diagnosis.render())
    return _DONE if diagnosis.ok else _FAILED


if __name__ == "__main__":
    sys.exit(main())
