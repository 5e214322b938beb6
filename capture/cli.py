"""``mla-warmup``: build, inspect, verify and clean the warm-up cache.

Importing this module, and so ``--help``, imports neither torch nor rich. Data goes to stdout, the rest to
stderr.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

from capture.errors import CaptureError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from capture.units import BuildOptions, WarmupSpec
    from capture.warmup import WarmupManager, WarmupPlan

__all__ = ["main"]

_DONE, _FAILED, _USAGE = 0, 1, 2
_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_BYTES = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``mla-warmup`` with ``argv`` (default: the process's). Returns 0 done, 1 failed, 2 wrong usage."""
    try:
        arguments = _parser().parse_args(argv)
    except SystemExit as exit:  # argparse has printed the help or what is wrong
        return _DONE if exit.code in (None, 0) else _USAGE
    command: Callable[[argparse.Namespace], int] = arguments.command
    try:
        return command(arguments)
    except _UsageError as error:
        print(f"mla-warmup: {error}", file=sys.stderr)
        return _USAGE
    except (CaptureError, OSError) as error:
        print(f"mla-warmup: {type(error).__name__}: {error}", file=sys.stderr)
        if os.environ.get("MLA_WARMUP_TRACEBACK"):
            raise
        return _FAILED
    except Exception:  # a bug, ours or of the user's factory, keeps its traceback
        traceback.print_exc()
        return _FAILED


class _UsageError(Exception):
    """The command line asks for something that cannot be."""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mla-warmup",
        description="Build kernels and compiled graphs once, keep them in a checked cache, start warm.",
        epilog="Exit status: 0 done, 1 failed, 2 wrong usage. MLA_WARMUP_TRACEBACK=1 shows the traceback of a failure.",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    build = _add(commands, "build", _build, "build what the cache lacks, load the rest, capture and verify")
    status = _add(commands, "status", _status, "list every unit and whether the cache has it")
    verify = _add(commands, "verify", _verify, "check the cache's files, then every graph against eager")
    for command in (build, status, verify):
        _add_model_options(command)
    build.add_argument("--dry-run", action="store_true", help="only say what would be done")
    for command in (build, verify):
        command.add_argument("--quiet", action="store_true", help="no progress, and no table")
    clean = _add(commands, "clean", _clean, "remove old or large entries of the cache")
    clean.add_argument("--older-than", type=_duration, metavar="AGE", help="built longer ago, such as 12h or 7d")
    clean.add_argument("--max-size", type=_size, metavar="SIZE", help="the oldest, until the rest fits: 500M, 10G")
    clean.add_argument("--all", action="store_true", help="every entry")
    clean.add_argument("--dry-run", action="store_true", help="only say what would be removed")
    for command in (build, status, verify, clean):
        command.add_argument("--cache-dir", help="default: $MLA_WARMUP_CACHE, else the user's cache directory")
        command.add_argument("--json", action="store_true", help="one JSON document on stdout")
    doctor = _add(commands, "doctor", _doctor, "say what this machine has, what it can serve and what to do")
    doctor.add_argument("--json", action="store_true", help="one JSON document on stdout")
    report = _add(commands, "report", _report, "show saved reports, several side by side")
    report.add_argument("files", nargs="+", metavar="FILE", help="what `build --json` wrote")
    return parser


def _add(commands: Any, name: str, run: Callable[[argparse.Namespace], int], help: str) -> argparse.ArgumentParser:
    command: argparse.ArgumentParser = commands.add_parser(name, help=help, description=help.capitalize() + ".")
    command.set_defaults(command=run)
    return command


