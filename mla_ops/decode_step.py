"""The decode step of a stack of MLA layers with random weights: what a warm-up captures and benchmarks measure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from capture import BuildOptions, GraphRunner
from mla_ops.compiled import compile_layers
from mla_ops.config import MLAConfig
from mla_ops.kv_cache import PagedLatentCache
from mla_ops.layer_functional import rms_norm
from mla_ops.module import DeepseekMLA
from mla_ops.plan import DecodeMetadata, DecodePlan
from mla_ops.validation import FLOAT8_DTYPES, FLOAT_DTYPES

__all__ = ["DecodeStep", "MLABlock", "dtypes_of"]

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
        device, (dtype, kv_dtype) = torch.device(options.device), dtypes_of(options)
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


def dtypes_of(options: BuildOptions) -> tuple[torch.dtype, torch.dtype]:
    """Of the step, and of the cache.

    Raises:
        ValueError: a name of no dtype that is served there.
    """
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
