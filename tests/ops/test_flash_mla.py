"""The flash_mla backend over a stand-in of FlashMLA that keeps its contract; the real kernel under ``gpu``."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import mla_ops.plan as plan_module
from mla_ops import BackendUnavailableError, DecodePlan, MLAConfig, functional
from mla_ops.backends import flash_mla
from mla_ops.backends.select import Choice, select
from mla_ops.testing import DecodeInputs, assert_matches, make_decode_inputs

CONFIG = MLAConfig(
    hidden_size=64, num_heads=4, kv_lora_rank=512, qk_nope_head_dim=16, qk_rope_head_dim=64, v_head_dim=16
)
SM_PARTS = 3


class FlashMLA:
    """FlashMLA's dense decode: a block table, a schedule of exactly these lengths, +inf for a row without keys."""

    def has_legacy(self) -> bool:
        return True

    def get_mla_decoding_metadata(self, lens: Tensor, rows: int, heads_k: int, *, use_legacy: bool) -> list[Tensor]:
        assert use_legacy
        assert heads_k == 1
        splits = torch.cat([lens.new_zeros(1), lens + rows])  # what the lengths and the rows determine
        return [lens.new_zeros(SM_PARTS, 8), splits]

    def get_mla_metadata(self) -> tuple[SimpleNamespace, None]:
        return SimpleNamespace(tile_scheduler_metadata=None, num_splits=None), None

    def flash_mla_with_kvcache(
        self,
        q: Tensor,
        k_cache: Tensor,
        table: Tensor,
        lens: Tensor,
        width: int,
        schedule: SimpleNamespace,
        **options: Any,
    ) -> tuple[Tensor, Tensor]:
        requests, query_len, heads, _ = q.shape
        assert options["use_legacy"]
        assert options["causal"] == (query_len > 1)
        assert k_cache.shape[1:3] == (64, 1)
        assert ((table >= 0) & (table < k_cache.shape[0])).all()
        if schedule.num_splits is not None:
            assert torch.equal(schedule.num_splits[1:], lens + query_len * heads)
            assert schedule.tile_scheduler_metadata.shape == (SM_PARTS, 8)
        out = torch.zeros(requests, query_len, heads, width, dtype=q.dtype)
        lse = torch.full((requests, heads, query_len), torch.inf)
        for b, length in enumerate(lens.tolist()):
            keys = k_cache[table[b].long()].flatten(0, 1)[:length, 0].double()
            for i in range(query_len):
                seen = keys[: max(0, length - (query_len - 1 - i))]
                if len(seen):
                    scores = q[b, i].double() @ seen.T * options["softmax_scale"]
                    out[b, i] = (scores.softmax(-1) @ seen[:, :width]).to(q.dtype)
                    lse[b, :, i] = scores.logsumexp(-1)
        return out, lse


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """FlashMLA's stand-in, serving the CPU."""
    module = FlashMLA()
    monkeypatch.setattr(flash_mla, "_module", lambda: module)
    monkeypatch.setattr(flash_mla, "_decode_op", lambda: None)
    monkeypatch.setattr(flash_mla, "refusal", lambda *args, **kwargs: None)
    return


def check(inputs: DecodeInputs) -> None:
    arguments = inputs.arguments()
    got = functional.mla_decode(**arguments, backend="flash_mla")
    exact = functional.mla_decode(
        **{**arguments, "q": inputs.q.double(), "kv_cache": inputs.kv_cache.double()}, backend="reference"
    )
    assert_matches(got.out, exact.out, factor=16)
    assert_matches(got.lse, exact.lse.double(), factor=1e4)  # of 16-bit scores


@pytest.mark.parametrize("query_lens", [1, 3, [2, 0, 3, 1, 3]], ids=["one", "three", "ragged"])
@pytest.mark.parametrize("pages", ["shuffled", "interleaved", "shared"])
def test_decode_without_a_plan_equals_the_reference(installed: None, query_lens: Any, pages: Any) -> None:
    check(
        make_decode_inputs(
            [0, 1, 64, 65, 130], query_lens=query_lens, page_size=64, kv_lora_rank=512, qk_rope_head_dim=64,
            pages=pages, dtype=torch.bfloat16,
        )
    )  # fmt: skip


