"""The verbs of ``mla-warmup`` over entries of the cache: explain, clean, pack, unpack, push, pull."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from capture.cli_support import UsageError, check_device, find_entry, make_plan, print_json

if TYPE_CHECKING:
    from capture.bundle import Bundle

__all__ = ["clean_cache", "explain_miss", "pack_entry", "pull_entry", "push_entry", "unpack_bundle"]

_DONE = 0


def explain_miss(arguments: argparse.Namespace) -> int:
    """``explain``: why the cache has not what the options ask for."""
    from capture.explain import explain

    explanation = explain(make_plan(arguments)[1])
    if arguments.json:
        print_json(explanation.to_json())
    else:
        print("\n".join(explanation.lines()))
    return _DONE


def clean_cache(arguments: argparse.Namespace) -> int:
    """``clean``: remove entries."""
    from capture.janitor import clean
    from capture.store import cache_root

    if not (arguments.all or arguments.older_than is not None or arguments.max_size is not None):
        raise UsageError("clean needs --older-than, --max-size or --all")
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
        print_json({"schema": 1, "dry_run": arguments.dry_run, "removed": rows})
        return _DONE
    verb = "would remove" if arguments.dry_run else "removed"
    for entry in removed:
        print(f"{verb} {entry.path} ({entry.bytes} bytes, built {entry.age / 3600:.1f} h ago)")
    if not removed:
        print(f"nothing to remove in {root}", file=sys.stderr)
    return _DONE


def pack_entry(arguments: argparse.Namespace) -> int:
    """``pack``: an entry to a file."""
    from capture.bundle import pack

    return _packed(pack(find_entry(arguments), arguments.url), arguments)


def push_entry(arguments: argparse.Namespace) -> int:
    """``push``: an entry into a folder."""
    from capture.bundle import push

    return _packed(push(find_entry(arguments), arguments.url), arguments)


def unpack_bundle(arguments: argparse.Namespace) -> int:
    """``unpack``: a file into the cache."""
    from capture.bundle import unpack

    return _unpacked(unpack(arguments.url, **_options(arguments)), arguments)


def pull_entry(arguments: argparse.Namespace) -> int:
    """``pull``: from a folder into the cache."""
    from capture.bundle import pull

    if arguments.elsewhere and arguments.entry is None and arguments.target is None:
        raise UsageError("with --elsewhere, --model would mean this machine's entry: name the other's with --entry")
    if arguments.entry is not None and re.fullmatch(r"[0-9a-f]{20}", arguments.entry):
        entry = arguments.entry  # need not be in this cache
    else:
        entry = find_entry(arguments).name
    return _unpacked(pull(arguments.url, entry, **_options(arguments)), arguments)


def _options(arguments: argparse.Namespace) -> dict[str, Any]:
    from capture.bundle import parse_digest

    try:
        parse_digest(arguments.digest)
    except ValueError as error:
        raise UsageError(f"--{error}") from None
    if not arguments.elsewhere:
        check_device(arguments.device)
    options = {
        "digest": arguments.digest,
        "cache_dir": arguments.cache_dir,
        "device": arguments.device,
        "elsewhere": arguments.elsewhere,
        "say": lambda line: print(f"mla-warmup: {line}", file=sys.stderr, flush=True),
    }
    return options if arguments.max_size is None else {**options, "max_bytes": arguments.max_size}


def _packed(bundle: Bundle, arguments: argparse.Namespace) -> int:
    out = sys.stderr if _is_stdout(bundle.url) else sys.stdout
    if arguments.json:
        print(json.dumps(_row(bundle), indent=2), file=out)
    else:
        print(bundle.digest, file=out)
        units = "1 unit" if len(bundle.units) == 1 else f"{len(bundle.units)} units"
        print(f"{bundle.url}: {units}, {bundle.bytes} bytes; unpack with the digest", file=sys.stderr)
    return _DONE


def _is_stdout(url: str) -> bool:
    """Whether the bundle went there, such as to ``/dev/stdout``: more would damage it."""
    with suppress(OSError, ValueError):
        return os.path.samestat(os.stat(url), os.fstat(1))
    return False


def _unpacked(bundle: Bundle, arguments: argparse.Namespace) -> int:
    if arguments.json:
        print_json({**_row(bundle), "taken": list(bundle.taken)})
    else:
        others = "" if len(bundle.taken) == len(bundle.units) else ", the others were there"
        print(f"{bundle.entry}: units taken: {len(bundle.taken)} of {len(bundle.units)}{others}")
    return _DONE


def _row(bundle: Bundle) -> dict[str, Any]:
    return {
        "schema": 1,
        "url": bundle.url,
        "digest": bundle.digest,
        "bytes": bundle.bytes,
        "entry": bundle.entry,
        "units": list(bundle.units),
    }
