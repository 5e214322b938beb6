"""torch.compile: whole graphs, one graph for all batch sizes and layers, and a cache that is never copied."""

from __future__ import annotations

import gc
import re
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import ReinplaceCounters
from torch._inductor.utils import fresh_cache, run_and_get_code

import mla_ops
from mla_ops import DecodeMetadata, DecodePlan, DeepseekMLA, MLAConfig, PrefillPlan, compile_layers
from mla_ops.backends import kernels
from mla_ops.testing import assert_matches, make_decode_inputs, make_prefill_inputs

CONFIG = MLAConfig(
    hidden_size=48, num_heads=3, kv_lora_rank=32, qk_nope_head_dim=12, qk_rope_head_dim=8, v_head_dim=10, q_lora_rank=24
)
PAGES, PAGE_SIZE = 509, 4  # a prime, so that no other size of a graph is that of the cache
FACTOR = 256.0


@pytest.fixture(autouse=True)
def fresh_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No graph of another test, in memory or on disk; scalar C++, for probing the vector units takes ten seconds."""
    monkeypatch.setattr("torch._inductor.cpu_vec_isa.valid_vec_isa_list", list)
    torch._dynamo.reset()
    ReinplaceCounters.clear()
    with (
        fresh_cache(dir=str(tmp_path)),
        torch._inductor.config.patch({"compile_threads": 1}),
        torch.no_grad(),
    ):
        yield
    torch._dynamo.reset()


def make_layers(count: int) -> list[DeepseekMLA]:
    return [DeepseekMLA(CONFIG).eval().requires_grad_(False) for _ in range(count)]


def make_caches(count: int) -> list[Tensor]:
    return [torch.randn(PAGES, PAGE_SIZE, CONFIG.latent_dim) for _ in range(count)]


def make_plan(query_len: int = 1) -> DecodePlan:
    return DecodePlan(
        CONFIG,
        max_batch_size=64,
        max_seq_len=28,
        query_len=query_len,
        page_size=PAGE_SIZE,
        device="cpu",
        dtype=torch.float32,
    )


def step(plan: DecodePlan, batch_size: int) -> tuple[Tensor, DecodeMetadata]:
    """Random hidden states, lengths and pages."""
    plan.update(
        torch.randperm(PAGES)[: batch_size * 7].reshape(batch_size, 7).int(),
        torch.randint(plan.query_len, 28, (batch_size,)).int(),
    )
    return torch.randn(batch_size * plan.query_len, CONFIG.hidden_size), plan.at(batch_size)


def make_prefill(query_lens: Sequence[int], prefix_lens: Sequence[int]) -> tuple[Tensor, PrefillPlan]:
    requests = len(query_lens)
    plan = PrefillPlan.make(
        CONFIG,
        query_lens=query_lens,
        prefix_lens=prefix_lens,
        block_table=torch.randperm(PAGES)[: requests * 8].reshape(requests, 8).int(),
        page_size=PAGE_SIZE,
        dtype=torch.float32,
        chunk_tokens=8 * max(1, sum(n > 0 for n in prefix_lens)),
    )
    return torch.randn(sum(query_lens), CONFIG.hidden_size), plan


# --- whole graphs -----------------------------------------------------------------------------------------------


def decode_call() -> tuple[Callable[..., Any], tuple[Tensor, ...]]:
    x = make_decode_inputs([3, 0, 9], query_lens=2)
    function = lambda q, cache: mla_ops.mla_decode(**x._replace(q=q, kv_cache=cache).arguments())  # noqa: E731
    return function, (x.q, x.kv_cache)


def decode_out_call() -> tuple[Callable[..., Any], tuple[Tensor, ...]]:
    x = make_decode_inputs([3, 0, 9])
    function = lambda out, lse: mla_ops.mla_decode(**x.arguments(), out=(out, lse))  # noqa: E731
    return function, (torch.full((*x.q.shape[:2], 32), torch.nan), torch.full(x.q.shape[:2], torch.nan))


def prefill_call() -> tuple[Callable[..., Any], tuple[Tensor, ...]]:
    x = make_prefill_inputs([3, 0, 2])
    return lambda q, k, v: mla_ops.mla_prefill(**x._replace(q=q, k=k, v=v)._asdict()), x[:3]


def write_call() -> tuple[Callable[..., Any], tuple[Tensor, ...]]:
    slots = torch.tensor([3, -1, 9])
    inputs = (torch.randn(3, 32), torch.randn(3, 16), torch.zeros(4, 4, 48))
    return lambda kv_c, k_pe, cache: mla_ops.write_latent_cache(kv_c, k_pe, cache, slots), inputs


def gather_call() -> tuple[Callable[..., Any], tuple[Tensor, ...]]:
    x = make_decode_inputs([3, 0, 5])
    pages = (x.kv_indptr, x.kv_indices, x.kv_last_page_lens, torch.tensor([0, 3, 3, 8]).int())
    return lambda cache: mla_ops.gather_latent_cache(cache, *pages, num_tokens=9), (x.kv_cache,)


def merge_call() -> tuple[Callable[..., Any], tuple[Tensor, ...]]:
    return mla_ops.merge_attn_states, (torch.randn(3, 2, 4), torch.randn(3, 2)) * 2


CALLS = {
    "gather_latent_cache": gather_call,
    "merge_attn_states": merge_call,
    "mla_decode": decode_call,
    "mla_decode-out": decode_out_call,
    "mla_prefill": prefill_call,
    "write_latent_cache": write_call,
}


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", sorted(CALLS))
def test_a_public_function_is_one_graph_and_gives_what_eager_gives(name: str, dynamic: bool) -> None:
    function, inputs = CALLS[name]()
    compiled_inputs = [x.clone() for x in inputs]
    expected = function(*inputs)
    found = torch.compile(function, fullgraph=True, backend="aot_eager", dynamic=dynamic)(*compiled_inputs)
    for a, b in zip((found, *compiled_inputs), (expected, *inputs), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


def test_all_public_functions_together_compile_with_inductor() -> None:
    calls = [make() for make in CALLS.values()]
    copies = [[x.clone() for x in inputs] for _, inputs in calls]

    def everything(all_inputs: list[list[Tensor]]) -> list[Any]:
        return [function(*inputs) for (function, _), inputs in zip(calls, all_inputs, strict=True)]

    found = torch.compile(everything, fullgraph=True)(copies)
    expected = everything([list(inputs) for _, inputs in calls])
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(copies, [list(inputs) for _, inputs in calls], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", ["gather_latent_cache", "merge_attn_states", "mla_decode", "mla_prefill"])
@torch.enable_grad()
def test_a_compiled_function_gives_the_gradients_of_eager(name: str) -> None:
    function, inputs = CALLS[name]()
    gradients = []
    for run in (function, torch.compile(function, fullgraph=True, backend="aot_eager")):
        leaves = [x.detach().clone().requires_grad_() for x in inputs]
        result = run(*leaves)
        (result if isinstance(result, Tensor) else result[0]).sum().backward()
        gradients.append([x.grad for x in leaves])
    torch.testing.assert_close(gradients[1], gradients[0], rtol=0, atol=0)


def write_row_by_row(kv_c: Tensor, k_pe: Tensor, kv_cache: Tensor, slots: Tensor, kv_scale: Tensor | None) -> None:
    """As a kernel does it: a row is written while later ones are still to be read."""
    for i, slot in enumerate(slots.tolist()):
        kv_cache.view(-1, kv_cache.shape[2])[slot] = torch.cat([kv_c[i], k_pe[i]])


def test_writing_to_a_clone_of_the_rows_cache_reads_the_rows_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    """pytorch#198031: Inductor turns ``op(x, x.clone())`` into ``op(x, x)``, which must give the same."""
    monkeypatch.setitem(kernels._KERNELS, ("write_latent_cache", "reference"), write_row_by_row)

    def function(x: Tensor, slots: Tensor) -> Tensor:
        cache = x * 2
        copy, rows = cache.clone(), cache.view(-1, 40)[:3]
        mla_ops.write_latent_cache(rows[:, :32], rows[:, 32:], copy, slots)
        return copy

    x, slots = torch.randn(5, 4, 40), torch.tensor([1, 2, 0])
    found, _ = compile_cold(function, x, slots)
    expected = (x * 2).view(-1, 40)
    expected[slots] = (x * 2).view(-1, 40)[:3]
    assert torch.equal(found.view(-1, 40), expected)


