"""AITER's own modules, built before they are needed: each in a process of its own, published whole or not at all.

Left to itself AITER builds a module inside the first call that needs it, behind three layers of lock files that a
killed builder leaves behind, and copies the result over a file that other ranks may be loading. Here one process per
machine builds, under one lock that goes with its holder, into a temporary directory; a module appears by a rename.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import os
import secrets
import shutil
import signal
import struct
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from filelock import FileLock, Timeout

from mla_ops.backends.aiter.contract import Installation

__all__ = ["BuildError", "BuiltModule", "ModuleBuilder", "build_key", "modules_for"]

Say = Callable[[str], None]

_BASE = ("module_aiter_core", "module_aiter_enum")
_DECODE = ("module_mla_asm",)
_PERSISTENT = ("module_mla_metadata", "module_mla_reduce")
_WRITE = ("module_cache",)
_PREFILL = ("module_fmha_v3_varlen_fwd",)
_HEARTBEAT = 10.0
_LOG_LINES = 15

_BUILDER = """
import importlib, inspect, json, os, sys
module, result, nonce = sys.argv[1:4]
core = importlib.import_module("aiter.jit.core")  # imports aiter, which builds its base module if it is missing
if not os.path.exists(os.path.join(os.environ["AITER_JIT_DIR"], module + ".so")):
    arguments = core.get_args_of_build(module) | {"md_name": module}
    accepted = inspect.signature(core.build_module).parameters
    core.build_module(**{name: value for name, value in arguments.items() if name in accepted})
with open(result, "w") as file:
    json.dump({"module": module, "nonce": nonce}, file)
