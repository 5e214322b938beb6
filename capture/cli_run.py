"""The verbs of ``mla-warmup`` that start programs or show what was measured: exec, bench, report."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys

from capture.cli_support import (
    UsageError,
    check_device,
    make_plan,
    model_arguments,
    print_json,
    print_rich,
    write_json,
    write_text,
)

__all__ = ["bench", "report", "run_program"]

_DONE = 0


def run_program(arguments: argparse.Namespace) -> int:
    """``exec``: a program over an entry of the cache; the exit status is the program's."""
    from capture.execute import entry_of_command, execute, run_and_keep

    command = arguments.program
    if not command:
        raise UsageError("exec needs the command to run, after --")
    if shutil.which(command[0]) is None:
        raise UsageError(f"there is no program {command[0]}")
    label = arguments.label or os.path.basename(command[0])
    if arguments.model is not None:
        store = make_plan(arguments)[1].store
    else:
        check_device(arguments.device)
        try:
            store = entry_of_command(label, cache_dir=arguments.cache_dir, device=arguments.device)
        except ValueError as error:
            raise UsageError(str(error)) from None
    if arguments.keep:
        return run_and_keep(store, command, label, _say)
    return execute(store, command, _say)


def bench(arguments: argparse.Namespace) -> int:
    """``bench``: cold and warm starts, repeated."""
    from capture.bench import measure_starts

    say = (lambda line: None) if arguments.quiet else _say
    result = measure_starts(model_arguments(arguments), arguments.repeat, say)
    if arguments.json:
        print_json(result.to_json())
    elif not arguments.quiet:
        print_rich(result.render())
    return _DONE


def report(arguments: argparse.Namespace) -> int:
    """``report``: show saved reports."""
    from capture.report import WarmupReport, render_side_by_side

    reports = []
    for name in arguments.files:
        try:
            with open(name, encoding="utf-8") as file:
                reports.append(WarmupReport.from_json(json.load(file)))
        except (OSError, ValueError) as error:
            raise UsageError(f"{name}: {error}") from None
    if arguments.html:
        from capture.page import render_page

        write_text(arguments.html, render_page(reports))
    if arguments.trace:
        from capture.trace import chrome_trace

        write_json(arguments.trace, chrome_trace(reports))
    if not (arguments.html or arguments.trace):
        print_rich(reports[0].render() if len(reports) == 1 else render_side_by_side(reports))
    return _DONE


def _say(line: str) -> None:
    print(f"mla-warmup: {line}", file=sys.stderr, flush=True)
