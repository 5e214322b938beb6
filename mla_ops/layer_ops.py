"""The contract of the ops around attention: what a layer does to its rows before and after, one kernel each.

Registered as those of :mod:`mla_ops.ops` are. Only the ``triton`` and ``reference`` backends have them.

Letters: T tokens, H heads, Q q_lora_rank, R kv_lora_rank, P qk_rope_head_dim, D = R + P, N qk_nope_head_dim,
V v_head_dim.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mla_ops import transforms, validation
from mla_ops.backends import reference
from mla_ops.backends.kernels import bound_kernel
from mla_ops.errors import InferenceOnlyError
from mla_ops.ops import apart, define
from mla_ops.signatures import READY, remember, signature

__all__ = ["LAYER_SCHEMAS", "absorb_query", "expand_values", "linear", "norm_rope_write", "rms_norm"]

LAYER_SCHEMAS = {
    "rms_norm": "(Tensor x, Tensor weight, float eps, str backend='reference') -> Tensor",
    "norm_rope_write": (
        "(Tensor q_a, Tensor latent, Tensor q_weight, Tensor kv_weight, Tensor positions, Tensor inv_freq,"
        " Tensor(a!) kv_cache, Tensor slot_mapping, float eps, float rope_scale, bool interleave,"
        " Tensor? kv_scale=None, str backend='reference') -> (Tensor q_a, Tensor latent)"
    ),
    "absorb_query": (
        "(Tensor q, Tensor w_uk, Tensor positions, Tensor inv_freq, float rope_scale, bool interleave,"
        " float scaling_beta=0.0, int scaling_window=1, str backend='reference') -> Tensor"
    ),
    "linear": (
        "(Tensor x, Tensor weight, Tensor? second=None, Tensor? residual=None, str backend='reference') -> Tensor"
    ),
    "expand_values": "(Tensor latent, Tensor w_uv, str backend='reference') -> Tensor",
}
"""Op name to schema."""


# --- rms_norm ---------------------------------------------------------------------------------------------------


def rms_norm(x: Tensor, weight: Tensor, eps: float, backend: str = "reference") -> Tensor:
    """The kernel of ``rms_norm``, for a call that :func:`mla_ops.transforms.goes_straight` to it; so are the others."""
    key = ("rms_norm", backend, eps, *signature((x, weight)))
    kernel = READY.get(key)
    if kernel is None:
        validation.check_rms_norm(x, weight)
        kernel = remember(key, bound_kernel("rms_norm", backend))
    result: Tensor = kernel(x, weight, eps) if x.numel() else x.new_empty(x.shape)
    return result


def _rms_norm_fake(x: Tensor, weight: Tensor, eps: float, backend: str = "reference") -> Tensor:
    validation.check_rms_norm(x, weight)
    return x.new_empty(x.shape)


# --- linear -----------------------------------------------------------------------------------------------------


def linear(
    x: Tensor, weight: Tensor, second: Tensor | None = None, residual: Tensor | None = None, backend: str = "reference"
) -> Tensor:
    """The kernel of ``linear``."""
    key = ("linear", backend, *signature((x, weight, second, residual)))
    kernel = READY.get(key)
    if kernel is None:
        validation.check_linear(x, weight, second, residual)
        kernel = remember(key, bound_kernel("linear", backend))
    result: Tensor = kernel(x, weight, second, residual) if x.shape[0] else _linear_output(x, weight, second)
    return result


def _linear_fake(
    x: Tensor, weight: Tensor, second: Tensor | None = None, residual: Tensor | None = None, backend: str = "reference"
) -> Tensor:
    validation.check_linear(x, weight, second, residual)
    return _linear_output(x, weight, second)


def _linear_output(x: Tensor, weight: Tensor, second: Tensor | None) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0] + (0 if second is None else second.shape[0]))


# --- norm_rope_write --------------------------------------------------------------------------------------------


def norm_rope_write(
    q_a: Tensor,
    latent: Tensor,
    q_weight: Tensor,
    kv_weight: Tensor,
    positions: Tensor,
    inv_freq: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    eps: float,
    rope_scale: float,
    interleave: bool,
    kv_scale: Tensor | None = None,
    backend: str = "reference",
) -> tuple[Tensor, Tensor]:
    """The kernel of ``norm_rope_write``."""
    tensors = (*apart(kv_cache, q_a, latent), q_weight, kv_weight, positions, inv_freq, kv_cache, slot_mapping)
    key = ("norm_rope_write", backend, eps, rope_scale, interleave, *signature((*tensors, kv_scale)))
    kernel = READY.get(key)
    if kernel is None:
        validation.check_norm_rope_write(*tensors, kv_scale)
        kernel = remember(key, bound_kernel("norm_rope_write", backend))
    if not latent.numel():
        return q_a.new_empty(q_a.shape), latent.new_empty(latent.shape)
    result: tuple[Tensor, Tensor] = kernel(*tensors, eps, rope_scale, interleave, kv_scale)
    torch.autograd.graph.increment_version(kv_cache)  # as in write_latent_cache
    return result


def _norm_rope_write_fake(
    q_a: Tensor,
    latent: Tensor,
    q_weight: Tensor,
    kv_weight: Tensor,
    positions: Tensor,
    inv_freq: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    eps: float,
    rope_scale: float,
    interleave: bool,
    kv_scale: Tensor | None = None,
    backend: str = "reference",
) -> tuple[Tensor, Tensor]:
    validation.check_norm_rope_write(
        q_a, latent, q_weight, kv_weight, positions, inv_freq, kv_cache, slot_mapping, kv_scale
    )
    return q_a.new_empty(q_a.shape), latent.new_empty(latent.shape)


# --- absorb_query -----------------------------------------------------------------------------------------------


def absorb_query(
    q: Tensor,
    w_uk: Tensor,
    positions: Tensor,
    inv_freq: Tensor,
    rope_scale: float,
    interleave: bool,
    scaling_beta: float = 0.0,
    scaling_window: int = 1,
    backend: str = "reference",
) -> Tensor:
    """The kernel of ``absorb_query``."""
    scalars = (rope_scale, interleave, scaling_beta, scaling_window)
    key = ("absorb_query", backend, *scalars, *signature((q, w_uk, positions, inv_freq)))
    kernel = READY.get(key)
    if kernel is None:
        validation.check_absorb_query(q, w_uk, positions, inv_freq, scaling_beta, scaling_window)
        kernel = remember(key, bound_kernel("absorb_query", backend))
    if not q.numel():
        return q.new_zeros(q.shape[0], q.shape[1], w_uk.shape[2] + 2 * inv_freq.shape[0])
    result: Tensor = kernel(q, w_uk, positions, inv_freq, *scalars)
    return result


def _absorb_query_fake(
    q: Tensor,
    w_uk: Tensor,
    positions: Tensor,
    inv_freq: Tensor,
    rope_scale: float,
    interleave: bool,
    scaling_beta: float = 0.0,
    scaling_window: int = 1,
    backend: str = "reference",
) -> Tensor:
    validation.check_absorb_query(q, w_uk, positions, inv_freq, scaling_beta, scaling_window)
    return q.new_empty(q.shape[0], q.shape[1], w_uk.shape[2] + 2 * inv_freq.shape[0])


# --- expand_values ----------------------------------------------------------------------------------------------


def expand_values(latent: Tensor, w_uv: Tensor, backend: str = "reference") -> Tensor:
    """The kernel of ``expand_values``."""
    key = ("expand_values", backend, *signature((latent, w_uv)))
    kernel = READY.get(key)
    if kernel is None:
        validation.check_expand_values(latent, w_uv)
        kernel = remember(key, bound_kernel("expand_values", backend))
    if not latent.numel():
        return latent.new_zeros(latent.shape[0], w_uv.shape[0] * w_uv.shape[1])
    result: Tensor = kernel(latent, w_uv)
    return result


def _expand_values_fake(latent: Tensor, w_uv: Tensor, backend: str = "reference") -> Tensor:
    validation.check_expand_values(latent, w_uv)
    return latent.new_empty(latent.shape[0], w_uv.shape[0] * w_uv.shape[1])


# --- autograd and vmap ------------------------------------------------------------------------------------------


def _register_gradient(library: torch.library.Library, op: str) -> None:
    """Gradients of the first two inputs, by running the reference again; the last input is the backend."""
    schema = getattr(torch.ops.mla_ops, op).default._schema

    def setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        transforms.refuse_other_backends(op, inputs[-1])
        if op == "linear" and any(ctx.needs_input_grad[2:4]):
            raise InferenceOnlyError(
                "linear has no gradient of a second weight or a residual; multiply and add apart from each other"
            )
        transforms.refuse_other_inputs(op, inputs, [x.name for x in schema.arguments[:2]])
        transforms.keep(ctx, inputs[:2], inputs[2:-1])

    def backward(ctx: Any, grad: Tensor | None) -> tuple[Any, ...]:
        return tuple(transforms.recompute(ctx, (grad,), (0, 1), getattr(reference, op)))

    transforms.register_differentiable(library, op, _ENTRIES[op][0], backward, setup)


def _register_vmap(library: torch.library.Library, op: str, rows: tuple[int, ...]) -> None:
    """Calls that share their weights are one call with more tokens; ``rows`` are the inputs of a row a token."""

    def rule(info: Any, in_dims: Any, *args: Any) -> tuple[Any, int]:
        fold = transforms.Fold(op, info.batch_size)
        names = [x.name for x in getattr(torch.ops.mla_ops, op).default._schema.arguments]
        fold.shared(**{names[i]: dim for i, dim in enumerate(in_dims) if i not in rows})
        folded = [fold.rows(x, in_dims[i]) if i in rows and x is not None else x for i, x in enumerate(args)]
        return fold.unfold(getattr(torch.ops.mla_ops, op)(*folded)), 0

    torch.library.register_vmap(f"mla_ops::{op}", rule, lib=library)


def _refuse_write_vmap(info: Any, in_dims: Any, *args: Any) -> Any:
    raise InferenceOnlyError("vmap of norm_rope_write is not defined; make one call with all tokens")


_ENTRIES: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "rms_norm": (rms_norm, _rms_norm_fake),
    "linear": (linear, _linear_fake),
    "norm_rope_write": (norm_rope_write, _norm_rope_write_fake),
    "absorb_query": (absorb_query, _absorb_query_fake),
    "expand_values": (expand_values, _expand_values_fake),
}


def _register() -> None:
    library = define(LAYER_SCHEMAS, _ENTRIES)
    for op, rows in (("rms_norm", (0,)), ("linear", (0, 3)), ("absorb_query", (0, 2)), ("expand_values", (0,))):
        _register_gradient(library, op)
        _register_vmap(library, op, rows)
    write = torch.ops.mla_ops.norm_rope_write.default
    transforms.register_inference_only(library, "norm_rope_write", write, _ENTRIES["norm_rope_write"][0])
    torch.library.register_vmap("mla_ops::norm_rope_write", _refuse_write_vmap, lib=library)


_register()
