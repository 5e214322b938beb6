"""Triton kernels on the interpreter: compile for a gfx target, no device needed, and launch on CPU tensors."""

import struct
from functools import cache
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel

from .elf import CodeObject
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
_OPTIONS = ("num_warps", "num_stages", "matrix_instr_nonkdim", "waves_per_eu")
_ALIGNMENT = 16
_programs: dict[str, Program] = {}


def launch_triton(
    kernel: Any,
    grid: tuple[int, ...],
    *args: Any,
    arch: str = "gfx942",
    order: str = "to_barrier",
    late: bool = False,
    **constexprs: Any,
) -> Program:
    """Compile a `triton.jit` function for `arch`, run it, and return the program; its `executed` names what it did.

    Args:
        grid: one to three workgroup counts.
        args: CPU tensors, ints and floats, in the order of the kernel's run-time parameters.
        order, late: as in `launch`.
        constexprs: the kernel's constexpr parameters, and Triton's num_warps, num_stages, matrix_instr_nonkdim and
            waves_per_eu.
    """
    options = {name: constexprs.pop(name) for name in _OPTIONS if name in constexprs}
    names = [name for name in kernel.arg_names if name not in constexprs]
    if len(names) != len(args):
        raise TypeError(f"{kernel.fn.__name__} takes the run-time arguments {names}, got {len(args)}")
    values = dict(zip(names, args, strict=True))
    compiled = compile_triton(kernel, values, constexprs, options, arch)
    program = _programs.setdefault(compiled.hash, Program(CodeObject(compiled.asm["hsaco"])))
    memory = Memory()
    for name, value in values.items():
        if isinstance(value, torch.Tensor):
            memory.add(value, name)
    (entry,) = program.code.kernels.values()
    block = (64 * compiled.metadata.num_warps, 1, 1)
    grid = (*grid, 1, 1)[:3]
    lds = max(0, compiled.metadata.shared - entry.lds_bytes)
    launch(
        program,
        entry.name,
        grid,
        block,
        _kernarg(entry, list(values.values())),
        memory,
        dynamic_lds=lds,
        order=order,
        late=late,
    )
    return program


def compile_triton(
    kernel: Any, values: dict[str, Any], constexprs: dict[str, Any], options: dict[str, Any], arch: str
) -> CompiledKernel:
    """The compiled kernel for arguments of these types, specialised on divisibility by 16 as a launch would be."""
    signature = {name: "constexpr" if name in constexprs else _type_name(values[name]) for name in kernel.arg_names}
    divisible = tuple(i for i, name in enumerate(kernel.arg_names) if name in values and _is_divisible(values[name]))
    return _compile(
        kernel, tuple(signature.items()), tuple(constexprs.items()), tuple(options.items()), divisible, arch
    )


@cache
def _compile(kernel, signature, constexprs, options, divisible, arch) -> CompiledKernel:
    attributes = {(index,): [["tt.divisibility", _ALIGNMENT]] for index in divisible}
    source = ASTSource(fn=kernel, signature=dict(signature), constexprs=dict(constexprs), attrs=attributes)
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
    raise TypeError(f"a kernel argument is a tensor, an int or a float, got {type(value).__name__}")


def _is_divisible(value: Any) -> bool:
    number = value.data_ptr() if isinstance(value, torch.Tensor) else value
    return isinstance(number, int) and number % _ALIGNMENT == 0


def _kernarg(entry, values: list[Any]) -> bytes:
    """The argument segment by the code object's metadata; what Triton adds behind the arguments stays zero."""
    segment = bytearray(entry.kernarg_bytes)
    for argument, value in zip(entry.arguments, values, strict=False):
        if isinstance(value, torch.Tensor):
            struct.pack_into("<Q", segment, argument.offset, value.data_ptr())
        else:
            struct.pack_into(_SCALARS[_type_name(value)], segment, argument.offset, value)
    return bytes(segment)
