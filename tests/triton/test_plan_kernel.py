"""The kernel of a plan's update writes what the torch operations write, element by element."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from mla_ops import DecodePlan, MLAConfig
from mla_ops.backends.triton import plan_kernels
from mla_ops.backends.triton.plan_kernels import plan_launch

CONFIG = MLAConfig.preset("deepseek-v2-lite")
POISON = -77


def plans_buffers(plan: DecodePlan) -> dict[str, Tensor]:
    """What an update writes, by the kernel's names."""
    named = ("kv_indptr", "kv_indices", "kv_last_page_lens", "slot_mapping", "positions")
    return {name: getattr(plan, f"_{name}") for name in named} | {"lens": plan._seq_lens}


def kernels_buffers(
    plan: DecodePlan, table: Tensor, lens: Tensor, device: torch.device, with_table: bool
) -> dict[str, Tensor | None]:
    """The same, poisoned and then written by the kernel; each buffer has 8 more elements behind it."""
    sizes = {name: (len(x), x.dtype) for name, x in plans_buffers(plan).items()}
    sizes["table"] = (plan.max_batch_size * plan.max_pages, torch.int32)
    whole = {name: torch.full((n + 8,), POISON, dtype=dtype, device=device) for name, (n, dtype) in sizes.items()}
    buffers: dict[str, Tensor | None] = {name: x[:-8] for name, x in whole.items()}
    if with_table:
        assert buffers["table"] is not None
        buffers["table"] = buffers["table"].view(plan.max_batch_size, plan.max_pages)
    else:
        buffers["table"] = None
    rule = plan.padding
    plan_launch(
        table.to(device), lens.to(device), buffers, page_size=plan.page_size, query_len=plan.query_len,
        padding=(rule.kv_len, rule.page, rule.slot),
    ).run()  # fmt: skip
    for name, x in whole.items():
        assert (x[-8:] == POISON).all(), f"{name} was written past its end"
    return buffers


def make_plan(batch: int, max_seq_len: int, page_size: int, query_len: int) -> DecodePlan:
    return DecodePlan(
        CONFIG, max_batch_size=batch, max_seq_len=max_seq_len, query_len=query_len, page_size=page_size, device="cpu",
        dtype=torch.float32,
    )  # fmt: skip


def check(plan: DecodePlan, table: Tensor, lens: Tensor, device: torch.device, with_table: bool = True) -> None:
    plan.update(table, lens)
    got = kernels_buffers(plan, table, lens, device, with_table)
    for name, expected in plans_buffers(plan).items():
        actual = got[name]
        assert actual is not None
        assert torch.equal(actual.cpu(), expected), name
    if with_table:
        assert got["table"] is not None
        pages = -(-plan._seq_lens // plan.page_size)
        width = min(table.shape[1], plan.max_pages)
        expected = torch.zeros(plan.max_batch_size, plan.max_pages, dtype=torch.int32)
        expected[: len(lens), :width] = table.where(torch.arange(width) < pages[: len(lens), None], 0)
        assert torch.equal(got["table"].cpu(), expected)


@pytest.mark.parametrize("query_len", [1, 3])
@pytest.mark.parametrize(("page_size", "max_seq_len"), [(1, 37), (4, 37), (64, 1000)])
def test_the_kernel_equals_the_torch_operations(
    page_size: int, max_seq_len: int, query_len: int, device: torch.device
) -> None:
    plan = make_plan(6, max_seq_len, page_size, query_len)
    for requests in (0, 1, 4, 6):
        width = random.randint(1, plan.max_pages)
        room = width * page_size
        edges = [0, 1, page_size - 1, page_size, page_size + 1, room, room + 9, -5, 2**31 - 1]
        lens = [random.choice([*edges, random.randint(0, room)]) for _ in range(requests)]
        table = torch.randint(0, 1000, (requests, width), dtype=torch.int32)
        check(plan, table, torch.tensor(lens, dtype=torch.int32), device, with_table=random.random() < 0.7)


def test_more_requests_and_pages_than_the_kernel_takes_at_a_time(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan_kernels, "_CHUNK", 16)
    plan = make_plan(40, 70, 2, 1)
    table = torch.randint(0, 9000, (37, 34), dtype=torch.int32)
    check(plan, table, torch.randint(0, 69, (37,), dtype=torch.int32), device)


@pytest.mark.parametrize("slow", ["columns of another table", "every other length", "transposed"])
def test_strided_inputs(slow: str, device: torch.device) -> None:
    plan = make_plan(4, 20, 4, 1)
    table, lens = torch.randint(0, 90, (4, 5), dtype=torch.int32), torch.tensor([20, 3, 0, 9], dtype=torch.int32)
    if slow == "columns of another table":
        table = torch.cat([table.new_full((4, 3), 7), table], 1)[:, 3:]
    elif slow == "every other length":
        lens = lens.repeat_interleave(2)[::2]
    else:
        table = table.T.contiguous().T
    check(plan, table, lens, device)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["triton", "flash_mla"])
def test_a_plan_on_a_gpu_says_what_one_on_a_cpu_says(backend: str) -> None:
    pytest.importorskip("flash_mla") if backend == "flash_mla" else None
    config = MLAConfig.preset("deepseek-v3")
    options: dict[str, Any] = {"max_batch_size": 130, "max_seq_len": 4000, "page_size": 64, "query_len": 2}
    there = DecodePlan(config, **options, device="cuda", dtype=torch.bfloat16, backend=backend, debug=True)
    here = DecodePlan(config, **options, device="cpu", dtype=torch.bfloat16)
    for requests in (130, 1, 64, 130, 0, 64):
        table = torch.randint(0, 9000, (requests, 63), dtype=torch.int32)
        lens = torch.randint(0, 4001, (requests,), dtype=torch.int32)
        here.update(table, lens)
        there.update(table.cuda(), lens.cuda())
        there.check_canaries()
        for name, expected in plans_buffers(here).items():
            assert torch.equal(plans_buffers(there)[name].cpu(), expected), name
        if backend == "flash_mla" and requests:
            shown, lengths = there.at(requests).backend_state[:2]
            assert torch.equal(lengths.cpu(), here._seq_lens[:requests])
            pages = -(-lens // 64)
            assert torch.equal(shown.cpu(), table.where(torch.arange(63) < pages[:, None], 0))
