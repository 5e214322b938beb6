"""Each backend's padding rule, as data: what a plan says of requests that are not there."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mla_ops import BackendUnavailableError, DecodePlan, DeepseekMLA, MLAConfig, plan
from mla_ops.backends.select import BACKENDS, Choice

CONFIG = MLAConfig(hidden_size=32, num_heads=2, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8)
PAGE_SIZE, LIVE, LARGEST = 4, 3, 6

RULES = plan.PADDING_RULES | {"of one row": plan.PaddingRule(kv_len=1, page=7, slot=0)}


def padded_plan(monkeypatch: pytest.MonkeyPatch, name: str, query_len: int) -> DecodePlan:
    monkeypatch.setattr(plan, "PADDING_RULES", RULES)
    monkeypatch.setattr(plan, "select", lambda *args, **kwargs: Choice(name, "planted"))
    monkeypatch.setattr(plan, "_STATEFUL", {})
    made = DecodePlan(
        CONFIG, max_batch_size=LARGEST, max_seq_len=16, query_len=query_len, page_size=PAGE_SIZE, device="cpu",
        dtype=torch.float32,
    )  # fmt: skip
    table = torch.arange(10, 10 + 4 * LIVE, dtype=torch.int32).view(LIVE, 4)
    made.update(table, torch.tensor([9, 4, 16], dtype=torch.int32))
    return made


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("query_len", [1, 4])
def test_padded_requests_have_the_rules_length_page_and_slot(
    monkeypatch: pytest.MonkeyPatch, name: str, query_len: int
) -> None:
    rule = RULES[name]
    metadata = padded_plan(monkeypatch, name, query_len).at(LARGEST)
    pages = -(-rule.kv_len // PAGE_SIZE)
    counts = metadata.kv_indptr.diff().tolist()
    assert counts == [3, 1, 4, *[pages] * (LARGEST - LIVE)]
    assert metadata.kv_last_page_lens.tolist()[LIVE:] == [rule.kv_len] * (LARGEST - LIVE)
    assert set(metadata.kv_indices.tolist()[8:]) == {rule.page}
    assert set(metadata.slot_mapping.tolist()[LIVE * query_len :]) == {rule.slot}
    assert not metadata.positions[LIVE * query_len :].any()
    assert not metadata.seq_lens[LIVE:].any()


@pytest.mark.parametrize("name", RULES)
def test_live_requests_do_not_depend_on_the_rule(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    metadata = padded_plan(monkeypatch, name, 2).at(LIVE)
    assert metadata.kv_indptr.tolist() == [0, 3, 4, 8]
    assert metadata.kv_indices.tolist()[:8] == [10, 11, 12, 14, 18, 19, 20, 21]
    assert metadata.slot_mapping.tolist() == [12 * 4 - 1, 12 * 4, 14 * 4 + 2, 14 * 4 + 3, 21 * 4 + 2, 21 * 4 + 3]


def test_every_backend_has_a_rule_and_pages_that_exist() -> None:
    assert plan.PADDING_RULES.keys() == set(BACKENDS)
    assert all(rule.page >= 0 for rule in plan.PADDING_RULES.values())  # page -1 is read by somebody


@pytest.mark.parametrize("query_len", [1, 3])
@pytest.mark.parametrize(
    ("backend", "device", "config"),
    [
        pytest.param("reference", "cpu", CONFIG, id="reference"),
        *(pytest.param(name, "cuda", None, id=f"{name}-gpu", marks=pytest.mark.gpu) for name in BACKENDS),
    ],
)
def test_padded_rows_of_the_result_are_zero(backend: str, device: str, config: Any, query_len: int) -> None:
    config = config or MLAConfig(
        hidden_size=256, num_heads=16, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128
    )
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    attention = DeepseekMLA(config, device=device, dtype=dtype).requires_grad_(False)
    try:
        made = DecodePlan(
            config, max_batch_size=LARGEST, max_seq_len=128, query_len=query_len, page_size=64, device=device,
            dtype=dtype, backend=backend,
        )  # fmt: skip
    except BackendUnavailableError as error:
        pytest.skip(str(error))
    cache = torch.full((LARGEST * 2, 64, config.latent_dim), torch.nan, dtype=dtype, device=device)
    table = torch.randperm(LARGEST * 2, device=device).view(LARGEST, 2).int()
    made.update(table[:LIVE], torch.full((LIVE,), query_len, dtype=torch.int32, device=device))
    metadata = made.at(LARGEST)
    hidden = torch.randn(LARGEST * query_len, config.hidden_size, dtype=dtype, device=device)
    out = attention(hidden, metadata.positions, cache, metadata)
    assert out[: LIVE * query_len].isfinite().all()
    assert not out[LIVE * query_len :].any()
