"""Triton kernels as units of a warm-up, also for a GPU that is not there.

Triton compiles for any target without a device. But the key under which it stores a kernel also holds what differs
between machines and does not matter: the hash of its own library (another one for each Python version), and on ROCm
up to Triton 3.8 the path that it is installed at. So each kernel gets a record of what it really depends on, and
before Triton looks a kernel up, one with the same record is put under the key that it will look for.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from capture.fingerprint import require_target
from capture.launchers import build_launcher, take_launchers
from capture.manifest import write_durably
from capture.process import await_background
from capture.relocate import is_group, located
from capture.units import Phase, Unit, UnitResult

__all__ = ["KernelBuildUnit", "is_target", "prebuilt_kernels", "target_driver"]

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
        launches_here: with a target: it is that of this machine's device, so also build what launches the kernel.
    """

    compile: Callable[[], object]
    target: str | None = None
    launches_here: bool = False
    kind: str = "kernel"
    phase: Phase = "kernels"

    def build(self, resources: Any) -> UnitResult:
        with _Keys(_sources.get()) as keys:
            if self.target is None:
                kernel = self.compile()
                if not keys.seen and _forget(kernel):
                    kernel = self.compile()
                _load(kernel)
            else:
                with target_driver(self.target) as driver:
                    kernel = self.compile()
                if self.launches_here:
                    with suppress(Exception):  # then the first launch makes it, or says why it cannot be
                        build_launcher(kernel, driver.get_current_target().backend)
        origin = f"not compiled: was built ahead ({', '.join(keys.placed)})" if keys.placed else ""
        return UnitResult(origin=origin)


def is_target(arch: str) -> bool:
    """Whether kernels can be built for ``arch`` without a device."""
    with suppress(ValueError):
        require_target(arch)
        return True
    return False


def _forget(kernel: Any) -> bool:
    """Whether this process had compiled a kernel before, wherever it keeps its files, and now has not."""
    from triton.compiler import CompiledKernel

    if not isinstance(kernel, CompiledKernel):
        return False
    kernel.src.fn.device_caches.clear()
    return True


def _load(kernel: Any) -> None:
    """Onto the device, as the first launch would: a kernel that cannot be loaded fails here and not in a capture."""
    from triton.compiler import CompiledKernel
    from triton.runtime import driver

    if isinstance(kernel, CompiledKernel) and not isinstance(driver.active, _StandIn):
        kernel[(1, 1, 1)]


@contextmanager
def prebuilt_kernels(directories: Iterable[Path]) -> Iterator[None]:
    """Let :class:`KernelBuildUnit` take kernels, and what launches them, from these Triton cache directories.

    Only of checked files: what is there is loaded into the process.
    """
    token = _sources.set(tuple(directories))
    try:
        yield
    finally:
        _sources.reset(token)


@contextmanager
def target_driver(target: str) -> Iterator[_StandIn]:
    """Triton's active driver is a stand-in for ``target``: it compiles, and cannot launch.

    Raises:
        ValueError: as :func:`capture.fingerprint.require_target`.
    """
    from triton.runtime import driver

    before = driver._active
    driver.set_active(_StandIn(target))
    try:
        yield driver.active
    finally:
        driver._active = before


