"""What the installed AITER offers, read from its files and never by importing it.

Importing AITER starts ``rocminfo`` and may start a build; and its signatures have changed in fourteen ways, some in
the middle of the list. So the package is located, its functions are parsed with ``ast``, and everything is decided
by the presence of a parameter or of a piece of source. The version number is for messages only.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

__all__ = ["AiterNotFoundError", "Contract", "Installation", "Signature", "locate", "parse_signature"]

_FUNCTIONS = {
    "mla_decode_fwd": "mla.py",
    "get_meta_param": "mla.py",
    "mla_decode_stage1_asm_fwd": "ops/attention.py",
    "get_mla_metadata_info_v1": "ops/attention.py",
    "get_mla_metadata_v1": "ops/attention.py",
    "flash_attn_varlen_func": "ops/mha.py",
    "concat_and_cache_mla": "ops/cache.py",
}
_DISTRIBUTION = "amd-aiter"
_DISPATCHER = "csrc/py_itfs_cu/asm_mla.cu"


class AiterNotFoundError(LookupError):
    """No usable AITER is installed.

    Attributes:
        reason: what was found.
        remedy: what to do.
    """

    def __init__(self, reason: str, remedy: str) -> None:
        self.reason = reason
        self.remedy = remedy
        super().__init__(f"{reason}; {remedy}")


@dataclass(frozen=True)
class Signature:
    """The parameters of a function, in order.

    Attributes:
        names: of all parameters.
        required: how many of them, from the left, have no default.
    """

    names: tuple[str, ...]
    required: int

    def __contains__(self, name: str) -> bool:
        return name in self.names


def parse_signature(definition: ast.FunctionDef) -> Signature:
    """The signature of a parsed function. AITER's have neither ``*args`` nor keyword-only parameters."""
    arguments = definition.args
    names = tuple(argument.arg for argument in (*arguments.posonlyargs, *arguments.args))
    return Signature(names, len(names) - len(arguments.defaults))


@dataclass(frozen=True)
class Contract:
    """The functions that we call, and what their source says that their parameters do not.

    Attributes:
        functions: signature by name, of those that are there.
        own_splits: ``mla_decode_fwd`` takes our ``num_kv_splits_indptr`` instead of a tensor that an ``lru_cache``
            owns (and frees under a captured graph).
        meta_outputs: the names that ``mla_decode_fwd`` gives to what ``get_meta_param`` returns.
        returns_lse: ``mla_decode_fwd(return_lse=True)`` writes the LSE of a non-persistent call and does not abort.
        prefill_needs_flydsl: ``flash_attn_varlen_func`` imports ``flydsl`` inside the call.
    """

    functions: dict[str, Signature]
    own_splits: bool
    meta_outputs: tuple[str, ...]
    returns_lse: bool
    prefill_needs_flydsl: bool

    @classmethod
    def parse(cls, sources: dict[str, str], dispatcher: str) -> Contract:
        """Read the contract from sources by path relative to the package, and the C++ dispatcher's text."""
        trees = {path: ast.parse(text) for path, text in sources.items()}
        definitions = {
            name: found
            for name, path in _FUNCTIONS.items()
            if path in trees and (found := _definition(trees[path], name)) is not None
        }
        mla, mha = sources.get("mla.py", ""), sources.get("ops/mha.py", "")
        decode = definitions.get("mla_decode_fwd")
        meta_outputs = () if decode is None else _targets_of_call(decode, "get_meta_param")
        return cls(
            functions={name: parse_signature(found) for name, found in definitions.items()},
            # Where it also makes stage 2's granularity, skipping it leaves that one undefined.
            own_splits=meta_outputs == ("num_kv_splits", "num_kv_splits_indptr"),
            meta_outputs=meta_outputs,
            # The three of them came one after another; with fewer, asking for the LSE is garbage or an abort.
            returns_lse="HAS_FINAL_LSE" in mla and "lse != nullptr && persistent" in dispatcher,
            prefill_needs_flydsl="flydsl" in mha,
        )


