"""The prefill kernel against the reference."""

from __future__ import annotations

import pytest
import torch
from kernel_cases import SCALE, check_prefill, indptr_of

from mla_ops import BackendUnavailableError


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize(("width", "v_width"), [(192, 128), (96, 64), (128, 128)])
def test_ragged(causal: bool, width: int, v_width: int, device: torch.device) -> None:
    check_prefill([5, 0, 70, 3, 1], [5, 4, 100, 1, 0], width, v_width, causal, device)


def test_half_precision(device: torch.device) -> None:
    check_prefill([40, 17], [40, 33], 192, 128, True, device, torch.float16)


def test_nan_of_the_next_request_stays_there(device: torch.device) -> None:
    q, k = (torch.randn(37, 1, 64, device=device) for _ in range(2))
    v = torch.randn(37, 1, 64, device=device)
    v[20:] = torch.nan
    indptr = indptr_of([20, 17], device)
    out, _ = torch.ops.mla_ops.mla_prefill(q, k, v, indptr, indptr, 20, 20, SCALE, False, "triton")
    assert out[:20].isfinite().all()


def test_heads_further_apart_than_32_bits_count(device: torch.device) -> None:
    q, k = (torch.randn(9, 3, 32, dtype=torch.float16, device=device) for _ in range(2))
    apart = 2**30 + 16  # elements: two of them are past what 32 bits with a sign hold
    far = torch.empty(2 * apart + k.numel(), dtype=torch.float16, device=device).as_strided(k.shape, (32, apart, 1))
    far.copy_(k)
    indptr = indptr_of([9], device)
    near, found = (
        torch.ops.mla_ops.mla_prefill(q, x, k[..., :16], indptr, indptr, 9, 9, SCALE, True, "triton") for x in (k, far)
    )
    assert all(map(torch.equal, found, near))


def test_what_the_kernel_is_not_made_for_is_refused(device: torch.device) -> None:
    indptr = indptr_of([4], device)
    for width, scale, message in ((224, 0.1, "sum of two"), (64, 0.0, "softmax_scale")):
        q = torch.randn(4, 1, width, device=device)
        with pytest.raises(BackendUnavailableError, match=message):
            torch.ops.mla_ops.mla_prefill(q, q, q[..., :64], indptr, indptr, 4, 4, scale, True, "triton")