def test_decoding_into_a_clone_of_the_queries_reads_the_queries_as_they_were() -> None:
    x = make_decode_inputs([3, 5], qk_rope_head_dim=0)

    def function(q: Tensor) -> Tensor:
        q = q * 2
        lse = q.new_empty(q.shape[:2])
        return mla_ops.mla_decode(**x._replace(q=q).arguments(), out=(q.clone(), lse)).out

    found, _ = compile_cold(function, x.q)
    assert_matches(found, mla_ops.mla_decode(**x._replace(q=x.q * 2).arguments()).out.double())


def test_a_cache_that_is_still_needed_is_not_written_in_place_of_its_clone() -> None:
    def function(cache: Tensor, rows: Tensor, slots: Tensor) -> Tensor:
        copy = cache.clone()
        mla_ops.write_latent_cache(rows[:, :32], rows[:, 32:], copy, slots)
        return copy

    cache, rows, slots = torch.randn(PAGES, 4, 40), torch.randn(2, 40), torch.tensor([0, 5])
    before = cache.clone()
    found = torch.compile(function, fullgraph=True)(cache, rows, slots)
    assert torch.equal(cache, before)
    assert torch.equal(found, function(before, rows, slots))


# --- one graph for all layers and batch sizes -------------------------------------------------------------------


