"""The reference backend against loops in float64 that share no code with it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import mla_ops
from mla_ops.testing import (
    DecodeInputs,
    PageOrder,
    PrefillInputs,
    assert_matches,
    make_decode_inputs,
    make_prefill_inputs,
)

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
FACTORS = {torch.float64: 64.0}  # no wider precision to compute in: sums in another order differ by several roundings
LENGTHS = [0, 1, 3, 4, 5, 37]  # empty, one key, a page edge and its neighbours, several pages


def decode_one_by_one(x: DecodeInputs, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Absorbed decode, one request and one query at a time."""
    out = torch.zeros(*x.q.shape[:2], x.kv_lora_rank, dtype=dtype)
    lse = torch.full(x.q.shape[:2], -math.inf, dtype=dtype)
    for b, length in enumerate(x.kv_lens):
        rows = x.latent_rows(b).to(dtype)
        first, last = x.qo_indptr[b : b + 2].tolist()
        for i in range(first, last):
            seen = length - (last - 1 - i)
            if seen > 0:
                q = x.q[i].to(dtype) * (1 if x.q_scale is None else x.q_scale.to(dtype))
                scores = (q * x.softmax_scale) @ rows[:seen].T
                lse[i] = scores.logsumexp(-1)
                out[i] = scores.softmax(-1) @ rows[:seen, : x.kv_lora_rank]
    return out, lse


