"""The bounded set of kernels that a model needs: what a warm-up compiles."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from mla_ops.backends.triton.cache import gather_launch, write_launch
from mla_ops.backends.triton.configs import (
    ABSORB,
    EXPAND,
    head_configs,
    linear_configs,
    prefill_config,
)
from mla_ops.backends.triton.decode import choose_decode, decode_launches
from mla_ops.backends.triton.heads import absorb_launch, expand_launch
from mla_ops.backends.triton.launch import Launch
from mla_ops.backends.triton.merge import merge_launch
from mla_ops.backends.triton.plan_kernels import plan_variants
from mla_ops.backends.triton.prefill import prefill_launch
from mla_ops.backends.triton.products import choose_linear, linear_launch
from mla_ops.backends.triton.rows import norm_rope_write_launch, rms_norm_launch
from mla_ops.backends.widths import split_width
from mla_ops.config import MLAConfig
from mla_ops.rope import attention_scaling
from mla_ops.validation import FLOAT8_DTYPES

__all__ = ["layer_variants", "variants"]


def _meta(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """An aligned tensor, as a plan's and a module's are. A slice of one is not: its address is its offset."""
    return torch.empty(shape, dtype=dtype, device="meta")


def variants(
    config: MLAConfig,
    *,
    dtype: torch.dtype,
    kv_dtype: torch.dtype | None = None,
    page_sizes: Iterable[int] = (64,),
    query_len: int = 1,
    arch: str,
) -> list[Launch]:
    """Every kernel that serving ``config`` launches, over meta tensors; ``.compile()`` builds one.

    Nothing in them depends on batch size, sequence lengths or number of pages.

    Args:
        config: the model, with the heads of one rank.
        dtype: of q and of the outputs.
        kv_dtype: of the cache; ``dtype`` if None.
        page_sizes: of the caches.
        query_len: longest decode query.
        arch: ``"sm_90"``, ``"gfx942"`` ...: picks the launch configurations. The code is made for the target of
            Triton's active driver.
    """
    kv_dtype, page_sizes = kv_dtype or dtype, tuple(page_sizes)
    return [
        *(
            launch
            for page_size in dict.fromkeys(page_sizes)
            for launch in _paged(config, dtype, kv_dtype, page_size, query_len, arch)
        ),
        *_unpaged(config, dtype, arch),
        *plan_variants(query_len),
        *layer_variants(config, dtype=dtype, kv_dtype=kv_dtype, page_sizes=page_sizes, arch=arch),
    ]


def layer_variants(
    config: MLAConfig,
    *,
    dtype: torch.dtype,
    kv_dtype: torch.dtype | None = None,
    page_sizes: Iterable[int] = (64,),
    arch: str,
) -> list[Launch]:
    """Those of :func:`variants` that a layer launches around attention, whatever attention's backend is."""
    return [
        *(_front(config, dtype, kv_dtype or dtype, page_size, arch) for page_size in dict.fromkeys(page_sizes)),
        *_around_heads(config, dtype, arch),
        *_products(config, dtype, arch),
    ]


