"""Autograd and ``torch.func.vmap`` rules of the ops.

Gradients: the reference backend is differentiable, by running the reference again under autograd in the backward.
A forward gradient, and the transforms of ``torch.func``, go through the operations that the reference is made of;
every other backend, and every op that writes in place, refuses with :class:`InferenceOnlyError` as soon as an input
requires a gradient. Nothing gives a silently wrong one.

vmap: a batch of calls becomes one call with more tokens and more requests. A call's unused rows (those after
``qo_indptr[-1]``) become a request of their own between two calls, whose result is that of a row of no request.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._library.autograd import Info, make_autograd_impl
from torch.autograd import forward_ad
from torch.utils import _pytree as pytree

from mla_ops.backends import reference
from mla_ops.errors import InferenceOnlyError
from mla_ops.validation import infer_kv_lora_rank

__all__ = [
    "Fold",
    "goes_straight",
    "keep",
    "recompute",
    "refuse_other_backends",
    "refuse_other_inputs",
    "register",
    "register_differentiable",
    "register_inference_only",
]

_ops = torch.ops.mla_ops


# --- autograd ---------------------------------------------------------------------------------------------------


def keep(ctx: Any, differentiable: Sequence[Tensor], rest: Sequence[Any]) -> None:
    """Keep a call's inputs for :func:`recompute`.

    All tensors, also those of indices: torch refuses a backward that would find one of them changed in place.
    """
    leaves, ctx.rest_spec = pytree.tree_flatten(list(rest))
    ctx.save_for_backward(*differentiable, *(x for x in leaves if isinstance(x, Tensor)))
    ctx.rest = [None if isinstance(x, Tensor) else x for x in leaves]
    ctx.rest_tensors = [i for i, x in enumerate(leaves) if isinstance(x, Tensor)]


def recompute(
    ctx: Any, grads: Sequence[Tensor | None], differentiable: Sequence[int], function: Callable[..., Any]
) -> list[Tensor | None]:
    """Gradients of the inputs at ``differentiable``, by running ``function`` on what was kept under autograd."""
    needed = [i for i in differentiable if ctx.needs_input_grad[i]]
    create_graph = torch.is_grad_enabled()
    saved = ctx.saved_tensors
    leaves, count = list(ctx.rest), len(differentiable)
    for i, x in zip(ctx.rest_tensors, saved[count:], strict=True):
        leaves[i] = x
    rest = pytree.tree_unflatten(leaves, ctx.rest_spec)
    with torch.enable_grad():
        # Aliases: where one input is another or was computed from it, a gradient must end at the input it is asked of
        inputs = [x.view_as(x) if x.requires_grad else x.detach().requires_grad_() for x in saved[:count]]
        outputs = function(*inputs, *rest)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    pairs = [(out, grad) for out, grad in zip(outputs, grads, strict=True) if grad is not None and out.requires_grad]
    wanted = [inputs[differentiable.index(i)] for i in needed]
    result: list[Tensor | None] = [None] * len(ctx.needs_input_grad)
    if pairs and wanted:
        found = torch.autograd.grad(
            [out for out, _ in pairs],
            wanted,
            [grad for _, grad in pairs],
            create_graph=create_graph,
            allow_unused=True,
        )
        for i, grad in zip(needed, found, strict=True):
            result[i] = grad
    return result


def refuse_other_backends(op: str, backend: str) -> None:
    """Raise where a gradient is asked of a backend that has none."""
    if backend != "reference":
        raise InferenceOnlyError(
            f'{op} with backend="{backend}" is for inference and has no gradient; '
            'call it under torch.no_grad(), or with backend="reference"'
        )


def refuse_other_inputs(op: str, inputs: Sequence[Any], differentiable: Sequence[str]) -> None:
    """Raise where a gradient is asked of an input that gets none: None would be taken for zero."""
    for argument, x in zip(getattr(_ops, op).default._schema.arguments, inputs, strict=True):
        if isinstance(x, Tensor) and x.requires_grad and argument.name not in differentiable:
            raise InferenceOnlyError(f"{op} has no gradient of {argument.name}; detach it")


def _decode_setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    refuse_other_backends("mla_decode", inputs[12])
    refuse_other_inputs("mla_decode", inputs, ("q", "kv_cache"))
    rank = infer_kv_lora_rank(inputs[0].shape[2], inputs[13])
    keep(ctx, inputs[:2], (*inputs[2:8], *inputs[9:12], rank))
    ctx.backend_state = len(inputs[6])


def _decode_backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Any, ...]:
    result: list[Any] = recompute(ctx, (grad_out, grad_lse), (0, 1), reference.decode_formula)
    result[6] = [None] * ctx.backend_state
    return tuple(result)


def _prefill_setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    refuse_other_backends("mla_prefill", inputs[9])
    keep(ctx, inputs[:3], inputs[3:9])


def _prefill_backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Any, ...]:
    return tuple(recompute(ctx, (grad_out, grad_lse), (0, 1, 2), reference.mla_prefill))


def _gather_setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    refuse_other_backends("gather_latent_cache", inputs[9])
    refuse_other_inputs("gather_latent_cache", inputs, ("kv_cache",))
    keep(ctx, inputs[:1], (*inputs[1:5], inputs[6], inputs[5], *inputs[7:9]))


def _gather_backward(ctx: Any, grad_out: Tensor | None) -> tuple[Any, ...]:
    return tuple(recompute(ctx, (grad_out,), (0,), reference.gather_latent_cache))


def _merge_setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    refuse_other_backends("merge_attn_states", inputs[4])
    keep(ctx, inputs[:4], ())


def _merge_backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Any, ...]:
    return tuple(recompute(ctx, (grad_out, grad_lse), (0, 1, 2, 3), reference.merge_attn_states))


def _plain_keys() -> int:
    """Dispatch keys of a call on ordinary tensors of a CPU or GPU with no mode, transform or wrapper about it."""
    backends = ("CPU", "CUDA", "AutogradCPU", "AutogradCUDA", "AutocastCPU", "AutocastCUDA")
    keys = (*backends, "BackendSelect", "ADInplaceOrView")
    return functools.reduce(
        operator.or_, (torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key)).raw_repr() for key in keys)
    )


_NOT_PLAIN = ~_plain_keys()


def _needs_grad(*args: Any, **kwargs: Any) -> bool:
    return torch.is_grad_enabled() and torch._C._any_requires_grad(*args, **kwargs)


def _has_tangent(*args: Any, **kwargs: Any) -> bool:
    """Whether an input carries a forward gradient, which no key and no flag of the tensor tells."""
    return forward_ad._current_level >= 0 and any(
        forward_ad.unpack_dual(x).tangent is not None  # type: ignore[no-untyped-call]
        for x in (*args, *kwargs.values())
        if isinstance(x, Tensor)
    )


_PLAIN_TYPES = frozenset({Tensor, torch.nn.Parameter, type(None)})


def goes_straight(first: Tensor, *others: Tensor | None) -> bool:
    """Whether the dispatcher would take a call on these tensors to the op's own kernel, and nothing would notice it.

    No mode, transform, tracer, profiler or tensor that stands for another is there, and nothing asks for a gradient.
    The others are on the device and of the kind of ``first``, or the op's checks refuse them.
    """
    if torch.compiler.is_compiling() or torch._C._len_torch_function_stack() or torch._C._autograd._profiler_enabled():
        return False
    if forward_ad._current_level >= 0:
        return False
    grad = torch.is_grad_enabled()
    for x in (first, *others):
        if type(x) not in _PLAIN_TYPES or (x is not None and (x.is_neg() or (grad and x.requires_grad))):
            return False
    keys = torch._C._dispatch_keys(first).raw_repr() | torch._C._dispatch_tls_local_include_set().raw_repr()
    return not keys & _NOT_PLAIN


def register_differentiable(
    library: torch.library.Library,
    name: str,
    entry: Callable[..., Any],
    backward: Callable[..., Any],
    setup: Callable[..., Any],
) -> None:
    """What ``torch.library.register_autograd`` registers, for an op whose kernel is ``entry``.

    What that makes passes the dispatcher a second time also where no input requires a gradient, for 8 us. Here the
    kernel is called at once where nothing would stop the call on its way there.
    """
    full = make_autograd_impl(getattr(_ops, name).default, Info(backward, setup))

    def kernel(keyset: torch._C.DispatchKeySet, *args: Any) -> Any:
        needs_grad = _needs_grad(*args)
        if _has_tangent(*args) or (needs_grad and torch._C._functorch.maybe_current_level() is not None):
            # The reference's own operations carry a tangent, and what torch.func asks for; torch's rule has neither
            refuse_other_backends(name, next((x for x in args if isinstance(x, str)), "reference"))
            return entry(*args)
        if needs_grad or keyset.raw_repr() & _NOT_PLAIN:
            return full(keyset, *args)
        return entry(*args)

    library.impl(name, kernel, "Autograd", with_keyset=True)  # type: ignore[no-untyped-call]


def register_inference_only(
    library: torch.library.Library, name: str, op: torch._ops.OpOverload, entry: Callable[..., Any]
) -> None:
    """Let an op that writes in place, whose kernel is ``entry``, refuse inputs that require a gradient."""

    def kernel(keyset: torch._C.DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        if _needs_grad(*args, **kwargs) or _has_tangent(*args, **kwargs):
            raise InferenceOnlyError(
                f"{op} writes in place and has no gradient; call it under torch.no_grad(), or detach the tensors"
            )
        if keyset.raw_repr() & _NOT_PLAIN:
            with torch._C._AutoDispatchBelowAutograd():
                return op.redispatch(keyset & torch._C._after_autograd_keyset, *args, **kwargs)
        return entry(*args, **kwargs)

    library.impl(name, kernel, "Autograd", with_keyset=True)  # type: ignore[no-untyped-call]


# --- vmap -------------------------------------------------------------------------------------------------------


class Fold:
    """Folds ``calls`` batched calls into one; ``None`` in ``in_dims`` is an argument that all calls share."""

    def __init__(self, op: str, calls: int) -> None:
        self.op = op
        self.calls = calls

    def batched(self, x: Tensor, dim: int | None) -> Tensor:
        """[calls, ...]"""
        return x.unsqueeze(0).expand(self.calls, *x.shape) if dim is None else x.movedim(dim, 0)

    def rows(self, x: Tensor, dim: int | None) -> Tensor:
        """[calls * T, ...]"""
        return self.batched(x, dim).flatten(0, 1)

    def unfold(self, x: Tensor) -> Tensor:
        return x.view(self.calls, -1, *x.shape[1:])

    def offsets(self, step: int, x: Tensor) -> Tensor:
        return torch.arange(self.calls, device=x.device, dtype=x.dtype)[:, None] * step

    def indptr(self, x: Tensor, dim: int | None, step: int) -> Tensor:
        """[calls * (B + 1) + 1]: each call's B requests, and one for what is left of its ``step`` rows."""
        folded = (self.batched(x, dim) + self.offsets(step, x)).flatten()
        return torch.cat([folded, folded.new_full((1,), self.calls * step)])

    def last_page_lens(self, x: Tensor, dim: int | None) -> Tensor:
        """[calls * (B + 1)]"""
        return torch.nn.functional.pad(self.batched(x, dim), (0, 1)).flatten()

    def pages(
        self, cache: Tensor, cache_dim: int | None, indices: Tensor, indptr: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The folded cache, indptr and indices into it; ``indices`` and ``indptr`` are [calls, ...].

        The calls' index tails go behind the last call's pages: the request between two calls has no keys, so that
        what is in a page of no request can reach no result and no gradient.
        """
        ends = indptr[:, -1].cumsum(0)
        starts = ends - indptr[:, -1]
        entry = torch.arange(indices.numel(), device=indices.device)
        call = torch.searchsorted(ends, entry, right=True).clamp(max=self.calls - 1)
        pages = indices[call, (entry - starts[call]).clamp(0, indices.shape[1] - 1)]
        if cache_dim is not None:
            pages = pages + call * cache.movedim(cache_dim, 0).shape[1]
        folded = torch.cat([(indptr + starts[:, None]).flatten(), ends[-1:]])
        return (
            cache if cache_dim is None else self.rows(cache, cache_dim),
            folded.to(indptr.dtype),
            pages.where(entry < ends[-1], 0).to(indices.dtype),
        )

    def used_rows(self, indptr: Tensor, dim: int | None, step: int) -> Tensor:
        """[calls * step] whether a row belongs to a request of its call."""
        row = torch.arange(step, device=indptr.device)
        return (row < self.batched(indptr, dim)[:, -1:]).flatten()

    def shared(self, **dims: Any) -> None:
        for name, dim in dims.items():
            if dim is not None:
                raise InferenceOnlyError(
                    f"vmap of {self.op} needs one {name} for all calls, got one per call; loop over the calls"
                )


def _decode_vmap(info: Any, in_dims: Any, *args: Any) -> tuple[Any, Any]:
    q, kv_cache, qo_indptr, kv_indptr, kv_indices, last_page_lens = args[:6]
    q_dim, cache_dim, qo_dim, indptr_dim, indices_dim, last_dim, state_dims = in_dims[:7]
    fold = Fold("mla_decode", info.batch_size)
    fold.shared(q_scale=in_dims[10], kv_scale=in_dims[11])
    backend = args[12] if len(args) > 12 else "reference"
    if any(dim is not None for dim in state_dims) or (args[6] and backend != "reference"):
        raise InferenceOnlyError("vmap of mla_decode needs an empty backend_state; loop over the calls")
    cache, indptr, indices = fold.pages(
        kv_cache, cache_dim, fold.batched(kv_indices, indices_dim), fold.batched(kv_indptr, indptr_dim)
    )
    out, lse = _ops.mla_decode(
        fold.rows(q, q_dim),
        cache,
        fold.indptr(qo_indptr, qo_dim, fold.batched(q, q_dim).shape[1]),
        indptr,
        indices,
        fold.last_page_lens(last_page_lens, last_dim),
        *args[6:],
    )
    return (fold.unfold(out), fold.unfold(lse)), (0, 0)


def _prefill_vmap(info: Any, in_dims: Any, *args: Any) -> tuple[Any, Any]:
    q, k, v, cu_q, cu_k = args[:5]
    fold = Fold("mla_prefill", info.batch_size)
    tokens, keys = fold.batched(q, in_dims[0]).shape[1], fold.batched(k, in_dims[1]).shape[1]
    used = fold.used_rows(cu_q, in_dims[3], tokens)[:, None]
    used_keys = fold.used_rows(cu_k, in_dims[4], keys)[:, None, None]
    out, lse = _ops.mla_prefill(
        # Rows of no request attend to one another: zeros, for a NaN would come back as their gradient
        fold.rows(q, in_dims[0]).where(used[..., None], 0.0),
        fold.rows(k, in_dims[1]).where(used_keys, 0.0),
        fold.rows(v, in_dims[2]).where(used_keys, 0.0),
        fold.indptr(cu_q, in_dims[3], tokens),
        fold.indptr(cu_k, in_dims[4], keys),
        *args[5:],
    )
    out, lse = out.where(used[..., None], 0.0), lse.where(used, -torch.inf)
    return (fold.unfold(out), fold.unfold(lse)), (0, 0)


def _write_vmap(info: Any, in_dims: Any, *args: Any) -> tuple[Any, Any]:
    kv_c, k_pe, kv_cache, slot_mapping = args[:4]
    fold = Fold("write_latent_cache", info.batch_size)
    fold.shared(**dict(zip(("kv_scale",), in_dims[4:5], strict=False)))
    if in_dims[2] is None:
        raise InferenceOnlyError(
            "vmap of write_latent_cache needs a kv_cache per call, got one for all: "
            "the calls would write it in no defined order; make one call with all tokens"
        )
    cache = kv_cache.movedim(in_dims[2], 0)
    if cache.stride(0) != cache.shape[1] * cache.stride(1):
        raise InferenceOnlyError(
            f"vmap of write_latent_cache needs each call's pages after another's, got a kv_cache of strides "
            f"{kv_cache.stride()} batched in dim {in_dims[2]}; batch it in dim 0 of a contiguous tensor"
        )
    slots = fold.batched(slot_mapping, in_dims[3])
    slots_of_call = cache.shape[1] * cache.shape[2]
    live = (slots >= 0) & (slots < slots_of_call)
    _ops.write_latent_cache(
        fold.rows(kv_c, in_dims[0]),
        fold.rows(k_pe, in_dims[1]),
        cache.flatten(0, 1),
        (slots + fold.offsets(slots_of_call, slots)).where(live, -1).flatten(),
        *args[4:],
    )
    return None, None


def _gather_vmap(info: Any, in_dims: Any, *args: Any) -> tuple[Any, Any]:
    kv_cache, kv_indptr, kv_indices, last_page_lens, cu_seqlens, num_tokens, seq_starts = (*args, None)[:7]
    fold = Fold("gather_latent_cache", info.batch_size)
    fold.shared(**dict(zip(("kv_scale",), in_dims[7:8], strict=False)))
    cache, indptr, indices = fold.pages(
        kv_cache, in_dims[0], fold.batched(kv_indices, in_dims[2]), fold.batched(kv_indptr, in_dims[1])
    )
    if seq_starts is not None:
        seq_starts = torch.nn.functional.pad(fold.batched(seq_starts, in_dims[6]), (0, 1)).flatten()
    out = _ops.gather_latent_cache(
        cache,
        indptr,
        indices,
        fold.last_page_lens(last_page_lens, in_dims[3]),
        fold.indptr(cu_seqlens, in_dims[4], num_tokens),
        num_tokens * fold.calls,
        seq_starts,
        *args[7:],
    )
    return fold.unfold(out), 0


def _merge_vmap(info: Any, in_dims: Any, *args: Any) -> tuple[Any, Any]:
    fold = Fold("merge_attn_states", info.batch_size)
    states = [fold.rows(x, dim) for x, dim in zip(args[:4], in_dims[:4], strict=True)]
    out, lse = _ops.merge_attn_states(*states, *args[4:])
    return (fold.unfold(out), fold.unfold(lse)), (0, 0)


def _refuse_out_vmap(*args: Any, **kwargs: Any) -> None:
    raise InferenceOnlyError("vmap of mla_decode.out is not defined; use mla_decode, which returns its results")


def register(library: torch.library.Library, entries: Mapping[str, Callable[..., Any]]) -> None:
    """Register the rules for the ops that ``library`` has defined, whose kernels are ``entries``."""
    for name, backward, setup in (
        ("mla_decode", _decode_backward, _decode_setup),
        ("mla_prefill", _prefill_backward, _prefill_setup),
        ("gather_latent_cache", _gather_backward, _gather_setup),
        ("merge_attn_states", _merge_backward, _merge_setup),
    ):
        register_differentiable(library, name, entries[name], backward, setup)
    register_inference_only(
        library, "write_latent_cache", _ops.write_latent_cache.default, entries["write_latent_cache"]
    )
    register_inference_only(library, "mla_decode.out", _ops.mla_decode.out, entries["mla_decode.out"])
    for name, rule in (
        ("mla_decode", _decode_vmap),
        ("mla_prefill", _prefill_vmap),
        ("write_latent_cache", _write_vmap),
        ("gather_latent_cache", _gather_vmap),
        ("merge_attn_states", _merge_vmap),
    ):
        torch.library.register_vmap(f"mla_ops::{name}", rule, lib=library)
    # register_vmap takes no op with keyword-only tensors
    library.impl("mla_decode.out", _refuse_out_vmap, "FuncTorchBatched")  # type: ignore[no-untyped-call]
