"""``torch.func.vmap`` of an op equals a loop over the calls, whatever is batched and whatever is in unused tails."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import vmap

import mla_ops
from mla_ops import InferenceOnlyError
from mla_ops.testing import make_decode_inputs

CALLS, REQUESTS, TOKENS, HEADS, PAGES, ENTRIES = 3, 2, 7, 2, 6, 7
_UNUSED = 2**31 - 1


def indptr(steps: Sequence[Sequence[int]]) -> Tensor:
    return torch.tensor([[0, *itertools.accumulate(row)] for row in steps]).int()


def decode_arguments(same_lengths: bool = False) -> tuple[Tensor, ...]:
    """Three calls of ragged requests, each with rows, entries and pages that no request owns, poisoned.

    ``same_lengths`` gives all calls the first call's: so has a call whose lengths are shared.
    """
    lengths: list[Any] = [[[1, 2], [2, 0], [3, 3]], [[2, 3], [1, 0], [0, 2]], [[3, 4], [1, 0], [0, 2]]]
    if same_lengths:
        lengths = [[x[0]] * CALLS for x in lengths]
    q = torch.randn(CALLS, TOKENS, HEADS, 48)
    cache = torch.randn(CALLS, PAGES, 4, 48)
    qo_indptr, kv_indptr = indptr(lengths[0]), indptr(lengths[1])
    kv_indices = torch.full((CALLS, ENTRIES), _UNUSED).int()
    for call in range(CALLS):
        q[call, qo_indptr[call, -1] :] = torch.nan
        used = int(kv_indptr[call, -1])
        kv_indices[call, :used] = 1 + torch.randperm(PAGES - 1)[:used]
    cache[:, 0] = torch.nan  # a page of no request
    return q, cache, qo_indptr, kv_indptr, kv_indices, torch.tensor(lengths[2]).int()


def decode(*args: Tensor) -> tuple[Tensor, Tensor]:
    return tuple(mla_ops.mla_decode(*args, softmax_scale=0.1, max_seqlen_q=3, kv_lora_rank=32))


def loop(function: Callable[..., Any], in_dims: Sequence[int | None], args: Sequence[Tensor]) -> list[Any]:
    return [
        function(*(x if dim is None else x.select(dim, call) for x, dim in zip(args, in_dims, strict=True)))
        for call in range(CALLS)
    ]


def assert_vmap_equals_loop(
    function: Callable[..., Any], in_dims: Sequence[int | None], args: Sequence[Tensor]
) -> None:
    folded = vmap(function, in_dims=tuple(in_dims))(*args)
    one_by_one = loop(function, in_dims, args)
    if isinstance(folded, Tensor):
        folded, one_by_one = (folded,), [(x,) for x in one_by_one]
    for i, result in enumerate(folded):
        # The same arithmetic, but matmuls of another size may add in another order
        torch.testing.assert_close(result, torch.stack([x[i] for x in one_by_one]), rtol=1e-6, atol=1e-6)


def choices(count: int) -> Iterator[tuple[int | None, ...]]:
    """All batched, each one shared by all calls, each one the only batched."""
    yield (0,) * count
    for i in range(count):
        yield tuple(None if j == i else 0 for j in range(count))
        yield tuple(0 if j == i else None for j in range(count))


def pick(in_dims: Sequence[int | None], args: Sequence[Tensor]) -> list[Tensor]:
    """A shared argument is that of the first call."""
    return [x if dim is not None else x[0] for x, dim in zip(args, in_dims, strict=True)]


@pytest.mark.parametrize("in_dims", list(choices(6)), ids=str)
def test_decode(in_dims: tuple[int | None, ...]) -> None:
    args = decode_arguments(same_lengths=in_dims != (0,) * 6)
    assert_vmap_equals_loop(decode, in_dims, pick(in_dims, args))


def test_decode_batched_in_other_dims() -> None:
    q, cache, *rest = decode_arguments()
    args = [q.movedim(0, 1), cache.movedim(0, 2), *rest]
    assert_vmap_equals_loop(decode, (1, 2, 0, 0, 0, 0), args)


def test_decode_of_an_fp8_cache_with_one_scale() -> None:
    q, cache, *rest = decode_arguments()
    scale = torch.tensor([0.5])

    def function(*args: Tensor) -> tuple[Tensor, Tensor]:
        return tuple(mla_ops.mla_decode(*args, softmax_scale=0.1, max_seqlen_q=3, kv_lora_rank=32, kv_scale=scale))

    folded = vmap(function)(q, cache.to(torch.float8_e4m3fn), *rest)
    one_by_one = loop(function, (0,) * 6, (q, cache.to(torch.float8_e4m3fn), *rest))
    torch.testing.assert_close(folded[0], torch.stack([x[0] for x in one_by_one]), rtol=1e-6, atol=1e-6)


def test_decode_of_a_plans_metadata() -> None:
    """A plan's ``backend_state`` bounds the pages of a request; a folded call has the same bound."""
    q, cache, *rest = decode_arguments()
    state = (torch.arange(3).int(),)

    def function(*args: Tensor) -> tuple[Tensor, Tensor]:
        return tuple(mla_ops.mla_decode(*args, softmax_scale=0.1, max_seqlen_q=3, kv_lora_rank=32, backend_state=state))

    assert_vmap_equals_loop(function, (0,) * 6, (q, cache, *rest))


