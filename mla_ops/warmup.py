"""What MLA needs warmed: the decode step of a model's attention, as units of :class:`capture.WarmupSpec`.

Weights are inputs of every kernel and compiled graph, so random ones of the right shapes warm any checkpoint, and
one compiled block serves all layers.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

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
from mla_ops.compiled import compile_layers
from mla_ops.config import PRESETS, MLAConfig
from mla_ops.kv_cache import PagedLatentCache
from mla_ops.layer_functional import rms_norm
from mla_ops.module import DeepseekMLA
from mla_ops.ops import op_fingerprint
from mla_ops.plan import DecodeMetadata, DecodePlan
from mla_ops.validation import FLOAT8_DTYPES, FLOAT_DTYPES

if TYPE_CHECKING:
    from mla_ops.backends.triton.launch import Launch

__all__ = ["DecodeStep", "MLABlock", "spec"]

# Verification attends to a few pages per request: what differs between lengths shows around the page edges.
_VERIFY_PAGES = 3


class MLABlock(nn.Module):
    """Norm, attention, residual: the part of a decoder layer that this package is about."""

    def __init__(self, config: MLAConfig, *, device: torch.device | str | None, dtype: torch.dtype) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps, device=device, dtype=dtype)
        self.self_attn = DeepseekMLA(config, device=device, dtype=dtype)

    def forward(self, hidden_states: Tensor, positions: Tensor, kv_cache: Tensor, plan: DecodeMetadata) -> Tensor:
        """``[T, hidden_size]`` to ``[T, hidden_size]``; see :meth:`mla_ops.DeepseekMLA.forward`."""
        norm = self.input_layernorm
        if self.self_attn.fuses(hidden_states, plan.backend):
            assert norm.eps is not None
            normed = rms_norm(hidden_states, norm.weight, eps=norm.eps, backend="triton")
        else:
            normed = norm(hidden_states)
        added: Tensor = self.self_attn(normed, positions, kv_cache, plan, hidden_states)
        return added


class DecodeStep:
    """The decode step of a stack of MLA layers, with all that it reads, and a runner for it.

    The plan is updated inside the step, so that a captured graph starts from a block table and lengths.

    Args:
        config: dimensions of one rank.
        options: sizes, dtypes, device.
        num_layers: layers.
        pages_per_request: most pages that :meth:`inputs` gives a request, and room for them in the cache.
    """

    def __init__(
        self, config: MLAConfig, options: BuildOptions, num_layers: int, *, pages_per_request: int = _VERIFY_PAGES
    ) -> None:
        device, (dtype, kv_dtype) = torch.device(options.device), _dtypes(options)
        self.config, self.options, self.dtype, self.kv_dtype = config, options, dtype, kv_dtype
        self.generator = torch.Generator(device).manual_seed(0)
        self.blocks = [self._random_block(device, dtype) for _ in range(num_layers)]
        self.plan = DecodePlan(
            config,
            max_batch_size=max(options.batch_sizes),
            max_seq_len=options.max_seq_len,
            query_len=options.query_len,
            page_size=options.page_size,
            device=device,
            dtype=dtype,
            kv_dtype=kv_dtype,
            backend=options.backend,
        )
        self.pages_per_request = min(pages_per_request, self.plan.max_pages)
        self.cache = PagedLatentCache(
            config,
            num_layers=num_layers,
            num_pages=max(options.batch_sizes) * self.pages_per_request + 1,
            page_size=options.page_size,
            dtype=kv_dtype,
            device=device,
        )
        for layer in self.cache.layers:
            # Through float32: fp8 tensors have no normal_
            rows = torch.randn(layer.shape, device=device, generator=self.generator)
            layer.copy_(rows)
        self.run_blocks: list[Callable[..., Tensor]] = list(self.blocks)

    def __call__(self, hidden_states: Tensor, block_table: Tensor, seq_lens: Tensor) -> Tensor:
        """hidden_states ``[B * query_len, hidden_size]``, block_table ``[B, max_pages]``, seq_lens ``[B]``."""
        self.plan.update(block_table, seq_lens)
        metadata = self.plan.at(seq_lens.shape[0])
        for block, kv_cache in zip(self.run_blocks, self.cache.layers, strict=True):
            hidden_states = block(hidden_states, metadata.positions, kv_cache, metadata)
        return hidden_states

    def inputs(self, batch_size: int, generator: torch.Generator) -> dict[str, Tensor]:
        """Fresh valid inputs: random rows, lengths and pages; no page belongs to two requests."""
        options, device, where = self.options, self.cache.layers[0].device, generator.device
        tokens = batch_size * options.query_len
        hidden = torch.randn(tokens, self.config.hidden_size, device=where, generator=generator)
        pages = torch.randperm(self.cache.num_pages, device=where, generator=generator)
        table = torch.zeros(batch_size, self.plan.max_pages, dtype=torch.int32, device=where)
        table[:, : self.pages_per_request] = pages[: batch_size * self.pages_per_request].view(batch_size, -1)
        longest = min(self.pages_per_request * options.page_size, options.max_seq_len)
        lens = torch.randint(options.query_len, longest + 1, (batch_size,), device=where, generator=generator)
        return {
            "hidden_states": hidden.to(device, self.dtype),
            "block_table": table.to(device),
            "seq_lens": lens.to(device, torch.int32),
        }

    def poison(self, inputs: Mapping[str, Tensor]) -> None:
        """NaN into every slot of the caches that a step over ``inputs`` must not read."""
        page_size = self.options.page_size
        table, lens = inputs["block_table"][:, : self.pages_per_request].long(), inputs["seq_lens"].long()
        position = torch.arange(self.pages_per_request * page_size, device=lens.device)
        slots = table[:, position // page_size] * page_size + position % page_size
        used = torch.zeros(self.cache.num_pages * page_size, dtype=torch.bool, device=lens.device)
        used[slots[position < lens[:, None]]] = True
        for layer in self.cache.layers:
            rows = layer.view(-1, layer.shape[-1])
            if layer.dtype in FLOAT8_DTYPES:
                nan = torch.full((), torch.nan, device=layer.device).to(layer.dtype).view(torch.uint8)
                rows.view(torch.uint8).masked_fill_(~used[:, None], int(nan))
            else:
                rows.masked_fill_(~used[:, None], torch.nan)

    def runner(self) -> GraphRunner:
        """A runner of this step, not captured yet."""
        return GraphRunner(
            self,
            batch_sizes=self.options.batch_sizes,
            example_inputs=self.inputs(max(self.options.batch_sizes), self.generator),
            batch_dims={"hidden_states": 0, "block_table": 0, "seq_lens": 0},
            state={f"kv_cache of layer {i}": layer for i, layer in enumerate(self.cache.layers)},
            make_inputs=self.inputs,
            poison_state=self.poison,
        )

    def compile(self) -> None:
        """Let the layers share a compiled function, and call it on a step of padded requests, which writes nothing, for
        each backend that the plan has for some size: a graph is of one."""
        compiled, dtype = compile_layers(self.blocks), self.dtype
        steps = {metadata.backend: metadata for metadata in map(self.plan.at, sorted(self.options.batch_sizes)[::-1])}
        with torch.no_grad():
            for metadata in steps.values():
                tokens = len(metadata.positions)
                hidden_states = torch.zeros(tokens, self.config.hidden_size, dtype=dtype, device=self.plan.device)
                compiled[0](hidden_states, metadata.positions, self.cache.layers[0], metadata)
        self.run_blocks = list(compiled)

    def _random_block(self, device: torch.device, dtype: torch.dtype) -> MLABlock:
        block = MLABlock(self.config, device=device, dtype=dtype)
        for name, parameter in block.named_parameters():
            if name.endswith("norm.weight"):
                nn.init.ones_(parameter)
            else:
                nn.init.normal_(parameter, std=0.02, generator=self.generator)
        if self.kv_dtype in FLOAT8_DTYPES:
            block.self_attn.kv_scale = torch.ones(1, device=device)
        return block.requires_grad_(False)


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
    device, (dtype, kv_dtype) = torch.device(options.device), _dtypes(options)
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
    for traced in ("compiled", "functional", "layer_functional", "module", "plan", "rope", "warmup"):
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


def _dtypes(options: BuildOptions) -> tuple[torch.dtype, torch.dtype]:
    """Of the step, and of the cache."""
    dtype = _dtype("dtype", options.dtype, FLOAT_DTYPES)
    if options.kv_dtype is None:
        return dtype, dtype
    kv_dtype = _dtype("kv_dtype", options.kv_dtype, (*FLOAT_DTYPES, *FLOAT8_DTYPES))
    if kv_dtype != dtype and kv_dtype not in FLOAT8_DTYPES:
        raise ValueError(f"kv_dtype must be dtype={options.dtype} or {_names(FLOAT8_DTYPES)}, got {options.kv_dtype}")
    return dtype, kv_dtype


def _dtype(name: str, value: str, served: Sequence[torch.dtype]) -> torch.dtype:
    dtype = getattr(torch, value, None)
    if not isinstance(dtype, torch.dtype) or dtype not in served:
        raise ValueError(f"{name} must name a floating torch dtype of {_names(served)}, got {value!r}")
    return dtype


def _names(dtypes: Sequence[torch.dtype]) -> str:
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


def _compiler_missing(device: torch.device) -> str:
    """Why nothing can be compiled for ``device`` here; "" where it can."""
    if device.type == "cpu" and not any(map(shutil.which, (os.environ.get("CXX") or "g++", "clang++", "g++"))):
        return "this machine has no C++ compiler (install g++)"
    return ""