def _add_model_options(parser: argparse.ArgumentParser) -> None:
    model = "a preset, a config.json or its directory, or module:factory (a function of BuildOptions that "
    parser.add_argument("--model", required=True, help=model + "returns a WarmupSpec)")
    sizes = parser.add_mutually_exclusive_group()
    sizes.add_argument("--batch-sizes", type=_numbers, metavar="N,N,...", help="batch sizes to capture")
    sizes.add_argument("--max-batch-size", type=_positive, metavar="N", help="capture the default sizes up to N")
    parser.add_argument("--query-len", type=_positive, metavar="N", help="query tokens per request (default 1)")
    parser.add_argument("--dtype", help="such as bfloat16 (the default)")
    parser.add_argument("--kv-dtype", help="of the latent cache (default: --dtype)")
    parser.add_argument("--page-size", type=_positive, metavar="N", help="tokens per page (default 64)")
    parser.add_argument("--tp", type=_positive, metavar="N", help="tensor-parallel ranks (default 1)")
    parser.add_argument("--layers", type=_positive, metavar="N", help="only the first N layers")
    parser.add_argument("--max-seq-len", type=_positive, metavar="N", help="longest sequence (default 8192)")
    parser.add_argument("--no-compile", action="store_true", help="capture the ops as they are, without torch.compile")
    parser.add_argument("--backend", help="auto (the default) or a backend's name")
    parser.add_argument("--device", help="such as cuda, cuda:1 or cpu (default: cuda if there is one)")


def _build(arguments: argparse.Namespace) -> int:
    manager, plan = _plan(arguments)
    if arguments.dry_run:
        _show_plan(plan, arguments.json)
        return _DONE
    return _run(manager, plan, arguments)


def _status(arguments: argparse.Namespace) -> int:
    _, plan = _plan(arguments)
    _show_plan(plan, arguments.json)
    return _DONE


def _verify(arguments: argparse.Namespace) -> int:
    manager, plan = _plan(arguments)
    for path, reason in plan.damaged.items():
        print(f"mla-warmup: damaged: {path}: {reason}", file=sys.stderr)
    for planned in plan.units:
        if planned.unit.persistent and planned.state != "hit":
            print(f"mla-warmup: {planned.state}: {planned.unit.key}", file=sys.stderr)
    if plan.damaged or any(planned.unit.persistent and planned.state != "hit" for planned in plan.units):
        print("mla-warmup: the cache is not whole; `mla-warmup build` completes it", file=sys.stderr)
        if arguments.json:
            _show_plan(plan, as_json=True)
        return _FAILED
    return _run(manager, plan, arguments)


def _run(manager: WarmupManager, plan: WarmupPlan, arguments: argparse.Namespace) -> int:
    report = manager.run(plan, progress=not arguments.quiet)
    if arguments.json:
        _print_json(report.to_json())
    elif not arguments.quiet:
        _print(report.render())
    for unit in report.units:
        if unit.state in ("failed", "skipped"):
            print(f"mla-warmup: {unit.state}: {unit.key}: {unit.reason}", file=sys.stderr)
    return _DONE if report.ok else _FAILED


def _clean(arguments: argparse.Namespace) -> int:
    from capture.janitor import clean
    from capture.store import cache_root

    if not (arguments.all or arguments.older_than is not None or arguments.max_size is not None):
        raise _UsageError("clean needs --older-than, --max-size or --all")
    root = cache_root(arguments.cache_dir)
    removed = clean(
        root,
        older_than=arguments.older_than,
        max_size=arguments.max_size,
        all=arguments.all,
        dry_run=arguments.dry_run,
    )
    if arguments.json:
        rows = [{"path": str(entry.path), "bytes": entry.bytes, "age": entry.age} for entry in removed]
        _print_json({"schema": 1, "dry_run": arguments.dry_run, "removed": rows})
        return _DONE
    verb = "would remove" if arguments.dry_run else "removed"
    for entry in removed:
        print(f"{verb} {entry.path} ({entry.bytes} bytes, built {entry.age / 3600:.1f} h ago)")
    if not removed:
        print(f"nothing to remove in {root}", file=sys.stderr)
    return _DONE


def _report(arguments: argparse.Namespace) -> int:
    from capture.report import WarmupReport, render_side_by_side

    reports = []
    for name in arguments.files:
        try:
            with open(name, encoding="utf-8") as file:
                reports.append(WarmupReport.from_json(json.load(file)))
        except (OSError, ValueError) as error:
            raise _UsageError(f"{name}: {error}") from None
    _print(reports[0].render() if len(reports) == 1 else render_side_by_side(reports))
    return _DONE


