"""Triton kernels as units of a warm-up, also for a GPU that is not there.

Triton compiles for any target without a device. But the key under which it stores a kernel also holds what differs
between machines and does not matter: the hash of its own library (another one for each Python version), and on ROCm
up to Triton 3.8 the path that it is installed at. So each kernel gets a record of what it really depends on, and
before Triton looks a kernel up, one with the same record is put under the key that it will look for.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from capture.manifest import write_durably
from capture.relocate import is_group, located
from capture.units import Phase, Unit, UnitResult

__all__ = ["KernelBuildUnit", "prebuilt_kernels", "target_driver"]

_RECORD = "record.json"
_NVIDIA_WARP, _AMD_WAVEFRONT = 32, 64
_sources: ContextVar[tuple[Path, ...]] = ContextVar("prebuilt kernels", default=())


@dataclass(frozen=True, kw_only=True)
class KernelBuildUnit(Unit):
    """One specialization of a Triton kernel.

    Attributes:
        compile: calls the kernel's ``warmup`` with what it will be launched with: tensors on the meta device (their
            dtypes, alignment and storage size count), numbers, options. Never a signature written by hand.
        target: ``sm_90``, ``gfx942`` ...; None: the device of this process.
    """

    compile: Callable[[], object]
    target: str | None = None
    kind: str = "kernel"
    phase: Phase = "kernels"

    def build(self, resources: Any) -> UnitResult:
        with _Keys(_sources.get()) as keys:
            if self.target is None:
                self.compile()
            else:
                with target_driver(self.target):
                    self.compile()
        origin = f"not compiled: was built ahead ({', '.join(keys.placed)})" if keys.placed else ""
        return UnitResult(origin=origin)


@contextmanager
def prebuilt_kernels(directories: Iterable[Path]) -> Iterator[None]:
    """Let :class:`KernelBuildUnit` take kernels from these Triton cache directories.

    Only of checked files: what is there is loaded into the process.
    """
    token = _sources.set(tuple(directories))
    try:
        yield
    finally:
        _sources.reset(token)


@contextmanager
def target_driver(target: str) -> Iterator[None]:
    """Triton's active driver is a stand-in for ``target``: it compiles, and cannot launch.

    Raises:
        ValueError: ``target`` is neither ``sm_<number>`` nor ``gfx<name>``.
    """
    from triton.runtime import driver

    before = driver._active
    driver.set_active(_StandIn(target))
    try:
        yield
    finally:
        driver._active = before


class _StandIn:
    """What Triton asks of a driver in order to compile."""

    def __init__(self, target: str) -> None:
        from triton.backends.compiler import GPUTarget

        if match := re.fullmatch(r"sm_?(\d+)a?", target):
            self._target = GPUTarget("cuda", int(match[1]), _NVIDIA_WARP)
        elif re.fullmatch(r"gfx9[0-9a-f]+", target):
            self._target = GPUTarget("hip", target, _AMD_WAVEFRONT)
        else:
            raise ValueError(f"target must be such as sm_90, gfx942 or gfx950, got {target!r}")

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> Any:
        return self  # kernels keep what they compiled by device: nothing of another target or cache is taken for ours

    def get_current_stream(self, device: Any) -> int:
        return 0


class _Keys:
    """Records the kernels that are compiled, and puts recorded ones where Triton will look for them.

    Attributes:
        placed: names of the kernels that were put under another key.
    """

    def __init__(self, sources: Iterable[Path]) -> None:
        self.placed: list[str] = []
        self._sources = tuple(sources)

    def __enter__(self) -> _Keys:
        from triton import knobs

        self._runtime: Any = knobs.runtime
        self._before = (self._runtime.jit_cache_hook, self._runtime.jit_post_compile_hook)
        self._runtime.jit_cache_hook = self._place
        self._runtime.jit_post_compile_hook = self._record
        return self

    def __exit__(self, *error: object) -> None:
        self._runtime.jit_cache_hook, self._runtime.jit_post_compile_hook = self._before

    def _place(self, **compilation: Any) -> bool | None:
        record, directory = _describe(compilation)
        if not _is_stored(directory) and (found := self._find(record)):
            _copy(found, directory)
            self.placed.append(str(record["name"]))
        before = self._before[0]
        return None if before is None else before(**compilation)  # True from a user's hook: do not compile

    def _record(self, **compilation: Any) -> None:
        record, directory = _describe(compilation)
        if _is_stored(directory) and not (directory / _RECORD).exists():
            write_durably(directory / _RECORD, _dump(record))
        if self._before[1] is not None:
            self._before[1](**compilation)

    def _find(self, record: Mapping[str, Any]) -> Path | None:
        wanted = _dump(record)
        for source in (*self._sources, _triton_directory()):
            for path in sorted(source.glob(f"*/{_RECORD}")):
                if path.read_bytes() == wanted:
                    return path.parent
        return None


def _describe(compilation: Mapping[str, Any]) -> tuple[dict[str, Any], Path]:
    """What a compilation depends on wherever Triton is installed, and the directory of its key here."""
    import triton
    from triton._C.libtriton import get_cache_invalidating_env_vars
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend
    from triton.runtime.cache import get_cache_key

    call, kernel = compilation["compile"], compilation["fn"].jit_function
    data = json.loads(call["specialization_data"])
    target = GPUTarget(**data["target"])
    backend = make_backend(target)
    chosen = {name: tuple(v) if isinstance(v, list) else v for name, v in data["options"].items()}
    options = backend.parse_options(chosen)
    source = kernel.ASTSource(kernel, call["signature"], call["constants"], call["configs"][0])
    environment = get_cache_invalidating_env_vars()
    key = get_cache_key(source, backend, options, environment)
    record = {
        "name": data["name"],
        "triton": triton.__version__,
        "target": data["target"],
        "source": source.hash(),
        "backend": backend.hash(),
        "options": {**data["options"], "extern_libs": _library_hashes(options)},
        "environment": dict(environment),
    }
    return record, _triton_directory() / _directory_name(key)


def _library_hashes(options: Any) -> list[list[str]]:
    """Names and contents of the libraries that are linked in, whose paths are this installation's."""
    return [[str(name), hashlib.sha256(Path(path).read_bytes()).hexdigest()] for name, path in options.extern_libs]


def _directory_name(key: str) -> str:
    from triton.runtime.cache import _base32

    return str(_base32(hashlib.sha256(key.encode()).hexdigest()))


def _triton_directory() -> Path:
    from triton import knobs

    return Path(knobs.cache.dir)


def _is_stored(directory: Path) -> bool:
    return any(directory.glob("__grp__*.json"))


def _copy(source: Path, target: Path) -> None:
    """All files of a kernel; the group file, without which Triton sees none of them, last."""
    target.parent.mkdir(parents=True, exist_ok=True)
    target.mkdir(exist_ok=True)
    files = [path for path in source.iterdir() if path.is_file() and path.name != "lock"]
    for path in sorted(files, key=lambda path: (is_group(path.name), path.name)):
        data = path.read_bytes()
        write_durably(target / path.name, located(data, target) if is_group(path.name) else data)


def _dump(record: Mapping[str, Any]) -> bytes:
    return (json.dumps(record, sort_keys=True, indent=1, default=str) + os.linesep).encode()
