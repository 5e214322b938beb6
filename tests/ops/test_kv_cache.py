"""Who owns which page of ``PagedLatentCache``."""

from __future__ import annotations

import contextlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mla_ops import MLAConfig, OutOfPagesError, PagedLatentCache

CONFIG = MLAConfig(
    hidden_size=64, num_heads=2, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=16, v_head_dim=16
)


def make_cache(num_pages: int = 8, page_size: int = 4, **options: object) -> PagedLatentCache:
    arguments = {"num_layers": 2, "dtype": torch.float32} | options
    return PagedLatentCache(CONFIG, num_pages=num_pages, page_size=page_size, **arguments)  # type: ignore[arg-type]


def state(cache: PagedLatentCache, names: list[str]) -> tuple[object, ...]:
    return cache.num_free_pages, [cache.length(n) for n in names], cache.block_table(names).tolist()


def test_layers_are_tensors_of_their_own() -> None:
    cache = make_cache(dtype=torch.bfloat16, num_layers=3)
    assert len({x.untyped_storage().data_ptr() for x in cache.layers}) == 3
    assert {(x.shape, x.dtype) for x in cache.layers} == {(torch.Size([8, 4, 48]), torch.bfloat16)}


@pytest.mark.parametrize("name", ["num_layers", "num_pages", "page_size"])
def test_a_size_below_one_is_named(name: str) -> None:
    sizes = {"num_layers": 1, "num_pages": 1, "page_size": 1} | {name: 0}
    with pytest.raises(ValueError, match=rf"{name} must be at least 1, got 0"):
        PagedLatentCache(CONFIG, dtype=torch.float32, **sizes)


@pytest.mark.parametrize(("tokens", "pages"), [(0, 0), (1, 1), (4, 1), (5, 2)])
def test_allocate_takes_as_many_pages_as_the_rows_need(tokens: int, pages: int) -> None:
    cache = make_cache()
    cache.allocate("a", tokens)
    assert (cache.length("a"), cache.num_free_pages) == (tokens, 8 - pages)
    assert cache.block_table(["a"]).shape == (1, pages)


def test_extend_takes_a_page_only_at_its_edge() -> None:
    cache = make_cache()
    cache.allocate("a", 3)
    free = []
    for _ in range(3):
        cache.extend("a")
        free.append(cache.num_free_pages)
    assert free == [7, 6, 6]
    assert cache.seq_lens(["a"]).tolist() == [6]


def test_extend_keeps_the_pages_that_hold_rows() -> None:
    cache = make_cache()
    cache.allocate("a", 7)
    before = cache.block_table(["a"]).tolist()[0]
    cache.extend("a", 9)
    assert cache.block_table(["a"]).tolist()[0][:2] == before


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abcd"), st.integers(0, 12)), max_size=30))
def test_no_page_has_two_owners_and_none_is_lost(steps: list[tuple[str, int]]) -> None:
    cache, lengths = make_cache(), dict[str, int]()
    for name, tokens in steps:
        with contextlib.suppress(OutOfPagesError):
            if name not in lengths:
                cache.allocate(name, tokens)
                lengths[name] = tokens
            elif tokens > 8:
                cache.free(name)
                del lengths[name]
            else:
                cache.extend(name, tokens)
                lengths[name] += tokens
        owned = [page for n in lengths for page in cache.block_table([n])[0].tolist()]
        assert len(set(owned)) == len(owned) == 8 - cache.num_free_pages
        assert {n: cache.length(n) for n in lengths} == lengths


@pytest.mark.parametrize("grow", ["allocate", "extend"])
def test_running_out_of_pages_changes_nothing(grow: str) -> None:
    cache = make_cache(num_pages=3)
    cache.allocate("a", 5)
    before = state(cache, ["a"])
    with pytest.raises(OutOfPagesError, match="still needs: 2, free ones: 1"):
        cache.extend("a", 8) if grow == "extend" else cache.allocate("b", 5)
    assert state(cache, ["a"]) == before
    cache.allocate("b", 4)


def test_freed_pages_can_be_had_again() -> None:
    cache = make_cache()
    cache.allocate("a", 32)
    cache.free("a")
    assert cache.num_free_pages == 8
    cache.allocate("a", 32)


def test_block_table_is_int32_and_filled_up_with_zero() -> None:
    cache = make_cache()
    cache.allocate("a", 9)
    cache.allocate("b", 0)
    table = cache.block_table(["b", "a"], width=5)
    assert table.dtype == torch.int32
    assert table[0].tolist() == [0] * 5
    assert table[1, 3:].tolist() == [0, 0]
    assert cache.block_table([]).shape == (0, 0)


def test_block_table_refuses_a_width_that_cuts_pages_off() -> None:
    cache = make_cache()
    cache.allocate("a", 9)
    with pytest.raises(ValueError, match=r"width must be at least 3 .*got 2"):
        cache.block_table(["a"], width=2)


@pytest.mark.parametrize("method", ["extend", "free", "length"])
def test_an_unknown_sequence_is_named(method: str) -> None:
    with pytest.raises(KeyError, match="sequence 'x' is not in the cache"):
        getattr(make_cache(), method)("x")


def test_a_sequence_is_allocated_once() -> None:
    cache = make_cache()
    cache.allocate("a", 1)
    with pytest.raises(ValueError, match="sequence 'a' is in the cache already"):
        cache.allocate("a", 1)


@pytest.mark.parametrize("method", ["allocate", "extend"])
def test_a_negative_length_is_refused_and_changes_nothing(method: str) -> None:
    cache = make_cache()
    cache.allocate("a", 5)
    with pytest.raises(ValueError, match="num_tokens must not be negative, got -1"):
        getattr(cache, method)("b" if method == "allocate" else "a", -1)
    assert state(cache, ["a"])[:2] == (6, [5])
