"""What MLA needs warmed: the decode step of a model's attention, as units of :class:`capture.WarmupSpec`.

Weights are inputs of every kernel and compiled graph, so random ones of the right shapes warm any checkpoint, and
one compiled block serves all layers.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from capture import (
    BuildOptions,
    CompiledFunctionUnit,
    GraphCaptureUnit,
    GraphRunner,
    KernelBuildUnit,
    Unit,
    VerifyUnit,
    WarmupSpec,
)
from capture.process import open_device, prepare
from mla_ops.backends.select import Choice, select
from mla_ops.config import PRESETS, MLAConfig
from mla_ops.decode_step import DecodeStep, dtypes_of
from mla_ops.ops import op_fingerprint

if TYPE_CHECKING:
    from mla_ops.backends.triton.launch import Launch

__all__ = ["spec"]


@dataclass
class _Resources:
    """What the units work on; the runner is made when the first of them asks."""

    step: DecodeStep
    made: GraphRunner | None = None

    def runner(self) -> GraphRunner:
        if self.made is None:
            self.made = self.step.runner()
        return self.made


def spec(model: str | os.PathLike[str] | MLAConfig, options: BuildOptions) -> WarmupSpec:
    """The units that warm up the MLA decode of a model.

    Args:
        model: a preset's name, the path of a Hugging Face ``config.json`` or its folder, or a config.
        options: sizes, dtypes, device; with a target, only its kernels are built, and no layers are made.

    Raises:
        ValueError: no such preset or file, or an option that does not fit the model.
        BackendUnavailableError: the backend that was asked for cannot serve.
    """
    config, layers_of_model = _resolve_model(model)
    config = config.shard(options.tp)
    if not options.target:
        _prepare(options)
    num_layers = options.layers or layers_of_model
    if num_layers is None:
        raise ValueError(f"{model} says nothing of layers; give a number of layers (--layers)")
    if layers_of_model is not None and num_layers > layers_of_model:
        raise ValueError(f"layers must be at most the model's {layers_of_model}, got {num_layers}")
    device, (dtype, kv_dtype) = torch.device(options.device), dtypes_of(options)
    if options.target:
        return _ahead(str(model), config, options, dtype, kv_dtype)
    choice = select(
        *(config, device, dtype),
        backend=options.backend,
        page_size=options.page_size,
        query_len=options.query_len,
        kv_dtype=kv_dtype,
    )
    compiled, tier = _tier(choice, device, dtype, options.compile)
    layers = "1 layer" if num_layers == 1 else f"{num_layers} layers"
    sizes = "batch size " if len(options.batch_sizes) == 1 else "batch sizes "
    sizes += ",".join(map(str, sorted(options.batch_sizes)))
    graphs = f"decode step, query_len {options.query_len}, {layers}, {sizes}"
    units: list[Unit] = list(_kernel_units(config, options, choice, dtype, kv_dtype))
    if compiled:
        units.append(
            CompiledFunctionUnit(
                key=f"decode block, query_len {options.query_len}",
                call=lambda resources: resources.step.compile(),
            )
        )
    units.append(GraphCaptureUnit(key=f"graphs of the {graphs}", runner=_Resources.runner))
    units.append(VerifyUnit(key=f"proof of the {graphs}", graphs=units[-1].key, runner=_Resources.runner))
    return WarmupSpec(
        name=str(model) if not isinstance(model, MLAConfig) else "MLA",
        device=options.device,
        backend=(choice.name, f"{choice.reason}; {tier}"),
        fields=_fields(config, options, choice, dtype, kv_dtype),
        setup=lambda: _Resources(DecodeStep(config, options, num_layers)),
        units=tuple(units),
    )


def _tier(choice: Choice, device: torch.device, dtype: torch.dtype, asked: bool | None) -> tuple[bool, str]:
    """Whether the block is compiled, and how it runs and why, as the rest of a sentence.

    Best first: our kernels around attention, which need no compiler; a compiled block; its ops one by one.
    """
    fused = _runs_our_kernels(choice, device, dtype)
    missing = _compiler_missing(device)
    wanted = not fused if asked is None else asked
    if wanted and not missing:
        around = " around our kernels" if fused else ""
        return True, f"the block is compiled{around}{', as asked for' if asked else ''}"
    if fused:
        return False, "the block runs our kernels, which no compiler need fuse"
    return False, "the block is not compiled, " + (f"because {missing}" if wanted else "as asked for")


def _runs_our_kernels(choice: Choice, device: torch.device, dtype: torch.dtype) -> bool:
    return choice.name != "reference" and select(None, device, dtype, op="layer").name == "triton"


def _ahead(
    name: str, config: MLAConfig, options: BuildOptions, dtype: torch.dtype, kv_dtype: torch.dtype
) -> WarmupSpec:
    """The kernels alone, for a GPU that need not be here; the same options there make the same fields."""
    if options.backend not in ("auto", "triton"):
        raise ValueError(f"only the triton backend's kernels can be built ahead, not those of {options.backend!r}")
    choice = select(config, "cuda", dtype, backend="triton")
    return WarmupSpec(
        name=name,
        device="cpu",
        backend=(choice.name, f"its kernels are built ahead for {options.target}"),
        fields=_fields(config, options, choice, dtype, kv_dtype),
        setup=lambda: None,
        units=tuple(_kernel_units(config, options, choice, dtype, kv_dtype)),
        target=options.target,
    )


def _kernel_units(
    config: MLAConfig, options: BuildOptions, choice: Choice, dtype: torch.dtype, kv_dtype: torch.dtype
) -> Iterator[Unit]:
    device = torch.device(options.device)
    if choice.name == "aiter":
        from mla_ops.integrations.aiter_units import aiter_units  # here: no other start should pay for it

        yield from aiter_units(options.device, config.num_heads, options.query_len, options.page_size)
    # FlashMLA decodes only: the other ops are those of the backend that auto takes without it.
    others = select(config, device, dtype).name if choice.name == "flash_mla" else choice.name
    where = torch.device("cuda") if options.target else device
    if where.type != "cuda" or not _runs_our_kernels(choice, where, dtype):
        return
    from mla_ops.backends.triton import layer_variants, variants
    from mla_ops.backends.triton.launch import arch_of_device
    from mla_ops.backends.triton.plan_kernels import plan_variants

    arch = options.target or arch_of_device(torch.device(options.device))
    sizes: dict[str, Any] = {"dtype": dtype, "kv_dtype": kv_dtype, "page_sizes": (options.page_size,), "arch": arch}
    if others == "triton":
        launches = variants(config, query_len=options.query_len, **sizes)
    else:
        launches = [*plan_variants(options.query_len), *layer_variants(config, **sizes)]
    for launch in launches:
        cost = 2.0 if launch.name.startswith(("decode", "prefill")) else 0.3
        yield KernelBuildUnit(key=launch.key, compile=launch.compile, target=options.target, cost=cost)
        if arch.startswith("gfx") and "kv_cache" in launch.args:
            key = f"{launch.key}, cache above 2 GiB"
            yield KernelBuildUnit(key=key, compile=_with_large_cache(launch).compile, target=options.target, cost=cost)


def _with_large_cache(launch: Launch) -> Launch:
    """The same launch over a cache to which Triton's AMD backend cannot point with 32 bits: another kernel."""
    cache = launch.args["kv_cache"]
    pages = 2**31 // cache[0].nbytes + 1
    large = torch.empty(pages, *cache.shape[1:], dtype=cache.dtype, device="meta")
    return replace(launch, args={**launch.args, "kv_cache": large})