def prefill_one_by_one(x: PrefillInputs, causal: bool, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Multi-head attention, one request and one query at a time."""
    out = torch.zeros(*x.q.shape[:2], x.v.shape[2], dtype=dtype)
    lse = torch.full(x.q.shape[:2], -math.inf, dtype=dtype)
    for b in range(len(x.cu_seqlens_q) - 1):
        (q0, q1), (k0, k1) = x.cu_seqlens_q[b : b + 2].tolist(), x.cu_seqlens_k[b : b + 2].tolist()
        for i in range(q0, q1):
            end = k1 - (q1 - 1 - i) if causal else k1
            if end > k0:
                scores = torch.einsum("hd,khd->hk", x.q[i].to(dtype) * x.softmax_scale, x.k[k0:end].to(dtype))
                lse[i] = scores.logsumexp(-1)
                out[i] = torch.einsum("hk,khv->hv", scores.softmax(-1), x.v[k0:end].to(dtype))
    return out, lse


def assert_decode_is_right(x: DecodeInputs) -> None:
    out, lse = mla_ops.mla_decode(**x.arguments())
    exact_out, exact_lse = decode_one_by_one(x)
    low_out, low_lse = decode_one_by_one(x, out.dtype)
    factor = FACTORS.get(out.dtype, 4.0)
    assert_matches(out, exact_out, low_precision=low_out, factor=factor)
    assert_matches(lse, exact_lse, low_precision=low_lse, factor=factor)


# --- mla_decode -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("query_len", [1, 2, 4])
def test_decode_equals_a_loop_over_requests_and_queries(dtype: torch.dtype, query_len: int) -> None:
    assert_decode_is_right(make_decode_inputs(LENGTHS, query_lens=query_len, dtype=dtype))


@pytest.mark.parametrize("pages", ["sequential", "shuffled", "interleaved", "shared"])
def test_decode_follows_any_page_order(pages: PageOrder) -> None:
    assert_decode_is_right(make_decode_inputs(LENGTHS, pages=pages))


@pytest.mark.parametrize("page_size", [1, 2, 16, 64, 256])
def test_decode_takes_any_page_size(page_size: int) -> None:
    lengths = [0, 1, max(page_size - 1, 1), page_size, page_size + 1, 2 * page_size + 3]
    assert_decode_is_right(make_decode_inputs(lengths, page_size=page_size, num_heads=2))


@pytest.mark.parametrize(
    ("heads", "rank", "rope"), [(1, 512, 64), (20, 256, 64), (40, 256, 32), (16, 512, 0), (128, 512, 64)]
)
def test_decode_takes_any_layout_and_head_count(heads: int, rank: int, rope: int) -> None:
    x = make_decode_inputs([0, 7, 19], num_heads=heads, kv_lora_rank=rank, qk_rope_head_dim=rope)
    assert_decode_is_right(x)
    without_rank = x.arguments() | {"kv_lora_rank": None}
    assert mla_ops.mla_decode(**without_rank).out.shape == (x.q.shape[0], heads, rank)


def test_decode_takes_requests_of_different_query_lengths() -> None:
    assert_decode_is_right(make_decode_inputs([5, 0, 9, 2, 6], query_lens=[1, 2, 0, 4, 3]))


@pytest.mark.parametrize("query_lens", [1, 3])
def test_decode_of_a_request_without_keys_is_zero_and_minus_infinity(query_lens: int) -> None:
    x = make_decode_inputs([0, 0], query_lens=query_lens)
    out, lse = mla_ops.mla_decode(**x.arguments())
    assert torch.equal(out, torch.zeros_like(out))
    assert torch.equal(lse, torch.full_like(lse, -math.inf))


def test_decode_rows_of_no_request_are_zero_and_minus_infinity() -> None:
    x = make_decode_inputs([5, 3])
    out, lse = mla_ops.mla_decode(**x.arguments())
    assert not out[2:].any()
    assert lse[2:].isneginf().all()


def test_decode_with_fewer_keys_than_queries_hides_all_keys_from_the_first_queries() -> None:
    x = make_decode_inputs([2], query_lens=4)
    lse = mla_ops.mla_decode(**x.arguments()).lse
    assert lse[:4].isneginf().all(-1).tolist() == [True, True, False, False]


@pytest.mark.parametrize("kv_dtype", [torch.float8_e4m3fn, torch.float8_e4m3fnuz], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_decode_scales_an_fp8_cache(dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    assert_decode_is_right(make_decode_inputs(LENGTHS, dtype=dtype, kv_dtype=kv_dtype))


def test_decode_scales_fp8_queries_and_answers_in_bfloat16() -> None:
    x = make_decode_inputs(LENGTHS, dtype=torch.float8_e4m3fn)
    assert mla_ops.mla_decode(**x.arguments()).out.dtype == torch.bfloat16
    assert_decode_is_right(x)


def test_decode_survives_large_scores() -> None:
    x = make_decode_inputs([9, 33], dtype=torch.float32)
    assert_decode_is_right(x._replace(q=x.q * 1000))


def test_decode_in_small_groups_equals_decode_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    x = make_decode_inputs(LENGTHS, query_lens=2)
    at_once = mla_ops.mla_decode(**x.arguments())
    monkeypatch.setattr("mla_ops.backends.reference._SCRATCH_BYTES", 1)
    by_one = mla_ops.mla_decode(**x.arguments())
    for a, b in zip(at_once, by_one, strict=True):
        assert_matches(a, b.double())


@pytest.mark.parametrize("query_len", [1, 3])
def test_absorbed_decode_equals_naive_attention(query_len: int) -> None:
    """Decode over latents, and prefill over the keys and values that W_UK and W_UV expand them to."""
    heads, rank, rope, nope, width = 4, 32, 16, 24, 20
    x = make_decode_inputs([3, 9, 17], query_lens=query_len, dtype=torch.float64, poison=False)
    w_uk, w_uv = torch.randn(heads, nope, rank).double(), torch.randn(heads, width, rank).double()
    q_nope, q_pe = torch.randn(x.q.shape[0], heads, nope).double(), x.q[..., rank:]
    absorbed = torch.cat([torch.einsum("thn,hnr->thr", q_nope, w_uk), q_pe], -1)
    out, lse = mla_ops.mla_decode(**x._replace(q=absorbed).arguments())

    latents = torch.cat([x.latent_rows(b) for b in range(3)])
    k_nope = torch.einsum("sr,hnr->shn", latents[:, :rank], w_uk)
    k = torch.cat([k_nope, latents[:, None, rank:].expand(-1, heads, rope)], -1)
    naive_out, naive_lse = mla_ops.mla_prefill(
        torch.cat([q_nope, q_pe], -1),
        k,
        torch.einsum("sr,hvr->shv", latents[:, :rank], w_uv),
        x.qo_indptr,
        torch.tensor([0, 3, 12, 29], dtype=torch.int32),
        max_seqlen_q=query_len,
        max_seqlen_k=17,
        softmax_scale=x.softmax_scale,
    )
    assert_matches(torch.einsum("thr,hvr->thv", out, w_uv), naive_out, factor=64)
    assert_matches(lse, naive_lse.double(), factor=8)


# --- mla_prefill ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_prefill_equals_a_loop_over_requests_and_queries(dtype: torch.dtype, causal: bool) -> None:
    x = make_prefill_inputs([3, 0, 1, 5, 2, 4], [3, 4, 0, 9, 1, 5], dtype=dtype)
    out, lse = mla_ops.mla_prefill(**x._asdict(), causal=causal)
    (exact_out, exact_lse), (low_out, low_lse) = (prefill_one_by_one(x, causal, d) for d in (torch.float64, dtype))
    assert_matches(out, exact_out, low_precision=low_out, factor=FACTORS.get(dtype, 4.0))
    assert_matches(lse, exact_lse, low_precision=low_lse, factor=FACTORS.get(dtype, 4.0))


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_prefill_equals_scaled_dot_product_attention(causal: bool) -> None:
    x = make_prefill_inputs([13], qk_head_dim=192, v_head_dim=128, dtype=torch.float64)
    q, k, v = (t[:13].transpose(0, 1)[None] for t in (x.q, x.k, x.v))
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=x.softmax_scale)[0].transpose(0, 1)
    out = mla_ops.mla_prefill(**x._asdict(), causal=causal).out
    assert_matches(out[:13], expected, factor=64)


def test_causal_prefill_is_aligned_to_the_last_key() -> None:
    """Two queries over five keys: the first sees four, so the fifth key's value can't matter to it."""
    x = make_prefill_inputs([2], [5])
    changed = x._replace(v=x.v.clone())
    changed.v[4] += 100
    a, b = (mla_ops.mla_prefill(**inputs._asdict()).out for inputs in (x, changed))
    assert torch.equal(a[0], b[0])
    assert not torch.equal(a[1], b[1])


def test_prefill_rows_of_no_request_are_zero_and_minus_infinity() -> None:
    out, lse = mla_ops.mla_prefill(**make_prefill_inputs([2, 3])._asdict())
    assert not out[5:].any()
    assert lse[5:].isneginf().all()


def test_prefill_in_small_blocks_equals_prefill_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    x = make_prefill_inputs([7, 3], [11, 3])
    at_once = mla_ops.mla_prefill(**x._asdict())
    monkeypatch.setattr("mla_ops.backends.reference._SCRATCH_BYTES", 1)
    by_row = mla_ops.mla_prefill(**x._asdict())
    for a, b in zip(at_once, by_row, strict=True):
        assert_matches(a, b.double())


# --- merge_attn_states ------------------------------------------------------------------------------------------


def attention_parts(*key_lens: int, dtype: torch.dtype = torch.float32) -> tuple[PrefillInputs, list[Tensor], int]:
    """One request's inputs over all keys, and the rows of k and v cut into parts."""
    x = make_prefill_inputs([6], [sum(key_lens)], dtype=dtype)
    return x, list(torch.arange(sum(key_lens)).split(list(key_lens))), 6


def attend(x: PrefillInputs, keys: Tensor) -> mla_ops.AttentionOutput:
    part = x._replace(k=x.k[keys], v=x.v[keys], cu_seqlens_k=torch.tensor([0, len(keys)]).int(), max_seqlen_k=len(keys))
    return mla_ops.mla_prefill(**part._asdict(), causal=False)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_merging_parts_equals_attention_over_all_keys(dtype: torch.dtype) -> None:
    x, parts, tokens = attention_parts(3, 8, 1, dtype=dtype)
    merged = attend(x, parts[0])
    for part in parts[1:]:
        merged = mla_ops.merge_attn_states(*merged, *attend(x, part))
    whole = attend(x._replace(q=x.q.double(), k=x.k.double(), v=x.v.double()), torch.arange(12))
    assert_matches(merged.out[:tokens], whole.out[:tokens], factor=8 if dtype.itemsize < 8 else 2**32)  # lse is fp32
    assert_matches(merged.lse, whole.lse.double(), factor=16)


def test_a_base_two_lse_would_not_merge_to_attention_over_all_keys() -> None:
    """Guards the tests of merging: they can tell natural log from log2."""
    x, parts, tokens = attention_parts(3, 8)
    a, b = (attend(x, part) for part in parts)
    wrong = mla_ops.merge_attn_states(a.out, a.lse / math.log(2), b.out, b.lse / math.log(2)).out
    with pytest.raises(AssertionError, match="worst at"):
        assert_matches(wrong[:tokens], attend(x, torch.arange(11)).out[:tokens].double(), factor=1000)


@pytest.mark.parametrize("garbage", [math.nan, math.inf, 1e30])
@pytest.mark.parametrize("empty_side", ["a", "b"])
def test_merging_with_a_side_without_keys_is_the_identity(garbage: float, empty_side: str) -> None:
    out, lse = torch.randn(5, 3, 8), torch.randn(5, 3)
    empty = torch.full_like(out, garbage), torch.full_like(lse, -math.inf)
    sides = (*empty, out, lse) if empty_side == "a" else (out, lse, *empty)
    merged = mla_ops.merge_attn_states(*sides)
    assert torch.equal(merged.out, out)
    assert torch.equal(merged.lse, lse)


def test_merging_two_sides_without_keys_is_zero_and_minus_infinity() -> None:
    side = torch.full((2, 3, 4), math.nan), torch.full((2, 3), -math.inf)
    out, lse = mla_ops.merge_attn_states(*side, *side)
    assert not out.any()
    assert lse.isneginf().all()


def test_merging_is_associative_and_commutative() -> None:
    a, b, c = ((torch.randn(4, 2, 8).double(), torch.randn(4, 2) * 5) for _ in range(3))
    merge = mla_ops.merge_attn_states
    left, right = merge(*merge(*a, *b), *c), merge(*a, *merge(*b, *c))
    for x, y, z in zip(left, right, merge(*c, *merge(*b, *a)), strict=True):
        assert_matches(x.float(), y.double(), factor=32)
        assert_matches(x.float(), z.double(), factor=32)


def test_merging_reads_states_of_any_strides() -> None:
    states = [torch.randn(5, 3, 8), torch.randn(5, 3), torch.randn(5, 3, 8), torch.randn(5, 3)]
    transposed = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in states]
    for a, b in zip(mla_ops.merge_attn_states(*states), mla_ops.merge_attn_states(*transposed), strict=True):
        assert torch.equal(a, b)


