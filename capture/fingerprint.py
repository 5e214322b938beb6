"""What a warm-up cache depends on, as named fields, and the digest that names its directory.

Two processes share a cache directory exactly when all of their fields are equal. A field belongs here if a
different value could make a cached kernel or graph wrong or useless. Places and identities never do: no path,
home directory, user, host, port, process id, rank or device index enters, so a cache may be copied to another
machine or path.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import metadata
from typing import TYPE_CHECKING, TypeAlias, Union

if TYPE_CHECKING:
    import torch

__all__ = [
    "ABSENT",
    "ENVIRONMENT_SWITCHES",
    "JSON",
    "Fingerprint",
    "environment_fields",
    "require_target",
    "target_fields",
]

JSON: TypeAlias = Union[bool, int, float, str, Sequence["JSON"], Mapping[str, "JSON"], None]  # noqa: UP007

ABSENT = "(absent)"
"""Stands for a missing field in :meth:`Fingerprint.diff`."""

_DIGEST_HEX = 20
_TRITON_DISTRIBUTIONS = ("triton", "triton-rocm", "pytorch-triton-rocm")

ENVIRONMENT_SWITCHES = (
    # Triton: what its own cache key reads. Present at all is another key, even when equal to the default.
    "AMDGCN_ANALYZE_SMALL_TENSOR_RANGE",
    "AMDGCN_SCALARIZE_PACKED_FOPS",
    "AMDGCN_USE_BUFFER_ATOMICS",
    "AMDGCN_USE_BUFFER_OPS",
    "DISABLE_LLVM_OPT",
    "DISABLE_PTXAS_OPT",
    "PTXAS_OPTIONS",
    "TRITON_DEBUG",
    "TRITON_DEFAULT_FP_FUSION",
    "TRITON_DISABLE_LINE_INFO",
    "TRITON_ENABLE_ASAN",
    "TRITON_F32_DEFAULT",
    "TRITON_FORCE_DISABLE_FP_FUSION",
    "TRITON_HIP_USE_ASYNC_COPY",
    "TRITON_HIP_USE_BLOCK_PINGPONG",
    "TRITON_HIP_USE_COEXEC_SCHEDULER",
    "TRITON_HIP_USE_EXPERT_SCHEDULING",
    "TRITON_HIP_USE_IN_THREAD_TRANSPOSE",
    "TRITON_INSTRUMENTATION_MODE",
    "TRITON_INTERPRET",
    "TRITON_OVERRIDE_ARCH",
    # torch.compile: the tag that its keys carry, and the switches of Inductor that change generated code.
    "TORCH_COMPILE_CACHE_KEY_TAG",
    "TORCHINDUCTOR_COMPREHENSIVE_PADDING",
    "TORCHINDUCTOR_COORDINATE_DESCENT_TUNING",
    "TORCHINDUCTOR_CPP_DYNAMIC_THREADS",
    "TORCHINDUCTOR_CPP_MARCH",
    "TORCHINDUCTOR_CPP_WRAPPER",
    "TORCHINDUCTOR_CUDAGRAPHS",
    "TORCHINDUCTOR_EMULATE_PRECISION_CASTS",
    "TORCHINDUCTOR_FREEZING",
    "TORCHINDUCTOR_GRAPH_PARTITION",
    "TORCHINDUCTOR_LAYOUT_OPTIMIZATION",
    "TORCHINDUCTOR_MAX_AUTOTUNE",
    "TORCHINDUCTOR_MAX_AUTOTUNE_GEMM",
    "TORCHINDUCTOR_MAX_AUTOTUNE_GEMM_BACKENDS",
    "TORCHINDUCTOR_MAX_AUTOTUNE_POINTWISE",
    "TORCHINDUCTOR_NAN_ASSERTS",
    "TORCHINDUCTOR_PERSISTENT_REDUCTIONS",
    "TORCHINDUCTOR_SHAPE_PADDING",
    "TORCHINDUCTOR_SIZE_ASSERTS",
    "TORCHINDUCTOR_UNIQUE_KERNEL_NAMES",
    # Numbers that matmuls round to.
    "NVIDIA_TF32_OVERRIDE",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
    # What AITER and other ROCm builds compile for.
    "GPU_ARCHS",
    "PYTORCH_ROCM_ARCH",
)
"""Environment variables that enter the fingerprint when they are set (to anything)."""


@dataclass(frozen=True)
class Fingerprint:
    """Named JSON fields; equal fields, equal digest.

    Raises:
        TypeError: a field is not JSON (the message names it).
    """

    fields: Mapping[str, JSON]

    def __post_init__(self) -> None:
        for name, value in self.fields.items():
            try:
                _check_keys(value)
                _canonical(value)
            except (TypeError, ValueError) as error:
                raise TypeError(
                    f"fingerprint field {name!r} is not JSON ({error}): use numbers, strings, lists"
                ) from None

    @cached_property
    def digest(self) -> str:
        """The first 20 hexadecimal digits of the sha256 of the fields as canonical JSON."""
        return hashlib.sha256(_canonical(self.fields).encode()).hexdigest()[:_DIGEST_HEX]

    def diff(self, other: Fingerprint) -> list[tuple[str, JSON, JSON]]:
        """The fields that differ, as ``(field, ours, theirs)``; nested fields are named ``outer.inner``."""
        ours, theirs = dict(_flatten(self.fields)), dict(_flatten(other.fields))
        pairs = ((name, ours.get(name, ABSENT), theirs.get(name, ABSENT)) for name in sorted({*ours, *theirs}))
        return [pair for pair in pairs if _canonical(pair[1]) != _canonical(pair[2])]


def environment_fields(device: str | torch.device) -> dict[str, JSON]:
    """The fields that come from this process and ``device`` and not from the model.

    A GPU's properties are read (this initialises the runtime, as any first use does). The driver's version is
    no field: every cached kernel is machine code for the named architecture, from compilers that are fields.
    The thread count is one on a CPU alone, where Inductor's C++ kernels are specialised to it.
    """
    import torch

    fields: dict[str, JSON] = {
        "mla_ops": _version_of(("mla-ops",)),
        "python": f"{sys.version_info.major}.{sys.version_info.minor}",
        "python_abi": str(sysconfig.get_config_var("SOABI")),
        "torch": torch.__version__,
        "torch_git": str(torch.version.git_version),
        "triton": _version_of(_TRITON_DISTRIBUTIONS),
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
    }
    fields |= _device_fields(torch.device(device))
    fields |= {f"env.{name}": os.environ[name] for name in ENVIRONMENT_SWITCHES if name in os.environ}
    return fields


def require_target(arch: str) -> None:
    """Refuse a target that kernels are not built for, or that a device of its kind would not look for.

    Raises:
        ValueError: ``arch`` is not ``sm_`` and a number or ``gfx9`` and the rest, as :func:`environment_fields` has it.
    """
    if not re.fullmatch(r"sm_\d{2,3}|gfx9[0-9a-f]+", arch):
        raise ValueError(f"target must be such as sm_90, gfx942 or gfx950, got {arch!r}")


def target_fields(arch: str) -> dict[str, JSON]:
    """The fields of kernels that were built for ``arch`` without a device of that kind.

    Less than :func:`environment_fields`, because the machine that builds cannot know the rest: such kernels carry
    what they depend on in records of their own, see :mod:`capture.kernels`.

    Args:
        arch: ``sm_90``, ``gfx942`` or all of a ``gcnArchName``.
    """
    return {"target": arch.split(":")[0], "triton": _version_of(_TRITON_DISTRIBUTIONS)}


def _device_fields(device: torch.device) -> dict[str, JSON]:
    import torch

    if device.type == "cpu":
        capability = torch.backends.cpu.get_cpu_capability()
        return {"device": "cpu", "device_name": "cpu", "arch": capability, "threads": torch.get_num_threads()}
    if device.type != "cuda":
        raise ValueError(f'device must be "cpu" or "cuda" (also for ROCm), got {str(device)!r}')
    properties = torch.cuda.get_device_properties(device)
    arch = properties.gcnArchName if torch.version.hip else f"sm_{properties.major}{properties.minor}"
    return {
        "device": "cuda",
        "device_name": properties.name,
        "arch": arch,
        "multi_processors": properties.multi_processor_count,  # fewer in a partition: other split plans
    }


def _version_of(distributions: Sequence[str]) -> str | None:
    """The version of the first that is installed."""
    for name in distributions:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def _canonical(value: JSON) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False, default=_plain)


def _check_keys(value: object) -> None:
    """A number as key would come back from the manifest as a string, at another place in the order."""
    if isinstance(value, Mapping):
        if odd := [key for key in value if not isinstance(key, str)]:
            raise TypeError(f"key {odd[0]!r} is no string")
        value = list(value.values())
    if isinstance(value, list | tuple):
        for item in value:
            _check_keys(item)


def _plain(value: object) -> object:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"got {type(value).__name__}")


def _flatten(fields: Mapping[str, JSON], prefix: str = "") -> Iterator[tuple[str, JSON]]:
    for name, value in fields.items():
        if isinstance(value, Mapping) and value:
            yield from _flatten(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value
