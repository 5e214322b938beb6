"""Gradients: right, or a typed error; never silently wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, func
from torch.autograd import forward_ad, gradcheck, gradgradcheck
from torch.utils._python_dispatch import TorchDispatchMode

import mla_ops
from mla_ops import DecodePlan, InferenceOnlyError, MLAConfig
from mla_ops.backends import kernels, reference
from mla_ops.testing import DecodeInputs, make_decode_inputs, make_prefill_inputs
from tests.ops.layer_calls import CALLS, absorb_query

Case = tuple[Callable[..., Any], tuple[Tensor, ...]]


def decode_inputs(**options: Any) -> DecodeInputs:
    return make_decode_inputs(
        [3, 0, 5], num_heads=2, kv_lora_rank=6, qk_rope_head_dim=2, dtype=torch.float64, poison=False, **options
    )


def decode_case(query_len: int = 1) -> Case:
    x = decode_inputs(query_lens=query_len)

    def function(q: Tensor, kv_cache: Tensor) -> Tensor:
        return mla_ops.mla_decode(**x._replace(q=q, kv_cache=kv_cache).arguments()).out

    return function, (x.q, x.kv_cache)


def prefill_case(causal: bool = True) -> Case:
    x = make_prefill_inputs([2, 0, 3], [3, 1, 2], num_heads=2, qk_head_dim=4, v_head_dim=3, dtype=torch.float64)
    x = x._replace(q=x.q.nan_to_num(), k=x.k.nan_to_num(), v=x.v.nan_to_num())

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return mla_ops.mla_prefill(**x._replace(q=q, k=k, v=v)._asdict(), causal=causal).out

    return function, (x.q, x.k, x.v)


def gather_case() -> Case:
    x = decode_inputs()

    def function(kv_cache: Tensor) -> Tensor:
        return mla_ops.gather_latent_cache(
            kv_cache,
            x.kv_indptr,
            x.kv_indices,
            x.kv_last_page_lens,
            torch.tensor([0, 2, 2, 6]).int(),
            num_tokens=7,
            seq_starts=torch.tensor([1, 0, 1]).int(),
        )

    return function, (x.kv_cache,)


def merge_case() -> Case:
    lse_a, lse_b = torch.randn(3, 2), torch.randn(3, 2)
    lse_a[0] = lse_b[1] = -torch.inf

    def function(out_a: Tensor, out_b: Tensor) -> Tensor:
        return mla_ops.merge_attn_states(out_a, lse_a, out_b, lse_b).out

    return function, (torch.randn(3, 2, 4).double(), torch.randn(3, 2, 4).double())


CASES: dict[str, Callable[[], Case]] = {
    "decode": decode_case,
    "decode-2-queries": lambda: decode_case(2),
    "gather": gather_case,
    "merge": merge_case,
    "prefill-causal": prefill_case,
    "prefill-full": lambda: prefill_case(False),
}


@pytest.mark.parametrize("case", sorted(CASES))
def test_gradients_are_those_of_finite_differences(case: str) -> None:
    function, inputs = CASES[case]()
    leaves = tuple(x.requires_grad_() for x in inputs)
    assert gradcheck(function, leaves, nondet_tol=0.0, fast_mode=True)
    assert gradgradcheck(function, leaves, nondet_tol=0.0, fast_mode=True)


def decode_pair() -> tuple[Callable[..., Any], Callable[..., Any], list[Tensor]]:
    x = decode_inputs()
    rest = (x.qo_indptr, x.kv_indptr, x.kv_indices, x.kv_last_page_lens, (), 1, 0, x.softmax_scale, None, None, 6)

    def op(q: Tensor, kv_cache: Tensor) -> Any:
        return mla_ops.mla_decode(**x._replace(q=q, kv_cache=kv_cache).arguments())

    return op, lambda q, kv_cache: reference.mla_decode(q, kv_cache, *rest), [x.q, x.kv_cache]


def prefill_pair() -> tuple[Callable[..., Any], Callable[..., Any], list[Tensor]]:
    x = make_prefill_inputs([2, 3], [3, 3], poison=False)

    def op(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return mla_ops.mla_prefill(**x._replace(q=q, k=k, v=v)._asdict())

    return op, lambda q, k, v: reference.mla_prefill(q, k, v, *x[3:], True), [x.q, x.k, x.v]


def merge_pair() -> tuple[Callable[..., Any], Callable[..., Any], list[Tensor]]:
    states = [torch.randn(3, 2, 4), torch.randn(3, 2), torch.randn(3, 2, 4), torch.randn(3, 2)]
    return mla_ops.merge_attn_states, reference.merge_attn_states, states


@pytest.mark.parametrize("pair", [decode_pair, prefill_pair, merge_pair])
def test_gradients_through_out_and_lse_are_those_of_plain_pytorch(
    pair: Callable[[], tuple[Callable[..., Any], Callable[..., Any], list[Tensor]]],
) -> None:
    """lse is float32 by contract, too coarse for finite differences: the same code under autograd is the measure."""
    op, plain, inputs = pair()
    gradients = []
    for function in (op, plain):
        leaves = [x.detach().clone().requires_grad_() for x in inputs]
        out, lse = function(*leaves)
        (out.sum() + lse.masked_fill(lse.isneginf(), 0.0).sum()).backward()
        gradients.append([x.grad for x in leaves])
    for found, expected in zip(*gradients, strict=True):
        assert torch.equal(found, expected)


def test_a_gradient_never_reaches_what_no_request_owns() -> None:
    x = make_decode_inputs([3, 0, 5], dtype=torch.float64)
    q, cache = x.q.requires_grad_(), x.kv_cache.requires_grad_()
    mla_ops.mla_decode(**x._replace(q=q, kv_cache=cache).arguments()).out.sum().backward()
    assert q.grad is not None
    assert cache.grad is not None
    assert not q.grad[3:].any()
    unused = x.kv_cache.isnan()
    assert not cache.grad[unused].any()
    assert cache.grad.isfinite().all()


INDICES = {
    "gather": ("kv_indptr", "kv_indices", "kv_last_page_lens", "cu_seqlens", "seq_starts"),
    "decode": ("qo_indptr", "kv_indptr", "kv_indices", "kv_last_page_lens"),
    "prefill": ("cu_seqlens_q", "cu_seqlens_k"),
    "absorb_query": ("positions", "inv_freq"),
}


def recorded(op: str) -> tuple[Tensor, dict[str, Tensor]]:
    """A result that asks for a gradient, and the tensors that say where it came from."""
    if op == "absorb_query":
        call = absorb_query(torch.float32)
        call["q"].requires_grad_()
        return mla_ops.absorb_query(**call), call
    if op == "prefill":
        inputs = make_prefill_inputs([2, 3], [3, 3], poison=False)._asdict()
        inputs["q"].requires_grad_()
        return mla_ops.mla_prefill(**inputs, backend="reference").out, inputs
    x = decode_inputs()
    x.kv_cache.requires_grad_()
    inputs = {
        **x._asdict(),
        "cu_seqlens": torch.tensor([0, 2, 2, 6]).int(),
        "seq_starts": torch.tensor([1, 0, 1]).int(),
    }
    if op == "decode":
        return mla_ops.mla_decode(**x.arguments()).out, inputs
    rows = {name: inputs[name] for name in INDICES["gather"]}
    return mla_ops.gather_latent_cache(x.kv_cache, **rows, num_tokens=7), inputs


@pytest.mark.parametrize(("op", "name"), [(op, name) for op, names in INDICES.items() for name in names])
def test_a_backward_notices_what_was_changed_since_the_forward(op: str, name: str) -> None:
    out, inputs = recorded(op)
    inputs[name].zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_a_backward_notices_that_its_plan_was_updated() -> None:
    plan = DecodePlan(
        MLAConfig.preset("deepseek-v2-lite"), max_batch_size=1, max_seq_len=8, page_size=4, device="cpu",
        dtype=torch.float32, backend="reference",
    )  # fmt: skip
    table = torch.tensor([[1]]).int()
    plan.update(table, torch.tensor([3]).int())
    metadata = plan.at(1)
    q = torch.randn(1, 16, 576, requires_grad=True)
    lists = (metadata.qo_indptr, metadata.kv_indptr, metadata.kv_indices, metadata.kv_last_page_lens)
    out = mla_ops.mla_decode(q, torch.randn(2, 4, 576), *lists, softmax_scale=0.3, backend="reference").out
    plan.update(table, torch.tensor([4]).int())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


# --- torch.func and forward gradients ---------------------------------------------------------------------------


def finite_difference(function: Callable[..., Tensor], inputs: Sequence[Tensor], tangents: Sequence[Tensor]) -> Tensor:
    step = 1e-6
    ahead = function(*(x + step * t for x, t in zip(inputs, tangents, strict=True)))
    behind = function(*(x - step * t for x, t in zip(inputs, tangents, strict=True)))
    return (ahead - behind) / (2 * step)


def by_jvp(function: Callable[..., Tensor], inputs: tuple[Tensor, ...], tangents: tuple[Tensor, ...]) -> Tensor:
    return func.jvp(function, inputs, tangents)[1]


def by_linearize(function: Callable[..., Tensor], inputs: tuple[Tensor, ...], tangents: tuple[Tensor, ...]) -> Tensor:
    return func.linearize(function, *inputs)[1](*tangents)


def by_jacobian(
    transform: Callable[..., Any], function: Callable[..., Tensor], inputs: Sequence[Tensor], tangents: Sequence[Tensor]
) -> Tensor:
    jacobians = transform(function, argnums=tuple(range(len(inputs))))(*inputs)
    parts = [torch.tensordot(j, t, t.dim()) for j, t in zip(jacobians, tangents, strict=True)]
    return torch.stack(parts).sum(0)


def by_vmap(function: Callable[..., Tensor], inputs: Sequence[Tensor], tangents: Sequence[Tensor]) -> Tensor:
    calls = [tuple(torch.stack([x, x]) for x in xs) for xs in (inputs, tangents)]
    return func.jvp(func.vmap(function), *calls)[1][1]


class Watch(TorchDispatchMode):
    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return op(*args, **(kwargs or {}))


def by_dual_tensors_under_a_mode(
    function: Callable[..., Tensor], inputs: Sequence[Tensor], tangents: Sequence[Tensor]
) -> Tensor:
    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(x, t) for x, t in zip(inputs, tangents, strict=True)]
        with Watch():
            result = function(*duals)
        return forward_ad.unpack_dual(result).tangent


DERIVATIVES: dict[str, Callable[..., Tensor]] = {
    "jvp": by_jvp,
    "linearize": by_linearize,
    "jacfwd": partial(by_jacobian, func.jacfwd),
    "jacrev": partial(by_jacobian, func.jacrev),
    "jvp of vmap": by_vmap,
    "dual tensors": by_dual_tensors_under_a_mode,
}


@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node:UserWarning")  # torch's own, in linearize
@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")  # torch's own, at the first dual tensor
@pytest.mark.parametrize("derivative", DERIVATIVES)
@pytest.mark.parametrize("case", sorted(CASES))
def test_derivatives_by_torch_func_are_those_of_finite_differences(case: str, derivative: str) -> None:
    function, inputs = CASES[case]()
    tangents = tuple(torch.randn_like(x) for x in inputs)
    found = DERIVATIVES[derivative](function, inputs, tangents)
    torch.testing.assert_close(found, finite_difference(function, inputs, tangents), atol=1e-6, rtol=1e-6)


@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")
@pytest.mark.parametrize("order", ["jvp of grad", "grad of jvp"])
@pytest.mark.parametrize("case", ["decode", "prefill-causal"])
def test_second_derivatives_by_torch_func_are_those_of_finite_differences(case: str, order: str) -> None:
    function, (first, *others) = CASES[case]()
    tangent = torch.randn_like(first)

    def loss(x: Tensor) -> Tensor:
        return function(x, *others).sin().sum()

    if order == "jvp of grad":
        found = func.jvp(func.grad(loss), (first,), (tangent,))[1]
    else:
        found = func.grad(lambda x: func.jvp(loss, (x,), (tangent,))[1])(first)
    expected = finite_difference(func.grad(loss), (first,), (tangent,))
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("op", ["absorb_query", "expand_values", "linear", "rms_norm"])
def test_an_op_around_attention_has_its_gradient_under_torch_func_too(op: str) -> None:
    call = {name: x for name, x in CALLS[op](torch.float64).items() if name not in ("second", "residual")}
    names = list(call)[:2]

    def loss(first: Tensor, second: Tensor) -> Tensor:
        return getattr(mla_ops, op)(**{**call, names[0]: first, names[1]: second}).sin().sum()

    leaves = [call[name].requires_grad_() for name in names]
    expected = torch.autograd.grad(loss(*leaves), leaves)
    found = func.grad(loss, argnums=(0, 1))(*(x.detach() for x in leaves))
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("both", [True, False], ids=["both sides without keys", "one side without keys"])
@pytest.mark.parametrize("width", [0, 4], ids=["no columns", "four columns"])
def test_merging_rows_without_keys_gives_no_gradient(both: bool, width: int) -> None:
    states = [torch.randn(3, 2, width), torch.randn(3, 2), torch.randn(3, 2, width), torch.randn(3, 2)]
    states[1][1] = -torch.inf
    if both:
        states[3][1] = -torch.inf
    leaves = [x.requires_grad_() for x in states]
    out, lse = mla_ops.merge_attn_states(*leaves, backend="reference")
    (out.sum() + lse[[0, 2]].sum() + lse[1].exp().sum()).backward()
    for x in leaves:
        assert x.grad is not None
        assert x.grad.isfinite().all()
    assert not states[1].grad[1].any()
    assert bool(states[3].grad[1].any()) != both


# --- refusals ---------------------------------------------------------------------------------------------------


def write(requires_grad: str) -> None:
    tensors = {"kv_c": torch.randn(2, 32), "k_pe": torch.randn(2, 16), "kv_cache": torch.zeros(2, 4, 48)}
    tensors[requires_grad].requires_grad_()
    mla_ops.write_latent_cache(**tensors, slot_mapping=torch.tensor([1, 5]))


def decode_out(requires_grad: str) -> None:
    x = make_decode_inputs([3])
    out, lse = torch.zeros(*x.q.shape[:2], 32), torch.zeros(x.q.shape[:2])
    {"q": x.q, "kv_cache": x.kv_cache, "out": out, "lse": lse}[requires_grad].requires_grad_()
    mla_ops.mla_decode(**x.arguments(), out=(out, lse))


IN_PLACE = [
    *[(write, name) for name in ("kv_c", "k_pe", "kv_cache")],
    *[(decode_out, name) for name in ("q", "kv_cache", "out", "lse")],
]


@pytest.mark.parametrize(("call", "name"), IN_PLACE)
def test_an_op_that_writes_in_place_refuses_a_gradient(call: Callable[[str], None], name: str) -> None:
    with pytest.raises(InferenceOnlyError, match=r"writes in place and has no gradient; call it under torch\.no_grad"):
        call(name)


@pytest.mark.parametrize(("call", "name"), IN_PLACE)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_an_op_that_writes_in_place_works_without_gradients(
    call: Callable[[str], None], name: str, mode: Callable[[], Any]
) -> None:
    with mode():
        call(name)


@pytest.fixture
def fake_backend(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A second backend, with the reference's kernels under another name."""
    monkeypatch.setitem(kernels._MODULES, "fake", "mla_ops.backends.reference")
    yield "fake"
    for key in [key for key in kernels._KERNELS if key[1] == "fake"]:
        del kernels._KERNELS[key]


