"""Cache write, gather and merge of the kernels against the reference."""

from __future__ import annotations

import pytest
import torch
from kernel_cases import assert_close_to_reference, paged


# The interpreter rounds to fp8 in a way of its own.
@pytest.mark.parametrize("fp8", [False, pytest.param(True, marks=pytest.mark.gpu)], ids=["same-dtype", "fp8"])
@pytest.mark.parametrize(("rank", "rope"), [(512, 64), (256, 32), (512, 0)])
def test_write_stores_what_the_reference_stores(rank: int, rope: int, fp8: bool, device: torch.device) -> None:
    latent = torch.randn(6, rank + rope, device=device).half()
    slots = torch.tensor([3, -1, 17, 0, 79, 80], device=device)  # 80 is behind the last
    dtype = torch.float8_e4m3fn if fp8 else torch.float16
    expected = torch.randn(5, 16, rank + rope, device=device).to(dtype)
    actual = expected.clone()
    scale = torch.full((1,), 0.005, device=device) if fp8 else None  # some values saturate
    for cache, backend in ((actual, "triton"), (expected, "reference")):
        torch.ops.mla_ops.write_latent_cache(latent[:, :rank], latent[:, rank:], cache, slots, scale, backend)
    assert torch.equal(actual.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.gpu  # the interpreter has no NaN in fp8; tests/cdna3 runs this as code
def test_nan_is_stored_as_nan_in_fp8(device: torch.device) -> None:
    latent = torch.randn(2, 288, device=device).half()
    latent[0, 7], latent[1, 280] = torch.nan, torch.nan
    cache = torch.zeros(1, 2, 288, device=device).to(torch.float8_e4m3fn)
    slots, scale = torch.arange(2, device=device), torch.full((1,), 0.5, device=device)
    torch.ops.mla_ops.write_latent_cache(latent[:, :256], latent[:, 256:], cache, slots, scale, "triton")
    assert torch.equal(cache[0].float().isnan(), latent.isnan())


@pytest.mark.parametrize("first", [0, 2], ids=["from-row-0", "from-row-2"])
@pytest.mark.parametrize("starts", [None, [1, 0, 5]], ids=["whole", "from-starts"])
@pytest.mark.parametrize("fp8", [False, True], ids=["same-dtype", "fp8"])
def test_gather_reads_what_the_reference_reads(
    starts: list[int] | None, fp8: bool, first: int, device: torch.device
) -> None:
    case = paged([20, 0, 33], 1, 16, 256, 32, device, torch.float16, fp8=fp8)
    cu_seqlens = torch.tensor([first, 19, 19, 47], dtype=torch.int32, device=device)
    seq_starts = None if starts is None else torch.tensor(starts, dtype=torch.int32, device=device)
    results = [
        torch.ops.mla_ops.gather_latent_cache(
            case.kv_cache, case.kv_indptr, indices, case.kv_last_page_lens, cu_seqlens, 50, seq_starts, case.kv_scale,
            torch.float16, backend,
        )
        for backend, indices in (("triton", case.kv_indices), ("reference", case.lower().kv_indices))
    ]  # fmt: skip
    assert torch.equal(*results)


def test_merge_is_exact_and_an_empty_side_is_the_identity(device: torch.device) -> None:
    out_a, out_b = (torch.randn(5, 3, 96, device=device) for _ in range(2))
    lse_a, lse_b = (torch.randn(5, 3, device=device) for _ in range(2))
    lse_a[0], out_a[0] = -torch.inf, torch.nan
    lse_b[1], out_b[1] = -torch.inf, torch.nan
    lse_a[2], lse_b[2] = -torch.inf, -torch.inf
    out, lse = torch.ops.mla_ops.merge_attn_states(out_a, lse_a, out_b, lse_b, "triton")
    assert torch.equal(out[0], out_b[0])
    assert torch.equal(out[1], out_a[1])
    assert not out[2].any()
    exact = torch.ops.mla_ops.merge_attn_states(out_a, lse_a, out_b, lse_b, "reference")
    assert_close_to_reference(out, exact[0].double(), exact[0])
    assert_close_to_reference(lse, exact[1].double(), exact[1])