@pytest.mark.parametrize("query_len", [1, 3])
@pytest.mark.parametrize("batch_size", [1, 3, 5])
def test_decode_with_a_plan_equals_the_reference(installed: None, query_len: int, batch_size: int) -> None:
    check_plan("cpu", query_len, batch_size)


def check_plan(device: str, query_len: int, batch_size: int) -> None:
    plan = DecodePlan(
        CONFIG, max_batch_size=5, max_seq_len=300, query_len=query_len, page_size=64, device=device,
        dtype=torch.bfloat16, backend="flash_mla",
    )  # fmt: skip
    cache = torch.full((40, 64, 576), torch.nan, dtype=torch.bfloat16, device=device)
    for lens in ([0, 1, 300, 64, 2], [65, 0, 0, 3, 299], [1, 1, 1, 1, 1]):
        table = torch.randperm(40, device=device)[:25].view(5, 5).int()
        cache.fill_(torch.nan)
        for row, length in zip(table.long(), lens, strict=True):
            slots = row[:, None] * 64 + torch.arange(64, device=device)
            cache.view(-1, 576)[slots.flatten()[:length]] = torch.randn(
                length, 576, dtype=torch.bfloat16, device=device
            )
        live = min(3, batch_size)  # at(5) after an update of 3 requests: two padded ones
        plan.update(table[:live], torch.tensor(lens[:live], dtype=torch.int32, device=device))
        metadata = plan.at(batch_size)
        q = torch.randn(batch_size * query_len, 4, 576, dtype=torch.bfloat16, device=device)
        lists = (metadata.qo_indptr, metadata.kv_indptr, metadata.kv_indices, metadata.kv_last_page_lens)
        options: dict[str, Any] = {"softmax_scale": 0.1, "max_seqlen_q": query_len, "kv_lora_rank": 512}
        got = functional.mla_decode(
            q, cache, *lists, **options, backend_state=metadata.backend_state, backend="flash_mla"
        )
        exact = functional.mla_decode(q.double(), cache.double(), *lists, **options, backend="reference")
        assert_matches(got.out, exact.out, factor=16)
        assert_matches(got.lse, exact.lse.double(), factor=1e4)
        padded = got.out.view(batch_size, -1)[live:]
        assert not padded.any()


