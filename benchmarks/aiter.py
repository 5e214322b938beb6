"""AITER's portable Triton decodes, from an unpacked source tree or wheel, also where there is no ROCm.

``import aiter`` builds and loads ROCm code, so only what a kernel's file itself imports is imported: ``aiter``,
``aiter.ops`` and ``aiter.ops.triton`` are stand-ins that run no code of theirs. And AITER passes launch options that
only Triton's AMD compiler knows, which its CUDA compiler refuses: on CUDA they are left out. Nothing else is changed.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from benchmarks.inputs import SCALE, DecodeInputs

__all__ = ["peers"]

Call = Callable[[], Tensor]

_PACKAGES = ("aiter", "aiter.ops", "aiter.ops.triton")
_AMD_OPTIONS = frozenset({"waves_per_eu", "matrix_instr_nonkdim", "kpack"})
_SPLITS = (4, 16)
"""AITER leaves the number of splits to its caller: what vLLM and SGLang pass."""


def peers(tree: str) -> dict[str, Callable[[DecodeInputs], Call]]:
    """Every MLA decode that ``tree`` has, by name: versions differ in which.

    Raises:
        ValueError: it has none.
    """
    triton_ops = Path(tree) / "aiter" / "ops" / "triton"
    for package in _PACKAGES:
        stand_in = ModuleType(package)
        stand_in.__path__ = [str(Path(tree, *package.split(".")))]
        sys.modules.setdefault(package, stand_in)
    found: dict[str, Callable[[DecodeInputs], Call]] = {}
    if (triton_ops / "attention" / "mla.py").exists():
        found["AITER Triton mla"] = _segmented
    for splits in _SPLITS:
        if (triton_ops / "attention" / "mla_decode.py").exists():
            found[f"AITER Triton mla_decode, {splits} splits"] = partial(_split, splits)
        if (triton_ops / "mla_decode_rope.py").exists():
            found[f"AITER Triton mla_decode_rope, {splits} splits"] = partial(_split_by_token, splits)
    if not found:
        raise ValueError(f"{triton_ops} has no MLA decode; give the folder that holds aiter/ (--aiter)")
    return found


def _segmented(step: DecodeInputs) -> Call:
    module = _module("attention.mla")
    lens, out, kv = _lens(step), _out(step), step.kv_cache.unsqueeze(2)

    def call() -> Tensor:
        module.mla_decode_fwd(
            step.q, kv, out, step.qo_indptr, lens, max(step.lens), step.block_table, SCALE, step.rank,
            step.q.shape[2] - step.rank, True, None, None,
        )  # fmt: skip
        return out

    return call


def _split(splits: int, step: DecodeInputs) -> Call:
    module = _module("attention.mla_decode")
    lens, out, kv = _lens(step), _out(step), step.kv_cache.unsqueeze(2)
    lse = torch.empty(step.q.shape[:2], device="cuda")
    one, partial_outs = torch.ones((), device="cuda"), _partial_outs(step, splits)

    def call() -> Tensor:
        module.decode_attention_fwd(
            step.q, kv, kv[..., : step.rank], out, lse, step.block_table, lens, partial_outs, splits, SCALE,
            step.kv_cache.shape[1], 0.0, one, one,
        )  # fmt: skip
        return out

    return call


def _split_by_token(splits: int, step: DecodeInputs) -> Call:
    """This one knows pages of one token only: each page becomes the list of its slots, outside of what is timed."""
    module = _module("mla_decode_rope")
    out, kv = _out(step), step.kv_cache.view(-1, 1, step.kv_cache.shape[2])
    page_size = step.kv_cache.shape[1]
    slots = [
        (step.block_table[request, :, None].long() * page_size + torch.arange(page_size, device="cuda")).flatten()[
            :length
        ]
        for request, length in enumerate(step.lens)
    ]
    indptr = torch.tensor([0, *step.lens], device="cuda").cumsum(0).int()
    indices, partial_outs = torch.cat(slots).int(), _partial_outs(step, splits)
    path = Path(module.__file__ or "").parent / "configs" / "MI300X-MLA_DECODE_ROPE-DEFAULT.json"
    config = json.loads(path.read_text())

    def call() -> Tensor:
        module.decode_attention_fwd_grouped_rope(
            step.q, kv, kv[..., : step.rank], out, indptr, indices, None, step.rank, 0, None, None, partial_outs,
            splits, SCALE, config=config,
        )  # fmt: skip
        return out

    return call


def _module(name: str) -> ModuleType:
    module = importlib.import_module(f"aiter.ops.triton.{name}")
    if torch.version.hip is None:
        for value in vars(module).values():
            if hasattr(value, "warmup") and hasattr(value, "arg_names") and not hasattr(value, "amd_options_left_out"):
                value.run = partial(_run_without_amd_options, value.run, frozenset(value.arg_names))
                value.amd_options_left_out = True
    return module


def _run_without_amd_options(run: Callable[..., Any], known: frozenset[str], *args: Any, **options: Any) -> Any:
    left: Mapping[str, Any] = {
        name: value for name, value in options.items() if name in known or name not in _AMD_OPTIONS
    }
    return run(*args, **left)


def _lens(step: DecodeInputs) -> Tensor:
    return torch.tensor(step.lens, dtype=torch.int32, device="cuda")


def _out(step: DecodeInputs) -> Tensor:
    return torch.full((*step.q.shape[:2], step.rank), torch.nan, device="cuda", dtype=step.q.dtype)


def _partial_outs(step: DecodeInputs, splits: int) -> Tensor:
    return torch.empty(*step.q.shape[:2], splits, step.rank + 1, device="cuda")
