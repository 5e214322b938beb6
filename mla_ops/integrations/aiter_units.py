"""AITER's modules and a first use of its decode kernel, as units of a warm-up."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from capture.units import Phase, Unit
from mla_ops.backends.aiter import runtime
from mla_ops.backends.aiter.build import ModuleBuilder, build_key, modules_for
from mla_ops.backends.aiter.probe import ProbeShape, run_probe
from mla_ops.backends.aiter.state import persistent_mode

__all__ = ["AiterModulesUnit", "AiterProbeUnit", "aiter_fields", "aiter_units"]

# Seconds of a cold build, from AITER's public reports.
_COST = {"module_aiter_core": 20.0, "module_aiter_enum": 20.0, "module_mla_asm": 20.0}
_OTHER_COST = 40.0


@dataclass(frozen=True, kw_only=True)
class AiterModulesUnit(Unit):
    """Modules that are built side by side into ``AITER_JIT_DIR``.

    Attributes:
        modules: their names.
        arch: GPU architecture to build for.
    """

    modules: tuple[str, ...]
    arch: str
    kind: str = "aiter_module"
    phase: Phase = "kernels"

    def build(self, resources: Any) -> None:
        builder = ModuleBuilder(
            runtime.installed_runtime().installation, Path(os.environ["AITER_JIT_DIR"]), archs=[self.arch]
        )
        builder.build(self.modules, lambda line: print(line, file=sys.stderr, flush=True))


@dataclass(frozen=True, kw_only=True)
class AiterProbeUnit(Unit):
    """The decode kernel, used once in a process of its own, compared with the reference.

    Attributes:
        shape: what is decoded.
    """

    shape: ProbeShape
    kind: str = "aiter_probe"
    phase: Phase = "kernels"
    cost: float = 20.0

    def build(self, resources: Any) -> None:
        run_probe(self.shape)

    def load(self, resources: Any) -> None:
        """Nothing: the verdict is the record that it succeeded, under the same fingerprint."""


def aiter_units(device: str, num_heads: int, query_len: int, page_size: int) -> tuple[Unit, ...]:
    """The units for a decode on ``device``: the base module, the others, the probe.

    Raises:
        BackendUnavailableError: there is no AITER.
        ValueError: ``device`` is not an AMD GPU.
    """
    arch = runtime.arch_of(torch.device(device))
    if arch is None:
        raise ValueError(f"device must be an AMD GPU for AITER's modules, got {device}")
    names = modules_for(runtime.installed_runtime().installation, persistent=persistent_mode())
    units: list[Unit] = []
    for group in (names[:1], names[1:]):
        key = f"AITER's {', '.join(group)} for {arch}"
        cost = sum(_COST.get(name, _OTHER_COST) for name in group)
        needs = tuple(unit.key for unit in units)
        units.append(AiterModulesUnit(key=key, modules=group, arch=arch, cost=cost, needs=needs))
    if not persistent_mode():
        shape = ProbeShape(num_heads, query_len, page_size)
        key = f"AITER's first decode of {num_heads} heads, query_len {query_len}, page size {page_size}"
        units.append(AiterProbeUnit(key=key, shape=shape, needs=tuple(unit.key for unit in units)))
    return tuple(units)


def aiter_fields(device: str) -> dict[str, str]:
    """What the fingerprint of a warm-up with AITER must hold."""
    arch = runtime.arch_of(torch.device(device))
    return {"aiter": build_key(runtime.installed_runtime().installation, [arch or "none"])}