def test_the_op_behind_the_wrapper_is_given_the_same(installed: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def op(
        q: Tensor, cache: Tensor, width: int, lens: Tensor, table: Tensor, scale: float, causal: bool, *parts: Any
    ) -> tuple[Any, ...]:
        schedule = SimpleNamespace(tile_scheduler_metadata=parts[0], num_splits=parts[1])
        options = {"softmax_scale": scale, "causal": causal, "use_legacy": True}
        return *FlashMLA().flash_mla_with_kvcache(q, cache, table, lens, width, schedule, **options), *parts

    monkeypatch.setattr(flash_mla, "_decode_op", lambda: op)
    test_decode_without_a_plan_equals_the_reference(installed, 3, "shuffled")
    check_plan("cpu", query_len=3, batch_size=3)


def test_a_build_without_the_op_is_called_by_its_wrapper(installed: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(flash_mla, "_module", FlashMLA)
    for op in (None, SimpleNamespace(default=SimpleNamespace(_schema="flash_mla_legacy::dense_decode_fwd(Tensor q)"))):
        monkeypatch.setattr(torch.ops, "flash_mla_legacy", SimpleNamespace(dense_decode_fwd=op), raising=False)
        assert flash_mla._decode_op.__wrapped__() is None


def test_a_plans_state_keeps_its_addresses_and_follows_the_update(installed: None) -> None:
    plan = DecodePlan(
        CONFIG, max_batch_size=4, max_seq_len=128, page_size=64, device="cpu", dtype=torch.bfloat16, backend="flash_mla"
    )
    before = plan.at(2).backend_state
    addresses = [x.data_ptr() for x in before]
    plan.update(torch.tensor([[3, 1], [2, 0]], dtype=torch.int32), torch.tensor([100, 7], dtype=torch.int32))
    assert [x.data_ptr() for x in plan.at(2).backend_state] == addresses
    table, lens, _, splits = before
    assert table.tolist() == [[3, 1], [2, 0]]
    assert lens.tolist() == [100, 7]
    assert splits.tolist() == [0, 104, 11]
    assert plan.at(3).backend_state[3].tolist() == [0, 104, 11, 4]


def test_a_state_of_another_size_is_refused(installed: None) -> None:
    plan = DecodePlan(
        CONFIG, max_batch_size=4, max_seq_len=128, page_size=64, device="cpu", dtype=torch.bfloat16, backend="flash_mla"
    )
    inputs = make_decode_inputs(
        [3, 64], page_size=64, kv_lora_rank=512, qk_rope_head_dim=64, dtype=torch.bfloat16, poison=False
    )
    with pytest.raises(ValueError, match=r"backend_state must be of plan.at\(2\)"):
        functional.mla_decode(**inputs.arguments(), backend="flash_mla", backend_state=plan.at(3).backend_state)


def test_the_other_ops_are_those_of_the_backend_that_auto_takes(installed: None) -> None:
    cache = torch.zeros(2, 64, 576)
    row = torch.randn(1, 576)
    functional.write_latent_cache(row[:, :512], row[:, 512:], cache, torch.tensor([70]), backend="flash_mla")
    assert torch.equal(cache[1, 6], row[0])


@pytest.mark.parametrize(
    ("device", "options", "reason"),
    [
        ("cpu", {}, "NVIDIA GPUs only"),
        ("cuda", {"dtype": torch.float32}, "bfloat16 or float16"),
        ("cuda", {"page_size": 16}, "pages have 64 rows, not 16"),
        ("cuda", {"kv_dtype": torch.float8_e4m3fn}, "cache has the queries' dtype"),
        ("cuda", {"widths": (320, 256)}, r"512 \| 64 wide, not 256 \| 64"),
        ("cuda", {"capability": (8, 0)}, "for sm_90"),
        ("cuda", {"missing": True}, "not installed"),
        ("cuda", {"broken": "ImportError: libcudart"}, "ImportError: libcudart"),
    ],
)
def test_what_it_cannot_serve_is_refused_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, device: str, options: dict[str, Any], reason: str
) -> None:
    options = dict(options)
    capability, missing = options.pop("capability", (9, 0)), options.pop("missing", False)
    broken, dtype = options.pop("broken", None), options.pop("dtype", torch.bfloat16)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if missing else object())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(flash_mla, "_import_error", lambda: broken)
    widths = options.pop("widths", (576, 512))
    config = MLAConfig(
        hidden_size=64, num_heads=4, kv_lora_rank=widths[1], qk_nope_head_dim=16, qk_rope_head_dim=64, v_head_dim=16
    )
    options.setdefault("page_size", 64)
    with pytest.raises(BackendUnavailableError, match=reason):
        select(config, device, dtype, backend="flash_mla", **options)
    assert select(config, device, dtype, **options).name != "flash_mla"


def test_auto_takes_it_where_it_serves_and_the_page_size_is_known(installed: None) -> None:
    assert select(CONFIG, "cuda", torch.bfloat16, page_size=64).name == "flash_mla"
    assert select(CONFIG, "cuda", torch.bfloat16).name != "flash_mla"
    assert select(CONFIG, "cpu", torch.bfloat16, page_size=64).name == "reference"


def test_auto_leaves_small_steps_to_triton(installed: None) -> None:
    choice = select(CONFIG, "cuda", torch.bfloat16, page_size=64)
    assert [choice.of(rows) for rows in (1, 256, 257, 10_000)] == ["triton", "triton", "flash_mla", "flash_mla"]
    asked = select(CONFIG, "cuda", torch.bfloat16, page_size=64, backend="flash_mla")
    assert asked.of(1) == "flash_mla"


