"""What an import costs, and which module may import which."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import mla_ops

ROOT = Path(mla_ops.__file__).parents[1]
HEAVY = ["aiter", "flash_mla", "rich", "sympy", "torch._dynamo", "torch._inductor", "transformers", "triton"]


def python(code: str, home: Path) -> str:
    """Run code in a fresh process whose home and caches are ``home``; gives its output."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("XDG", "TORCH", "TRITON"))}
    environment |= {"HOME": str(home), "TMPDIR": str(home), "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        env=environment,
        cwd=home,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("package", ["mla_ops", "capture"])
def test_importing_a_package_loads_nothing_heavy_touches_no_device_and_creates_no_file(
    package: str, tmp_path: Path
) -> None:
    code = f"""
import sys
import torch
before = {{m.split(".")[0] for m in sys.modules}} | set(sys.modules)
import {package}
new = sorted(m for m in {HEAVY!r} if m in sys.modules and m not in before)
assert not new, new
assert not torch.cuda.is_initialized()
"""
    python(code, tmp_path)
    assert list(tmp_path.rglob("*")) == []


def test_torch_itself_brings_none_of_the_compiler_before_us(tmp_path: Path) -> None:
    """Else the test above would prove nothing."""
    loaded = python(f"import sys, torch; print([m for m in {HEAVY!r} if m in sys.modules])", tmp_path)
    assert "torch._dynamo" not in loaded
    assert "triton" not in loaded


def test_the_eager_ops_run_where_no_optional_package_is_installed(tmp_path: Path) -> None:
    code = """
import sys
for name in ("aiter", "flash_mla", "rich", "transformers", "triton"):
    sys.modules[name] = None
import mla_ops
from mla_ops.testing import make_decode_inputs
out, lse = mla_ops.mla_decode(**make_decode_inputs([3, 0, 9]).arguments())
assert out[:3].isfinite().all()
assert "torch._dynamo" not in sys.modules
"""
    python(code, tmp_path)


# --- arrows -----------------------------------------------------------------------------------------------------


def sources(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imports(path: Path) -> Iterator[tuple[str, bool]]:
    """Every module that a file imports, and whether a function (not the module's body) does it."""

    def visit(node: ast.AST, inside: bool) -> Iterator[tuple[str, bool]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                yield from ((alias.name, inside) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                assert child.level == 0, f"{path}: relative import"
                yield from ((f"{child.module}.{alias.name}", inside) for alias in child.names)
            elif not (isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)):
                deeper = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
                yield from visit(child, inside or deeper)

    yield from visit(ast.parse(path.read_text()), False)


def is_in(module: str, *packages: str) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)


def test_capture_imports_mla_ops_only_inside_the_functions_of_its_command_line() -> None:
    for path in sources("capture"):
        for module, inside in imports(path):
            if is_in(module, "mla_ops"):
                assert inside, f"{name_of(path)} imports {module}"
                assert name_of(path) == "capture.cli", f"{name_of(path)} imports {module}"


def test_only_the_top_floor_of_mla_ops_imports_capture() -> None:
    for path in sources("mla_ops"):
        if not is_in(name_of(path), "mla_ops.integrations", "mla_ops.warmup", "mla_ops.decode_step"):
            for module, _ in imports(path):
                assert not is_in(module, "capture"), f"{name_of(path)} imports {module}"


# A module may import what is on its line, and of this package nothing else. Lower floors never import higher ones.
ALLOWED = {
    "mla_ops.errors": (),
    "mla_ops.config": (),
    "mla_ops.validation": (),
    "mla_ops.backends.reference_layer": (),
    "mla_ops.backends.reference": ("mla_ops.backends.reference_layer", "mla_ops.validation"),
    "mla_ops.backends.select": ("mla_ops.config", "mla_ops.errors", "mla_ops.backends"),
    "mla_ops.transforms": ("mla_ops.backends.reference", "mla_ops.backends", "mla_ops.errors", "mla_ops.validation"),
    "mla_ops.backends.kernels": ("mla_ops.errors",),
    "mla_ops.signatures": (),
    "mla_ops.ops": ("mla_ops.transforms", "mla_ops.validation", "mla_ops.backends.kernels", "mla_ops.signatures"),
    "mla_ops.layer_ops": ("mla_ops.backends", "mla_ops.ops", "mla_ops.errors", "mla_ops.signatures"),
    "mla_ops.functional": ("mla_ops.ops", "mla_ops.backends.select", "mla_ops.transforms", "mla_ops.validation"),
    "mla_ops.layer_functional": ("mla_ops.layer_ops", "mla_ops.backends.select", "mla_ops.transforms"),
    "mla_ops.kv_cache": ("mla_ops.config", "mla_ops.errors"),
    "mla_ops.rope": ("mla_ops.config",),
    "mla_ops.prefill_plan": ("mla_ops.config", "mla_ops.backends.select"),
    "mla_ops.plan": ("mla_ops.config", "mla_ops.errors", "mla_ops.backends", "mla_ops.prefill_plan"),
    "mla_ops.module": (
        "mla_ops.functional",
        "mla_ops.layer_functional",
        "mla_ops.config",
        "mla_ops.plan",
        "mla_ops.rope",
    ),
    "mla_ops.compiled": ("mla_ops.module", "mla_ops.plan"),
    "mla_ops.testing": ("mla_ops.plan",),
}


@pytest.mark.parametrize("module", sorted(ALLOWED))
def test_a_module_imports_only_lower_floors(module: str) -> None:
    path = ROOT.joinpath(*module.split(".")).with_suffix(".py")
    for imported, _ in imports(path):
        if is_in(imported, "mla_ops") and imported != "mla_ops.transforms" and imported != "mla_ops.validation":
            assert is_in(imported, *ALLOWED[module]), f"{module} imports {imported}"


@pytest.mark.parametrize(
    ("package", "home"), [("aiter", "mla_ops.backends.aiter"), ("flash_mla", "mla_ops.backends.flash_mla")]
)
def test_only_one_place_imports_a_vendor_package(package: str, home: str) -> None:
    for path in [*sources("mla_ops"), *sources("capture")]:
        for module, _ in imports(path):
            assert not is_in(module, package) or is_in(name_of(path), home), f"{name_of(path)} imports {module}"


def test_the_reference_imports_torch_and_the_checks_only() -> None:
    allowed = ("__future__", "collections", "torch", "mla_ops.validation", "mla_ops.backends.reference_layer")
    for file in ("reference.py", "reference_layer.py"):
        for module, _ in imports(ROOT / "mla_ops/backends" / file):
            assert is_in(module, *allowed), module
