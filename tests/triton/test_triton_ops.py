"""The ops over this backend as citizens of PyTorch: opcheck, and one graph for all sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kernel_cases import SCALE, paged

from mla_ops.layer_ops import LAYER_SCHEMAS
from mla_ops.ops import SCHEMAS


def _calls(device: torch.device) -> dict[str, tuple[Any, ...]]:
    case = paged([20, 33], 2, 16, 64, 16, device)
    indptr = torch.tensor([0, 5, 8], dtype=torch.int32, device=device)
    q, lse = torch.randn(8, 2, 32, device=device), torch.randn(8, 2, device=device)
    latent = torch.randn(3, 80, device=device)
    weight, index = torch.randn(2, 48, 64, device=device), torch.tensor([1, 2, 3], device=device)
    frequencies = torch.rand(8, device=device)
    return {
        "mla_decode": (
            case.q, case.kv_cache, case.qo_indptr, case.kv_indptr, case.kv_indices, case.kv_last_page_lens, [], 1, 0,
            SCALE, None, None, "triton", 64,
        ),
        "mla_prefill": (q, q, q, indptr, indptr, 5, 5, SCALE, True, "triton"),
        "write_latent_cache": (
            latent[:, :64], latent[:, 64:], case.kv_cache, torch.tensor([1, 2, 3], device=device), None, "triton",
        ),
        "gather_latent_cache": (
            case.kv_cache, case.kv_indptr, case.kv_indices, case.kv_last_page_lens,
            torch.tensor([0, 20, 53], dtype=torch.int32, device=device), 53, None, None, None, "triton",
        ),
        "merge_attn_states": (q, lse, q, lse, "triton"),
        "rms_norm": (latent, latent[0], 1e-6, "triton"),
        "linear": (latent, weight.view(-1, 64)[:40, :64].repeat(1, 2)[:, :80].contiguous(), latent, None, "triton"),
        "norm_rope_write": (
            latent, latent, latent[0], weight[0, 0], index, frequencies, case.kv_cache.clone(), index, 1e-6, 1.0, True,
            None, "triton",
        ),
        "absorb_query": (
            torch.randn(3, 2, 48, device=device), weight[:, :32], index, frequencies, 1.0, True, 0.0, 1, "triton",
        ),
        "expand_values": (torch.randn(3, 2, 64, device=device), weight[:, 32:], "triton"),
    }  # fmt: skip


@pytest.mark.parametrize("op", [name for name in (*SCHEMAS, *LAYER_SCHEMAS) if "." not in name])
def test_opcheck(op: str, device: torch.device) -> None:
    torch.library.opcheck(getattr(torch.ops.mla_ops, op).default, _calls(device)[op])


def test_one_graph_for_all_batch_sizes(device: torch.device) -> None:
    def step(*args: Any) -> torch.Tensor:
        out, lse = torch.ops.mla_ops.mla_decode(*args, [], 1, 0, SCALE, None, None, "triton", 64)
        return out * lse.exp()[..., None]

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
    for requests in (3, 4, 5):
        case = paged([20, 33, 7, 1, 16][:requests], 2, 16, 64, 16, device, stray_rows=0)
        args = (case.q, case.kv_cache, case.qo_indptr, case.kv_indptr, case.kv_indices, case.kv_last_page_lens)
        with torch._dynamo.config.patch(error_on_recompile=requests > 3):
            torch.testing.assert_close(compiled(*args), step(*args))
