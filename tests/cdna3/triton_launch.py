"""Triton kernels on the interpreter: compile for a gfx target, no device needed, and launch on CPU tensors."""

import struct
from functools import cache
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel

from .elf import CodeObject, Kernel
from .launch import launch
from .machine import Memory
from .program import Program

__all__ = ["compile_triton", "launch_triton"]

_POINTERS = {
    torch.float32: "*fp32", torch.float16: "*fp16", torch.bfloat16: "*bf16",
    torch.float8_e4m3fnuz: "*fp8e4b8", torch.float8_e4m3fn: "*fp8e4nv", torch.float8_e5m2: "*fp8e5",
    torch.int64: "*i64", torch.int32: "*i32", torch.int16: "*i16", torch.int8: "*i8", torch.uint8: "*u8",
}  # fmt: skip
_SCALARS = {"i32": "<i", "i64": "<q", "fp32": "<f"}
_ALIGNMENT = 16
_programs: dict[str, Program] = {}


def launch_triton(
    kernel: Any,
    grid: tuple[int, ...],
    *args: Any,
    arch: str = "gfx942",
    order: str = "to_barrier",
    late: bool = False,
    **named: Any,
) -> Program:
    """Compile a `triton.jit` function for `arch`, run it, and return the program; its `executed` names what it did.

    Args:
        grid: one to three workgroup counts.
        args, named: what `kernel[grid](...)` takes: arguments, CPU tensors for the pointers, and options such as
            num_warps.
        order, late: as in `launch`.
    """
    values = dict(zip(kernel.arg_names, args, strict=False)) | {k: v for k, v in named.items() if k in kernel.arg_names}
    values = {p.name: p.default for p in kernel.params if p.has_default} | values
    if missing := [name for name in kernel.arg_names if name not in values]:
        raise TypeError(f"{kernel.fn.__name__} is missing the arguments {', '.join(missing)}")
    options = {name: value for name, value in named.items() if name not in kernel.arg_names}
    compiled, constants = compile_triton(kernel, values, options, arch)
    if compiled.hash not in _programs:
        _programs[compiled.hash] = Program(CodeObject(compiled.asm["hsaco"]))
    program = _programs[compiled.hash]
    run_time = {name: values[name] for name in kernel.arg_names if name not in constants}
    memory = Memory()
    for name, value in run_time.items():
        if isinstance(value, torch.Tensor):
            memory.add(value, name)
    (entry,) = program.code.kernels.values()
    block = (64 * compiled.metadata.num_warps, 1, 1)
    lds = max(0, compiled.metadata.shared - entry.lds_bytes)
    kernarg = _kernarg(entry, list(run_time.values()))
    launch(program, entry.name, (*grid, 1, 1)[:3], block, kernarg, memory, dynamic_lds=lds, order=order, late=late)
    return program


def compile_triton(
    kernel: Any, values: dict[str, Any], options: dict[str, Any], arch: str
) -> tuple[CompiledKernel, dict[str, Any]]:
    """The compiled kernel for these arguments, and those of them that became constants.

    Specialised as Triton would at a launch: on None, on the integer 1, and on divisibility by 16.
    """
    constants, divisible = {}, []
    for index, parameter in enumerate(kernel.params):
        value = values[parameter.name]
        specialised = not parameter.do_not_specialize
        if parameter.is_constexpr or value is None or (type(value) is int and value == 1 and specialised):
            constants[parameter.name] = value
        elif specialised and not parameter.do_not_specialize_on_alignment and _is_divisible(value):
            divisible.append(index)
    signature = {n: "constexpr" if n in constants else _type_name(values[n]) for n in kernel.arg_names}
    key = (tuple(d.items()) for d in (signature, constants, options))
    return _compile(kernel, *key, tuple(divisible), arch), constants


@cache
def _compile(kernel, signature, constants, options, divisible, arch) -> CompiledKernel:
    attributes = {(index,): [["tt.divisibility", _ALIGNMENT]] for index in divisible}
    source = ASTSource(fn=kernel, signature=dict(signature), constexprs=dict(constants), attrs=attributes)
    # Given, because Triton 3.9 warns where it is left to the default.
    return triton.compile(
        source, target=GPUTarget("hip", arch, 64), options={"enable_fp_fusion": True, **dict(options)}
    )


def _type_name(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return _POINTERS[value.dtype]
    if isinstance(value, float):
        return "fp32"
    if isinstance(value, int):
        return "i32" if -(1 << 31) <= value < 1 << 31 else "i64"
    raise TypeError(f"a kernel argument is a tensor, an int, a float or None, got {type(value).__name__}")


def _is_divisible(value: Any) -> bool:
    number = value.data_ptr() if isinstance(value, torch.Tensor) else value
    return isinstance(number, int) and number % _ALIGNMENT == 0


def _kernarg(entry: Kernel, values: list[Any]) -> bytes:
    """The argument segment by the code object's metadata; what Triton adds behind the arguments stays zero."""
    segment = bytearray(entry.kernarg_bytes)
    for argument, value in zip(entry.arguments, values, strict=False):
        if isinstance(value, torch.Tensor):
            struct.pack_into("<Q", segment, argument.offset, value.data_ptr())
        else:
            struct.pack_into(_SCALARS[_type_name(value)], segment, argument.offset, value)
    return bytes(segment)
