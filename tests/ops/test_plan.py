"""The values of plans, against a construction with Python lists."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import mla_ops
from mla_ops import DecodePlan, MLAConfig, PlanError, PrefillPlan
from mla_ops.testing import check_plan_values

CONFIG = MLAConfig.preset("deepseek-v2-lite")
BATCH, MAX_LEN = 6, 37
VALUES = ("kv_indptr", "kv_last_page_lens", "slot_mapping", "positions", "seq_lens", "qo_indptr")


def make_plan(page_size: int = 4, query_len: int = 1, max_seq_len: int = MAX_LEN, **options: Any) -> DecodePlan:
    return DecodePlan(
        CONFIG,
        max_batch_size=BATCH,
        max_seq_len=max_seq_len,
        query_len=query_len,
        page_size=page_size,
        device="cpu",
        dtype=torch.float32,
        **options,
    )


def random_table(requests: int, width: int) -> Tensor:
    return torch.randperm(1000)[: requests * width].reshape(requests, width).int()


def naive(table: Sequence[Sequence[int]], lens: Sequence[int], page_size: int, query_len: int) -> dict[str, list[int]]:
    """What a plan must say of ``BATCH`` requests, those after the given ones not there."""
    expected: dict[str, list[int]] = {name: [] for name in VALUES}
    expected |= {"kv_indptr": [0], "kv_indices": [], "qo_indptr": [i * query_len for i in range(BATCH + 1)]}
    for b in range(BATCH):
        length = lens[b] if b < len(lens) else 0
        pages = list(table[b][: -(-length // page_size)]) if length else []
        expected["kv_indices"] += pages
        expected["kv_indptr"].append(len(expected["kv_indices"]))
        expected["kv_last_page_lens"].append(length - (len(pages) - 1) * page_size if pages else 0)
        expected["seq_lens"].append(length)
        for position in range(length - query_len, length):
            live = length > 0 and position >= 0
            expected["positions"].append(position if live else 0)
            slot = table[b][position // page_size] * page_size + position % page_size if live else -1
            expected["slot_mapping"].append(slot)
    return expected


def assert_plan_is(plan: DecodePlan, expected: dict[str, list[int]]) -> None:
    metadata = plan.at(BATCH)
    for name in VALUES:
        assert getattr(metadata, name).tolist() == expected[name], name
    used = expected["kv_indptr"][-1]
    assert metadata.kv_indices.tolist() == expected["kv_indices"] + [0] * (len(metadata.kv_indices) - used)


@pytest.mark.parametrize("query_len", [1, 2, 4])
@pytest.mark.parametrize("page_size", [1, 4, 16, 64])
def test_update_writes_what_the_lists_say(page_size: int, query_len: int) -> None:
    plan = make_plan(page_size, query_len)
    for _ in range(10):
        requests, width = random.randint(0, BATCH), random.randint(1, plan.max_pages)
        room = min(width * page_size, MAX_LEN)
        edges = [n for n in (0, 1, page_size - 1, page_size, page_size + 1, room) if n <= room]
        lens = [random.choice([*edges, random.randint(0, room)]) for _ in range(requests)]
        table = random_table(requests, width)
        plan.update(table, torch.tensor(lens, dtype=torch.int32))
        assert_plan_is(plan, naive(table.tolist(), lens, page_size, query_len))


def test_update_ignores_what_an_earlier_one_wrote() -> None:
    plan, fresh = make_plan(), make_plan()
    plan.update(random_table(6, 10), torch.full((6,), 37, dtype=torch.int32))
    table, lens = random_table(2, 3), torch.tensor([5, 0]).int()
    for each in (plan, fresh):
        each.update(table, lens)
    for name in (*VALUES, "kv_indices"):
        assert torch.equal(getattr(plan.at(BATCH), name), getattr(fresh.at(BATCH), name)), name


@pytest.mark.parametrize("length", [-1, -(2**31), 13, 1000, 2**31 - 1])
def test_a_length_out_of_range_is_cut_to_what_the_block_table_has(length: int) -> None:
    plan = make_plan(debug=True)
    table = random_table(2, 3)
    plan.update(table, torch.tensor([length, 5], dtype=torch.int32))
    assert_plan_is(plan, naive(table.tolist(), [min(max(length, 0), 12), 5], 4, 1))
    check_plan_values(plan.at(BATCH), num_pages=1000, page_size=4)
    plan.check_canaries()


def test_a_length_over_max_seq_len_never_writes_past_the_buffers() -> None:
    plan = make_plan(debug=True)
    plan.update(random_table(BATCH, plan.max_pages), torch.full((BATCH,), 2**31 - 1, dtype=torch.int32))
    check_plan_values(plan.at(BATCH), num_pages=1000, page_size=4)
    plan.check_canaries()


def test_a_new_plan_describes_requests_that_are_not_there() -> None:
    assert_plan_is(make_plan(query_len=2), naive([], [], 4, 2))


@pytest.mark.parametrize("query_len", [1, 2])
def test_padded_requests_are_inert(query_len: int) -> None:
    """A step over more requests than there are writes no row and gives zeros for those that are not."""
    plan, cache = make_plan(query_len=query_len), torch.randn(40, 4, 576)
    table = torch.randperm(40)[:20].reshape(2, 10).int()
    plan.update(table, torch.tensor([9, 5]).int())
    metadata = plan.at(BATCH)
    assert metadata.slot_mapping[2 * query_len :].tolist() == [-1] * 4 * query_len
    before, tokens = cache.clone(), BATCH * query_len
    mla_ops.write_latent_cache(torch.randn(tokens, 512), torch.randn(tokens, 64), cache, metadata.slot_mapping)
    changed = (cache != before).any(-1).flatten().nonzero().flatten().tolist()
    assert sorted(changed) == sorted(metadata.slot_mapping[: 2 * query_len].tolist())
    out, lse = mla_ops.mla_decode(
        torch.randn(tokens, 16, 576),
        cache,
        metadata.qo_indptr,
        metadata.kv_indptr,
        metadata.kv_indices,
        metadata.kv_last_page_lens,
        softmax_scale=0.1,
        max_seqlen_q=query_len,
        backend_state=metadata.backend_state,
    )
    assert not out[2 * query_len :].any()
    assert lse[2 * query_len :].isneginf().all()
    assert out[: 2 * query_len].any(-1).all()


def test_at_gives_the_same_tensors_at_every_call_and_after_every_update() -> None:
    plan = make_plan()
    first = plan.at(3)
    addresses = [x.data_ptr() for x in first if isinstance(x, Tensor)]
    plan.update(random_table(3, 2), torch.tensor([3, 8, 1]).int())
    again = plan.at(3)
    assert again is first
    assert [x.data_ptr() for x in again if isinstance(x, Tensor)] == addresses
    assert first.seq_lens.tolist() == [3, 8, 1]


def test_a_bucket_is_the_first_requests_of_the_whole_plan() -> None:
    plan = make_plan(query_len=2)
    plan.update(random_table(5, 9), torch.tensor([3, 8, 1, 30, 36]).int())
    whole = plan.at(BATCH)
    for batch in range(1, BATCH + 1):
        part = plan.at(batch)
        for name in (*VALUES, "kv_indices"):
            x = getattr(part, name)
            assert torch.equal(x, getattr(whole, name)[: len(x)]), name
            assert x.storage_offset() == 0


class NoHostReads(TorchDispatchMode):
    """Fails on anything that a stream capture would refuse: reading a tensor on the host, sizes that depend on it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        assert name not in ("_local_scalar_dense", "nonzero", "masked_select", "unique", "item"), (
            f"{name} reads a tensor"
        )
        return func(*args, **(kwargs or {}))