@pytest.mark.parametrize(("count", "query_len"), [(1, 1), (4, 1), (2, 2)])
def test_batch_sizes_1_to_64_are_one_graph_whatever_the_number_of_layers(count: int, query_len: int) -> None:
    layers, caches, plan = make_layers(count), make_caches(count), make_plan(query_len)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = compile_layers(layers, backend=counter)
    for batch_size in (1, 2, *torch.randint(3, 64, (2,)).tolist(), 64, 1):
        hidden, metadata = step(plan, batch_size)
        for layer, run, cache in zip(layers, compiled, caches, strict=True):
            expected_cache = cache.clone()
            expected = layer(hidden, metadata.positions, expected_cache, metadata)
            assert_matches(run(hidden, metadata.positions, cache, metadata), expected.double(), factor=FACTOR)
            assert_matches(cache, expected_cache.double(), factor=FACTOR)
    assert counter.frame_count == 1


def test_the_first_batch_size_does_not_matter() -> None:
    layers, caches, plan = make_layers(1), make_caches(1), make_plan()
    for order in ((1, 64, 3), (64, 3, 1)):
        torch._dynamo.reset()
        counter = CompileCounterWithBackend("eager")
        run = compile_layers(layers, backend=counter)[0]
        for batch_size in order:
            hidden, metadata = step(plan, batch_size)
            run(hidden, metadata.positions, caches[0], plan.at(batch_size))
        assert counter.frame_count == 1


def test_a_step_over_the_same_plan_and_rows_still_compiles_on_its_own() -> None:
    """What is marked for one graph of all sizes is ours alone: no other compilation meets the mark."""
    layers, caches, plan = make_layers(1), make_caches(2), make_plan()
    hidden, metadata = step(plan, 64)
    compile_layers(layers, backend="eager")[0](hidden, metadata.positions, caches[0], metadata, hidden)
    block_table, seq_lens = torch.randperm(PAGES)[: 64 * 7].reshape(64, 7).int(), torch.randint(1, 28, (64,)).int()

    def whole(rows: Tensor, cache: Tensor) -> Tensor:
        plan.update(block_table, seq_lens)
        added: Tensor = layers[0](rows, plan.at(64).positions, cache, plan)
        return rows + added if rows.shape[0] > 1 else added

    caches[1].copy_(caches[0])
    found = torch.compile(whole, backend="aot_eager", fullgraph=True)(hidden, caches[0])
    assert_matches(found, whole(hidden, caches[1]).double(), factor=FACTOR)


