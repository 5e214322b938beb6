"""``DeepseekMLA``: multi-head latent attention with Hugging Face's weight names, over the ops of this package.

Letters: T tokens, H heads, R kv_lora_rank, P qk_rope_head_dim, D = R + P, N qk_nope_head_dim, V v_head_dim, S keys.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn

from mla_ops import functional, layer_functional
from mla_ops.config import MLAConfig
from mla_ops.plan import DecodeMetadata, DecodePlan, PrefillPlan
from mla_ops.rope import RotaryEmbedding, apply_rotary

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["DeepseekMLA", "check_call"]

# Hugging Face and DeepSeek build the two inner norms without the config's epsilon.
_INNER_NORM_EPS = 1e-6
_OURS = "triton"  # the backend of the ops around attention, whatever attention's is
_HAS_TRITON = importlib.util.find_spec("triton") is not None


class DeepseekMLA(nn.Module):
    """One MLA layer: absorbed paged decode, ragged prefill, chunked prefill over a cached prefix.

    Its state dict has the names and shapes of Hugging Face's ``DeepseekV3Attention``. Decode multiplies the query by
    W_UK and the result by W_UV, which are views of ``kv_b_proj.weight``: absorption takes no memory of its own until
    :meth:`absorb` is asked to free ``kv_b_proj``.

    Args:
        config: dimensions; ``config.shard(tp_size)`` for one tensor-parallel rank.
        device: of the parameters.
        dtype: of the parameters.

    Attributes:
        kv_scale: ``[1]`` float32 scale of an fp8 cache, or ``None``.
    """

    kv_scale: Tensor | None
    kv_b_weight: Tensor

    def __init__(
        self, config: MLAConfig, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.config = config
        self.num_local_heads = config.num_heads
        linear = partial(nn.Linear, device=device, dtype=dtype)
        norm = partial(nn.RMSNorm, eps=_INNER_NORM_EPS, device=device, dtype=dtype)
        heads, bias = config.num_heads, config.attention_bias
        if config.q_lora_rank is None:
            self.q_proj = linear(config.hidden_size, heads * config.qk_head_dim, bias=False)
        else:
            self.q_a_proj = linear(config.hidden_size, config.q_lora_rank, bias=bias)
            self.q_a_layernorm = norm(config.q_lora_rank)
            self.q_b_proj = linear(config.q_lora_rank, heads * config.qk_head_dim, bias=False)
        self.kv_a_proj_with_mqa = linear(config.hidden_size, config.latent_dim, bias=bias)
        if config.q_lora_rank is not None:
            _store_together(self.q_a_proj, self.kv_a_proj_with_mqa)
        self.kv_a_layernorm = norm(config.kv_lora_rank)
        self.kv_b_proj: nn.Linear | None = linear(
            config.kv_lora_rank, heads * (config.qk_nope_head_dim + config.v_head_dim), bias=False
        )
        self.o_proj = linear(heads * config.v_head_dim, config.hidden_size, bias=bias)
        self.rotary_emb = RotaryEmbedding(config, device)
        self.register_buffer("kv_scale", None, persistent=False)
        self.register_load_state_dict_post_hook(_compute_frequencies)  # type: ignore[no-untyped-call]

    @property
    def W_UK(self) -> Tensor:
        """``[H, N, R]``: expands a latent to the keys' part without position."""
        return self._up_projections()[:, : self.config.qk_nope_head_dim]

    @property
    def W_UV(self) -> Tensor:
        """``[H, V, R]``: expands a latent to the values."""
        return self._up_projections()[:, self.config.qk_nope_head_dim :]

    def absorb(self, *, free_kv_b_proj: bool = False) -> tuple[Tensor, Tensor]:
        """Derive W_UK ``[H, N, R]`` and W_UV ``[H, V, R]`` from ``kv_b_proj``.

        Args:
            free_kv_b_proj: move the (local) weight into a buffer outside the state dict, and drop ``kv_b_proj``.
                Both forms of attention go on; a later ``load_state_dict`` with ``kv_b_proj.weight`` is refused.

        Returns:
            The two, as views of one tensor.
        """
        if free_kv_b_proj and self.kv_b_proj is not None:
            self.register_buffer("kv_b_weight", self._kv_b_weight().detach(), persistent=False)
            # A submodule that is only set to None still takes its name in a state dict, and drops the weight
            del self.kv_b_proj
            self.kv_b_proj = None
        w_uk, w_uv = self._up_projections().split_with_sizes((self.config.qk_nope_head_dim, self.config.v_head_dim), 1)
        return w_uk, w_uv

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        scale = self.kv_scale
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if scale is not None and self.kv_scale is not None and self.kv_scale.dtype != scale.dtype:
            # .to(torch.bfloat16) is meant for the weights: the ops take a float32 scale, and rounded it is another
            self.kv_scale = scale.to(self.kv_scale.device)
        return self

    def parallelize(self, mesh: DeviceMesh) -> Self:
        """Shard the heads over a one-dimensional mesh, with torch's own tensor-parallel styles.

        ``q_b_proj`` (or ``q_proj``) and ``kv_b_proj`` are split by heads, ``o_proj`` by its inputs, whose partial
        results are summed over the mesh in each call. The cache is the same on every rank.

        Raises:
            ValueError: the mesh's size does not divide ``num_heads``, or ``kv_b_proj`` has been freed.
        """
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        if self.kv_b_proj is None:
            raise ValueError("kv_b_proj has been freed; parallelize the module before absorb(free_kv_b_proj=True)")
        self.num_local_heads = self.config.shard(mesh.size()).num_heads
        q = "q_proj" if self.config.q_lora_rank is None else "q_b_proj"
        plan = {q: ColwiseParallel(), "kv_b_proj": ColwiseParallel(), "o_proj": RowwiseParallel()}
        parallelize_module(self, mesh, plan)
        return self

    def forward(
        self,
        hidden_states: Tensor,
        positions: Tensor,
        kv_cache: Tensor,
        plan: DecodePlan | DecodeMetadata,
        residual: Tensor | None = None,
    ) -> Tensor:
        """Decode: write the new rows to the cache, attend to all rows in absorbed form.

        Args:
            hidden_states: ``[T, hidden_size]``, ``query_len`` rows of each request.
            positions: ``[T]`` int64; ``plan.at(batch_size).positions`` are those of the plan's lengths.
            kv_cache: ``[pages, page_size, D]``, written in place.
            plan: updated for this step, whole or ``plan.at(batch_size)``.
            residual: ``[T, hidden_size]``, added to the result where given.

        Returns:
            ``[T, hidden_size]``; rows of padded requests are 0, plus ``o_proj``'s bias where it has one, plus residual.

        Raises:
            ValueError, TypeError: a plan of another kind, number of tokens or page size; and as the ops.
        """
        if isinstance(plan, DecodePlan):
            plan = plan.at(hidden_states.shape[0] // plan.query_len)
        check_call(hidden_states, positions, kv_cache, plan, DecodeMetadata)
        config, fused = self.config, self.fuses(hidden_states, plan.backend)
        w_uk, w_uv = self.absorb()
        if fused:
            q, _ = self._project_fused(hidden_states, positions, kv_cache, plan.slot_mapping)
            beta, window = config.query_scaling
            q = layer_functional.absorb_query(
                q, w_uk, positions, **self._rope_options, scaling_beta=beta, scaling_window=window, backend=_OURS
            )
        else:
            q_nope, q_pe, kv_c, k_pe = self._project(hidden_states, positions)
            functional.write_latent_cache(
                kv_c, k_pe, kv_cache, plan.slot_mapping, kv_scale=self.kv_scale, backend=plan.backend
            )
            q_latent = torch.bmm(q_nope.transpose(0, 1), w_uk).transpose(0, 1)  # [T, H, R]
            q = torch.cat([q_latent, q_pe], dim=-1)
        out, _ = functional.mla_decode(
            q,
            kv_cache,
            plan.qo_indptr,
            plan.kv_indptr,
            plan.kv_indices,
            plan.kv_last_page_lens,
            softmax_scale=config.softmax_scale,
            max_seqlen_q=plan.max_seqlen_q,
            num_kv_splits=plan.num_kv_splits,
            backend_state=plan.backend_state,
            kv_scale=self.kv_scale,
            kv_lora_rank=config.kv_lora_rank,
            backend=plan.backend,
        )
        if fused:
            return _product(self.o_proj, layer_functional.expand_values(out, w_uv, backend=_OURS), residual)
        values = torch.bmm(out.transpose(0, 1), w_uv.mT).transpose(0, 1).flatten(1)  # [T, H * V]
        output: Tensor = self.o_proj(values)
        return output if residual is None else residual + output

    def prefill(self, hidden_states: Tensor, positions: Tensor, kv_cache: Tensor, plan: PrefillPlan) -> Tensor:
        """Prefill: write the new rows to the cache, attend to them and to a cached prefix in expanded form.

        The prefix is gathered and expanded chunk by chunk, and merged by log-sum-exp.

        Args:
            hidden_states: ``[T, hidden_size]``, the new rows of all requests, one request after another.
            positions: ``[T]`` int64; ``plan.positions`` are those after the prefixes.
            kv_cache: ``[pages, page_size, D]``, written in place.
            plan: of this prefill.

        Returns:
            ``[T, hidden_size]``.

        Raises:
            ValueError, TypeError: as in :meth:`forward`.
        """
        check_call(hidden_states, positions, kv_cache, plan, PrefillPlan)
        if self.fuses(hidden_states, plan.backend):
            q, rows = self._project_fused(hidden_states, positions, kv_cache, plan.slot_mapping)
            q_nope, q_pe = self._rope_queries(q, positions)
            kv_c, k_pe = self._split(rows, self.config.kv_lora_rank)
        else:
            q_nope, q_pe, kv_c, k_pe = self._project(hidden_states, positions)
            functional.write_latent_cache(
                kv_c, k_pe, kv_cache, plan.slot_mapping, kv_scale=self.kv_scale, backend=plan.backend
            )
        q = torch.cat([q_nope, q_pe], dim=-1)  # [T, H, N + P]
        attend = partial(functional.mla_prefill, q, softmax_scale=self.config.softmax_scale, backend=plan.backend)
        k, v = self._expand(kv_c, k_pe)
        state = attend(
            k,
            v,
            cu_seqlens_q=plan.cu_seqlens_q,
            cu_seqlens_k=plan.cu_seqlens_q,
            max_seqlen_q=plan.max_seqlen_q,
            max_seqlen_k=plan.max_seqlen_q,
        )
        for chunk in plan.chunks:
            rows = functional.gather_latent_cache(
                kv_cache,
                plan.kv_indptr,
                plan.kv_indices,
                plan.kv_last_page_lens,
                chunk.cu_seqlens,
                num_tokens=chunk.num_tokens,
                seq_starts=chunk.seq_starts,
                kv_scale=self.kv_scale,
                dtype=hidden_states.dtype,
                backend=plan.backend,
            )
            k, v = self._expand(*self._split(rows, self.config.kv_lora_rank))
            part = attend(
                k,
                v,
                cu_seqlens_q=plan.cu_seqlens_q,
                cu_seqlens_k=chunk.cu_seqlens,
                max_seqlen_q=plan.max_seqlen_q,
                max_seqlen_k=chunk.max_seqlen,
                causal=False,
            )
            state = functional.merge_attn_states(*state, *part, backend=plan.backend)
        output: Tensor = self.o_proj(state.out.flatten(1))
        return output

    def fuses(self, hidden_states: Tensor, backend: str) -> bool:
        """Whether our kernels around attention serve a call.

        They have no gradient, float32 at most, and the norms that a layer is made with.
        """
        ours = backend == "triton" or (backend in ("aiter", "flash_mla") and _HAS_TRITON and hidden_states.is_cuda)
        if not ours or hidden_states.dtype == torch.float64:
            return False
        if not _is_plain(self.kv_a_layernorm, nn.RMSNorm):
            return False
        if self.config.q_lora_rank is not None and not _is_plain(self.q_a_layernorm, nn.RMSNorm):
            return False
        if not torch.is_grad_enabled():
            return True
        return not (hidden_states.requires_grad or any(x.requires_grad for x in self.parameters()))

    def _project_fused(
        self, hidden_states: Tensor, positions: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> tuple[Tensor, Tensor]:
        """``[T, hidden_size]`` to queries ``[T, H, N + P]`` without position and latent rows ``[T, D]``, written."""
        has_lora, kv_a = self.config.q_lora_rank is not None, self.kv_a_proj_with_mqa
        q_a_weight, kv_a_weight = _weight_alone(self.q_a_proj) if has_lora else None, _weight_alone(kv_a)
        if q_a_weight is not None and kv_a_weight is not None:
            both = layer_functional.linear(hidden_states, q_a_weight, kv_a_weight, backend=_OURS)
            q_a, latent = self._split(both, q_a_weight.shape[0])
        else:
            latent = _product(kv_a, hidden_states)
            q_a = self.q_a_proj(hidden_states) if has_lora else latent[:, :0]
        weight = self.kv_a_layernorm.weight
        q_a, rows = layer_functional.norm_rope_write(
            q_a,
            latent,
            self.q_a_layernorm.weight if has_lora else weight[:0],
            weight,
            positions,
            kv_cache=kv_cache,
            slot_mapping=slot_mapping,
            eps=_INNER_NORM_EPS,
            kv_scale=self.kv_scale,
            **self._rope_options,
            backend=_OURS,
        )
        q = _product(self.q_b_proj, q_a) if has_lora else _product(self.q_proj, hidden_states)
        return q.view(hidden_states.shape[0], self.num_local_heads, self.config.qk_head_dim), rows

    @property
    def _rope_options(self) -> dict[str, Any]:
        rope = self.rotary_emb
        return {"inv_freq": rope.inv_freq, "rope_scale": rope.scaling, "interleave": self.config.rope_interleave}

    def _project(self, hidden_states: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """``[T, hidden_size]`` to q_nope ``[T, H, N]``, q_pe ``[T, H, P]``, kv_c ``[T, R]``, k_pe ``[T, P]``."""
        config = self.config
        if config.q_lora_rank is None:
            q = self.q_proj(hidden_states)
        else:
            q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(hidden_states)))
        q = q.view(hidden_states.shape[0], self.num_local_heads, config.qk_head_dim)
        q_nope, q_pe = self._rope_queries(q, positions)
        kv_c, k_pe = self._split(self.kv_a_proj_with_mqa(hidden_states), config.kv_lora_rank)
        return q_nope, q_pe, self.kv_a_layernorm(kv_c), self._rope(k_pe, positions)

    def _rope_queries(self, q: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """``[T, H, N + P]`` to q_nope ``[T, H, N]`` and q_pe ``[T, H, P]``, with Mistral 4's scale."""
        beta, window = self.config.query_scaling
        if beta:
            growth = 1 + beta * torch.log1p((positions // window).float())
            q = q * growth[:, None, None].to(q.dtype)
        q_nope, q_pe = self._split(q, self.config.qk_nope_head_dim)
        return q_nope, self._rope(q_pe, positions)

    def _rope(self, x: Tensor, positions: Tensor) -> Tensor:
        if not self.config.qk_rope_head_dim:
            return x
        return apply_rotary(x, *self.rotary_emb(positions), interleave=self.config.rope_interleave)

    def _expand(self, kv_c: Tensor, k_pe: Tensor) -> tuple[Tensor, Tensor]:
        """Latent rows ``[S, R]``, ``[S, P]`` to k ``[S, H, N + P]`` and v ``[S, H, V]``."""
        config = self.config
        expanded = nn.functional.linear(kv_c, self._kv_b_weight())
        expanded = expanded.view(kv_c.shape[0], self.num_local_heads, config.qk_nope_head_dim + config.v_head_dim)
        k_nope, v = self._split(expanded, config.qk_nope_head_dim)
        k_pe = k_pe[:, None].expand(-1, self.num_local_heads, -1)
        return torch.cat([k_nope, k_pe], dim=-1), v

    @staticmethod
    def _split(x: Tensor, width: int) -> tuple[Tensor, Tensor]:
        first, rest = x.split_with_sizes((width, x.shape[-1] - width), -1)
        return first, rest

    def _kv_b_weight(self) -> Tensor:
        if self.kv_b_proj is None:
            return self.kv_b_weight
        weight: Any = self.kv_b_proj.weight
        sharded = hasattr(weight, "to_local")  # a DTensor: parallelize's hooks are about placement alone
        bias: object = self.kv_b_proj.bias
        if bias is not None or not _only_calls(self.kv_b_proj, nn.Linear, hooks=sharded):
            raise ValueError(
                "kv_b_proj must be an nn.Linear with no bias, hook or forward of its own, for only its weight is read, "
                f"got {type(self.kv_b_proj).__name__}; merge into the weight what else it does"
            )
        local: Tensor = weight.to_local() if sharded else weight
        return local

    def _up_projections(self) -> Tensor:
        """``[H, N + V, R]``"""
        config = self.config
        return self._kv_b_weight().view(
            self.num_local_heads, config.qk_nope_head_dim + config.v_head_dim, config.kv_lora_rank
        )


def check_call(
    hidden_states: Tensor,
    positions: Tensor,
    kv_cache: Tensor,
    plan: object,
    kind: type[DecodeMetadata | PrefillPlan],
) -> None:
    """Refuse a call whose plan is of another step or cache: its slots would be other ones there.

    A compiler does not see this: what it compiles is checked before, by :func:`mla_ops.compile_layers`.

    Raises:
        TypeError: ``plan`` is not of this kind.
        ValueError: hidden_states ``[T, hidden_size]`` or positions ``[T]`` have not the plan's T, or the cache not its
            page size.
    """
    if torch.compiler.is_compiling():
        return
    if not isinstance(plan, kind):
        wanted = "PrefillPlan" if kind is PrefillPlan else "DecodePlan, or what its at(batch_size) gives"
        raise TypeError(f"plan must be a {wanted}, got a {type(plan).__name__}")
    tokens = plan.slot_mapping.shape[0]
    if hidden_states.dim() != 2 or hidden_states.shape[0] != tokens:
        raise ValueError(
            f"hidden_states must be [{tokens}, hidden_size], a row for each of the plan's tokens, got "
            f"{tuple(hidden_states.shape)}"
        )
    if positions.shape != (tokens,):
        raise ValueError(
            f"positions must be [{tokens}], one of each of the plan's tokens, got {tuple(positions.shape)}"
        )
    if kv_cache.dim() == 3 and kv_cache.shape[1] != plan.page_size:
        raise ValueError(
            f"kv_cache must have pages of {plan.page_size} rows, as the plan has, got {kv_cache.shape[1]}; make both "
            "with one page_size"
        )


def _compute_frequencies(layer: DeepseekMLA, _: object) -> None:
    """After a load: weights that are assigned to a layer made on the meta device bring no frequencies with them."""
    rope, weight = layer.rotary_emb, layer.o_proj.weight
    if rope.inv_freq.is_meta and not weight.is_meta:
        rope.to_empty(device=weight.device)


def _store_together(first: nn.Linear, second: nn.Linear) -> None:
    """Put one weight's rows behind the other's, so that ``linear`` may take both as one; separate, they are two."""
    both = torch.cat([first.weight.detach(), second.weight.detach()])
    first.weight = nn.Parameter(both[: first.out_features])
    second.weight = nn.Parameter(both[first.out_features :])


def _weight_alone(layer: nn.Linear) -> Tensor | None:
    """The weight of a layer that is the product with it and nothing else: no bias, shard or ``forward`` of its own."""
    weight: object = layer.weight
    bias: object = layer.bias
    alone = _is_plain(layer, nn.Linear) and type(weight) in (Tensor, nn.Parameter) and bias is None
    return layer.weight if alone else None


def _is_plain(layer: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether a call of it does what its class says: no hook, subclass, or ``forward`` of its own (accelerate's)."""
    return type(layer) is kind and _only_calls(layer, kind)


def _only_calls(layer: nn.Module, kind: type[nn.Module], *, hooks: bool = False) -> bool:
    """Whether a call of it is ``kind.forward``, also of a parametrized layer; ``hooks``: it may have some besides."""
    own = type(layer).forward is not kind.forward or "forward" in layer.__dict__
    return not own and (hooks or not (layer._forward_hooks or layer._forward_pre_hooks))


def _product(layer: nn.Linear, x: Tensor, residual: Tensor | None = None) -> Tensor:
    """``layer(x)``, added to a residual, by our kernel where that is all that the layer does."""
    weight = _weight_alone(layer)
    if weight is not None:
        return layer_functional.linear(x, weight, residual=residual, backend=_OURS)
    result: Tensor = layer(x)
    return result if residual is None else residual + result