def test_a_plan_makes_no_schedule_for_the_steps_of_another_backend(
    installed: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    choice = Choice("flash_mla", "", ("triton", 2 * CONFIG.num_heads * 2))
    monkeypatch.setattr(plan_module, "select", lambda *args, **options: choice)
    plan = DecodePlan(
        CONFIG, max_batch_size=4, max_seq_len=128, query_len=2, page_size=64, device="cpu", dtype=torch.bfloat16,
        num_kv_splits=3,
    )  # fmt: skip
    monkeypatch.setattr(flash_mla.DecodeState, "_schedule", lambda *args: pytest.fail("a schedule was made"))
    plan.update(torch.tensor([[3], [2]], dtype=torch.int32), torch.tensor([60, 7], dtype=torch.int32))
    for size in (1, 2, 2):
        metadata = plan.at(size)
        assert (metadata.backend, metadata.backend_state, metadata.num_kv_splits) == ("triton", (), 3)
    assert metadata.kv_indices[:2].tolist() == [3, 2]
    monkeypatch.undo()
    monkeypatch.setattr(flash_mla, "_module", lambda: FlashMLA())
    assert plan.at(3).backend == "flash_mla"
    assert plan.at(3).backend_state[3].tolist() == [0, 68, 15, 8]


needs_flash_mla = pytest.mark.skipif(
    importlib.util.find_spec("flash_mla") is None, reason="needs flash_mla (pip install sgl-flash-mla)"
)


@pytest.mark.gpu
@needs_flash_mla
@pytest.mark.parametrize("query_lens", [1, 4, [2, 0, 3, 1, 3]], ids=["one", "four", "ragged"])
@pytest.mark.parametrize("num_heads", [4, 16, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_kernel_equals_the_reference(dtype: torch.dtype, num_heads: int, query_lens: Any) -> None:
    check(
        make_decode_inputs(
            [0, 1, 64, 1000, 5000], query_lens=query_lens, num_heads=num_heads, page_size=64, kv_lora_rank=512,
            qk_rope_head_dim=64, dtype=dtype, device="cuda",
        )
    )  # fmt: skip


@pytest.mark.gpu
@needs_flash_mla
@pytest.mark.parametrize("query_len", [1, 2, 4])
@pytest.mark.parametrize("batch_size", [1, 3, 5])
def test_the_kernel_with_a_plan_equals_the_reference(query_len: int, batch_size: int) -> None:
    check_plan("cuda", query_len, batch_size)


@pytest.mark.gpu
@needs_flash_mla
def test_a_plan_of_two_backends_equals_the_reference_at_every_size() -> None:
    config = MLAConfig(
        hidden_size=64, num_heads=64, kv_lora_rank=512, qk_nope_head_dim=16, qk_rope_head_dim=64, v_head_dim=16
    )
    options: dict[str, Any] = {"max_batch_size": 8, "max_seq_len": 700, "page_size": 64, "dtype": torch.bfloat16}
    plan = DecodePlan(config, device="cuda", **options)
    assert {plan.at(size).backend for size in range(1, 9)} == {"triton", "flash_mla"}
    cache = torch.randn(96, 64, 576, dtype=torch.bfloat16, device="cuda")
    for size in (8, 1, 5, 4, 8, 2):
        table = torch.randperm(96, device="cuda")[: 11 * size].view(size, 11).int()
        plan.update(table, torch.randint(1, 701, (size,), dtype=torch.int32, device="cuda"))
        at = plan.at(size)
        q = torch.randn(size, 64, 576, dtype=torch.bfloat16, device="cuda")
        lists = (at.qo_indptr, at.kv_indptr, at.kv_indices, at.kv_last_page_lens)
        of_both: dict[str, Any] = {"softmax_scale": 0.1, "kv_lora_rank": 512}
        got = functional.mla_decode(q, cache, *lists, **of_both, backend_state=at.backend_state, backend=at.backend)
        exact = functional.mla_decode(q.double(), cache.double(), *lists, **of_both, backend="reference")
        assert_matches(got.out, exact.out, factor=16)
