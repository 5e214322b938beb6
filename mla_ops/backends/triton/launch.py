"""What one kernel launch consists of, and what the launchers must know of a device."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

import torch
import triton
from torch import Tensor

from mla_ops.errors import BackendUnavailableError

__all__ = [
    "BoundLaunch",
    "BoundOp",
    "Launch",
    "RepeatedLaunch",
    "arch_of",
    "arch_of_device",
    "bound_stream",
    "compute_units",
    "empty_strided",
    "heads_lie_near",
    "refuse",
]

empty_strided: Callable[[Sequence[int], Sequence[int], torch.dtype], Tensor] = getattr(
    torch._C._dynamo.guards,
    "_empty_strided_cuda",
    lambda shape, strides, dtype: torch.empty_strided(shape, strides, dtype=dtype, device="cuda"),
)
"""A tensor on the current device. What Inductor's code allocates with costs a third of ``torch.empty``."""

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

    def run(self) -> Any:
        """Launch on the current stream of the tensors' device; what Triton compiled, None where it keeps nothing.

        Triton binds, specialises and hashes some thirty arguments at each launch, in Python. So what it compiled is
        kept by a key of our own, and launched with the arguments as they are. What makes the same launch at each step
        binds it, and saves this key too: :class:`BoundLaunch`.
        """
        device = next((x.device for x in self.args.values() if isinstance(x, Tensor)), None)
        if device is not None and device.type == "cuda" and device.index != torch.cuda.current_device():
            with torch.cuda.device(device):  # Triton launches on the current device, wherever the tensors are
                return self._run()
        return self._run()

    def _run(self) -> Any:
        key, values = self._specialization()
        compiled = _COMPILED.get(key) if key else None
        if compiled is not None:
            compiled[(*self.grid, 1, 1)[:3]](*values)
            return compiled
        compiled = self.kernel[self.grid](**self.args, **self.options)
        if key and compiled is not None:
            _COMPILED[key] = compiled
        return compiled if key else None

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
            else:
                key.append(value)
        return tuple(key), values

    def compile(self) -> Any:
        """Compile for the active driver's target without running; the compiled kernel."""
        return self.kernel.warmup(**self.args, grid=self.grid, **self.options)


class BoundLaunch:
    """What Triton compiled for a launch, to be launched again with the same grid and scalars over other addresses.

    The caller answers for what the code was made for: dtypes, and addresses of 16 bytes where they were so before.
    (Code for AMD may have offsets of 32 bits where a tensor is below 2 GiB. They follow from shapes and strides: with
    the same ones they fit again.)

    Args:
        launch: the launch; its kernel has its pointers first.
        compiled: what ``launch.run()`` returned.
        names: what a call will give the addresses of, in order.

    Raises:
        KeyError: the kernel points to something that is not in ``names``.
    """

    __slots__ = ("_code", "_grid", "_pick", "_rest", "_run")

    def __init__(self, launch: Launch, compiled: Any, names: Sequence[str]) -> None:
        order = [name for name, _ in _parameters(launch.kernel)]
        place = {name: i for i, name in enumerate(names)}
        pointers = [name for name in order if name in place or isinstance(launch.args[name], Tensor)]
        assert order[: len(pointers)] == pointers, f"{launch.name} must have its pointers first"
        self._run = compiled.run
        self._code = (compiled.function, compiled.packed_metadata, None, None, None)  # no metadata, no hooks
        self._grid = (*launch.grid, 1, 1)[:3]
        places = [place[name] for name in pointers]
        # An itemgetter of one place gives what is there, of more a tuple
        self._pick = itemgetter(*places) if len(places) > 1 else lambda addresses: [addresses[i] for i in places]
        self._rest = tuple(launch.args[name] for name in order[len(pointers) :])

    def __call__(self, stream: int, addresses: Sequence[int | None]) -> None:
        """Launch on ``stream``, one of :func:`bound_stream`."""
        self._run(*self._grid, stream, *self._code, *self._pick(addresses), *self._rest)


