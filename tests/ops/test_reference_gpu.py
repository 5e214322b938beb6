"""The reference backend on a device: the CPU's results, and a step that can be captured and replayed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import mla_ops
from capture import GraphRunner, verify
from mla_ops.testing import assert_matches, make_decode_inputs, make_prefill_inputs

pytestmark = pytest.mark.gpu
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def in_fp64(arguments: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value.double() if isinstance(value, Tensor) and value.is_floating_point() else value
        for name, value in arguments.items()
    }


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("query_len", [1, 3])
def test_decode_on_a_device_equals_the_cpu(dtype: torch.dtype, query_len: int) -> None:
    x = make_decode_inputs([0, 1, 63, 64, 65, 700], query_lens=query_len, page_size=64, num_heads=20, dtype=dtype)
    exact = mla_ops.mla_decode(**in_fp64(x.arguments()))
    low = mla_ops.mla_decode(**x.arguments())
    arguments = {name: v.cuda() if isinstance(v, Tensor) else v for name, v in x.arguments().items()}
    out = mla_ops.mla_decode(**arguments, backend="reference")
    assert_matches(out.out, exact.out, low_precision=low.out)
    assert_matches(out.lse, exact.lse, low_precision=low.lse)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_prefill_on_a_device_equals_the_cpu(dtype: torch.dtype, causal: bool) -> None:
    x = make_prefill_inputs([5, 0, 130, 1], [9, 4, 200, 0], dtype=dtype)._asdict()
    exact = mla_ops.mla_prefill(**in_fp64(x), causal=causal)
    low = mla_ops.mla_prefill(**x, causal=causal)
    arguments = {name: v.cuda() if isinstance(v, Tensor) else v for name, v in x.items()}
    out = mla_ops.mla_prefill(**arguments, causal=causal, backend="reference")
    assert_matches(out.out, exact.out, low_precision=low.out)
    assert_matches(out.lse, exact.lse, low_precision=low.lse)


@pytest.mark.parametrize("query_len", [1, 2])
@torch.no_grad()
def test_captured_module_equals_eager(query_len: int) -> None:
    """Cache write, plan update, decode and all: the whole step of two layers, at other lengths and pages."""
    from capture import BuildOptions
    from mla_ops.decode_step import DecodeStep

    config = mla_ops.MLAConfig(
        hidden_size=64, num_heads=4, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=16, v_head_dim=16
    )
    options = BuildOptions(
        batch_sizes=(1, 2, 5), query_len=query_len, page_size=16, device="cuda", max_seq_len=256, backend="reference"
    )
    runner: GraphRunner = DecodeStep(config, options, 2).runner()
    runner.capture(verify=False)
    report = verify(runner, trials=20)
    report.raise_if_failed()
    runner.close()


def test_more_than_2_to_the_31_elements_are_addressed_right() -> None:
    """The live page is behind 4 GiB and 2^31 elements of the pool."""
    pages, page_size, width = 58_500, 64, 576
    kv_cache = torch.zeros(pages, page_size, width, dtype=torch.bfloat16, device="cuda")
    assert kv_cache.numel() > 2**31
    rows = torch.randn(page_size, width, device="cuda", dtype=torch.bfloat16)
    slots = torch.arange((pages - 1) * page_size, pages * page_size, device="cuda")
    mla_ops.write_latent_cache(rows[:, :512], rows[:, 512:], kv_cache, slots, backend="reference")
    assert torch.equal(kv_cache[-1], rows)

    def lists(*values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device="cuda")

    q = torch.randn(1, 16, width, device="cuda", dtype=torch.bfloat16)
    out = mla_ops.mla_decode(
        q,
        kv_cache,
        lists(0, 1),
        lists(0, 1),
        lists(pages - 1),
        lists(page_size),
        softmax_scale=0.1,
        backend="reference",
    )
    exact = torch.softmax(q[0].double() @ rows.double().T * 0.1, -1) @ rows[:, :512].double()
    low = (torch.softmax(q[0].float() @ rows.float().T * 0.1, -1) @ rows[:, :512].float()).bfloat16()
    assert_matches(out.out[0], exact, low_precision=low)