@pytest.mark.parametrize("in_dims", list(choices(5)), ids=str)
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_prefill(in_dims: tuple[int | None, ...], causal: bool) -> None:
    q, k, v = torch.randn(CALLS, 7, 2, 8), torch.randn(CALLS, 9, 2, 8), torch.randn(CALLS, 9, 2, 4)
    cu_q, cu_k = indptr([[1, 2], [3, 0], [3, 3]]), indptr([[4, 2], [1, 5], [0, 4]])
    for tensor, used in ((q, 6), (k, 6), (v, 6)):
        tensor[:, used:] = torch.nan  # rows of no request in any call
    for call in range(CALLS):
        q[call, cu_q[call, -1] :] = torch.nan
        k[call, cu_k[call, -1] :] = torch.nan
        v[call, cu_k[call, -1] :] = torch.nan
    if in_dims != (0,) * 5:  # a shared argument is the first call's: so are all lengths
        q, k, v = (torch.randn_like(x) for x in (q, k, v))

    def function(*args: Tensor) -> tuple[Tensor, Tensor]:
        return tuple(mla_ops.mla_prefill(*args, max_seqlen_q=3, max_seqlen_k=5, softmax_scale=0.3, causal=causal))

    assert_vmap_equals_loop(function, in_dims, pick(in_dims, (q, k, v, cu_q, cu_k)))


@pytest.mark.parametrize("in_dims", list(choices(5)), ids=str)
def test_gather(in_dims: tuple[int | None, ...]) -> None:
    _, cache, _, kv_indptr, kv_indices, last = decode_arguments(same_lengths=in_dims != (0,) * 5)
    args = (cache, kv_indptr, kv_indices, last, indptr([[4, 6], [2, 1], [1, 3]]))

    def function(*args: Tensor) -> Tensor:
        return mla_ops.gather_latent_cache(*args, num_tokens=11)

    assert_vmap_equals_loop(function, in_dims, pick(in_dims, args))


def test_gather_from_seq_starts() -> None:
    _, cache, _, kv_indptr, kv_indices, last = decode_arguments()
    cu_seqlens, starts = indptr([[4, 6], [1, 0], [0, 2]]), torch.tensor([[3, 5], [0, 0], [0, 4]]).int()

    def function(*args: Tensor) -> Tensor:
        return mla_ops.gather_latent_cache(*args[:5], num_tokens=11, seq_starts=args[5])

    assert_vmap_equals_loop(function, (0,) * 6, (cache, kv_indptr, kv_indices, last, cu_seqlens, starts))


@pytest.mark.parametrize("in_dims", list(choices(4)), ids=str)
def test_merge(in_dims: tuple[int | None, ...]) -> None:
    args = (
        torch.randn(CALLS, 5, 2, 4),
        torch.randn(CALLS, 5, 2),
        torch.randn(CALLS, 5, 2, 4),
        torch.randn(CALLS, 5, 2),
    )
    args[1][:, 2] = -torch.inf
    args[0][:, 2] = torch.nan
    assert_vmap_equals_loop(lambda *x: tuple(mla_ops.merge_attn_states(*x)), in_dims, pick(in_dims, args))


@pytest.mark.parametrize("cache_dim", [0, 1])
@pytest.mark.parametrize("in_dims", [(0, 0, 0), (None, 0, 0), (0, None, 0), (0, 0, None), (None, None, None)], ids=str)
def test_write(in_dims: tuple[int | None, ...], cache_dim: int) -> None:
    kv_c, k_pe = torch.randn(CALLS, 4, 32), torch.randn(CALLS, 4, 16)
    slots = torch.stack([torch.randperm(12)[:4] for _ in range(CALLS)])
    slots[1, 2], slots[2, 0] = -1, 99
    caches = torch.zeros(CALLS, 3, 4, 48)
    expected = caches.clone()

    def function(kv_c: Tensor, k_pe: Tensor, slots: Tensor, cache: Tensor) -> Tensor:
        mla_ops.write_latent_cache(kv_c, k_pe, cache, slots)
        return slots

    inputs = pick(in_dims, (kv_c, k_pe, slots))
    loop(function, (*in_dims, 0), (*inputs, expected))
    vmap(function, in_dims=(*in_dims, cache_dim))(*inputs, caches.movedim(0, cache_dim))
    assert torch.equal(caches, expected)