def test_no_host_reads_notices_a_read() -> None:
    with NoHostReads(), pytest.raises(AssertionError, match="reads a tensor"):
        torch.ones(1).item()


@pytest.mark.parametrize("requests", [0, 2, BATCH])
def test_update_never_reads_a_tensor_on_the_host(requests: int) -> None:
    plan, table, lens = make_plan(query_len=2), random_table(requests, 3), torch.full((requests,), 7).int()
    with NoHostReads():
        plan.update(table, lens)


def test_a_decode_step_over_the_reference_never_reads_a_tensor_on_the_host() -> None:
    plan, cache = make_plan(), torch.randn(1000, 4, 576)
    plan.update(random_table(3, 3), torch.full((3,), 7).int())
    rows, q, metadata = torch.randn(3, 576), torch.randn(3, 16, 576), plan.at(3)
    pages = (metadata.qo_indptr, metadata.kv_indptr, metadata.kv_indices, metadata.kv_last_page_lens)
    with NoHostReads():
        mla_ops.write_latent_cache(rows[:, :512], rows[:, 512:], cache, metadata.slot_mapping)
        mla_ops.mla_decode(q, cache, *pages, softmax_scale=0.1, backend_state=metadata.backend_state)


def test_canaries_notice_a_write_past_a_buffer() -> None:
    plan = make_plan(debug=True)
    plan.check_canaries()
    slots = plan.at(BATCH).slot_mapping
    torch.as_strided(slots, (BATCH + 1,), (1,)).fill_(7)
    with pytest.raises(PlanError, match="something wrote past the plan's buffer slot_mapping"):
        plan.check_canaries()