# --- write_latent_cache -----------------------------------------------------------------------------------------


def write(
    cache: Tensor, slots: Sequence[int], kv_scale: Tensor | None = None, dtype: torch.dtype | None = None
) -> Tensor:
    """Write random rows; returns them."""
    rows = torch.randn(len(slots), cache.shape[2]).to(dtype or cache.dtype)
    mla_ops.write_latent_cache(
        rows[:, :32].contiguous(), rows[:, 32:].contiguous(), cache, torch.tensor(slots).long(), kv_scale=kv_scale
    )
    return rows


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_write_stores_rows_at_their_slots_and_nothing_elsewhere(dtype: torch.dtype) -> None:
    cache = torch.randn(5, 4, 48).to(dtype)
    expected = cache.clone().flatten(0, 1)
    slots = torch.randperm(20)[:7].tolist()
    expected[slots] = write(cache, slots)
    assert torch.equal(cache.flatten(0, 1), expected)


@pytest.mark.parametrize("dead", [-1, -7, 20, 2**40])
def test_write_to_a_slot_that_the_cache_does_not_have_writes_nothing(dead: int) -> None:
    cache = torch.randn(5, 4, 48)
    expected = cache.clone().flatten(0, 1)
    rows = write(cache, [dead, 9, dead, 3, dead])
    expected[[9, 3]] = rows[[1, 3]]
    assert torch.equal(cache.flatten(0, 1), expected)


