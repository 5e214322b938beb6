"""The shipped test helpers: the tolerance, the poisoned inputs, the check of plan values."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import mla_ops
from mla_ops.testing import assert_matches, check_plan_values, make_decode_inputs, make_prefill_inputs


def test_assert_matches_accepts_rounding_to_the_tested_dtype() -> None:
    exact = torch.randn(100, 100, dtype=torch.float64)
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        assert_matches(exact.to(dtype), exact, factor=1.0)


def test_assert_matches_allows_a_multiple_of_the_low_precision_error() -> None:
    exact = torch.randn(100, dtype=torch.float64)
    low = exact + 0.01
    assert_matches((exact + 0.019).float(), exact, low_precision=low, factor=2.0)
    with pytest.raises(AssertionError, match="worst at"):
        assert_matches((exact + 0.021).float(), exact, low_precision=low, factor=2.0)


def test_assert_matches_names_the_worst_index_and_both_budgets() -> None:
    exact = torch.zeros(3, 4, dtype=torch.float64)
    actual = exact.float()
    actual[2, 1] = 1.0
    with pytest.raises(AssertionError, match=r"worst at \(2, 1\).*max abs error.*budget.*relative L2.*budget"):
        assert_matches(actual, exact)


def test_assert_matches_refuses_one_bad_element_that_an_l2_norm_would_hide() -> None:
    exact = torch.full((1_000_000,), 1.0, dtype=torch.float64)
    low = exact + 1e-3 * torch.randn(1_000_000, dtype=torch.float64)
    actual = low.clone().float()
    actual[17] += 0.1
    with pytest.raises(AssertionError, match=r"worst at \(17,\)"):
        assert_matches(actual, exact, low_precision=low)


@pytest.mark.parametrize("where", ["actual", "exact", "low_precision"])
def test_assert_matches_never_passes_nan(where: str) -> None:
    tensors = {name: torch.ones(3) for name in ("actual", "exact", "low_precision")}
    tensors[where][1] = math.nan
    with pytest.raises(AssertionError, match=rf"{where} is NaN at \(1,\)"):
        assert_matches(**tensors)


@pytest.mark.parametrize(("got", "want"), [(-math.inf, 0.0), (0.0, -math.inf), (math.inf, -math.inf)])
def test_assert_matches_wants_infinities_in_the_same_places(got: float, want: float) -> None:
    with pytest.raises(AssertionError, match=r"infinities differ at \(0,\)"):
        assert_matches(torch.tensor([got, 1.0]), torch.tensor([want, 1.0]))
    assert_matches(torch.tensor([want, 1.0]), torch.tensor([want, 1.0]))


def test_assert_matches_refuses_another_shape() -> None:
    with pytest.raises(AssertionError, match="shapes differ"):
        assert_matches(torch.ones(3), torch.ones(1, 3))


def test_decode_inputs_poison_everything_that_no_request_owns() -> None:
    x = make_decode_inputs([0, 5, 8], query_lens=2, page_size=4)
    assert x.kv_cache.isfinite().all(-1).sum() == 13
    assert x.kv_cache.isnan().all(-1).sum() == x.kv_cache.shape[0] * 4 - 13
    assert x.q[6:].isnan().all()
    assert x.kv_indices[4:].tolist() == [2**31 - 1] * 3


def test_prefill_inputs_poison_the_spare_rows() -> None:
    x = make_prefill_inputs([2, 3], [4, 0])
    assert x.q[:5].isfinite().all()
    assert all(t.isnan().all() for t in (x.q[5:], x.k[4:], x.v[4:]))


def test_shared_pages_are_the_same_pages() -> None:
    x = make_decode_inputs([9, 13], page_size=4, pages="shared")
    first, second = x.kv_indices[:3].tolist(), x.kv_indices[3:7].tolist()
    assert first[:2] == second[:2]
    assert first[2] not in second


def test_inputs_are_the_same_for_the_same_seed() -> None:
    a, b = (make_decode_inputs([3, 4], generator=torch.Generator().manual_seed(7), poison=False) for _ in range(2))
    assert torch.equal(a.kv_cache, b.kv_cache)
    assert torch.equal(a.q, b.q)


@pytest.mark.parametrize("make", [make_decode_inputs, make_prefill_inputs])
def test_input_factories_want_one_length_per_request(make: Any) -> None:
    with pytest.raises(ValueError, match=r"(query|key)_lens must have one number per request \(2\), got 1"):
        make([1, 2], **({"query_lens": [1]} if make is make_decode_inputs else {"key_lens": [1]}))


# --- check_plan_values ------------------------------------------------------------------------------------------


def plan_values() -> dict[str, Any]:
    """Three requests of one query: 5, 0 and 4 rows in pages of 4."""
    return {
        "qo_indptr": torch.tensor([0, 1, 2, 3]),
        "max_seqlen_q": 1,
        "kv_indptr": torch.tensor([0, 2, 2, 3]),
        "kv_indices": torch.tensor([4, 0, 2, 2**31 - 1]),
        "kv_last_page_lens": torch.tensor([1, 0, 4]),
        "seq_lens": torch.tensor([5, 0, 4]),
        "slot_mapping": torch.tensor([0, -1, 11]),
    }


def test_good_plan_values_pass() -> None:
    check_plan_values(plan_values(), num_pages=5, page_size=4)
    check_plan_values(make_decode_inputs([5, 0, 4], query_lens=2), num_pages=6, page_size=4)


def test_the_values_of_both_kinds_of_plan_pass() -> None:
    config = mla_ops.MLAConfig.preset("deepseek-v2-lite")
    plan = mla_ops.DecodePlan(
        config, max_batch_size=3, max_seq_len=9, page_size=4, device="cpu", dtype=torch.float32, query_len=2
    )
    table = torch.tensor([[4, 0, 1], [2, 3, 5]]).int()
    plan.update(table, torch.tensor([9, 1]).int())
    check_plan_values(plan.at(3), num_pages=6, page_size=4)
    prefill = mla_ops.PrefillPlan.make(
        config, query_lens=[3, 0], prefix_lens=[6, 4], block_table=table, page_size=4, dtype=torch.float32
    )
    check_plan_values(prefill, num_pages=6, page_size=4)


@pytest.mark.parametrize(
    ("name", "index", "value", "message"),
    [
        ("qo_indptr", 1, 2, r"qo_indptr gives request 0 2 rows, over max_seqlen_q=1"),
        ("qo_indptr", 3, 1, r"qo_indptr must not decrease, got qo_indptr\[3\]=1 after 2"),
        ("qo_indptr", 0, 1, r"qo_indptr\[0\] must be 0, got 1"),
        ("kv_indptr", 2, 1, r"kv_indptr must not decrease, got kv_indptr\[2\]=1 after 2"),
        ("kv_indptr", 3, 5, r"kv_indptr\[-1\] must be at most 4 .*got 5"),
        ("kv_indices", 1, 5, r"kv_indices\[1\] must be in 0\.\.4 .*got 5"),
        ("kv_indices", 2, -1, r"kv_indices\[2\] must be in 0\.\.4 .*got -1"),
        ("kv_last_page_lens", 0, 0, r"kv_last_page_lens\[0\] must be in 1\.\.4 .*got 0"),
        ("kv_last_page_lens", 2, 5, r"kv_last_page_lens\[2\] must be in 1\.\.4 .*got 5"),
        ("kv_last_page_lens", 1, 1, r"kv_last_page_lens\[1\] must be 0 for a request without pages, got 1"),
        ("seq_lens", 1, -3, r"seq_lens\[1\] must be in 0\.\.20 .*got -3"),
        ("slot_mapping", 1, 20, r"slot_mapping\[1\] must be -1 or in 0\.\.19, got 20"),
        ("slot_mapping", 0, -2, r"slot_mapping\[0\] must be -1 or in 0\.\.19, got -2"),
        ("slot_mapping", 2, 0, r"slot_mapping\[2\] must not repeat slot 0 of slot_mapping\[0\]"),
    ],
)
def test_a_bad_plan_value_is_named(name: str, index: int, value: int, message: str) -> None:
    values = plan_values()
    values[name][index] = value
    with pytest.raises(ValueError, match=message):
        check_plan_values(values, num_pages=5, page_size=4)
