"""A call whose signature has been seen goes straight to its kernels: right whatever changes between two calls."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import triton
from kernel_cases import Paged, assert_close_to_reference, check_decode, check_prefill, paged
from torch import Tensor

from mla_ops import signatures

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")


@pytest.fixture(autouse=True)
def no_signatures() -> None:
    signatures.READY.clear()


def case(requests: int = 3, heads: int = 16, dtype: torch.dtype = torch.bfloat16, **options: Any) -> Paged:
    lens = torch.randint(0, 900, (requests,)).tolist()
    return paged(lens, heads, 64, 512, 64, CUDA, dtype, **options)


def unaligned(x: Tensor) -> Tensor:
    """The same values at an address that is not of 16 bytes."""
    return torch.empty(x.numel() + 1, dtype=x.dtype, device=x.device)[1:].view(x.shape).copy_(x)


def row_of_more(x: Tensor) -> Tensor:
    """The same values in rows of a wider tensor."""
    return torch.cat([x, torch.full_like(x, torch.nan)], -1)[..., : x.shape[-1]]


def test_the_second_call_compiles_nothing_and_does_not_go_through_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    from mla_ops.backends.triton.launch import Launch

    first = case()
    check_decode(first)
    monkeypatch.setattr(Launch, "run", lambda self: pytest.fail("bound calls do not come here"))
    first.q = torch.randn_like(first.q)
    check_decode(first)


@pytest.mark.parametrize("again", [False, True], ids=["new values", "as before"])
@pytest.mark.parametrize(
    "change",
    [
        lambda x: setattr(x, "q", row_of_more(x.q)),
        lambda x: setattr(x, "q", unaligned(x.q)),
        lambda x: setattr(x, "q", x.q.transpose(0, 1).contiguous().transpose(0, 1)),
        lambda x: setattr(x, "kv_cache", row_of_more(x.kv_cache)),
        lambda x: setattr(x, "kv_indices", unaligned(x.kv_indices)),
        lambda x: setattr(x, "kv_indptr", unaligned(x.kv_indptr)),
        lambda x: setattr(x, "kv_indices", torch.cat([x.kv_indices] * 2)),
        lambda x: setattr(x, "max_seqlen_q", 2),
    ],
    ids=["stride", "alignment", "heads first", "cache stride", "unaligned indices", "unaligned indptr", "more indices",
         "max_seqlen_q"],
)  # fmt: skip
def test_a_changed_call_is_right(change: Any, again: bool) -> None:
    one = case()
    check_decode(one)
    change(one)
    check_decode(one)
    if again:
        check_decode(one)


def test_other_sizes_and_dtypes_one_after_the_other() -> None:
    cases = [
        case(),
        case(requests=5),
        case(heads=32),
        case(dtype=torch.float16),
        case(fp8=True),
        case(query_lens=[2, 1, 2]),
    ]
    for one in (*cases, *cases):
        check_decode(one)


def test_the_scalars_of_a_call_are_its_own() -> None:
    one = case()
    for splits in (0, 1, 7, 0, 7):
        check_decode(one, splits)
    arguments = (one.q, one.kv_cache, one.qo_indptr, one.kv_indptr, one.kv_indices, one.kv_last_page_lens, [], 1, 0)
    by_scale = [torch.ops.mla_ops.mla_decode(*arguments, scale, None, None, "triton")[1] for scale in (0.1, 0.2) * 2]
    assert torch.equal(by_scale[0], by_scale[2])
    assert torch.equal(by_scale[1], by_scale[3])
    assert not torch.equal(by_scale[0], by_scale[1])


def test_triton_launch_hooks_see_bound_launches() -> None:
    one = case()
    check_decode(one)
    seen: list[str] = []

    def hook(metadata: Any) -> None:
        seen.append(metadata.get()["name"])

    triton.knobs.runtime.launch_enter_hook.add(hook)
    try:
        check_decode(one)
    finally:
        triton.knobs.runtime.launch_enter_hook.remove(hook)
    assert len(seen) == 2
    check_decode(one)
    assert len(seen) == 2


def test_calls_on_other_streams() -> None:
    cases = [case(requests=4) for _ in range(2)]
    expected = [one.decode("triton") for one in cases]
    streams = [torch.cuda.Stream() for _ in cases]
    torch.cuda.synchronize()
    results: list[list[tuple[Tensor, Tensor]]] = [[], []]
    for _ in range(20):
        for stream, one, got in zip(streams, cases, results, strict=True):
            with torch.cuda.stream(stream):
                got.append(one.decode("triton"))
    torch.cuda.synchronize()
    for got, (out, lse) in zip(results, expected, strict=True):
        assert all(torch.equal(a, out) and torch.equal(b, lse) for a, b in got)


def test_calls_of_two_threads() -> None:
    cases = [case(requests=2), case(requests=4)]
    expected = [one.decode("triton") for one in cases]
    wrong: list[int] = []
    start = threading.Barrier(2)

    def work(index: int) -> None:
        start.wait()
        with torch.cuda.stream(torch.cuda.Stream()):
            for step in range(100):
                at = (index + step) % 2
                got = cases[at].decode("triton")
                torch.cuda.current_stream().synchronize()
                if not all(map(torch.equal, got, expected[at])):
                    wrong.append(step)

    torch.cuda.synchronize()
    threads = [threading.Thread(target=work, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_captured_bound_call_replays_over_other_values() -> None:
    one = case()
    expected = one.decode("triton")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = one.decode("triton")
    graph.replay()
    assert torch.equal(out, expected[0])
    one.q.copy_(torch.randn_like(one.q))
    graph.replay()
    expected = one.decode("triton")
    assert torch.equal(out, expected[0])
    assert torch.equal(lse, expected[1])


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_tensors_on_a_device_that_is_not_the_current_one() -> None:
    here = case()
    expected = here.decode("triton")
    there = Paged(**{name: x.to("cuda:1") if isinstance(x, Tensor) else x for name, x in vars(here).items()})
    for _ in range(3):
        assert all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(there.decode("triton"), expected, strict=True))
        assert all(map(torch.equal, here.decode("triton"), expected))


def test_a_bad_call_after_a_good_one_is_refused_before_its_launch() -> None:
    one = case()
    one.decode("triton")
    one.kv_indptr = one.kv_indptr[:-1]
    with pytest.raises(ValueError, match="kv_indptr must have 4"):
        one.decode("triton")


def test_a_write_of_a_known_signature_goes_where_its_slots_say() -> None:
    for rows in (3, 3, 7, 3):
        cache = torch.zeros(4, 64, 576, dtype=torch.bfloat16, device=CUDA)
        kv_c, k_pe = torch.randn(rows, 512, device=CUDA).bfloat16(), torch.randn(rows, 64, device=CUDA).bfloat16()
        slots = torch.randperm(256, device=CUDA)[:rows]
        slots[1] = -1
        torch.ops.mla_ops.write_latent_cache(kv_c, k_pe, cache, slots, None, "triton")
        expected = torch.zeros(256, 576, dtype=torch.bfloat16, device=CUDA)
        live = slots >= 0
        expected[slots[live]] = torch.cat([kv_c, k_pe], 1)[live]
        assert torch.equal(cache.view(256, 576), expected)


# --- the ops around attention -----------------------------------------------------------------------------------


def half(*shape: int) -> Tensor:
    return torch.randn(shape, device=CUDA).bfloat16()


def rows_of_layer(tokens: int) -> dict[str, tuple[Any, ...]]:
    """Fresh arguments of each op, all but the backend."""
    both, slots = half(tokens, 1536 + 576), torch.randperm(256, device=CUDA)[:tokens]
    positions, frequencies = torch.randint(0, 9000, (tokens,), device=CUDA), torch.rand(32, device=CUDA)
    kv_b = half(4, 256, 512) / 22
    return {
        "rms_norm": (half(tokens, 7168), half(7168), 1e-6),
        "linear": (half(tokens, 1024), half(512, 1024) / 32, half(576, 1024) / 32, half(tokens, 1088)),
        "norm_rope_write": (
            *(both[:, :1536], both[:, 1536:], half(1536), half(512), positions, frequencies),
            *(half(4, 64, 576), slots, 1e-6, 1.25, True, None),
        ),
        "absorb_query": (half(tokens, 4, 192), kv_b[:, :128], positions, frequencies, 1.25, True, 0.0, 1),
        "expand_values": (half(tokens, 4, 512), kv_b[:, 128:]),
    }


OPS_AROUND = ["absorb_query", "expand_values", "linear", "norm_rope_write", "rms_norm"]


def check_op(op: str, args: Sequence[Any]) -> None:
    """The op by the kernels against the reference; what it writes in place is compared too."""
    call = getattr(torch.ops.mla_ops, op)
    cache = 6 if op == "norm_rope_write" else None
    ours = [x.clone() if place == cache else x for place, x in enumerate(args)]
    theirs, exact = (
        [x.to(dtype, copy=True) if isinstance(x, Tensor) and x.dtype == torch.bfloat16 else x for x in args]
        for dtype in (torch.bfloat16, torch.float64)
    )
    results = []
    for inputs, backend in ((ours, "triton"), (theirs, "reference"), (exact, "reference")):
        result = call(*inputs, backend=backend)
        results.append([result] if cache is None else [*result, inputs[cache]])
    for found, low, high in zip(*results, strict=True):
        assert_close_to_reference(found, high, low)


@pytest.mark.parametrize("tokens", [1, 3, 40])
@pytest.mark.parametrize("op", OPS_AROUND)
def test_a_repeat_of_an_op_around_attention_is_bound_and_right(
    op: str, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mla_ops.backends.triton.launch import Launch

    check_op(op, rows_of_layer(tokens)[op])
    monkeypatch.setattr(Launch, "run", lambda self: pytest.fail("bound calls do not come here"))
    for _ in range(2):
        check_op(op, rows_of_layer(tokens)[op])


@pytest.mark.parametrize("op", OPS_AROUND)
def test_a_changed_call_of_an_op_around_attention_is_right(op: str) -> None:
    changes = (lambda x: x, row_of_more, unaligned, lambda x: x, row_of_more)
    for place in range(2):
        for change in changes:
            args = list(rows_of_layer(3)[op])
            args[place] = change(args[place])
            check_op(op, args)


@pytest.mark.parametrize("place", range(8, 11), ids=["eps", "rope_scale", "interleave"])
def test_the_scalars_of_a_front_are_its_own(place: int) -> None:
    args = list(rows_of_layer(3)["norm_rope_write"])
    values = {8: (1e-6, 0.5), 9: (1.25, 2.0), 10: (True, False)}[place]
    for value in values * 2:
        args[place] = value
        check_op("norm_rope_write", args)


def test_launch_hooks_see_the_ops_around_attention() -> None:
    def hook(metadata: Any) -> None:
        seen.append(metadata.get()["name"])

    calls = rows_of_layer(3)
    for _ in range(2):
        seen: list[str] = []
        triton.knobs.runtime.launch_enter_hook.add(hook)
        try:
            for op in OPS_AROUND:
                check_op(op, calls[op])
        finally:
            triton.knobs.runtime.launch_enter_hook.remove(hook)
        assert len(seen) == len(OPS_AROUND)
        for op in OPS_AROUND:
            check_op(op, calls[op])
        assert len(seen) == len(OPS_AROUND)


def test_rows_that_lie_in_the_cache_once_leave_no_strides_behind() -> None:
    """They are copied, and a copy is dense where the rows of a call like it are not."""
    for _ in range(2):
        for lies_there in (True, False):
            cache = half(8, 64, 576)
            before = cache.clone()
            rows = (cache if lies_there else before.clone()).view(-1, 576)[:3]
            slots = torch.tensor([1, 2, 300], device=CUDA)
            torch.ops.mla_ops.write_latent_cache(rows[:, :512], rows[:, 512:], cache, slots, None, "triton")
            expected = before.view(-1, 576).clone()
            expected[slots] = before.view(-1, 576)[:3]
            assert torch.equal(cache.view(-1, 576), expected)


def test_prefills_through_descriptors_one_after_the_other() -> None:
    """What Triton compiled is launched again with other descriptors."""
    for query_lens, heads in ([40, 17], 2), ([300, 1], 2), ([40, 17], 3), ([129], 2):
        check_prefill(query_lens, query_lens, 192, 128, True, CUDA, torch.bfloat16, heads)
