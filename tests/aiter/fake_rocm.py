"""A ROCm that is not there: enough of one for AITER's real Python to be imported and to launch into our hands.

`rocm_home` writes stand-ins for hipconfig, hipcc and rocminfo, and for the compiled modules that AITER would build.
The stand-in modules have pybind11's docstrings, by which AITER checks its own arguments, and record each call under
C++'s parameter names; an executor may then do what the kernel would have done.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import IntEnum
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

__all__ = ["COMPUTE_UNITS", "Launch", "Launches", "launches", "module_namespace", "rocm_home", "stand_in_packages"]

COMPUTE_UNITS = 304

_ENUMS = {
    "ActivationType": ["Silu", "Gelu", "Swiglu", "No"],
    "QuantType": ["No", "per_Tensor", "per_Token", "per_1x32", "per_1x128", "per_128x128"],
}
_VARLEN = (
    "q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: torch.Tensor, "
    "cu_seqlens_k: Optional[torch.Tensor], max_seqlen_q: int, max_seqlen_k: int, min_seqlen_q: int, dropout_p: float, "
    "softmax_scale: float, logits_soft_cap: float, zero_tensors: bool, is_causal: bool, window_size_left: int, "
    "window_size_right: int, return_softmax_lse: bool, return_dropout_randval: bool, "
    "out: Optional[torch.Tensor] = None, block_table: Optional[torch.Tensor] = None, "
    "bias: Optional[torch.Tensor] = None, "
    "alibi_slopes: Optional[torch.Tensor] = None, gen: Optional[torch.Generator] = None, "
    "cu_seqlens_q_padded: Optional[torch.Tensor] = None, cu_seqlens_k_padded: Optional[torch.Tensor] = None"
)
# The parameters of the C++ functions, in C++'s order and by C++'s names (csrc/include/rocm_ops.hpp).
FUNCTIONS = {
    "module_mla_asm": {
        "mla_decode_stage1_asm_fwd": (
            "Q: torch.Tensor, KV: torch.Tensor, qo_indptr: torch.Tensor, kv_indptr: torch.Tensor, "
            "kv_page_indices: torch.Tensor, kv_last_page_lens: torch.Tensor, "
            "num_kv_splits_indptr: Optional[torch.Tensor], work_metadata: Optional[torch.Tensor], "
            "work_indptr: Optional[torch.Tensor], work_info_set: Optional[torch.Tensor], max_seqlen_q: int, "
            "softmax_scale: float, splitData: torch.Tensor, splitLse: torch.Tensor, output: torch.Tensor, "
            "q_scale: Optional[torch.Tensor] = None, kv_scale: Optional[torch.Tensor] = None"
        )
    },
    "module_mla_metadata": {
        "get_mla_metadata_v1": (
            "seqlens_qo_indptr: torch.Tensor, seqlens_kv_indptr: torch.Tensor, num_heads_per_head_k: int, "
            "num_heads_k: int, is_causal: bool, work_metadata_ptrs: torch.Tensor, work_info_set: torch.Tensor, "
            "work_indptr: torch.Tensor, reduce_indptr: torch.Tensor, reduce_final_map: torch.Tensor, "
            "reduce_partial_map: torch.Tensor, kv_granularity: int = 16, max_seqlen_qo: int = -1, "
            "uni_seqlen_qo: int = -1, fast_mode: bool = True, topk: int = -1, max_split_per_batch: int = -1"
        )
    },
    "module_mla_reduce": {
        "mla_reduce_v1": (
            "partial_output: torch.Tensor, partial_lse: torch.Tensor, reduce_indptr: torch.Tensor, "
            "reduce_final_map: Optional[torch.Tensor], reduce_partial_map: torch.Tensor, final_output: torch.Tensor, "
            "final_lse: Optional[torch.Tensor] = None"
        )
    },
    "module_cache": {
        "concat_and_cache_mla": (
            "kv_c: torch.Tensor, k_pe: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor, "
            "kv_cache_dtype: str, scale: torch.Tensor"
        )
    },
}


@dataclass(frozen=True)
class Launch:
    """One call of a compiled function: arguments under C++'s names."""

    function: str
    arguments: dict[str, Any]