def test_write_without_a_live_slot_changes_nothing() -> None:
    cache = torch.full((5, 4, 48), math.nan)
    write(cache, [-1, -1, 20])
    assert cache.isnan().all()


def test_write_to_slot_zero_beside_dropped_rows_stores_that_row() -> None:
    cache = torch.zeros(5, 4, 48)
    rows = write(cache, [-1, 0, -1])
    assert torch.equal(cache[0, 0], rows[1])
    assert not cache.flatten(0, 1)[1:].any()


@pytest.mark.parametrize("kv_dtype", [torch.float8_e4m3fn, torch.float8_e4m3fnuz], ids=str)
def test_write_to_an_fp8_cache_scales_and_changes_live_bytes_only(kv_dtype: torch.dtype) -> None:
    before = torch.randint(0, 256, (5, 4, 48), dtype=torch.uint8)
    cache, scale = before.clone().view(kv_dtype), torch.tensor([0.037])
    rows = write(cache, [-1, 13, 2], scale, torch.bfloat16)
    expected = before.flatten(0, 1)
    expected[[13, 2]] = (rows[1:].float() / scale).to(kv_dtype).view(torch.uint8)
    assert torch.equal(cache.view(torch.uint8).flatten(0, 1), expected)


@pytest.mark.parametrize("kv_dtype", [torch.float8_e4m3fn, torch.float8_e4m3fnuz], ids=str)
def test_write_to_an_fp8_cache_saturates(kv_dtype: torch.dtype) -> None:
    cache, limit = torch.zeros(1, 1, 48).to(kv_dtype), torch.finfo(kv_dtype).max
    rows = torch.tensor([1e4, -1e4]).repeat(24)[None]
    mla_ops.write_latent_cache(
        rows[:, :32], rows[:, 32:], cache, torch.zeros(1, dtype=torch.int64), kv_scale=torch.ones(1)
    )
    assert cache.float().flatten().tolist() == [limit, -limit] * 24