def _doctor(arguments: argparse.Namespace) -> int:
    from mla_ops.doctor import diagnose

    diagnosis = diagnose()
    if arguments.json:
        _print_json(diagnosis.to_json())
    else:
        print(diagnosis.render())
    return _DONE if diagnosis.ok else _FAILED


def _plan(arguments: argparse.Namespace) -> tuple[WarmupManager, WarmupPlan]:
    from capture.warmup import WarmupManager

    manager = WarmupManager(arguments.cache_dir)
    return manager, manager.plan(_spec(arguments.model, _options(arguments)))


def _options(arguments: argparse.Namespace) -> BuildOptions:
    from capture.units import BuildOptions

    names = (
        "query_len",
        "dtype",
        "kv_dtype",
        "page_size",
        "tp",
        "layers",
        "max_seq_len",
        "backend",
        "device",
    )
    chosen = {name: value for name in names if (value := getattr(arguments, name)) is not None}
    if arguments.max_batch_size is not None:
        chosen["batch_sizes"] = import_module("capture.buckets").default_batch_sizes(arguments.max_batch_size)
    elif arguments.batch_sizes is not None:
        chosen["batch_sizes"] = arguments.batch_sizes
    chosen["compile"] = not arguments.no_compile
    if "device" not in chosen:
        import torch

        chosen["device"] = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        return BuildOptions(**chosen)
    except ValueError as error:
        raise _UsageError(str(error)) from None


def _spec(model: str, options: BuildOptions) -> WarmupSpec:
    from capture.units import WarmupSpec

    module, colon, factory = model.partition(":")
    if not colon or os.path.exists(model):
        make, refusals = import_module("mla_ops.warmup").spec, (ValueError, import_module("mla_ops").MLAError, OSError)
        try:
            spec = make(model, options)
        except refusals as error:
            raise _UsageError(f"--model {model}: {error}") from None
    else:
        if os.getcwd() not in sys.path:
            sys.path.insert(0, os.getcwd())  # as `python -m` does; an installed command's path lacks it
        try:
            make = getattr(import_module(module), factory)
        except (ImportError, AttributeError) as error:
            raise _UsageError(f"--model {model}: {error}") from None
        spec = make(options)
    if not isinstance(spec, WarmupSpec):
        raise _UsageError(f"--model {model} gave a {type(spec).__name__}; it must return a capture.WarmupSpec")
    return spec


def _show_plan(plan: WarmupPlan, as_json: bool) -> None:
    units = [
        {"kind": row.unit.kind, "key": row.unit.key, "phase": row.unit.phase, "state": row.state} for row in plan.units
    ]
    if as_json:
        _print_json(
            {
                "schema": 1,
                "fingerprint": {"digest": plan.fingerprint.digest, "fields": dict(plan.fingerprint.fields)},
                "directory": str(plan.directory),
                "backend": {"name": plan.spec.backend[0], "reason": plan.spec.backend[1]},
                "units": units,
                "damaged": dict(plan.damaged),
            }
        )
        return
    width = max((len(unit["key"]) for unit in units), default=0)
    for unit in units:
        print(f"{unit['state']:8} {unit['phase']:8} {unit['key']:{width}} {unit['kind']}")
    for path, reason in plan.damaged.items():
        print(f"damaged  {path}: {reason}")
    print(f"{plan.spec.name} on {plan.spec.device}, backend {plan.spec.backend[0]} ({plan.spec.backend[1]})")
    print(f"{plan.directory}")


def _print(renderable: RenderableType) -> None:
    from rich.console import Console

    Console().print(renderable)


def _print_json(document: dict[str, Any]) -> None:
    print(json.dumps(document, indent=2))


def _positive(text: str) -> int:
    number = int(text) if text.isdecimal() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return number


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(sorted({_positive(part.strip()) for part in text.split(",")}))


def _duration(text: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text)
    if not match:
        raise argparse.ArgumentTypeError(f"{text!r} is not an age such as 45s, 30m, 12h or 7d")
    return float(match[1]) * _SECONDS[match[2]]


def _size(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGT]?)(?:i?B)?", text)
    if not match:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 500M or 10G")
    return int(float(match[1]) * _BYTES[match[2]])


if __name__ == "__main__":
    sys.exit(main())