def test_a_plan_without_canaries_says_so() -> None:
    with pytest.raises(PlanError, match="make it with debug=True"):
        make_plan().check_canaries()


@pytest.mark.parametrize("name", ["max_batch_size", "max_seq_len", "query_len", "page_size"])
def test_a_plan_size_below_one_is_named(name: str) -> None:
    sizes = {"max_batch_size": 1, "max_seq_len": 8, "query_len": 1, "page_size": 4} | {name: 0}
    with pytest.raises(ValueError, match=rf"{name} must be at least 1, got 0"):
        DecodePlan(CONFIG, device="cpu", dtype=torch.float32, **sizes)


@pytest.mark.parametrize(
    ("table", "lens", "error", "match"),
    [
        (torch.zeros(2, 3), torch.zeros(2).int(), TypeError, "block_table must be int32"),
        (torch.zeros(2, 3).int(), torch.zeros(2).long(), TypeError, "seq_lens must be int32"),
        (torch.zeros(6).int(), torch.zeros(2).int(), ValueError, "block_table must be 2-D"),
        (torch.zeros(2, 3).int(), torch.zeros(2, 1).int(), ValueError, "seq_lens must be 1-D"),
        (torch.zeros(2, 3).int(), torch.zeros(3).int(), ValueError, r"block_table must have a row per request \(3"),
        (torch.zeros(7, 3).int(), torch.zeros(7).int(), ValueError, "at most max_batch_size=6 requests"),
        (torch.zeros(2, 11).int(), torch.zeros(2).int(), ValueError, "at most max_pages=10 columns, got 11"),
        (torch.zeros(2, 3, device="meta").int(), torch.zeros(2).int(), ValueError, "block_table must be on the plan's"),
    ],
)
def test_update_names_what_does_not_fit(table: Tensor, lens: Tensor, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        make_plan().update(table, lens)


@pytest.mark.parametrize("batch_size", [0, -1, BATCH + 1])
def test_at_refuses_a_batch_size_that_the_plan_has_not(batch_size: int) -> None:
    with pytest.raises(ValueError, match=rf"batch_size must be in 1\.\.6 .*got {batch_size}"):
        make_plan().at(batch_size)


# --- PrefillPlan ------------------------------------------------------------------------------------------------


def make_prefill(query_lens: Sequence[int], prefix_lens: Sequence[int] | None = None, **options: Any) -> PrefillPlan:
    arguments = {"page_size": 4, "block_table": random_table(len(query_lens), 12)} | options
    return PrefillPlan.make(CONFIG, query_lens=query_lens, prefix_lens=prefix_lens, dtype=torch.float32, **arguments)


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_prefill_plan_says_what_the_lists_say(page_size: int) -> None:
    new, cached = [3, 0, 1, 5], [6, 4, 0, 7]
    table = random_table(4, 12)
    plan = make_prefill(new, cached, block_table=table, page_size=page_size)
    rows = [(b, p) for b in range(4) for p in range(cached[b], cached[b] + new[b])]
    assert plan.cu_seqlens_q.tolist() == [0, 3, 3, 4, 9]
    assert plan.max_seqlen_q == 5
    assert plan.positions.tolist() == [p for _, p in rows]
    assert plan.slot_mapping.tolist() == [int(table[b, p // page_size]) * page_size + p % page_size for b, p in rows]
    pages = [-(-n // page_size) for n in cached]
    assert plan.kv_indices.tolist() == [page for b in range(4) for page in table[b, : pages[b]].tolist()]
    assert plan.kv_indptr.tolist() == [sum(pages[:b]) for b in range(5)]
    check_plan_values(plan, num_pages=1000, page_size=page_size)


@pytest.mark.parametrize("chunk_tokens", [1, 4, 8, 10, 1000])
def test_chunks_cover_each_prefix_once_and_in_order(chunk_tokens: int) -> None:
    cached = [6, 0, 17, 1]
    plan = make_prefill([1, 1, 1, 1], cached, chunk_tokens=chunk_tokens)
    covered: list[list[int]] = [[] for _ in cached]
    for chunk in plan.chunks:
        lengths = chunk.cu_seqlens.diff().tolist()
        assert chunk.num_tokens == sum(lengths) <= max(chunk_tokens, 4 * 3)
        assert chunk.max_seqlen == max(lengths) > 0
        for b, (start, n) in enumerate(zip(chunk.seq_starts.tolist(), lengths, strict=True)):
            covered[b] += range(start, start + n)
    assert covered == [list(range(n)) for n in cached]


def test_a_prefill_without_prefixes_has_no_chunks() -> None:
    assert make_prefill([3, 0]).chunks == ()
    assert make_prefill([], []).cu_seqlens_q.tolist() == [0]


@pytest.mark.parametrize(
    ("query_lens", "prefix_lens", "options", "match"),
    [
        ([3], [1, 2], {}, "must be of the same requests"),
        ([3, 2], None, {"block_table": torch.zeros(1, 3).int()}, "must be of the same requests"),
        ([3, -1], None, {}, r"query_lens\[1\]=-1"),
        ([3, 1], [0, -2], {}, r"prefix_lens\[1\]=-2"),
        ([3, 40], [0, 9], {}, "request 1 has 49 rows and block_table has pages for 48"),
        ([1], None, {"page_size": 0}, "page_size must be at least 1, got 0"),
        ([1], None, {"chunk_tokens": 0}, "chunk_tokens must be at least 1, got 0"),
    ],
)
def test_prefill_plan_names_what_does_not_fit(
    query_lens: list[int], prefix_lens: list[int] | None, options: dict[str, Any], match: str
) -> None:
    with pytest.raises(ValueError, match=match):
        make_prefill(query_lens, prefix_lens, **options)


def test_prefill_plan_wants_an_int32_block_table() -> None:
    with pytest.raises(TypeError, match="block_table must be int32"):
        make_prefill([1], block_table=torch.zeros(1, 3).long())


def test_making_a_plan_launches_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    # A warm-up makes plans before it has loaded the kernels that its cache has
    monkeypatch.setattr(DecodePlan, "_writer", lambda self: lambda *tensors: pytest.fail("a kernel was launched"))
    plan = make_plan()
    assert set(plan.at(2).slot_mapping.tolist()) == {-1}
