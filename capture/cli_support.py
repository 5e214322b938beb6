"""What the verbs of ``mla-warmup`` share: options, the plan that they describe, printing."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from rich.console import RenderableType

    from capture.units import BuildOptions, WarmupSpec
    from capture.warmup import WarmupManager, WarmupPlan

__all__ = [
    "UsageError",
    "add_model_options",
    "check_device",
    "count",
    "device",
    "duration",
    "find_entry",
    "make_plan",
    "model_arguments",
    "numbers",
    "positive",
    "print_json",
    "print_rich",
    "printing_to_stderr",
    "show_plan",
    "size",
    "write_json",
    "write_text",
]

_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_OPTIONS = (
    "query_len",
    "dtype",
    "kv_dtype",
    "page_size",
    "tp",
    "layers",
    "max_seq_len",
    "backend",
    "device",
    "target",
)
_GPU_NODES = ("/dev/nvidiactl", "/dev/kfd")  # to know of a GPU before torch, which would take a second to tell
_BYTES = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


class UsageError(Exception):
    """The command line asks for something that cannot be."""


def add_model_options(parser: argparse.ArgumentParser, *, required: bool = True) -> None:
    """The options that become :class:`capture.BuildOptions`."""
    model = "a preset, a config.json or its directory, or module:factory (a function of BuildOptions that "
    parser.add_argument("--model", required=required, help=model + "returns a WarmupSpec)")
    sizes = parser.add_mutually_exclusive_group()
    sizes.add_argument("--batch-sizes", type=numbers, metavar="N,N,...", help="batch sizes to capture")
    sizes.add_argument("--max-batch-size", type=positive, metavar="N", help="capture the default sizes up to N")
    parser.add_argument("--query-len", type=positive, metavar="N", help="query tokens per request (default 1)")
    parser.add_argument("--dtype", help="such as bfloat16 (the default)")
    parser.add_argument("--kv-dtype", help="of the latent cache (default: --dtype)")
    parser.add_argument("--page-size", type=positive, metavar="N", help="tokens per page (default 64)")
    parser.add_argument("--tp", type=positive, metavar="N", help="tensor-parallel ranks (default 1)")
    parser.add_argument("--layers", type=positive, metavar="N", help="only the first N layers")
    parser.add_argument("--max-seq-len", type=positive, metavar="N", help="longest sequence (default 8192)")
    parser.add_argument(
        "--compile", action=argparse.BooleanOptionalAction, help="torch.compile blocks (default: where that is faster)"
    )
    parser.add_argument("--backend", help="auto (the default) or a backend's name")
    parser.add_argument("--device", type=device, help="such as cuda, cuda:1 or cpu (default: cuda if there is one)")
    parser.add_argument(
        "--target", metavar="ARCH", help="only build kernels, for a GPU that need not be here: sm_90, gfx942"
    )


def make_plan(arguments: argparse.Namespace) -> tuple[WarmupManager, WarmupPlan]:
    """The plan that the options describe."""
    from capture.process import prepare
    from capture.warmup import WarmupManager

    if arguments.target is None:
        prepare(arguments.device or ("cuda" if any(map(os.path.exists, _GPU_NODES)) else "cpu"))
    manager = WarmupManager(arguments.cache_dir, workers=getattr(arguments, "workers", None))
    with printing_to_stderr():
        spec = _spec(arguments.model, _options(arguments))
    return manager, manager.plan(spec)


@contextmanager
def printing_to_stderr() -> Iterator[None]:
    """Send to stderr what a model or its units print on stdout, and what compilers print that they start."""
    stdout = sys.stdout
    with redirect_stdout(sys.stderr), _descriptor_of_stderr(stdout):
        yield


@contextmanager
def _descriptor_of_stderr(stdout: TextIO | None) -> Iterator[None]:
    """Descriptor 1 is that of stderr; ``stdout`` is what writes there otherwise."""
    try:
        saved = os.dup(1)
    except OSError:  # closed: there is no stdout
        yield
        return
    try:
        _flush(stdout)
        with suppress(OSError):
            os.dup2(2, 1)
        yield
    finally:
        _flush(stdout)  # of who printed by way of sys.__stdout__
        import ctypes

        ctypes.CDLL(None).fflush(None)  # what C code printed would else come out at the end of the process
        os.dup2(saved, 1)
        os.close(saved)


def _flush(stdout: TextIO | None) -> None:
    if stdout is not None:
        with suppress(OSError, ValueError):
            stdout.flush()


def _options(arguments: argparse.Namespace) -> BuildOptions:
    from capture.units import BuildOptions

    chosen = {name: value for name in _OPTIONS if (value := getattr(arguments, name)) is not None}
    if arguments.max_batch_size is not None:
        chosen["batch_sizes"] = import_module("capture.buckets").default_batch_sizes(arguments.max_batch_size)
    elif arguments.batch_sizes is not None:
        chosen["batch_sizes"] = arguments.batch_sizes
    chosen["compile"] = arguments.compile
    if "device" not in chosen:
        import torch

        chosen["device"] = "cuda" if torch.cuda.is_available() else "cpu"
    if arguments.target is None:
        check_device(chosen["device"])
    try:
        return BuildOptions(**chosen)
    except ValueError as error:
        raise UsageError(str(error)) from None


def check_device(name: str | None) -> None:
    """Refuse a GPU that is not in this machine; None is what will be found here."""
    if name is None:
        return
    import torch

    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= (found := torch.cuda.device_count()):
        raise UsageError(f"device {name} is not here: GPUs that torch finds: {found}")


def _spec(model: str, options: BuildOptions) -> WarmupSpec:
    from capture.units import WarmupSpec

    module, colon, factory = model.partition(":")
    if not colon or os.path.exists(model):
        make, refusals = import_module("mla_ops.warmup").spec, (ValueError, import_module("mla_ops").MLAError, OSError)
        try:
            spec = make(model, options)
        except refusals as error:
            raise UsageError(f"--model {model}: {error}") from None
    else:
        if not module or module.startswith("."):
            raise UsageError(f"--model {model}: before the colon must be a module's whole name")
        if os.getcwd() not in sys.path:
            sys.path.insert(0, os.getcwd())  # as `python -m` does; an installed command's path lacks it
        try:
            make = getattr(import_module(module), factory)
        except (ImportError, AttributeError) as error:
            raise UsageError(f"--model {model}: {error}") from None
        spec = make(options)
    if not isinstance(spec, WarmupSpec):
        raise UsageError(f"--model {model} gave a {type(spec).__name__}; it must return a capture.WarmupSpec")
    if spec.target != options.target:
        raise UsageError(
            f"--model {model} made nothing for --target {options.target}; its spec has target {spec.target}"
        )
    return spec


def model_arguments(arguments: argparse.Namespace) -> list[str]:
    """The options of :func:`add_model_options` that were given, as a command line."""
    words = ["--model", str(arguments.model)]
    for name in (*_OPTIONS, "max_batch_size"):
        if (value := getattr(arguments, name)) is not None:
            words += [f"--{name.replace('_', '-')}", str(value)]
    if arguments.batch_sizes is not None:
        words += ["--batch-sizes", ",".join(map(str, arguments.batch_sizes))]
    if arguments.compile is not None:
        words.append("--compile" if arguments.compile else "--no-compile")
    return words


def find_entry(arguments: argparse.Namespace) -> Path:
    """The entry that ``--entry`` or ``--model`` names."""
    from capture.janitor import entries
    from capture.store import cache_root

    if (arguments.entry is None) == (arguments.model is None):
        raise UsageError("name an entry of the cache: either --entry or --model")
    if arguments.model is not None:
        return make_plan(arguments)[1].directory
    root = cache_root(arguments.cache_dir)
    found = [entry.path for entry in entries(root) if entry.path.name.startswith(arguments.entry)]
    if len(found) != 1:
        names = ", ".join(entry.path.name for entry in entries(root)) or "none"
        raise UsageError(
            f"--entry {arguments.entry} must begin one entry's name, not {len(found)}; {root} has: {names}"
        )
    return found[0]


def show_plan(plan: WarmupPlan, as_json: bool) -> None:
    """Print a plan on stdout."""
    units = [
        {"kind": row.unit.kind, "key": row.unit.key, "phase": row.unit.phase, "state": row.state} for row in plan.units
    ]
    if as_json:
        print_json(
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


def print_rich(renderable: RenderableType) -> None:
    """Print tables on stdout."""
    from rich.console import Console

    Console().print(renderable)


def print_json(document: dict[str, Any]) -> None:
    """Print one JSON document on stdout."""
    print(json.dumps(document, indent=2))


def write_text(path: str, text: str) -> None:
    """Write a file that the user named."""
    Path(path).write_text(text, encoding="utf-8")


def write_json(path: str, document: dict[str, Any]) -> None:
    """Write a JSON file that the user named."""
    write_text(path, json.dumps(document))


def positive(text: str) -> int:
    """A positive integer."""
    number = int(text) if text.isdecimal() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive integer")
    return number


def count(text: str) -> int:
    """An integer of 0 or more."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer of 0 or more")
    return int(text)


def numbers(text: str) -> tuple[int, ...]:
    """Positive integers, separated by commas."""
    return tuple(sorted({positive(part.strip()) for part in text.split(",")}))


def device(text: str) -> str:
    """A device, as torch names it; torch itself is not asked, for it is still to be imported."""
    if not re.fullmatch(r"(cpu|cuda)(:\d+)?", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a device such as cpu, cuda or cuda:1")
    return text


def duration(text: str) -> float:
    """An age such as 12h, in seconds."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text)
    if not match:
        raise argparse.ArgumentTypeError(f"{text!r} is not an age such as 45s, 30m, 12h or 7d")
    return float(match[1]) * _SECONDS[match[2]]


def size(text: str) -> int:
    """A size such as 10G, in bytes."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGT]?)(?:i?B)?", text)
    if not match:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 500M or 10G")
    return int(float(match[1]) * _BYTES[match[2]])