class _StandIn:
    """What Triton asks of a driver in order to compile."""

    def __init__(self, target: str) -> None:
        from triton.backends.compiler import GPUTarget

        require_target(target)
        if target.startswith("sm_"):
            self._target = GPUTarget("cuda", int(target[3:]), _NVIDIA_WARP)
        else:
            self._target = GPUTarget("hip", target, _AMD_WAVEFRONT)

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
        seen: whether Triton looked any kernel up.
    """

    def __init__(self, sources: Iterable[Path]) -> None:
        self.placed: list[str] = []
        self.seen = False
        self._sources = tuple(sources)

    def __enter__(self) -> _Keys:
        from triton import knobs

        await_background()  # else Triton would read its library twice
        self._runtime: Any = knobs.runtime
        self._before = (self._runtime.jit_cache_hook, self._runtime.jit_post_compile_hook)
        for source in self._sources:
            take_launchers(source, _triton_directory())
        self._runtime.jit_cache_hook = self._place
        self._runtime.jit_post_compile_hook = self._record
        return self

    def __exit__(self, *error: object) -> None:
        self._runtime.jit_cache_hook, self._runtime.jit_post_compile_hook = self._before

    def _place(self, **call: Any) -> bool | None:
        self.seen = True
        compilation = _Compilation(call)
        if not compilation.is_stored and (found := self._find(compilation.record)):
            _copy(found, compilation.directory)
            self.placed.append(str(compilation.record["name"]))
        before = self._before[0]
        return None if before is None else before(**call)  # True from a user's hook: do not compile

    def _record(self, **call: Any) -> None:
        compilation = _Compilation(call)
        path = compilation.directory / _RECORD
        if compilation.is_stored and not path.exists():
            write_durably(path, _dump(compilation.record))
        if self._before[1] is not None:
            self._before[1](**call)

    def _find(self, record: Mapping[str, Any]) -> Path | None:
        wanted = _dump(record)
        for source in (*self._sources, _triton_directory()):
            for path in sorted(source.glob(f"*/{_RECORD}")):
                if path.read_bytes() == wanted:
                    return path.parent
        return None


class _Compilation:
    """A compilation that Triton told a hook of."""

    def __init__(self, call: Mapping[str, Any]) -> None:
        from triton._C.libtriton import get_cache_invalidating_env_vars

        compiled, kernel = call["compile"], call["fn"].jit_function
        self._data = json.loads(compiled["specialization_data"])
        _, _, self._target, self._backend, _ = kernel.device_caches[compiled["device"]]
        chosen = {name: tuple(value) if isinstance(value, list) else value for name, value in self._given.items()}
        self._options = self._backend.parse_options(chosen)
        signature, constants, (attributes,) = compiled["signature"], compiled["constants"], compiled["configs"]
        self._source = kernel.ASTSource(kernel, signature, constants, attributes)
        self._environment = get_cache_invalidating_env_vars()

    @property
    def _given(self) -> dict[str, Any]:
        options: dict[str, Any] = self._data["options"]
        return options

    @cached_property
    def directory(self) -> Path:
        """Where this installation of Triton keeps its result."""
        from triton.runtime.cache import _base32, get_cache_key

        key = get_cache_key(self._source, self._backend, self._options, self._environment)
        return _triton_directory() / str(_base32(hashlib.sha256(key.encode()).hexdigest()))

    @property
    def is_stored(self) -> bool:
        """Whether it is there; without a group file Triton sees nothing."""
        return any(self.directory.glob("__grp__*.json"))

    @cached_property
    def record(self) -> dict[str, Any]:
        """What the result depends on wherever Triton is installed."""
        import triton

        libraries = [[str(name), _sha256(Path(path))] for name, path in self._options.extern_libs]
        return {
            "name": self._data["name"],
            "triton": triton.__version__,
            "target": vars(self._target),
            "source": self._source.hash(),
            "backend": self._backend.hash(),
            "options": {**self._given, "extern_libs": libraries},
            "environment": dict(self._environment),
        }


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _triton_directory() -> Path:
    from triton import knobs

    return Path(knobs.cache.dir)


def _copy(source: Path, target: Path) -> None:
    """All files of a kernel; the group file, without which Triton sees none of them, last."""
    target.parent.mkdir(parents=True, exist_ok=True)
    target.mkdir(exist_ok=True)
    files = [path for path in source.iterdir() if path.is_file() and path.name != "lock"]
    for path in sorted(files, key=lambda path: (is_group(path.name), path.name)):
        data = path.read_bytes()
        write_durably(target / path.name, located(data, target) if is_group(path.name) else data)


def _dump(record: Mapping[str, Any]) -> bytes:
    return (json.dumps(record, sort_keys=True, indent=1, default=str) + "\n").encode()