@dataclass(frozen=True)
class Installation:
    """An AITER on this machine.

    Attributes:
        root: the package's folder.
        meta: folder of its ``csrc`` and ``hsa``.
        version: for messages.
        contract: what it offers.
        digest: hash of the sources that the contract and the builds depend on, for cache keys.
    """

    root: Path
    meta: Path
    version: str
    contract: Contract
    digest: str

    def kernel_table(self, arch: str) -> Path | None:
        """The csv file of the decode kernels for ``arch``; ``None`` in versions whose dispatcher is hard-coded."""
        path = self.meta / "hsa" / arch / "mla" / "mla_asm.csv"
        return path if path.is_file() else None


def locate(root: Path | None = None) -> Installation:
    """Find AITER without importing it.

    Args:
        root: the package's folder; found as Python would find it where ``None``.

    Raises:
        AiterNotFoundError: there is none, or what is called ``aiter`` is the async-iterator package of that name.
    """
    root = _package_folder() if root is None else root
    if not (root / "mla.py").is_file():
        raise AiterNotFoundError(
            f"the package aiter in {root} is not AMD's (it has no mla.py): PyPI's `aiter` is an unrelated package of "
            "async iterators",
            f"pip uninstall aiter, then install {_DISTRIBUTION} or a wheel of ROCm/aiter's releases",
        )
    meta = root.parent / "aiter_meta"
    if not (meta / "hsa").is_dir():
        meta = root.parent  # a source checkout, installed in place
    paths = sorted({*_FUNCTIONS.values()})
    sources = {path: (root / path).read_text(encoding="utf-8") for path in paths if (root / path).is_file()}
    dispatcher = meta / _DISPATCHER
    dispatcher_text = dispatcher.read_text(encoding="utf-8") if dispatcher.is_file() else ""
    return Installation(
        root=root,
        meta=meta,
        version=_version(root),
        contract=Contract.parse(sources, dispatcher_text),
        digest=_digest(root, meta),
    )


def _package_folder() -> Path:
    spec = importlib.util.find_spec("aiter")
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    if spec is None:
        raise AiterNotFoundError(
            "AITER is not installed", f"install {_DISTRIBUTION} (a wheel of ROCm/aiter's releases for your ROCm)"
        )
    if folders:
        return Path(folders[0])
    assert spec.origin is not None
    return Path(spec.origin).parent / "aiter"  # a single module is not AMD's; the caller says so


def _version(root: Path) -> str:
    try:
        distribution = metadata.distribution(_DISTRIBUTION)
    except metadata.PackageNotFoundError:
        found = sorted(root.parent.glob("amd_aiter-*.dist-info"))
        return found[0].name.removesuffix(".dist-info").partition("-")[2] if found else "unknown"
    return distribution.version


def _digest(root: Path, meta: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted((root / "jit" / "optCompilerConfig.json", root / "mla.py", *_native_sources(meta))):
        if path.is_file():
            digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def _native_sources(meta: Path) -> Iterator[Path]:
    for folder in ("csrc/include", "csrc/kernels", "csrc/py_itfs_cu", "csrc/pybind"):
        yield from (path for path in (meta / folder).rglob("*") if path.is_file())


def _definition(tree: ast.Module, name: str) -> ast.FunctionDef | None:
    found = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name]
    return found[-1] if found else None


def _targets_of_call(function: ast.FunctionDef, called: str) -> tuple[str, ...]:
    """The names that ``function`` assigns the values of its call of ``called`` to."""
    for node in ast.walk(function):
        if (
            isinstance(node, ast.Assign)
            and isinstance(node.value, ast.Call)
            and isinstance(node.value.func, ast.Name)
            and node.value.func.id == called
        ):
            target = node.targets[0]
            names = target.elts if isinstance(target, ast.Tuple) else [target]
            return tuple(name.id for name in names if isinstance(name, ast.Name))
    return ()
