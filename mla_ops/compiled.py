"""``compile_layers``: one compiled function for all layers of a model."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from mla_ops.module import DeepseekMLA, check_call
from mla_ops.plan import DecodeMetadata, DecodePlan, PrefillPlan

__all__ = ["compile_layers"]

_ALIAS = "_mla_ops_unbacked"


def compile_layers(
    layers: Sequence[nn.Module], *, method: str = "forward", dynamic_batch: bool = True, **options: Any
) -> list[Callable[..., Tensor]]:
    """Compile one function for all layers of a model.

    The layers' parameters and buffers are inputs of it (``torch.func.functional_call``), so what is compiled, and how
    long that takes, does not depend on how many layers there are.

    Args:
        layers: modules of one kind and shape, called as ``DeepseekMLA`` is: such layers, or blocks around them.
        method: ``"forward"`` (decode) or ``"prefill"``.
        dynamic_batch: one graph for every batch size, 1 included: the token and request dims of the first call are
            marked unbacked. Else a graph per batch size, as the compiler sees fit.
        options: of ``torch.compile``; ``fullgraph=True`` unless given.

    Returns:
        A function per layer, with the method's arguments (a ``DecodePlan`` is taken as ``plan.at(batch_size)``). It
        raises what the method raises, and ValueError where a submodule has been replaced since.

    Raises:
        ValueError: no layers, or of different kinds or shapes.
    """
    if not layers or any(_shapes(layer) != _shapes(layers[0]) for layer in layers):
        raise ValueError("layers must be one or more of one kind and shape; compile each kind of layer apart")
    skeleton = _MethodOf(_without_data(layers[0]), method)

    def call(tensors: dict[str, Tensor], *args: Any) -> Tensor:
        result: Tensor = functional_call(skeleton, tensors, args)
        return result

    # Dynamo keeps what it compiled, and counts it against its limit, by code object: each call gets its own.
    call.__code__ = call.__code__.replace(co_name=f"mla_{method}")
    compiled = torch.compile(call, **{"fullgraph": True, **options})
    kind = PrefillPlan if method == "prefill" else DecodeMetadata

    def run(
        slots: list[_Slot],
        modules: list[_Submodule],
        hidden_states: Tensor,
        positions: Tensor,
        kv_cache: Tensor,
        plan: Any,
        residual: Tensor | None = None,
    ) -> Tensor:
        if isinstance(plan, DecodePlan):
            plan = plan.at(hidden_states.shape[0] // plan.query_len)
        eager = not torch.compiler.is_compiling()
        if eager:
            check_call(hidden_states, positions, kv_cache, plan, kind)
            for name, store, key, module in modules:
                if store.get(key, module) is not module:  # absorb() takes one away, and keeps its weight's parts
                    raise ValueError(f"{name} was replaced after compile_layers; call it again for the new module")
        rest = [] if residual is None else [residual]  # which only forward has
        if dynamic_batch and eager:
            hidden_states, positions, *rest = map(_unbacked, (hidden_states, positions, *rest))
            plan = _unbacked_plan(plan)
        tensors = {name: x for name, store, key in slots if (x := store[key]) is not None}
        return compiled(tensors, hidden_states, positions, kv_cache, plan, *rest)

    methods = [_MethodOf(layer, method) for layer in layers]
    return [partial(run, each.slots(), each.submodules()) for each in methods]


def _without_data(layer: nn.Module) -> nn.Module:
    """A copy on the meta device, to trace over: it can't keep one layer's weights alive, or use them."""
    memo: dict[int, Any] = {id(x): nn.Parameter(x.detach().to("meta"), x.requires_grad) for x in layer.parameters()}
    memo.update((id(x), x.to("meta")) for x in layer.buffers())
    return copy.deepcopy(layer, memo)


def _shapes(layer: nn.Module) -> tuple[object, ...]:
    tensors = (*layer.named_parameters(), *layer.named_buffers())
    return (
        type(layer),
        *((name, tensor.shape, tensor.dtype) for name, tensor in tensors),
        *(module.config for module in layer.modules() if isinstance(module, DeepseekMLA)),
    )


_Slot = tuple[str, dict[str, Any], str]
_Submodule = tuple[str, dict[str, Any], str, nn.Module | None]


class _MethodOf(nn.Module):
    """A module whose ``forward`` is another module's method, for ``functional_call``."""

    def __init__(self, module: nn.Module, method: str) -> None:
        super().__init__()
        self.module = module
        self.method = method

    def slots(self) -> list[_Slot]:
        """Where each parameter and buffer is kept, to be looked up at each call: modules replace theirs."""
        return [
            (f"{prefix}.{name}", store, name)
            for prefix, module in self.named_modules()
            for store in (module._parameters, module._buffers)
            for name in store
        ]

    def submodules(self) -> list[_Submodule]:
        """Which module is where: its slots are of it alone."""
        return [
            (f"{prefix}.{name}".removeprefix("module."), parent._modules, name, module)
            for prefix, parent in self.module.named_modules(prefix="module")
            for name, module in parent._modules.items()
        ]

    def forward(self, *args: Any) -> Any:
        return getattr(self.module, self.method)(*args)


def _unbacked(tensor: Tensor) -> Tensor:
    """The same memory as another tensor, marked: a mark stays, and would be met where the caller compiles its own."""
    alias = tensor.view_as(tensor)
    torch._dynamo.decorators.mark_unbacked(alias, 0)
    return alias


def _unbacked_plan(plan: Any) -> Any:
    """A plan of such tensors, but for those of a backend's own, which are no rows of the batch."""
    return plan._make(map(_unbacked_field, plan))


def _unbacked_field(field: Any) -> Any:
    if isinstance(field, Tensor):
        return _unbacked_once(field)
    if isinstance(field, tuple):
        return tuple([_unbacked_plan(x) if hasattr(x, "_make") else x for x in field])  # a prefill's chunks
    return field


def _unbacked_once(tensor: Tensor) -> Tensor:
    """As :func:`_unbacked`, made at the first call: a plan's tensors stay, and to make one takes some microseconds."""
    alias: Tensor | None = getattr(tensor, _ALIAS, None)
    if alias is None:
        alias = tensor.detach()  # not a view: that keeps its base, which keeps it
        torch._dynamo.decorators.mark_unbacked(alias, 0)
        setattr(tensor, _ALIAS, alias)
    return alias
