"""What only a GPU can show: bf16, Hopper, graphs at other lengths, and that nothing compiles while serving."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import triton
from kernel_cases import Paged, check_decode, check_prefill, paged

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

    step(1, 100)
    step(32, 100)
    step(256, 100)  # three merges: for requests in many parts, and in few, and for many rows
    with _counted_compilations() as names:
        for requests in (1, 2, 3, 5, 16, 17, 64, 100, 128, 255, 256):
            for keys in (1, 63, 64, 65, 1024, 4097):
                step(requests, keys)
        step(1, 100_000)
    assert not names