"""


class BuildError(RuntimeError):
    """A module could not be built, or what was built is not sound.

    Attributes:
        module: its name.
        reason: why.
    """

    def __init__(self, module: str, reason: str) -> None:
        self.module = module
        self.reason = reason
        super().__init__(f"AITER's {module} could not be built: {reason}")

    def __reduce__(self) -> tuple[type[BuildError], tuple[str, str]]:
        return type(self), (self.module, self.reason)


@dataclass(frozen=True)
class BuiltModule:
    """One module in the directory.

    Attributes:
        name: such as ``module_mla_asm``.
        sha256, bytes: of its file.
        seconds: that its build took.
    """

    name: str
    sha256: str
    bytes: int
    seconds: float


def modules_for(installation: Installation, *, prefill: bool = True, persistent: bool = False) -> tuple[str, ...]:
    """The modules that MLA needs, the base module first; those that this version does not have are left out."""
    names = (*_BASE, *_DECODE, *(_PERSISTENT if persistent else ()), *_WRITE, *(_PREFILL if prefill else ()))
    known = json.loads((installation.root / "jit" / "optCompilerConfig.json").read_text(encoding="utf-8"))
    return tuple(name for name in names if name in known)


def build_key(installation: Installation, archs: Sequence[str]) -> str:
    """Hash of what a built module depends on; AITER itself looks at none of it."""
    pybind11 = importlib.util.find_spec("pybind11")
    fields = {
        "aiter": [installation.version, installation.digest],
        "archs": sorted(archs),
        "torch": [torch.__version__, torch.version.git_version, torch.version.hip],
        "pybind11": None if pybind11 is None else importlib.metadata.version("pybind11"),
        "python": sysconfig.get_config_var("SOABI"),
    }
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:16]


class ModuleBuilder:
    """Builds modules into a directory that AITER is pointed at by ``AITER_JIT_DIR``.

    The lock and the manifest are beside the directory: inside are modules only.

    Args:
        installation: whose modules.
        directory: where they go.
        archs: GPU architectures to build for; no GPU is needed.
        compute_units: of the machine that they are for, where AITER cannot ask a GPU.
        parallel: modules that are built at a time.
        max_jobs: compiler processes of all of them together; the machine's processors where ``None``.
        timeout: seconds for one module.
        lock_timeout: seconds to wait for another process that builds here.
        command: what builds one module, called with its name, a result file and a word to put there.
    """

    def __init__(
        self,
        installation: Installation,
        directory: Path,
        *,
        archs: Sequence[str],
        compute_units: int | None = None,
        parallel: int = 3,
        max_jobs: int | None = None,
        timeout: float = 1800.0,
        lock_timeout: float = 3600.0,
        command: Sequence[str] = (sys.executable, "-c", _BUILDER),
    ) -> None:
        if not archs:
            raise ValueError("archs must name at least one GPU architecture, such as gfx942, got none")
        self.installation = installation
        self.directory = directory
        self._archs = tuple(archs)
        self._compute_units = compute_units
        self._parallel = max(1, parallel)
        self._max_jobs = max_jobs or os.cpu_count() or 1
        self._timeout = timeout
        self._lock_timeout = lock_timeout
        self._command = tuple(command)
        self._key = build_key(installation, archs)
        self._manifest_path = directory.with_name(directory.name + ".manifest.json")
        self._lock = FileLock(directory.with_name(directory.name + ".lock"), mode=0o600)

    def sound(self) -> dict[str, BuiltModule]:
        """The modules that the directory has, of this key and with the bytes that were built. Takes no lock."""
        try:
            manifest = json.loads(self._manifest_path.read_text(encoding="utf-8"))
            rows = [BuiltModule(**row) for row in manifest["modules"]] if manifest["key"] == self._key else []
        except (OSError, ValueError, KeyError, TypeError):
            return {}
        return {row.name: row for row in rows if self._digest_of(row.name) == row.sha256}

    def build(self, modules: Sequence[str], say: Say = print) -> dict[str, BuiltModule]:
        """Make the directory have ``modules``; those that it has are left alone.

        Raises:
            BuildError: a module failed; the others have been published.
            PermissionError: something is missing and the directory cannot be written.
            TimeoutError: another process kept the lock for longer than ``lock_timeout``.
        """
        have = self.sound()
        if set(modules) <= have.keys():
            return {name: have[name] for name in modules}
        if not os.access(self.directory if self.directory.exists() else self.directory.parent, os.W_OK):
            lacks = ", ".join(name for name in modules if name not in have)
            raise PermissionError(f"{self.directory} is read-only and lacks {lacks}; build into another directory")
        with self._held(say):
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            have = self.sound()  # another process may have built them meanwhile
            sweep_locks(self.directory)
            missing = [name for name in modules if name not in have]
            base = [name for name in missing if name in _BASE]
            failures: list[BuildError] = []
            # The base module first: every other build imports AITER, and would build it again.
            others = [name for name in missing if name not in base]
            for group in (base, others):
                failures += self._build_group(group, have, say)
        if failures:
            raise failures[0]
        return {name: have[name] for name in modules}

    @contextmanager
    def _held(self, say: Say) -> Iterator[None]:
        start = time.monotonic()
        while True:
            waited = time.monotonic() - start
            try:
                self._lock.acquire(timeout=max(0.0, min(_HEARTBEAT, self._lock_timeout - waited)))
                break
            except Timeout:
                waited = time.monotonic() - start
                if waited >= self._lock_timeout:
                    raise TimeoutError(
                        f"waited {waited:.0f} s for the process that holds {self._lock.lock_file}; "
                        "wait longer, or end that process if it hangs: its lock goes with it"
                    ) from None
                say(f"waiting for another builder on {self._lock.lock_file} ({waited:.0f} s)")
        try:
            yield
        finally:
            self._lock.release()

    def _build_group(self, modules: Sequence[str], have: dict[str, BuiltModule], say: Say) -> list[BuildError]:
        failures: list[BuildError] = []
        workers = min(self._parallel, len(modules)) or 1
        with tempfile.TemporaryDirectory(prefix="aiter-build-") as scratch, ThreadPoolExecutor(workers) as pool:
            jobs = max(1, self._max_jobs // workers)
            futures: dict[str, Future[tuple[Path, float]]] = {
                module: pool.submit(self._build_one, module, Path(scratch) / module, jobs) for module in modules
            }
            for module, future in futures.items():
                try:
                    made, seconds = _finished(future, module, say)
                    have[module] = self._publish(module, made, seconds, have)
                    say(f"built AITER's {module} in {seconds:.1f} s")
                except BuildError as error:
                    failures.append(error)
                    say(str(error))
        return failures

    def _build_one(self, module: str, scratch: Path, jobs: int) -> tuple[Path, float]:
        """Run the builder in ``scratch``; the module's file and its seconds."""
        scratch.mkdir()
        for built in self.sound():
            shutil.copy2(self._file(built), scratch)
        result, log, nonce = scratch / "result.json", scratch / "log.txt", secrets.token_hex(8)
        start = time.monotonic()
        with log.open("wb") as output:
            process = subprocess.Popen(
                [*self._command, module, str(result), nonce],
                env=self._environment(scratch, jobs),
                cwd=scratch,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                code = process.wait(self._timeout)
            except subprocess.TimeoutExpired:
                raise BuildError(module, f"no end after {self._timeout:.0f} s\n{_tail(log)}") from None
            finally:
                _end_group(process)
        seconds = time.monotonic() - start
        if code:
            ended = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
            raise BuildError(module, f"the builder ended with {ended}\n{_tail(log)}")
        if not _has_token(result, module, nonce):
            # AITER's failures call exit(0)
            raise BuildError(module, f"the builder ended with exit code 0 and no result\n{_tail(log)}")
        made = scratch / f"{module}.so"
        if reason := unsound(made, self._archs):
            raise BuildError(module, reason)
        return made, seconds

    def _environment(self, scratch: Path, jobs: int) -> dict[str, str]:
        environment = dict(os.environ)
        environment.pop("AITER_REBUILD", None)
        environment |= {
            "AITER_AOT_IMPORT": "1",
            "AITER_JIT_DIR": str(scratch),
            "GPU_ARCHS": ";".join(self._archs),
            "MAX_JOBS": str(jobs),
            "PYTHONPATH": os.pathsep.join([str(self.installation.root.parent), environment.get("PYTHONPATH", "")]),
            "TMPDIR": str(scratch),  # AITER writes merged tables to the temporary directory, unlocked
        }
        if self._compute_units is not None:
            environment["CU_NUM"] = str(self._compute_units)
        return environment

    def _publish(self, module: str, made: Path, seconds: float, have: dict[str, BuiltModule]) -> BuiltModule:
        target = self._file(module)
        part = target.with_suffix(".part")
        shutil.copyfile(made, part)
        _sync(part)
        os.replace(part, target)
        row = BuiltModule(module, _sha256(target), target.stat().st_size, round(seconds, 3))
        rows = {**have, module: row}
        manifest = {"schema": 1, "key": self._key, "modules": [asdict(rows[name]) for name in sorted(rows)]}
        part = self._manifest_path.with_suffix(".part")
        part.write_text(json.dumps(manifest, indent=1), encoding="utf-8")
        _sync(part)
        os.replace(part, self._manifest_path)
        return row

    def _file(self, module: str) -> Path:
        return self.directory / f"{module}.so"

    def _digest_of(self, module: str) -> str | None:
        path = self._file(module)
        return _sha256(path) if path.is_file() else None


def sweep_locks(directory: Path) -> list[Path]:
    """Remove AITER's lock files of all three layers. Only under our lock: whoever made them is gone."""
    build = directory / "build"
    found = [*build.glob("lock_*"), *build.glob("*/build/lock"), *build.rglob(".ninja_lock")]
    for path in found:
        path.unlink(missing_ok=True)
    return found


def unsound(path: Path, archs: Sequence[str]) -> str:
    """What is wrong with a built module: missing, cut off, or without code for an architecture; "" for nothing."""
    if not path.is_file():
        return "the builder reported success and made no file"
    data = path.read_bytes()
    if len(data) < 64 or data[:4] != b"\x7fELF":
        return f"{path.name} is not an ELF file"
    (sections,), (size, count) = struct.unpack_from("<Q", data, 40), struct.unpack_from("<HH", data, 58)
    if sections + size * count > len(data):  # the section table is at the end
        return f"{path.name} is cut off at {len(data)} bytes"
    if b"amdgcn-amd-amdhsa--" in data:
        missing = [arch for arch in archs if f"amdgcn-amd-amdhsa--{arch}".encode() not in data]
        if missing:
            return f"{path.name} has no code for {', '.join(missing)}"
    return ""


def _finished(future: Future[tuple[Path, float]], module: str, say: Say) -> tuple[Path, float]:
    start = time.monotonic()
    while True:
        try:
            return future.result(_HEARTBEAT)
        except TimeoutError:
            say(f"building AITER's {module} ({time.monotonic() - start:.0f} s)")


def _has_token(result: Path, module: str, nonce: str) -> bool:
    try:
        return bool(json.loads(result.read_text()) == {"module": module, "nonce": nonce})
    except (OSError, ValueError):
        return False


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """End the builder and every compiler that it started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    finally:
        process.wait()


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-_LOG_LINES:])


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
