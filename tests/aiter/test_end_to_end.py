"""Proof c: our public ops run AITER's real Python and its gfx942 machine code, and agree with the reference."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import mla_ops
from mla_ops import DecodePlan, MLAConfig, PagedLatentCache
from mla_ops.testing import DecodeInputs, assert_matches, make_decode_inputs

from .fake_rocm import Launch

CASES = [(16, 1), (16, 2), (16, 4), (128, 1), (128, 2)]
IDS = [f"{heads}-heads-q{query_len}" for heads, query_len in CASES]
# One token, block edges of 16 and 64 keys, several pages, and a request without keys.
LENGTHS = [1, 16, 64, 65, 0, 130]


def decode_inputs(lengths: list[int], heads: int, query_len: int, page_size: int = 16) -> DecodeInputs:
    """Poisoned inputs for AITER: as many query rows as the kernels step over, and a page 0 that is finite.

    Past the end of a request the kernels give slot 0 the weight 0, and 0 * NaN is NaN.
    """
    inputs = make_decode_inputs(
        lengths,
        num_heads=heads,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        query_lens=query_len,
        page_size=page_size,
        dtype=torch.bfloat16,
        softmax_scale=192**-0.5,
    )
    inputs.kv_cache[0].nan_to_num_()
    return inputs._replace(q=inputs.q[: len(lengths) * query_len].contiguous())


def exact(inputs: DecodeInputs) -> tuple[Tensor, Tensor]:
    arguments = inputs.arguments() | {"q": inputs.q.double(), "kv_cache": inputs.kv_cache.double()}
    return mla_ops.mla_decode(**arguments, backend="reference")


def low_precision(inputs: DecodeInputs) -> Tensor:
    """What bf16 weights and a bf16 result cost, in plain PyTorch."""
    out, _ = mla_ops.mla_decode(**inputs.arguments(), backend="reference")
    return out


@pytest.mark.parametrize("splits", [1, 2, 3, 4])
@pytest.mark.parametrize(("heads", "query_len"), CASES, ids=IDS)
def test_decode_agrees_with_the_reference(
    heads: int, query_len: int, splits: int, machine: list[Launch]
) -> None:
    inputs = decode_inputs(LENGTHS, heads, query_len)
    out, lse = mla_ops.mla_decode(**inputs.arguments(), num_kv_splits=splits, backend="aiter")
    expected, expected_lse = exact(inputs)
    assert [launch.function for launch in machine] == ["mla_decode_stage1_asm_fwd"]
    assert_matches(out, expected, low_precision=low_precision(inputs))
    assert_matches(lse, expected_lse)