def _paged(
    config: MLAConfig, dtype: torch.dtype, kv_dtype: torch.dtype, page_size: int, query_len: int, arch: str
) -> list[Launch]:
    heads, rank = config.num_heads, config.kv_lora_rank
    cache = _meta(4, page_size, config.latent_dim, dtype=kv_dtype)
    scale = _meta(1, dtype=torch.float32) if kv_dtype in FLOAT8_DTYPES else None
    row = choose_decode(arch, _meta(1, heads, config.latent_dim, dtype=dtype), cache, heads * query_len, rank)
    launches: dict[tuple[object, ...], Launch] = {}
    # A request in many parts, in some, and in one or two: three merge kernels.
    for requests, units in ((1, 64), (1, 3), (1024, 1)):
        index, lens = _meta(requests + 1, dtype=torch.int32), _meta(requests, dtype=torch.int32)
        for launch in decode_launches(
            _meta(requests * query_len, heads, config.latent_dim, dtype=dtype), cache, index, index, index, lens,
            query_len, 0, config.softmax_scale, None, scale,
            _meta(requests * query_len, heads, rank, dtype=dtype),
            _meta(requests * query_len, heads, dtype=torch.float32), row, units * -(-heads * query_len // row.block_m),
        ):  # fmt: skip
            launches[launch.name, launch.args.get("PARTS")] = launch
    index, lens = _meta(2, dtype=torch.int32), _meta(1, dtype=torch.int32)
    tokens = _meta(4, config.latent_dim, dtype=dtype)
    write = write_launch(tokens[:, :rank], tokens[:, rank:], cache, _meta(4, dtype=torch.int64), scale)
    gathers = [gather_launch(cache, index, index, lens, index, starts, scale, tokens) for starts in (None, lens)]
    return [*launches.values(), write, *gathers]


def _front(config: MLAConfig, dtype: torch.dtype, kv_dtype: torch.dtype, page_size: int, arch: str) -> Launch:
    cache = _meta(4, page_size, config.latent_dim, dtype=kv_dtype)
    scale = _meta(1, dtype=torch.float32) if kv_dtype in FLOAT8_DTYPES else None
    width = config.q_lora_rank or 0
    if config.attention_bias:
        q_a, latent = _meta(4, width, dtype=dtype), _meta(4, config.latent_dim, dtype=dtype)
    else:  # one product with both weights
        both = _meta(4, width + config.latent_dim, dtype=dtype)
        q_a, latent = both[:, :width], both[:, width:]
    q_weight, kv_weight, index = (
        _meta(width, dtype=dtype), _meta(config.kv_lora_rank, dtype=dtype), _meta(4, dtype=torch.int64)
    )  # fmt: skip
    q_out, row = _meta(4, width, dtype=dtype), _meta(4, config.latent_dim, dtype=dtype)
    return norm_rope_write_launch(
        q_a, latent, q_weight, kv_weight, index, _frequencies(config), cache, index, config.rms_norm_eps,
        attention_scaling(config), config.rope_interleave, scale, q_out, row, arch,
    )  # fmt: skip


def _frequencies(config: MLAConfig) -> torch.Tensor:
    return _meta(config.qk_rope_head_dim // 2, dtype=torch.float32)


def _unpaged(config: MLAConfig, dtype: torch.dtype, arch: str) -> list[Launch]:
    heads, width = config.num_heads, config.v_head_dim
    index = _meta(2, dtype=torch.int32)
    q, lse = _meta(2, heads, config.qk_head_dim, dtype=dtype), _meta(2, heads, dtype=torch.float32)
    k, v, out = q, _meta(2, heads, width, dtype=dtype), _meta(2, heads, width, dtype=dtype)
    row, merge = prefill_config(arch, dtype), merge_launch(out, lse, out, lse, out, lse)
    if split_width(config.qk_head_dim) is None:  # another backend prefills
        return [merge]
    prefills = [
        prefill_launch(q, k, v, index, index, 2, 2, config.softmax_scale, causal, out, lse, row)
        for causal in (True, False)
    ]
    return [*prefills, merge]


def _around_heads(config: MLAConfig, dtype: torch.dtype, arch: str) -> list[Launch]:
    """The norm of a block, and the products per head for each tile of tokens."""
    heads, rank, rope = config.num_heads, config.kv_lora_rank, config.qk_rope_head_dim
    weight = _meta(heads, config.qk_nope_head_dim + config.v_head_dim, rank, dtype=dtype)
    hidden, index = _meta(2, config.hidden_size, dtype=dtype), _meta(2, dtype=torch.int64)
    q, absorbed = _meta(2, heads, config.qk_head_dim, dtype=dtype), _meta(2, heads, rank + rope, dtype=dtype)
    latent, values = _meta(2, heads, rank, dtype=dtype), _meta(2, heads * config.v_head_dim, dtype=dtype)
    w_uk, w_uv = weight[:, : config.qk_nope_head_dim], weight[:, config.qk_nope_head_dim :]
    return [
        rms_norm_launch(hidden, hidden[0], config.rms_norm_eps, hidden, arch),
        *(
            absorb_launch(
                *(q, w_uk, index, _frequencies(config), attention_scaling(config), config.rope_interleave),
                *(*config.query_scaling, absorbed, row, arch),
            )
            for row in head_configs(ABSORB, arch, dtype)
        ),
        *(expand_launch(latent, w_uv, values, row, arch) for row in head_configs(EXPAND, arch, dtype)),
    ]


def _products(config: MLAConfig, dtype: torch.dtype, arch: str) -> list[Launch]:
    """The products of few rows with the weights of a layer without bias."""
    heads, hidden, lora = config.num_heads, config.hidden_size, config.q_lora_rank
    shapes: list[tuple[int, ...]] = [(lora or hidden, heads * config.qk_head_dim)]  # width, then rows of each weight
    if not config.attention_bias:
        shapes.append((hidden, config.latent_dim) if lora is None else (hidden, lora, config.latent_dim))
        shapes.append((heads * config.v_head_dim, hidden))
    configs = linear_configs(arch, dtype)
    rows = {
        (shape, choose_linear(configs, row.most_rows, sum(shape[1:]), shape[0])) for shape in shapes for row in configs
    }
    return [
        linear_launch(
            _meta(1, width, dtype=dtype), [_meta(size, width, dtype=dtype) for size in sizes],
            _meta(1, sum(sizes), dtype=dtype) if adds else None, _meta(1, sum(sizes), dtype=dtype), row, arch,
        )
        for (width, *sizes), row in sorted(rows, key=repr)
        for adds in ((False, True) if (width, *sizes) == shapes[-1] else (False,))  # o_proj may add to a residual
        if row is not None
    ]  # fmt: skip