@dataclass
class Launches:
    """The calls so far, and what stands in for the kernels."""

    calls: list[Launch] = field(default_factory=list)
    executors: dict[str, Callable[..., Any]] = field(default_factory=dict)

    @contextmanager
    def recorded(self, **executors: Callable[..., Any]) -> Iterator[list[Launch]]:
        """Record the calls inside, and let ``executors`` (by function) do the work of theirs."""
        self.calls, self.executors = [], executors
        try:
            yield self.calls
        finally:
            self.executors = {}


launches = Launches()


def module_namespace(module: str) -> dict[str, Any]:
    """What a compiled module would define."""
    if module == "module_aiter_enum":
        return {name: _enum(name) for name in _ENUMS}
    if module.startswith("mha_varlen_fwd"):
        return {"mha_varlen_fwd": _function("mha_varlen_fwd", _VARLEN, "List[torch.Tensor]")}
    return {name: _function(name, text, "None") for name, text in FUNCTIONS[module].items()}


def _enum(name: str) -> Callable[[int], IntEnum]:
    enum = IntEnum(name, _ENUMS[name], start=0)

    def member(value: int) -> IntEnum:
        return enum(value)

    member.__doc__ = f"Members: of {name}"
    return member


def _function(name: str, parameters: str, result: str) -> Callable[..., Any]:
    names = re.findall(r"(\w+): ", parameters)
    required = parameters.count(":") - parameters.count("=")

    def call(*args: Any, **kwargs: Any) -> Any:
        arguments = dict(zip(names, args, strict=False))
        assert kwargs.keys() <= set(names[len(args) :]), (name, kwargs)
        arguments |= kwargs
        assert set(names[:required]) <= arguments.keys(), (name, set(names[:required]) - arguments.keys())
        launches.calls.append(Launch(name, arguments))
        executor = launches.executors.get(name)
        return None if executor is None else executor(**arguments)

    call.__doc__ = f"{name}({parameters}) -> {result}"
    return call


def rocm_home(folder: Path, arch: str) -> Path:
    """A ROCm home with the tools that AITER asks at import."""
    tools = {
        "hipconfig": "echo 7.0.0",
        "hipcc": "exit 0",
        "rocminfo": f"printf 'Agent 1\\n  Name: {arch}\\n  Device Type: GPU\\n  Compute Unit: {COMPUTE_UNITS}\\n'",
    }
    (folder / "bin").mkdir(parents=True)
    for name, line in tools.items():
        tool = folder / "bin" / name
        tool.write_text(f"#!/bin/sh\n{line}\n")
        tool.chmod(0o755)
    return folder


def stand_in_modules(folder: Path, recorder: str) -> Path:
    """A directory of AITER's compiled modules, each a few lines of Python."""
    folder.mkdir(parents=True)
    flags = ("mask", "nmask")
    varlen = [f"mha_varlen_fwd_{t}_nlogits_nbias_{m}_lse_ndropout_nskip" for t in ("bf16", "fp16") for m in flags]
    for module in ("module_aiter_enum", *FUNCTIONS, *varlen):
        (folder / f"{module}.py").write_text(
            f"from {recorder} import module_namespace\nglobals().update(module_namespace({module!r}))\n"
        )
    return folder


@contextmanager
def stand_in_packages() -> Iterator[None]:
    """Empty packages for what AITER imports at its top and MLA never calls, where they are not installed."""
    added = [name for name in ("pandas", "psutil", "einops") if importlib.util.find_spec(name) is None]
    for name in added:
        sys.modules[name] = importlib.util.module_from_spec(ModuleSpec(name, None))
        sys.modules[name].DataFrame = sys.modules[name].Process = object  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for name in added:
            del sys.modules[name]
