"""A toy Triton kernel as units, for this machine's device (a stand-in) and for targets that are not there."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl

from capture import BuildOptions, KernelBuildUnit, Unit, UnitResult, WarmupSpec
from capture.kernels import target_driver


@triton.jit
def _scaled(x, SCALE: tl.constexpr):  # type: ignore[no-untyped-def]
    return x * SCALE


@triton.jit
def scale_rows(x_ptr, stride, count, SCALE: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    offsets = tl.program_id(0) * stride + tl.arange(0, BLOCK)
    mask = tl.arange(0, BLOCK) < count
    tl.store(x_ptr + offsets, _scaled(tl.load(x_ptr + offsets, mask=mask), SCALE), mask=mask)


def launch(dtype: torch.dtype, block: int = 64, scale: float = 2.0, warps: int = 4) -> Any:
    x = torch.empty(4, block, dtype=dtype, device="meta")
    return scale_rows.warmup(x, block, 63, SCALE=scale, BLOCK=block, grid=(4,), num_warps=warps)


DTYPES = (torch.float32, torch.float16)


def units(target: str | None) -> tuple[KernelBuildUnit, ...]:
    return tuple(
        KernelBuildUnit(key=f"scale_rows {dtype}", compile=partial(launch, dtype), target=target) for dtype in DTYPES
    )


class _Here(KernelBuildUnit):
    """As on a machine that has the device: the driver is there before the unit asks for it."""

    def build(self, resources: Any) -> UnitResult:
        with target_driver("gfx942"):
            return super().build(resources)


def factory(options: BuildOptions) -> WarmupSpec:
    """With a target: to be built ahead. Without: what a machine with a gfx942 runs."""
    made: tuple[Unit, ...] = units(options.target)
    if options.target is None:
        made = tuple(_Here(key=unit.key, compile=unit.compile) for unit in units(None))
    return WarmupSpec("toy", "cpu", ("triton", "toy"), {"toy": 1}, lambda: None, made, target=options.target)