def _fields(
    config: MLAConfig, options: BuildOptions, choice: Choice, dtype: torch.dtype, kv_dtype: torch.dtype
) -> dict[str, Any]:
    of_backend: dict[str, Any] = {}
    if choice.name == "aiter":
        from mla_ops.integrations.aiter_units import aiter_fields

        of_backend = aiter_fields(options.device)
    return {
        **of_backend,
        "op_schemas": op_fingerprint(),
        "sources": _source_hash(),
        "config": config.to_dict(),
        "dtype": str(dtype).removeprefix("torch."),
        "kv_dtype": str(kv_dtype).removeprefix("torch."),
        "backend": choice.name,
        "query_len": options.query_len,
        "page_size": options.page_size,
        "max_seq_len": options.max_seq_len,
    }


def _source_hash() -> str:
    """Hash of what is traced into a compiled block."""
    folder, digest = Path(__file__).parent, hashlib.sha256()
    for traced in ("compiled", "decode_step", "functional", "layer_functional", "module", "plan", "rope"):
        digest.update((folder / f"{traced}.py").read_bytes())
    return digest.hexdigest()[:16]


def _prepare(options: BuildOptions) -> None:
    """Begin what needs no interpreter, and import our kernels meanwhile, which every backend of a GPU needs."""
    if options.backend == "reference":
        open_device(options.device)
        return
    prepare(options.device)
    if options.device.startswith("cuda"):
        with suppress(ImportError):
            import_module("mla_ops.backends.triton")


def _resolve_model(model: str | os.PathLike[str] | MLAConfig) -> tuple[MLAConfig, int | None]:
    if isinstance(model, MLAConfig):
        return model, None
    if str(model) in PRESETS:
        return PRESETS[str(model)], _LAYERS_OF_PRESET[str(model)]
    path = Path(model)
    if not path.exists():
        raise ValueError(f"model must be a preset ({', '.join(sorted(PRESETS))}) or a config.json, got {str(model)!r}")
    return MLAConfig.from_hf(path), MLAConfig.num_layers_of_hf(path)


_LAYERS_OF_PRESET = {
    "deepseek-v2-lite": 27,
    "deepseek-v2": 60,
    "deepseek-v3": 61,
    "kimi-k2": 61,
    "mistral-small-4": 36,
    "minicpm3": 62,
}


def _compiler_missing(device: torch.device) -> str:
    """Why nothing can be compiled for ``device`` here; "" where it can."""
    if device.type == "cpu" and not any(map(shutil.which, (os.environ.get("CXX") or "g++", "clang++", "g++"))):
        return "this machine has no C++ compiler (install g++)"
    return ""