def test_a_plan_that_was_compiled_with_can_go() -> None:
    layers, cache = make_layers(1), make_caches(1)[0]
    hidden, plan = make_prefill([3, 5], [0, 9])
    compile_layers(layers, method="prefill", backend="eager")[0](hidden, plan.positions, cache, plan)
    tensors = [weakref.ref(x) for x in (*plan, *plan.chunks[0]) if isinstance(x, Tensor)]
    del plan
    torch._dynamo.reset()
    gc.collect()
    assert not any(tensor() is not None for tensor in tensors)


def test_a_plan_is_taken_whole() -> None:
    layers, cache, plan = make_layers(1), make_caches(1)[0], make_plan()
    hidden, metadata = step(plan, 64)
    run = compile_layers(layers, backend="eager")[0]
    found = run(hidden, metadata.positions, cache, plan)
    assert_matches(found, layers[0](hidden, metadata.positions, cache, plan).double(), factor=FACTOR)


def test_a_residual_is_taken_and_its_batch_is_dynamic_too() -> None:
    layers, cache, plan = make_layers(1), make_caches(1)[0], make_plan()
    counter = CompileCounterWithBackend("eager")
    run = compile_layers(layers, backend=counter)[0]
    for batch_size in (1, 5, 64):
        hidden, metadata = step(plan, batch_size)
        residual = torch.randn_like(hidden)
        arguments = (hidden, metadata.positions, cache, metadata)
        expected = layers[0](*arguments, residual).double()
        assert_matches(run(*arguments, residual), expected, factor=FACTOR)
        assert_matches(run(*arguments, residual=residual), expected, factor=FACTOR)
    assert counter.frame_count == 1


def test_inductor_gives_what_eager_gives_at_every_batch_size() -> None:
    layers, caches, plan = make_layers(2), make_caches(2), make_plan()
    compiled = compile_layers(layers)
    for batch_size in (1, 2, 17, 64):
        hidden, metadata = step(plan, batch_size)
        for layer, run, cache in zip(layers, compiled, caches, strict=True):
            found = run(hidden, metadata.positions, cache, metadata)
            assert_matches(found, layer(hidden, metadata.positions, cache, metadata).double(), factor=FACTOR)
    assert ReinplaceCounters.get_total_missed() == 0


@pytest.mark.parametrize("count", [1, 3])
def test_prefills_of_all_layers_are_one_graph(count: int) -> None:
    layers, caches = make_layers(count), make_caches(count)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = compile_layers(layers, method="prefill", backend=counter)
    hidden, plan = make_prefill([5, 2, 9], [6, 0, 11])
    assert len(plan.chunks) == 2
    for layer, run, cache in zip(layers, compiled, caches, strict=True):
        found = run(hidden, plan.positions, cache, plan)
        assert_matches(found, layer.prefill(hidden, plan.positions, cache, plan).double(), factor=FACTOR)
    assert counter.frame_count == 1


def test_prefills_of_new_lengths_stop_recompiling() -> None:
    """The lengths on the host become symbols: two graphs, whatever comes after."""
    layers, cache = make_layers(1), make_caches(1)[0]
    counter = CompileCounterWithBackend("eager")
    run = compile_layers(layers, method="prefill", backend=counter)[0]
    for query_lens in ([5, 2], [9, 1], [3, 3], [7, 4], [11, 2]):
        hidden, plan = make_prefill(query_lens, [0, 0])
        found = run(hidden, plan.positions, cache, plan)
        assert_matches(found, layers[0].prefill(hidden, plan.positions, cache, plan).double(), factor=FACTOR)
    assert counter.frame_count <= 2


@pytest.mark.parametrize("change", ["copy", "assign", "double", "absorb"])
def test_weights_that_change_after_compiling_are_used(change: str) -> None:
    layers, cache, plan = make_layers(2), make_caches(1)[0], make_plan()
    run = compile_layers(layers, backend="eager")[0]
    hidden, metadata = step(plan, 5)
    before = run(hidden, metadata.positions, cache, metadata)
    if change == "double":
        layers[0].to(torch.float64)
        hidden, cache = hidden.double(), cache.double()
    elif change == "absorb":
        layers[0].absorb(free_kv_b_proj=True)
    else:
        layers[0].load_state_dict(make_layers(1)[0].state_dict(), assign=change == "assign")
    found = run(hidden, metadata.positions, cache, metadata)
    assert_matches(found, layers[0](hidden, metadata.positions, cache, metadata).double(), factor=FACTOR)
    assert found.dtype == hidden.dtype
    assert torch.allclose(found.float(), before, atol=1e-5) == (change in ("double", "absorb"))


