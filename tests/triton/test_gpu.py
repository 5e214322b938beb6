"""What only a GPU can show: bf16, Hopper, graphs at other lengths, and that nothing compiles while serving."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import triton
from kernel_cases import Paged, check_decode, check_prefill, paged

from capture import BuildOptions
from mla_ops import PRESETS
from mla_ops.decode_step import DecodeStep

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("fp8", [False, True], ids=["same-dtype", "fp8"])
@pytest.mark.parametrize(
    ("heads", "page_size", "rank", "rope", "query_lens"),
    [
        (16, 64, 512, 64, None),
        (20, 16, 256, 64, None),
        (32, 64, 512, 64, [1, 2, 1, 2, 1, 1]),
        (40, 1, 256, 32, None),
        (96, 20, 512, 64, None),
        (128, 64, 512, 64, [4, 4, 4, 4, 4, 4]),
        (128, 256, 512, 0, None),
    ],
    ids=["H16", "H20", "H32-mtp", "H40-page1", "H96-page20", "H128-mtp", "H128-nope"],
)
def test_decode(
    heads: int, page_size: int, rank: int, rope: int, query_lens: list[int] | None, fp8: bool, dtype: torch.dtype
) -> None:
    lens = [0, 1, 63, 64, 1000, 5000]
    check_decode(paged(lens, heads, page_size, rank, rope, CUDA, dtype, query_lens, fp8=fp8))


@pytest.mark.parametrize("heads", [16, 32, 128])
@pytest.mark.parametrize("fp8", [False, True], ids=["same-dtype", "fp8"])
@pytest.mark.parametrize(
    "lens",
    [[4096] * 32, [4096 - 16 * i for i in range(32)], [2113] * 130, [700] * 300, [40000]],
    ids=["parts", "unequal-parts", "one-each", "several-each", "one-request"],
)
def test_batches_of_about_equal_lengths(lens: list[int], fp8: bool, heads: int) -> None:
    check_decode(paged(lens, heads, 64, 512, 64, CUDA, torch.bfloat16, fp8=fp8))


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize(("width", "v_width"), [(192, 128), (96, 64), (128, 128), (192, 32)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_prefill(dtype: torch.dtype, width: int, v_width: int, causal: bool) -> None:
    check_prefill([1000, 1, 129, 0, 300], [1000, 500, 129, 20, 200], width, v_width, causal, CUDA, dtype, heads=3)


@pytest.mark.parametrize("heads", [16, 128])
def test_long_request_beside_short_ones(heads: int) -> None:
    check_decode(paged([40000, 3, 0, 700], heads, 64, 512, 64, CUDA, torch.bfloat16))


def test_pool_above_two_to_the_31_elements() -> None:
    case = paged([130, 64], 16, 64, 512, 64, CUDA, torch.bfloat16)
    expected = case.decode("triton")
    pages = 2**31 // (64 * 576) + 100
    pool = torch.full((pages, 64, 576), torch.nan, dtype=torch.bfloat16, device=CUDA)
    used = len(case.kv_cache)
    pool[-used:] = case.kv_cache
    case.kv_cache = pool
    case.kv_indices[:-5] += pages - used
    assert all(map(torch.equal, case.decode("triton"), expected))


@pytest.mark.parametrize("heads", [16, 128])
def test_graph_captured_at_one_key_is_right_at_others(heads: int) -> None:
    case = paged([1] * 4, heads, 64, 512, 64, CUDA, torch.bfloat16)
    other = paged([0, 9000, 65, 300], heads, 64, 512, 64, CUDA, torch.bfloat16)
    case.kv_cache = torch.cat([case.kv_cache, torch.full_like(other.kv_cache, torch.nan)])
    case.kv_indices = torch.cat([case.kv_indices, torch.zeros_like(other.kv_indices)])
    case.decode("triton")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = case.decode("triton")
    case.q.copy_(other.q)
    case.kv_cache[: len(other.kv_cache)] = other.kv_cache
    case.kv_indices[: len(other.kv_indices)] = other.kv_indices
    case.kv_indptr.copy_(other.kv_indptr)
    case.kv_last_page_lens.copy_(other.kv_last_page_lens)
    out.fill_(torch.nan)
    graph.replay()
    expected = other.decode("triton")
    assert torch.equal(out, expected[0])
    assert torch.equal(lse, expected[1])


@contextmanager
def _counted_compilations() -> Iterator[list[str]]:
    names: list[str] = []

    def hook(*, key: str, repr: str, fn: object, compile: object, **_: object) -> None:
        names.append(repr)

    before = triton.knobs.runtime.jit_post_compile_hook
    triton.knobs.runtime.jit_post_compile_hook = hook
    try:
        yield names
    finally:
        triton.knobs.runtime.jit_post_compile_hook = before


def _repeat(case: Paged, requests: int) -> Paged:
    """The first request, ``requests`` times."""
    pages = int(case.kv_indptr[1])
    indptr = torch.arange(requests + 1, dtype=torch.int32, device=CUDA)
    return Paged(
        case.q[:1].repeat(requests, 1, 1), case.kv_cache, indptr, indptr * pages,
        case.kv_indices[:pages].repeat(requests),
        case.kv_last_page_lens[:1].repeat(requests), 1, case.rank,
    )  # fmt: skip


@pytest.mark.parametrize("heads", [16, 128])
def test_nothing_compiles_after_the_first_steps(heads: int) -> None:
    def step(requests: int, keys: int) -> None:
        _repeat(paged([keys], heads, 64, 512, 64, CUDA, torch.bfloat16), requests).decode("triton")

    # Three merges: for requests in many parts (1), in few (16 of 128 heads, 32 of 16), and for many rows (256).
    for requests in (1, 16, 32, 256):
        step(requests, 100)
    with _counted_compilations() as names:
        for requests in (1, 2, 3, 5, 16, 17, 64, 100, 128, 255, 256):
            for keys in (1, 63, 64, 65, 1024, 4097):
                step(requests, keys)
        step(1, 100_000)
    assert not names


@pytest.mark.parametrize("tokens", [1, 3, 8, 9, 130])
def test_replayed_ops_around_attention_see_what_the_ones_in_front_have_just_written(tokens: int) -> None:
    """Kernels that may start early, in a row, over inputs and weights that change from replay to replay."""
    heads, nope, width, rank, rope, lora, hidden = 16, 128, 128, 512, 64, 1536, 2048
    shapes = {
        "x": (tokens, hidden),
        "gain": (hidden,),
        "q_down": (lora, hidden),
        "kv_down": (rank + rope, hidden),
        "q_gain": (lora,),
        "kv_gain": (rank,),
        "q_up": (heads * (nope + rope), lora),
        "kv_up": (heads, nope + width, rank),
        "out": (hidden, heads * width),
    }
    t = {name: torch.empty(shape, device=CUDA, dtype=torch.bfloat16) for name, shape in shapes.items()}
    fresh = {name: torch.empty_like(x) for name, x in t.items()}
    positions = torch.empty(tokens, dtype=torch.int64, device=CUDA)
    frequencies = torch.rand(rope // 2, device=CUDA)
    cache, slots = torch.zeros(4, 64, rank + rope, device=CUDA).bfloat16(), torch.arange(tokens, device=CUDA)
    ops = torch.ops.mla_ops

    def step() -> list[torch.Tensor]:
        for name, x in fresh.items():
            t[name].copy_(x)
        normed = ops.rms_norm(t["x"], t["gain"], 1e-6, "triton")
        both = ops.linear(normed, t["q_down"], t["kv_down"], backend="triton")
        q_a, rows = ops.norm_rope_write(
            both[:, :lora], both[:, lora:], t["q_gain"], t["kv_gain"], positions, frequencies, cache, slots, 1e-6, 1.0,
            True, None, "triton",
        )  # fmt: skip
        q = ops.linear(q_a, t["q_up"], backend="triton").view(tokens, heads, nope + rope)
        absorbed = ops.absorb_query(
            q, t["kv_up"][:, :nope], positions, frequencies, 1.0, True, 0.0, 1, backend="triton"
        )
        values = ops.expand_values(absorbed[..., :rank], t["kv_up"][:, nope:], "triton")
        return [rows, absorbed, ops.linear(values, t["out"], None, t["x"], backend="triton"), cache]

    def draw() -> None:
        for x in fresh.values():
            x.copy_(torch.randn(x.shape, device=CUDA) * 0.05)
        positions.random_(0, 100_000)

    draw()
    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    for _ in range(20):
        draw()
        for x in results:
            x.fill_(torch.nan)
        graph.replay()
        found = [x.clone() for x in results]
        cache.fill_(torch.nan)
        torch.cuda.synchronize()
        for x, expected in zip(found, step(), strict=True):
            assert torch.equal(x.nan_to_num(), expected.nan_to_num())
            assert x[:tokens].isfinite().all() or x.shape == cache.shape


@pytest.mark.parametrize("backend", ["triton", "flash_mla"])
@pytest.mark.parametrize("heads", [16, 128])
def test_graphs_of_a_step_with_kernels_that_come_in_early_are_proved(heads: int, backend: str) -> None:
    """FlashMLA launches its own kernels so too, and ends without waiting where a request has one split."""
    if backend == "flash_mla":
        pytest.importorskip("flash_mla")
    config = dataclasses.replace(PRESETS["deepseek-v3"], hidden_size=2048, num_heads=heads)
    options = BuildOptions(batch_sizes=(1, 8, 128), backend=backend, device="cuda", compile=False)
    step = DecodeStep(config, options, 3)
    with torch.no_grad():
        report = step.runner().capture(verify=True)
    assert report.verification is not None
    assert report.verification.ok