def calls_of(backend: str, requires_grad: bool, scale: Tensor | float = 1.0) -> dict[str, Callable[[], Any]]:
    x, p = make_decode_inputs([3, 5]), make_prefill_inputs([3])
    x, p = x._replace(kv_cache=x.kv_cache * scale), p._replace(q=p.q * scale)
    out, lse = torch.randn(3, 2, 4) * scale, torch.randn(3, 2)
    if requires_grad:
        for tensor in (x.q, x.kv_cache, p.q, p.k, p.v, out):
            tensor.requires_grad_()
    cu_seqlens = torch.tensor([0, 3, 8]).int()
    pages = (x.kv_cache, x.kv_indptr, x.kv_indices, x.kv_last_page_lens, cu_seqlens)
    return {
        "mla_decode": lambda: mla_ops.mla_decode(**x.arguments(), backend=backend),
        "mla_prefill": lambda: mla_ops.mla_prefill(**p._asdict(), backend=backend),
        "gather_latent_cache": lambda: mla_ops.gather_latent_cache(*pages, num_tokens=8, backend=backend),
        "merge_attn_states": lambda: mla_ops.merge_attn_states(out, lse, out, lse, backend=backend),
    }


@pytest.mark.parametrize("op", ["gather_latent_cache", "merge_attn_states", "mla_decode", "mla_prefill"])
def test_a_backend_without_a_backward_refuses_a_gradient(op: str, fake_backend: str) -> None:
    with pytest.raises(InferenceOnlyError, match=rf'{op} with backend="fake" is for inference and has no gradient'):
        calls_of(fake_backend, True)[op]()
    with torch.no_grad():
        calls_of(fake_backend, True)[op]()
    calls_of(fake_backend, False)[op]()


