"""A Triton kernel, compiled for a GPU that need not be there."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from capture import BuildOptions, CompiledFunctionUnit, WarmupSpec


@triton.jit
def add_one(x_ptr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x_ptr + offsets, tl.load(x_ptr + offsets) + 1)


def cross_compile(resources: Any) -> None:
    source = ASTSource(add_one, {"x_ptr": "*fp32", "BLOCK": "constexpr"}, {"BLOCK": 64})
    triton.compile(source, target=GPUTarget("hip", "gfx942", 64))


def factory(options: BuildOptions) -> WarmupSpec:
    unit = CompiledFunctionUnit(key="add_one gfx942", call=cross_compile, kind="kernel", phase="kernels")
    return WarmupSpec("triton toy", "cpu", ("triton", "the only one"), {}, lambda: None, (unit,))