def test_a_submodule_that_was_replaced_after_compiling_is_refused() -> None:
    layers, cache = make_layers(1), make_caches(1)[0]
    run = compile_layers(layers, backend="eager")[0]
    layers[0].o_proj = make_layers(1)[0].o_proj
    hidden, metadata = step(make_plan(), 3)
    with pytest.raises(ValueError, match="o_proj was replaced after compile_layers"):
        run(hidden, metadata.positions, cache, metadata)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("method", ["forward", "prefill"])
def test_a_call_of_another_step_or_cache_than_the_plans_is_refused(method: str, compiled: bool) -> None:
    layers, cache = make_layers(1), make_caches(1)[0]
    if method == "prefill":
        hidden, plan = make_prefill([3, 2], [0, 8])
        other: Any = step(make_plan(), 2)[1]
    else:
        hidden, plan = step(make_plan(), 3)
        other = make_prefill([3], [0])[1]
    run = compile_layers(layers, method=method, backend="eager")[0] if compiled else getattr(layers[0], method)
    before = cache.clone()
    for rows, shape in ((torch.cat([hidden, hidden[:1]]), len(hidden) + 1), (hidden[None], f"1, {len(hidden)}")):
        with pytest.raises(ValueError, match=rf"hidden_states must be \[{len(hidden)}, hidden_size\].*got \({shape}, "):
            run(rows, plan.positions, cache, plan)
    for positions in (plan.positions[:1], plan.positions[:, None], torch.cat([plan.positions, plan.positions])):
        with pytest.raises(ValueError, match=rf"positions must be \[{len(hidden)}\]"):
            run(hidden, positions, cache, plan)
    with pytest.raises(ValueError, match=f"kv_cache must have pages of {PAGE_SIZE} rows"):
        run(hidden, plan.positions, cache[1:].view(-1, 2 * PAGE_SIZE, cache.shape[-1]), plan)
    with pytest.raises(TypeError, match=r"plan must be a (DecodePlan|PrefillPlan)"):
        run(hidden, plan.positions, cache, other)
    assert torch.equal(cache, before)


def test_compiled_layers_keep_no_copy_of_the_weights() -> None:
    layers = make_layers(1)
    run = compile_layers(layers, backend="eager")[0]
    for parameter in layers[0].parameters():
        parameter.zero_()
    hidden, metadata = step(make_plan(), 3)
    assert not run(hidden, metadata.positions, make_caches(1)[0], metadata).any()


@pytest.mark.parametrize("layers", [[], "of two configs"])
def test_compile_layers_refuses_what_is_not_one_kind_of_layer(layers: Any) -> None:
    if layers:
        layers = [DeepseekMLA(CONFIG), DeepseekMLA(CONFIG.shard(3))]
    with pytest.raises(ValueError, match="layers must be one or more of one kind and shape"):
        compile_layers(layers)


# --- the cache is never copied ----------------------------------------------------------------------------------

CACHE_NUMEL = PAGES * PAGE_SIZE * CONFIG.latent_dim


def copies_of_the_cache(source: str, layers: int = 3) -> list[str]:
    """Lines of generated code that allocate a tensor of a cache's size, or loop over one."""
    sizes = "|".join(str(n * CACHE_NUMEL) for n in range(1, layers + 1))
    loop, buffer = rf"\b(?:{sizes})L\b", rf"\bempty_strided_\w+\(\((?:(?:{sizes}), |(?:\d+, )?{PAGES}, )"
    return [line.strip() for line in source.splitlines() if re.search(f"{loop}|{buffer}", line)]


def compile_cold(function: Callable[..., Any], *args: Any, **options: Any) -> tuple[Any, str]:
    """The result and the generated code."""
    result, sources = run_and_get_code(torch.compile(function, fullgraph=True, **options), *args)
    assert sources
    return result, "\n".join(sources)