@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")
@pytest.mark.parametrize("transform", ["grad", "jvp"])
@pytest.mark.parametrize("op", ["gather_latent_cache", "merge_attn_states", "mla_decode", "mla_prefill"])
def test_a_backend_without_a_backward_refuses_torch_func(op: str, transform: str, fake_backend: str) -> None:
    def call(scale: Tensor) -> Tensor:
        result = calls_of(fake_backend, False, scale)[op]()
        return (result if isinstance(result, Tensor) else result.out).sum()

    one = torch.tensor(1.0)
    with pytest.raises(InferenceOnlyError, match=rf'{op} with backend="fake" is for inference and has no gradient'):
        func.grad(call)(one) if transform == "grad" else func.jvp(call, (one,), (one,))


@pytest.mark.parametrize("relation", ["same", "computed"])
def test_inputs_that_hang_together_get_each_gradient_once(relation: str) -> None:
    indptr = torch.tensor([0, 3]).int()

    def function(x: Tensor) -> Tensor:
        q = x * 1.5
        k, v = (q, q) if relation == "same" else (q.exp(), q.sin())
        sizes = {"max_seqlen_q": 3, "max_seqlen_k": 3, "softmax_scale": 0.3}
        return mla_ops.mla_prefill(q, k, v, indptr, indptr, **sizes, backend="reference").out

    leaf = torch.randn(3, 2, 4, dtype=torch.float64, requires_grad=True)
    assert gradcheck(function, (leaf,), fast_mode=True)
    assert gradgradcheck(function, (leaf,), fast_mode=True)


def test_a_gradient_of_a_scale_is_refused() -> None:
    x = make_decode_inputs([3, 5], dtype=torch.float8_e4m3fn, poison=False)
    for name in ("q_scale", "kv_scale"):
        scale = getattr(x, name).requires_grad_()
        with pytest.raises(InferenceOnlyError, match=f"mla_decode has no gradient of {name}; detach it"):
            mla_ops.mla_decode(**x.arguments(), backend="reference")
        scale.requires_grad_(False)
    pages = (x.kv_cache, x.kv_indptr, x.kv_indices, x.kv_last_page_lens)
    x.kv_scale.requires_grad_()
    with pytest.raises(InferenceOnlyError, match="gather_latent_cache has no gradient of kv_scale; detach it"):
        mla_ops.gather_latent_cache(
            *pages, torch.tensor([0, 2, 4]).int(), num_tokens=4, kv_scale=x.kv_scale, dtype=torch.float32
        )