def assert_gradients_equal_those_of_a_loop(function: Callable[..., Tensor], args: Sequence[Tensor]) -> None:
    gradients = []
    for run in (vmap(function), lambda *x: torch.stack(loop(function, (0,) * len(x), x))):
        leaves = [x.detach().clone().requires_grad_(x.is_floating_point()) for x in args]
        run(*leaves).sum().backward()
        gradients.append([x.grad for x in leaves if x.requires_grad])
    for found, expected in zip(*gradients, strict=True):
        assert found.isfinite().all()
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_gradients_through_a_vmapped_decode_never_meet_poison() -> None:
    assert_gradients_equal_those_of_a_loop(lambda *x: decode(*x)[0].sum(), decode_arguments())


def test_gradients_through_a_vmapped_prefill_never_meet_poison() -> None:
    q, k, v = torch.randn(CALLS, 7, 2, 8), torch.randn(CALLS, 9, 2, 8), torch.randn(CALLS, 9, 2, 4)
    for x in (q, k, v):
        x[:, 6:] = torch.nan

    def function(*args: Tensor) -> Tensor:
        return mla_ops.mla_prefill(*args, max_seqlen_q=3, max_seqlen_k=5, softmax_scale=0.3).out.sum()

    cu_q, cu_k = indptr([[3, 3]] * CALLS), indptr([[4, 2], [1, 5], [2, 4]])
    assert_gradients_equal_those_of_a_loop(function, (q, k, v, cu_q, cu_k))


# --- refusals ---------------------------------------------------------------------------------------------------


def test_write_to_one_cache_from_many_calls_is_refused() -> None:
    cache = torch.zeros(3, 4, 48)

    def function(kv_c: Tensor, slots: Tensor) -> Tensor:
        mla_ops.write_latent_cache(kv_c, torch.zeros(4, 16), cache, slots)
        return slots

    with pytest.raises(InferenceOnlyError, match="vmap of write_latent_cache needs a kv_cache per call"):
        vmap(function)(torch.randn(CALLS, 4, 32), torch.zeros(CALLS, 4, dtype=torch.int64))
    assert not cache.any()


def test_write_to_caches_whose_pages_alternate_is_refused() -> None:
    """They can't be folded into one cache without a copy, and a copy would not be the caller's."""
    caches = torch.zeros(3, CALLS, 4, 48)

    def function(kv_c: Tensor, cache: Tensor) -> Tensor:
        mla_ops.write_latent_cache(kv_c, torch.zeros(1, 16), cache, torch.tensor([5]))
        return kv_c

    with pytest.raises(InferenceOnlyError, match="vmap of write_latent_cache needs each call's pages after another's"):
        vmap(function, in_dims=(0, 1))(torch.randn(CALLS, 1, 32), caches)
    assert not caches.any()


def test_decode_into_buffers_is_refused() -> None:
    x = make_decode_inputs([3])
    out, lse = torch.zeros(CALLS, *x.q.shape[:2], 32), torch.zeros(CALLS, *x.q.shape[:2])

    def function(out: Tensor, lse: Tensor) -> Tensor:
        return mla_ops.mla_decode(**x.arguments(), out=(out, lse)).out

    with pytest.raises(InferenceOnlyError, match=r"vmap of mla_decode\.out is not defined; use mla_decode"):
        vmap(function)(out, lse)


@pytest.mark.parametrize("op", ["mla_decode", "gather_latent_cache", "write_latent_cache"])
def test_a_scale_per_call_is_refused(op: str) -> None:
    q, cache, *rest = decode_arguments()
    cu_seqlens = indptr([[4, 6], [1, 0], [0, 2]])

    def function(scale: Tensor, cache: Tensor) -> Tensor:
        if op == "mla_decode":
            args = [x[0] for x in (q, *rest)]
            return mla_ops.mla_decode(
                args[0], cache, *args[1:], softmax_scale=0.1, max_seqlen_q=3, kv_lora_rank=32, kv_scale=scale
            ).out
        if op == "gather_latent_cache":
            pages = [x[0] for x in (*rest[1:], cu_seqlens)]
            return mla_ops.gather_latent_cache(cache, *pages, num_tokens=11, kv_scale=scale, dtype=torch.float32)
        mla_ops.write_latent_cache(torch.zeros(1, 32), torch.zeros(1, 16), cache, torch.tensor([1]), kv_scale=scale)
        return scale

    with pytest.raises(InferenceOnlyError, match=rf"vmap of {op} needs one kv_scale for all calls"):
        vmap(function)(torch.ones(CALLS, 1), cache.to(torch.float8_e4m3fn))


def test_a_backend_state_per_call_is_refused() -> None:
    q, cache, *rest = decode_arguments()

    def function(state: Tensor, *args: Tensor) -> Tensor:
        return mla_ops.mla_decode(*args, softmax_scale=0.1, max_seqlen_q=3, kv_lora_rank=32, backend_state=(state,)).out

    with pytest.raises(InferenceOnlyError, match="vmap of mla_decode needs an empty backend_state"):
        vmap(function)(torch.arange(3).int().expand(CALLS, 3), q, cache, *rest)
