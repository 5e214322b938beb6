"""AITER's wheel from PyPI: its gfx942 kernels, and its Python imported under a ROCm that is not there."""

import ast
import hashlib
import importlib
import importlib.util
import os
import subprocess
import sys
import warnings
import zipfile
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import platformdirs
import pytest
import torch
from filelock import FileLock

from mla_ops.backends.aiter import runtime
from mla_ops.backends.aiter.contract import Installation, locate

from ..cdna3.elf import CodeObject
from ..cdna3.program import Program
from ..cdna3.triton_launch import launch_triton
from . import fake_rocm
from .stage1 import run_stage1

_REQUIREMENT = "amd-aiter==0.1.7.post2.dev18"
_FILE = "amd_aiter-0.1.7.post2.dev18-py3-none-any.whl"
_SHA256 = "fe139d74438217c35e87e3b961166bac8db2d381eadccb371da2e63615f05a31"
_KERNELS = "aiter_meta/hsa/gfx942/mla/"
ARCH = "gfx942"


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
def site(aiter_wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What an installer unpacks of the wheel, but for the tables of matrix products, which AITER merges at import."""
    folder = tmp_path_factory.mktemp("site")
    wanted = ("aiter/", "amd_aiter", "aiter_meta/csrc/", "aiter_meta/hsa/gfx942/mla/", "aiter_meta/hsa/gfx950/mla/")
    with zipfile.ZipFile(aiter_wheel) as archive:
        names = [name for name in archive.namelist() if name.startswith(wanted) and "/model_configs/" not in name]
        archive.extractall(folder, names)
    return folder


@pytest.fixture(scope="session")
def installation(site: Path) -> Installation:
    return locate(site / "aiter")


@pytest.fixture(scope="session")
def imported_aiter(site: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModuleType]:
    """AITER's real Python, imported in this process under a ROCm that is not there."""
    folder = tmp_path_factory.mktemp("rocm")
    jit = fake_rocm.stand_in_modules(folder / "jit", fake_rocm.__name__)
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(), fake_rocm.stand_in_packages():
        warnings.simplefilter("ignore")  # of AITER's and its imports' own
        patch.setenv("ROCM_HOME", str(fake_rocm.rocm_home(folder / "rocm", ARCH)))
        patch.setenv("AITER_JIT_DIR", str(jit))
        patch.delenv("GPU_ARCHS", raising=False)
        patch.syspath_prepend(str(site))
        patch.setenv("AITER_ASM_DIR", "")  # the import sets it
        path = list(sys.path)
        module = importlib.import_module("aiter")
        added = [entry for entry in sys.path if entry not in path]
        yield module
        for entry in added:
            sys.path.remove(entry)
    # The wheel defines its ops as aiter::aiter::name, which torch 2.13 cannot take apart at exit.
    for name in [name for name in sys.modules if name.partition(".")[0] in ("aiter", "torch_guard")]:
        library = getattr(sys.modules.pop(name), "aiter_lib", None)
        if library is not None:
            library._op_defs.clear()


@pytest.fixture
def fake_gpu(
    imported_aiter: ModuleType, installation: Installation, monkeypatch: pytest.MonkeyPatch
) -> fake_rocm.Launches:
    """The CPU taken for a gfx942 with AITER: what it launches is recorded."""
    installed = runtime.Runtime(installation)
    monkeypatch.setattr(runtime, "arch_of", lambda device: ARCH)
    monkeypatch.setattr(runtime, "compute_units", lambda device: fake_rocm.COMPUTE_UNITS)
    monkeypatch.setattr(runtime, "installed_runtime", lambda root=None: installed)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    properties = SimpleNamespace(multi_processor_count=fake_rocm.COMPUTE_UNITS, gcnArchName=f"{ARCH}:sramecc+")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device=None: properties)
    return fake_rocm.launches


@pytest.fixture
def machine(
    fake_gpu: fake_rocm.Launches,
    imported_aiter: ModuleType,
    load_program: Callable[[str], Program],
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[list[fake_rocm.Launch]]:
    """The same, with the kernels executed: AITER's machine code, and its Triton kernel compiled for gfx942."""
    monkeypatch.setattr(
        imported_aiter.mla, "_fwd_kernel_stage2_asm", Interpreted(imported_aiter.mla._fwd_kernel_stage2_asm)
    )

    def stage1(**arguments: Any) -> None:
        assert arguments["work_metadata"] is None
        run_stage1(
            load_program,
            q=arguments["Q"],
            kv_buffer=arguments["KV"],
            qo_indptr=arguments["qo_indptr"],
            kv_indptr=arguments["kv_indptr"],
            kv_indices=arguments["kv_page_indices"],
            kv_last_page_lens=arguments["kv_last_page_lens"],
            num_kv_splits_indptr=arguments["num_kv_splits_indptr"],
            max_seqlen_q=arguments["max_seqlen_q"],
            softmax_scale=arguments["softmax_scale"],
            split_data=arguments["splitData"],
            split_lse=arguments["splitLse"],
            output=arguments["output"],
        )

    with fake_gpu.recorded(mla_decode_stage1_asm_fwd=stage1) as calls:
        yield calls


class Interpreted:
    """A `triton.jit` function whose launches run on the interpreter."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Program]:
        return partial(launch_triton, self.kernel, grid)


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
