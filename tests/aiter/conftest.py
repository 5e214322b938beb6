"""AITER's own gfx942 kernels, read out of its wheel on PyPI; nothing of it is installed or imported."""

import ast
import hashlib
import importlib.util
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import platformdirs
import pytest
from filelock import FileLock

from ..cdna3.elf import CodeObject
from ..cdna3.program import Program

_REQUIREMENT = "amd-aiter==0.1.7.post2.dev18"
_FILE = "amd_aiter-0.1.7.post2.dev18-py3-none-any.whl"
_SHA256 = "fe139d74438217c35e87e3b961166bac8db2d381eadccb371da2e63615f05a31"
_KERNELS = "aiter_meta/hsa/gfx942/mla/"


@pytest.fixture(scope="session")
def aiter_wheel() -> Path:
    """The wheel: `$MLA_AITER_WHEEL`, else downloaded once into the user's cache (40 MB), else the test is skipped."""
    wheel = Path(os.environ.get("MLA_AITER_WHEEL") or _download())
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    if digest != _SHA256:
        pytest.fail(f"{wheel} is not the {_REQUIREMENT} that these tests describe: its SHA-256 is {digest}")
    return wheel


def _download() -> Path:
    directory = platformdirs.user_cache_path("mla-ops") / "test-wheels"
    directory.mkdir(parents=True, exist_ok=True)
    with FileLock(directory / ".lock"):
        if not (directory / _FILE).exists():
            pip = (sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", directory)
            done = subprocess.run([*pip, _REQUIREMENT], capture_output=True, text=True)
            if done.returncode:
                reason = (done.stderr.strip() or "no message").splitlines()[-1]
                pytest.skip(
                    f"{_REQUIREMENT} could not be downloaded ({reason}); set MLA_AITER_WHEEL to a copy of {_FILE}"
                )
    return directory / _FILE


@pytest.fixture(scope="session")
def load_program(aiter_wheel: Path) -> Callable[[str], Program]:
    """From the file name of a gfx942 code object in the wheel to its program; each is read once."""

    @cache
    def load(name: str) -> Program:
        with zipfile.ZipFile(aiter_wheel) as archive:
            return Program(CodeObject(archive.read(_KERNELS + name)))

    return load


@pytest.fixture(scope="session")
def stage2_kernel(aiter_wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """AITER's Triton merge of the splits, cut out of its mla.py, which imports nowhere without ROCm."""
    name = "_fwd_kernel_stage2_asm"
    with zipfile.ZipFile(aiter_wheel) as archive:
        source = archive.read("aiter/mla.py").decode()
    function = next(node for node in ast.parse(source).body if getattr(node, "name", None) == name)
    path = tmp_path_factory.mktemp("stage2") / "stage2.py"
    text = ast.get_source_segment(source, function)
    path.write_text(f"import triton\nimport triton.language as tl\n\n\n@triton.jit\n{text}\n")
    specification = importlib.util.spec_from_file_location("aiter_stage2", path)
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return getattr(module, name)
