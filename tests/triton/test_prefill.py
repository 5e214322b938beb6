"""The prefill kernel against the reference."""

from __future__ import annotations

import pytest
import torch
from kernel_cases import SCALE, assert_close_to_reference
from torch import Tensor

from mla_ops import BackendUnavailableError


def _indptr(lens: list[int], device: torch.device) -> Tensor:
    return torch.tensor([0, *lens]).cumsum(0).to(device, torch.int32)


def _check(
    q_lens: list[int], k_lens: list[int], width: int, v_width: int, causal: bool, device: torch.device,
    dtype: torch.dtype = torch.float32, heads: int = 2,
) -> None:  # fmt: skip
    q = torch.randn(sum(q_lens) + 3, heads, width).to(device, dtype)
    k = torch.randn(sum(k_lens) + 2, heads, width).to(device, dtype)
    kv = torch.randn(sum(k_lens) + 2, heads, 2 * v_width).to(device, dtype)
    v = kv[..., v_width:]  # as kv_b_proj gives it
    k[sum(k_lens) :] = torch.nan
    v[sum(k_lens) :] = torch.nan
    rest = (_indptr(q_lens, device), _indptr(k_lens, device), max(q_lens), max(k_lens), SCALE, causal)
    out, lse = torch.ops.mla_ops.mla_prefill(q, k, v, *rest, "triton")
    exact = torch.ops.mla_ops.mla_prefill(q.double(), k.double(), v.double(), *rest, "reference")
    low = torch.ops.mla_ops.mla_prefill(q, k, v, *rest, "reference")
    assert_close_to_reference(out, exact[0], low[0])
    assert_close_to_reference(lse, exact[1].double(), low[1])


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize(("width", "v_width"), [(192, 128), (96, 64), (128, 128)])
def test_ragged(causal: bool, width: int, v_width: int, device: torch.device) -> None:
    _check([5, 0, 70, 3, 1], [5, 4, 100, 1, 0], width, v_width, causal, device)


def test_half_precision(device: torch.device) -> None:
    _check([40, 17], [40, 33], 192, 128, True, device, torch.float16)


def test_nan_of_the_next_request_stays_there(device: torch.device) -> None:
    q, k = (torch.randn(37, 1, 64, device=device) for _ in range(2))
    v = torch.randn(37, 1, 64, device=device)
    v[20:] = torch.nan
    indptr = _indptr([20, 17], device)
    out, _ = torch.ops.mla_ops.mla_prefill(q, k, v, indptr, indptr, 20, 20, SCALE, False, "triton")
    assert out[:20].isfinite().all()


def test_what_the_kernel_is_not_made_for_is_refused(device: torch.device) -> None:
    indptr = _indptr([4], device)
    for width, scale, message in ((224, 0.1, "sum of two"), (64, 0.0, "softmax_scale")):
        q = torch.randn(4, 1, width, device=device)
        with pytest.raises(BackendUnavailableError, match=message):
            torch.ops.mla_ops.mla_prefill(q, q, q[..., :64], indptr, indptr, 4, 4, scale, True, "triton")