def decode_layers(hidden: Tensor, caches: Sequence[Tensor], metadata: DecodeMetadata) -> Tensor:
    """Three layers' writes and reads without their projections; each reads what it wrote, the next one's row is new."""
    for cache in caches:
        rows = hidden[:, : CONFIG.latent_dim]
        mla_ops.write_latent_cache(rows[:, :32], rows[:, 32:], cache, metadata.slot_mapping)
        out, _ = mla_ops.mla_decode(
            hidden[:, None, : CONFIG.latent_dim].expand(-1, 3, -1).contiguous(),
            cache,
            metadata.qo_indptr,
            metadata.kv_indptr,
            metadata.kv_indices,
            metadata.kv_last_page_lens,
            softmax_scale=0.2,
            backend_state=metadata.backend_state,
            kv_lora_rank=32,
        )
        hidden = hidden + torch.nn.functional.pad(out.sum(1), (0, 16))
    return hidden


@pytest.mark.parametrize("layout", ["one tensor per layer", "one stacked tensor"])
def test_writes_and_decodes_of_several_layers_copy_no_cache(layout: str) -> None:
    hidden, metadata = step(make_plan(), 5)
    stacked = torch.stack(make_caches(3))
    caches: Any = stacked if layout == "one stacked tensor" else [x.clone() for x in stacked]
    expected_caches = stacked.clone()
    expected = decode_layers(hidden, list(expected_caches), metadata)
    found, source = compile_cold(
        lambda h, c, m: decode_layers(h, [c[i] for i in range(3)], m), hidden, caches, metadata
    )
    assert ReinplaceCounters.get_total_missed() == 0
    assert copies_of_the_cache(source) == []
    assert_matches(found, expected.double(), factor=FACTOR)
    assert_matches(torch.stack(list(caches)), expected_caches.double(), factor=FACTOR)


def test_a_layers_decode_and_chunked_prefill_copy_no_cache() -> None:
    """Chunked prefill writes once and reads many times: no write comes after a read that it could not wait for."""
    layer, (cache,), plan = make_layers(1)[0], make_caches(1), make_plan()
    hidden, prefill = make_prefill([5, 2], [6, 11])
    assert len(prefill.chunks) == 2

    def function(hidden: Tensor, cache: Tensor, plan: PrefillPlan, metadata: DecodeMetadata) -> Tensor:
        x = layer.prefill(hidden, plan.positions, cache, plan)
        return layer(x[:2], metadata.positions, cache, metadata)

    _, metadata = step(plan, 2)
    expected_cache = cache.clone()
    expected = function(hidden, expected_cache, prefill, metadata)
    found, source = compile_cold(function, hidden, cache, prefill, metadata)
    assert ReinplaceCounters.get_total_missed() == 0
    assert copies_of_the_cache(source) == []
    assert_matches(found, expected.double(), factor=FACTOR)
    assert_matches(cache, expected_cache.double(), factor=FACTOR)


def write_and_gather(rows: Tensor, cache: Tensor, slots: Tensor, pages: Sequence[Tensor]) -> Tensor:
    """Reads that the next write does not depend on."""
    parts = []
    for i in range(3):
        mla_ops.write_latent_cache(rows[:, :32] + i, rows[:, 32:], cache, slots + i)
        parts.append(mla_ops.gather_latent_cache(cache, *pages, num_tokens=6))
    return torch.cat(parts)


@pytest.mark.parametrize("reorder", [True, False])
def test_reads_that_no_write_depends_on_copy_the_cache_unless_inductor_keeps_their_order(reorder: bool) -> None:
    """Guards the tests above, which must be able to see a copy; and shows the remedy for code of this kind."""
    cache, rows, slots = make_caches(1)[0], torch.randn(2, 40), torch.tensor([4, 12])
    pages = [torch.tensor(x).int() for x in ([0, 1, 2], [1, 3], [3, 3], [0, 3, 6])]
    expected_cache = cache.clone()
    expected = write_and_gather(rows, expected_cache, slots, pages)
    found, source = compile_cold(write_and_gather, rows, cache, slots, pages, options={"reorder_for_locality": reorder})
    assert (ReinplaceCounters.get_total_missed() > 0) is reorder
    assert bool(copies_of_the_cache(source)) is reorder
    assert torch.equal(found, expected)
    assert torch.equal(cache, expected_cache)