def test_write_into_a_strided_view_leaves_its_neighbours() -> None:
    whole = torch.zeros(2, 5, 4, 64)
    cache = whole[1, :, :, 8:56]
    rows = write(cache, [6])
    assert torch.equal(cache[1, 2], rows[0])
    assert whole.count_nonzero() == 48


def test_write_reads_rows_of_any_strides() -> None:
    rows, slots = torch.randn(3, 48), torch.tensor([7, 0, 12])
    expected, cache = torch.zeros(5, 4, 48), torch.zeros(5, 4, 48)
    mla_ops.write_latent_cache(rows[:, :32].contiguous(), rows[:, 32:].contiguous(), expected, slots)
    strided = rows.T.contiguous().T
    mla_ops.write_latent_cache(strided[:, :32], strided[:, 32:], cache, slots.repeat_interleave(2)[::2])
    assert torch.equal(cache, expected)


# --- gather_latent_cache ----------------------------------------------------------------------------------------


def gather(x: DecodeInputs, counts: Sequence[int], num_tokens: int, **options: object) -> Tensor:
    return mla_ops.gather_latent_cache(
        x.kv_cache,
        x.kv_indptr,
        x.kv_indices,
        x.kv_last_page_lens,
        torch.tensor([0, *counts]).cumsum(0).int(),
        num_tokens=num_tokens,
        kv_scale=x.kv_scale,
        **options,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_gather_gives_each_requests_rows_and_zero_tails(dtype: torch.dtype, page_size: int) -> None:
    x = make_decode_inputs(LENGTHS, dtype=dtype, page_size=page_size)
    rows = gather(x, x.kv_lens, sum(x.kv_lens) + 3)
    expected = torch.cat([*(x.latent_rows(b) for b in range(len(LENGTHS))), torch.zeros(3, 48)]).to(dtype)
    assert torch.equal(rows, expected)


def test_gather_begins_at_seq_starts() -> None:
    x = make_decode_inputs([9, 0, 17])
    starts = torch.tensor([4, 0, 11]).int()
    rows = gather(x, [5, 0, 3], 8, seq_starts=starts)
    assert torch.equal(rows.double(), torch.cat([x.latent_rows(0)[4:9], x.latent_rows(2)[11:14]]))


def test_gather_of_rows_before_the_first_request_or_its_first_row_gives_zeros() -> None:
    cache = torch.arange(1.0, 25.0).view(4, 2, 3)
    pages = (cache, *(torch.tensor(x).int() for x in ([0, 2], [1, 2], [2])))
    for indptr, starts in (([2, 4], [0]), ([0, 4], [-2])):
        rows = mla_ops.gather_latent_cache(
            *pages, torch.tensor(indptr).int(), num_tokens=4, seq_starts=torch.tensor(starts).int(), backend="reference"
        )
        assert torch.equal(rows, torch.cat([torch.zeros(2, 3), cache[1]]))


def test_gather_past_the_end_of_a_request_gives_zeros() -> None:
    x = make_decode_inputs([2, 5])
    rows = gather(x, [4, 3], 7)
    expected = torch.cat([x.latent_rows(0), torch.zeros(2, 48), x.latent_rows(1)[:3]])
    assert torch.equal(rows.double(), expected)


@pytest.mark.parametrize("kv_dtype", [torch.float8_e4m3fn, torch.float8_e4m3fnuz], ids=str)
def test_gather_scales_an_fp8_cache(kv_dtype: torch.dtype) -> None:
    x = make_decode_inputs([3, 6], kv_dtype=kv_dtype)
    rows = gather(x, x.kv_lens, 9, dtype=torch.bfloat16)
    assert_matches(rows, torch.cat([x.latent_rows(0), x.latent_rows(1)]))


def test_gather_gives_back_what_was_written() -> None:
    x = make_decode_inputs([6, 3])
    slots = (x.kv_indices[:3].long()[:, None] * 4 + torch.arange(4)).flatten()[[0, 1, 2, 3, 4, 5, 8, 9, 10]]
    rows = write(x.kv_cache, slots.tolist())
    assert torch.equal(gather(x, x.kv_lens, 9), rows)


# --- empty inputs -----------------------------------------------------------------------------------------------


def test_ops_take_empty_batches() -> None:
    x = make_decode_inputs([])
    assert not mla_ops.mla_decode(**x.arguments()).out.any()
    assert gather(x, [], 2).tolist() == torch.zeros(2, 48).tolist()
    p = make_prefill_inputs([])
    assert mla_ops.mla_prefill(**p._asdict()).lse.isneginf().all()
    cache = torch.zeros(1, 1, 48)
    write(cache, [])
    assert not cache.any()
    out, lse = mla_ops.merge_attn_states(*(torch.zeros(0, 4, 8), torch.zeros(0, 4)) * 2)
    assert out.shape == (0, 4, 8)
    assert lse.shape == (0, 4)
