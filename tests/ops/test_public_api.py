"""The public names, and what an exception promises."""

from __future__ import annotations

import ast
import importlib
import pickle
from pathlib import Path
from types import ModuleType

import pytest

import capture
import mla_ops
from mla_ops import errors

MODULES = sorted(
    ".".join(path.relative_to(root.parent).with_suffix("").parts).removesuffix(".__init__")
    for root in (Path(mla_ops.__file__).parent, Path(capture.__file__).parent)
    for path in root.rglob("*.py")
)
# Registers an op or a command when it is imported, or needs what this machine may not have.
NEEDS_MORE = ("mla_ops.backends.triton", "mla_ops.backends.aiter", "mla_ops.backends.flash_mla")


def public_definitions(module: str) -> set[str]:
    """Public classes, functions and constants that a module's source defines at its top level."""
    tree = ast.parse(source_of(module).read_text())
    names: set[str] = set()
    for node in tree.body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            names.add(node.name)
    return {name for name in names if not name.startswith("_")}


def source_of(module: str) -> Path:
    base = Path(mla_ops.__file__).parents[1].joinpath(*module.split("."))
    return base / "__init__.py" if base.is_dir() else base.with_suffix(".py")


def declared(module: str) -> list[str] | None:
    """``__all__`` as the source has it."""
    for node in ast.parse(source_of(module).read_text()).body:
        if isinstance(node, ast.Assign) and [ast.unparse(t) for t in node.targets] == ["__all__"]:
            names: list[str] = ast.literal_eval(node.value)
            return names
    return None


@pytest.mark.parametrize("module", MODULES)
def test_all_is_sorted_and_without_repeats(module: str) -> None:
    names = declared(module)
    if names is None:
        assert not public_definitions(module), f"{module} defines public names and has no __all__"
        return
    assert len(set(names)) == len(names)
    assert names == sorted(names, key=isort_style)


def isort_style(name: str) -> tuple[int, str]:
    """Constants, then classes, then the rest, as ruff sorts ``__all__``."""
    kind = 0 if name.isupper() else 1 if name[0].isupper() else 2
    return kind, name


@pytest.mark.parametrize("module", [m for m in MODULES if not m.startswith(NEEDS_MORE)])
def test_every_name_in_all_can_be_imported(module: str) -> None:
    loaded = importlib.import_module(module)
    for name in declared(module) or []:
        assert getattr(loaded, name) is not None or name in vars(loaded)


@pytest.mark.parametrize("package", [capture, mla_ops], ids=lambda package: package.__name__)
def test_no_public_name_is_that_of_a_module(package: ModuleType) -> None:
    """An import of that module would put it in place of what the name means."""
    modules = {module.rpartition(".")[2] for module in MODULES if module.rpartition(".")[0] == package.__name__}
    assert not modules & set(package.__all__)


def test_the_package_offers_every_exception() -> None:
    assert set(errors.__all__) <= set(mla_ops.__all__)
    assert all(issubclass(getattr(errors, name), mla_ops.MLAError) for name in errors.__all__)


def test_the_package_offers_a_function_for_every_op() -> None:
    from mla_ops.ops import SCHEMAS

    assert {name.split(".")[0] for name in SCHEMAS} <= set(mla_ops.__all__)


@pytest.mark.parametrize(
    "error",
    [
        mla_ops.BackendUnavailableError("aiter", "no AMD GPU", "use auto"),
        mla_ops.OutOfPagesError(3, 1),
        mla_ops.InferenceOnlyError("no gradient"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_exception_survives_a_process_boundary(error: Exception) -> None:
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert str(again) == str(error)
    assert vars(again) == vars(error)


def test_inference_only_error_is_a_runtime_error_as_torch_raises_them() -> None:
    assert issubclass(mla_ops.InferenceOnlyError, RuntimeError)
