"""Ragged queries and page lists to padded ones and back, by kernels, as by torch operations."""

from __future__ import annotations

import pytest
import torch
from kernel_cases import paged
from torch import Tensor

from mla_ops.backends import flash_mla
from mla_ops.backends.triton.ragged import Ragged, pad_launch, unpad_launch


@pytest.mark.parametrize(
    ("query_lens", "heads"), [([1, 1, 1, 1], 20), ([2, 0, 3, 1], 4), ([3, 3, 3, 3], 17)], ids=["one", "ragged", "three"]
)
def test_pad_equals_the_torch_operations(query_lens: list[int], heads: int, device: torch.device) -> None:
    case = paged([0, 1, 64, 700], heads, 64, 32, 16, device, query_lens=query_lens)
    lists = (case.qo_indptr, case.kv_indptr, case.kv_indices, case.kv_last_page_lens)
    most = max(query_lens)
    expected = flash_mla._pad(case.q.cpu(), *(x.cpu() for x in lists), most)
    padded, table, lens = (torch.full_like(x, -7, device=device) for x in expected)
    pad_launch(case.q, *lists, padded, table, lens, page_size=64).run()
    assert torch.equal(padded.cpu(), expected[0])
    assert torch.equal(table.cpu(), expected[1])
    assert torch.equal(lens.cpu(), expected[2])


def test_pad_reads_queries_apart_from_each_other(device: torch.device) -> None:
    case = paged([5, 70], 3, 64, 32, 16, device)
    lists = (case.qo_indptr, case.kv_indptr, case.kv_indices, case.kv_last_page_lens)
    wide = torch.full((len(case.q), 3, 50), torch.nan, device=device)[..., :48].copy_(case.q)
    padded = torch.empty(2, 1, 3, 48, device=device)
    table, lens = (torch.empty(shape, dtype=torch.int32, device=device) for shape in ((2, 8), (2,)))
    pad_launch(wide, *lists, padded, table, lens, page_size=64).run()
    assert torch.equal(padded[:, 0], case.q[:2])


@pytest.mark.parametrize(
    "indptr", [[0, 2, 2, 5, 6], [1, 3, 4, 5, 8], [0, 5, 6, 7, 7]], ids=["ragged", "strays", "long"]
)
@pytest.mark.parametrize("transposed", [False, True], ids=["dense lse", "transposed lse"])
def test_unpad_equals_the_torch_operations(indptr: list[int], transposed: bool, device: torch.device) -> None:
    parts, part_lse = torch.randn(4, 3, 17, 32), torch.randn(4, 17, 3)
    part_lse = part_lse.mT.contiguous().mT if transposed else part_lse
    part_lse[1] = torch.inf
    part_lse[2, 3, 2] = torch.nan
    qo_indptr = torch.tensor(indptr, dtype=torch.int32)
    out, lse = torch.full((9, 17, 32), torch.nan, device=device), torch.full((9, 17), torch.nan, device=device)
    unpad_launch(parts.to(device), part_lse.to(device), qo_indptr.to(device), out, lse).run()
    expected: tuple[Tensor, Tensor] = flash_mla._unpad(parts, part_lse, qo_indptr, 9)
    assert torch.equal(out.cpu(), expected[0])
    assert torch.equal(lse.cpu().nan_to_num(5.0), expected[1].nan_to_num(5.0))


def test_both_ways_again_over_more_index_entries(device: torch.device) -> None:
    """The number of entries is not in a call's signature, and the table is as wide."""
    ragged = Ragged()
    for length in (700, 700, 100, 2000, 700):
        case = paged([length, 65], 5, 64, 32, 16, device)
        lists = (case.qo_indptr, case.kv_indptr, case.kv_indices, case.kv_last_page_lens)
        got = ragged.pad(case.q, lists, 1, 64)
        expected = flash_mla._pad(case.q.cpu(), *(x.cpu() for x in lists), 1)
        assert all(torch.equal(a.cpu(), b) for a, b in zip(got, expected, strict=True))