class RepeatedLaunch:
    """One launch after another that differ in addresses only; the first is made, and what it compiled is bound.

    Args:
        names: of what the kernel points to.
    """

    def __init__(self, *names: str) -> None:
        self._names = names
        self._bound: tuple[BoundLaunch, int] | None = None

    def __call__(self, make: Callable[[], Launch], *tensors: Tensor | None) -> None:
        """Launch over ``tensors``, in the order of the names; ``make`` makes the launch where it must be made."""
        bound = self._bound
        stream = None if bound is None else bound_stream(bound[1])
        if bound is not None and stream is not None:
            bound[0](stream, [None if x is None else x.data_ptr() for x in tensors])
            return
        launch = make()
        compiled = launch.run()
        if compiled is not None:
            device = next(x.device.index for x in tensors if x is not None)
            self._bound = BoundLaunch(launch, compiled, self._names), device


class BoundOp:
    """An op of one launch, for calls of one signature: the same shapes, strides, dtypes, devices, alignments, scalars.

    The first call makes the launch and the tensors that it writes; the next ones allocate the like, and launch what
    Triton compiled then over their own addresses. Nothing on the device is kept between calls.

    Args:
        prepare: the launch of a call, and the new tensors that it writes.
        names: of a call's arguments, then of these tensors, as the kernel calls what it points to.
    """

    def __init__(self, prepare: Callable[..., tuple[Launch, tuple[Tensor, ...]]], *names: str) -> None:
        self._prepare = prepare
        self._names = names
        self._ready: _ReadyOp | None = None

    def __call__(self, *args: Any) -> Any:
        """The tensors that are written; one alone is no tuple."""
        ready = self._ready
        stream = None if ready is None else bound_stream(ready.device)
        if ready is not None and stream is not None:
            results = tuple([empty_strided(*layout) for layout in ready.results])
            pointed = ready.pick((*args, *results))
            ready.launch(stream, [None if x is None else x.data_ptr() for x in pointed])
        else:
            launch, results = self._prepare(*args)
            compiled = launch.run()
            if compiled is not None:
                self._ready = self._bind(launch, compiled, (*args, *results), results)
        return results[0] if len(results) == 1 else results

    def _bind(self, launch: Launch, compiled: Any, values: Sequence[Any], results: Sequence[Tensor]) -> _ReadyOp:
        places = [i for i, x in enumerate(values) if x is None or isinstance(x, Tensor)]
        return _ReadyOp(
            device=next(x.device.index for x in values if isinstance(x, Tensor)),
            pick=itemgetter(*places),
            launch=BoundLaunch(launch, compiled, [self._names[i] for i in places]),
            results=tuple((tuple(x.shape), x.stride(), x.dtype) for x in results),
        )


@dataclass(frozen=True, slots=True)
class _ReadyOp:
    """What all calls of one signature have in common."""

    device: int
    pick: Callable[[Sequence[Any]], Sequence[Tensor | None]]  # of arguments and results what is pointed to
    launch: BoundLaunch
    results: tuple[tuple[tuple[int, ...], tuple[int, ...], torch.dtype], ...]


def bound_stream(device: int) -> int | None:
    """The current stream for bound launches on ``device``; None where they may not be used.

    They go where :meth:`Launch.run` would: to the current device; and past Triton's launch hooks (a profiler's).
    """
    runtime = triton.knobs.runtime
    for hook in (runtime.launch_enter_hook, runtime.launch_exit_hook):
        if hook is not None and getattr(hook, "calls", True):
            return None
    if torch.cuda.current_device() != device:
        return None
    return torch._C._cuda_getCurrentRawStream(device)


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


def heads_lie_near(x: Tensor) -> bool:
    """Whether the offsets of all heads of ``[T, H, ...]`` fit in 32 bits, in which the kernels compute them."""
    return (x.shape[1] - 1) * x.stride(1) < 2**31


def refuse(reason: str) -> BackendUnavailableError:
    """The error for what these kernels are not made for and the reference is."""
    return BackendUnavailableError("triton", reason, 'use backend="reference"')
