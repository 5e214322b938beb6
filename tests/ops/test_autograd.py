"""Gradients: right, or a typed error; never silently wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

import mla_ops
from mla_ops import InferenceOnlyError
from mla_ops.backends import kernels, reference
from mla_ops.testing import DecodeInputs, make_decode_inputs, make_prefill_inputs

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


def calls_of(backend: str, requires_grad: bool) -> dict[str, Callable[[], Any]]:
    x, p = make_decode_inputs([3, 5]), make_prefill_inputs([3])
    out, lse = torch.randn(3, 2, 4), torch.randn(3, 2)
    for tensor in (x.q, x.kv_cache, p.q, p.k, p.v, out):
        tensor.requires_grad_(requires_grad)
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
