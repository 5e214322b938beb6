"""What one kernel launch consists of, and what the launchers must know of a device."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from mla_ops.errors import BackendUnavailableError

__all__ = ["Launch", "arch_of", "arch_of_device", "compute_units", "is_power_of_two", "refuse"]

# Programs that share the work where there is no device to count: enough to split requests, few enough to interpret.
_INTERPRETED_UNITS = 6


_AMD = torch.version.hip is not None
_COMPILED: dict[tuple[Any, ...], Any] = {}


@functools.cache
def _parameters(kernel: Any) -> tuple[tuple[str, bool], ...]:
    """Names of a kernel's parameters in order, and whether code is not specialised to a parameter's value."""
    return tuple((parameter.name, bool(parameter.do_not_specialize)) for parameter in kernel.params)


@dataclass(frozen=True)
class Launch:
    """A kernel with everything that its compilation and its run need.

    The launchers build these and run them; :func:`mla_ops.backends.triton.variants` builds them over meta tensors
    and compiles them, so what is warmed is by construction what is launched.
    """

    kernel: Any
    grid: tuple[int, ...]
    args: Mapping[str, Any]
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The kernel's name."""
        return str(self.kernel.__name__)

    @property
    def key(self) -> str:
        """What tells this launch's code from another's: dtypes, compile-time constants, arguments left out."""
        parts = [self.name]
        for name, value in self.args.items():
            if isinstance(value, Tensor):
                parts.append(f"{name}:{str(value.dtype).removeprefix('torch.')}")
            elif value is None or name.isupper():
                parts.append(f"{name}={value}")
        return " ".join(parts)

    def run(self) -> None:
        """Launch on the current stream.

        Triton binds, specialises and hashes some thirty arguments at each launch, in Python: most of the host time of
        an eager decode. So what it compiled is kept by a key of our own, and launched with the arguments as they are.
        """
        key, values = self._specialization()
        compiled = _COMPILED.get(key) if key else None
        if compiled is not None:
            compiled[(*self.grid, 1, 1)[:3]](*values)
            return
        compiled = self.kernel[self.grid](**self.args, **self.options)
        if key and compiled is not None:
            _COMPILED[key] = compiled

    def _specialization(self) -> tuple[tuple[Any, ...], list[Any]]:
        """A key that is at least as fine as Triton's, and the arguments in order; () where Triton must do it.

        Triton's code depends on dtypes, on whether pointers are of 16 bytes (on AMD also on whether a tensor is above
        2 GiB), and on integers by divisibility, which are in our key by value unless the kernel exempts them.
        """
        if triton.knobs.runtime.interpret:
            return (), []
        key: list[Any] = [self.kernel, torch.cuda.current_device(), *self.options.items()]
        values = []
        for name, exempt in _parameters(self.kernel):
            value = self.args[name]
            values.append(value)
            if isinstance(value, Tensor):
                key += (value.dtype, value.data_ptr() & 15, _AMD and value.untyped_storage().nbytes() >> 31)
            elif exempt:
                key.append(type(value) if isinstance(value, float) else -(2**31) <= value < 2**31)
            elif isinstance(value, TensorDescriptor):
                return (), []
            else:
                key.append(value)
        return tuple(key), values

    def compile(self) -> Any:
        """Compile for the active driver's target without running; the compiled kernel."""
        return self.kernel.warmup(**self.args, grid=self.grid, **self.options)


@functools.cache
def arch_of_device(device: torch.device) -> str:
    """``"sm_90"``, ``"gfx942"`` ... of a CUDA or HIP device."""
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        return str(properties.gcnArchName).split(":")[0]
    return f"sm_{properties.major}{properties.minor}"


@functools.cache
def _compute_units(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def arch_of(tensor: Tensor) -> str:
    """``"sm_90"``, ``"gfx942"`` ...; ``"cpu"`` under Triton's interpreter.

    Raises:
        BackendUnavailableError: the tensor is on a device for which Triton makes no code here.
    """
    if tensor.is_cuda:
        return arch_of_device(tensor.device)
    if tensor.device.type == "cpu" and triton.knobs.runtime.interpret:
        return "cpu"
    raise BackendUnavailableError(
        "triton",
        f"its kernels cannot run on {tensor.device}",
        'use backend="reference" there, or set TRITON_INTERPRET=1 before the import to debug the kernels on a CPU',
    )


def compute_units(tensor: Tensor) -> int:
    """Streaming multiprocessors or compute units of the tensor's device."""
    return _compute_units(tensor.device) if tensor.is_cuda else _INTERPRETED_UNITS


def is_power_of_two(value: int, least: int) -> bool:
    """Whether ``value`` is a power of two and at least ``least``."""
    return value >= least and not value & (value - 1)


def refuse(reason: str) -> BackendUnavailableError:
    """The error for what these kernels are not made for and the reference is."""
    return BackendUnavailableError("triton", reason, 'use backend="reference"')
