"""The decode kernels against the reference, on hostile inputs."""

from __future__ import annotations

import pytest
import torch
from kernel_cases import Paged, check_decode, paged

from mla_ops import BackendUnavailableError
from mla_ops.backends.triton import mla_decode


@pytest.mark.parametrize(
    ("heads", "page_size", "rank", "rope"),
    [(16, 64, 512, 64), (20, 16, 256, 64), (40, 1, 256, 32), (128, 20, 512, 0)],
    ids=["512|64-H16-page64", "256|64-H20-page16", "256|32-H40-page1", "512|0-H128-page20"],
)
def test_lengths_around_page_edges(heads: int, page_size: int, rank: int, rope: int, device: torch.device) -> None:
    edge = max(page_size, 16)
    check_decode(paged([0, 1, edge - 1, edge, edge + 1, 130], heads, page_size, rank, rope, device))


@pytest.mark.parametrize("query_lens", [[2, 2, 2], [4, 4, 4], [1, 4, 2]], ids=["2", "4", "ragged"])
def test_the_last_query_sees_the_last_key(query_lens: list[int], device: torch.device) -> None:
    check_decode(paged([33, 2, 70], 16, 16, 256, 64, device, query_lens=query_lens))


def test_half_precision(device: torch.device) -> None:
    check_decode(paged([5, 100], 16, 16, 256, 64, device, torch.float16))


def test_fp8_cache(device: torch.device) -> None:
    check_decode(paged([5, 100], 16, 16, 256, 64, device, torch.float16, fp8=True))


def test_heads_further_apart_than_32_bits_count_are_refused(device: torch.device) -> None:
    case = paged([5], 3, 16, 256, 64, device, torch.float16, stray_rows=0)
    apart = 2**30 + 16
    far = torch.empty(2 * apart + case.q.numel(), dtype=torch.float16, device=device)
    case.q = far.as_strided(case.q.shape, (320, apart, 1)).copy_(case.q)
    with pytest.raises(BackendUnavailableError, match="make q contiguous"):
        case.decode("triton")


@pytest.mark.parametrize("num_kv_splits", [1, 2, 7])
def test_any_number_of_splits(num_kv_splits: int, device: torch.device) -> None:
    check_decode(paged([300, 0, 17], 16, 16, 256, 32, device), num_kv_splits)


def test_requests_share_pages(device: torch.device) -> None:
    case = paged([48, 64], 16, 16, 256, 32, device)
    case.kv_indices[3:5] = case.kv_indices[:2]
    check_decode(case)


def test_rows_of_the_cache_apart_from_each_other(device: torch.device) -> None:
    case = paged([5, 100], 16, 16, 256, 64, device, torch.float16)
    wide = torch.full((*case.kv_cache.shape[:2], 331), torch.nan, device=device, dtype=torch.float16)
    wide[..., 3:323] = case.kv_cache
    case.kv_cache = wide[..., 3:323]
    check_decode(case)


def test_no_request_has_keys(device: torch.device) -> None:
    out, lse = paged([0, 40], 16, 16, 256, 32, device).decode("triton")
    assert not out[0].any()
    assert lse[0].isneginf().all()
    assert out[1].any()
    case = paged([40], 16, 16, 256, 32, device)
    case.kv_indptr.zero_()
    out, lse = case.decode("triton")
    assert not out.any()
    assert lse.isneginf().all()


def test_many_empty_requests_between_two(device: torch.device) -> None:
    check_decode(paged([70, *[0] * 40, 70], 16, 16, 256, 32, device))


def test_more_requests_than_a_program_reads_at_once(device: torch.device) -> None:
    lens = [0] * 300
    lens[3], lens[255], lens[256], lens[299] = 20, 40, 17, 33
    check_decode(paged(lens, 16, 16, 256, 32, device))


def _call(case: Paged, softmax_scale: float = 0.1) -> None:
    mla_decode(
        case.q, case.kv_cache, case.qo_indptr, case.kv_indptr, case.kv_indices, case.kv_last_page_lens, [],
        case.max_seqlen_q, 0, softmax_scale, None, None, case.rank,
    )  # fmt: skip


def test_what_the_kernels_are_not_made_for_is_refused(device: torch.device) -> None:
    case = paged([20], 16, 16, 256, 32, device)
    with pytest.raises(BackendUnavailableError, match="softmax_scale"):
        _call(case, -1.0)
    case.rank = 192
    with pytest.raises(BackendUnavailableError, match="powers of two"):
        _call(case)
    with pytest.raises(BackendUnavailableError, match="float64"):
        _call(paged([20], 16, 16, 256, 32, device, torch.float64))
