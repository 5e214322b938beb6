"""Proof c: our public ops run AITER's real Python and its gfx942 machine code, and agree with the reference."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import mla_ops
from mla_ops import DecodePlan, MLAConfig, PagedLatentCache
from mla_ops.backends.aiter import runtime
from mla_ops.backends.aiter.state import expand_pages
from mla_ops.testing import DecodeInputs, assert_matches, make_decode_inputs

from .fake_rocm import Launch, Launches

# One token, block edges of 16 and 64 keys, several pages, and a request without keys.
LENGTHS = {(16, 1): [1, 16, 64, 65, 0, 130], (16, 2): [1, 16, 65, 0], (16, 4): [2, 16, 65, 0], (128, 1): [33, 0, 16]}
# One split has no LSE but in the first kernel; the others get two.
CASES = [
    *((16, 1, splits) for splits in (1, 2, 3, 4)),
    *((16, query_len, splits) for query_len in (2, 4) for splits in (1, 3, 4)),
    *((128, 1, splits) for splits in (1, 3, 4)),
]
# A sum of split LSEs in float32, each rounded by the kernel's own exp and log.
LSE_FACTOR = 16.0


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


@pytest.mark.parametrize(
    ("heads", "query_len", "splits"), CASES, ids=[f"{h}-heads-q{q}-{s}-splits" for h, q, s in CASES]
)
def test_decode_agrees_with_the_reference(heads: int, query_len: int, splits: int, machine: list[Launch]) -> None:
    inputs = decode_inputs(LENGTHS[heads, query_len], heads, query_len)
    out, lse = mla_ops.mla_decode(**inputs.arguments(), num_kv_splits=splits, backend="aiter")
    expected, expected_lse = exact(inputs)
    assert [launch.function for launch in machine] == ["mla_decode_stage1_asm_fwd"]
    assert machine[0].arguments["splitData"].shape[1] == max(splits, 1 if (heads, query_len) == (16, 1) else 2)
    assert_matches(out, expected, low_precision=low_precision(inputs))
    assert_matches(lse, expected_lse, factor=LSE_FACTOR)


def test_head_counts_that_aiter_lacks_are_padded_and_agree(machine: list[Launch]) -> None:
    inputs = decode_inputs([40, 0, 17], 5, 1)
    out, lse = mla_ops.mla_decode(**inputs.arguments(), num_kv_splits=2, backend="aiter")
    expected, expected_lse = exact(inputs)
    assert machine[0].arguments["Q"].shape[1] == 16
    assert out.is_contiguous()
    assert_matches(out, expected, low_precision=low_precision(inputs))
    assert_matches(lse, expected_lse, factor=LSE_FACTOR)


@pytest.mark.parametrize("page_size", [1, 64])
def test_a_plan_over_shuffled_pages_decodes_as_the_reference_does(page_size: int, machine: list[Launch]) -> None:
    """Two steps of one plan: what the first left behind must not show in the second."""
    config = MLAConfig(
        hidden_size=64, num_heads=16, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128
    )
    cache = PagedLatentCache(config, num_layers=1, num_pages=400, page_size=page_size, dtype=torch.bfloat16)
    pool = cache.layers[0]
    pool.copy_(torch.randn(pool.shape))
    make = {"max_batch_size": 3, "max_seq_len": 192, "page_size": page_size, "device": "cpu", "dtype": torch.bfloat16}
    ours, theirs = (DecodePlan(config, **make, backend=backend) for backend in ("aiter", "reference"))
    for lengths in ([130, 1], [64, 0, 17]):
        pages = torch.randperm(pool.shape[0] - 1)[: 3 * ours.max_pages] + 1
        table = pages.view(3, -1)[: len(lengths)].int()
        q = torch.randn(3, 16, 576).bfloat16()
        results = []
        for plan, dtype in ((ours, torch.bfloat16), (theirs, torch.float64), (theirs, torch.bfloat16)):
            plan.update(table, torch.tensor(lengths, dtype=torch.int32))
            m = plan.at(3)
            lists = (m.qo_indptr, m.kv_indptr, m.kv_indices, m.kv_last_page_lens)
            results.append(
                mla_ops.mla_decode(
                    *(q.to(dtype), pool.to(dtype), *lists),
                    softmax_scale=config.softmax_scale,
                    backend_state=m.backend_state,
                    num_kv_splits=m.num_kv_splits,
                    backend=m.backend,
                )
            )
        (out, lse), (expected, expected_lse), (low, _) = results
        assert_matches(out, expected, low_precision=low)
        assert_matches(lse, expected_lse, factor=LSE_FACTOR)


def test_the_kernel_of_128_heads_masks_nothing_which_is_why_several_query_tokens_are_refused(
    fake_gpu: Launches, machine: list[Launch]
) -> None:
    """Its first query token sees the last key too. Should this fail, the refusal can go."""
    inputs = decode_inputs([20], 128, 2)
    with pytest.raises(mla_ops.BackendUnavailableError, match="masks nothing"):
        mla_ops.mla_decode(**inputs.arguments(), backend="aiter")
    lists = expand_pages(
        *(inputs.qo_indptr, inputs.kv_indptr, inputs.kv_indices, inputs.kv_last_page_lens),
        *(inputs.kv_cache.shape[1], 2, torch.arange(64, dtype=torch.int32)),
    )
    out = torch.full((2, 128, 512), torch.nan, dtype=torch.bfloat16)
    runtime.installed_runtime().decode(
        (inputs.q, inputs.kv_cache.view(-1, 1, 1, 576), out, inputs.qo_indptr, *lists[:3], 2),
        sm_scale=inputs.softmax_scale,
        num_kv_splits=2,
        splits_indptr=torch.tensor([0, 2], dtype=torch.int32),
        q_scale=None,
        kv_scale=None,
    )
    rows = inputs.latent_rows(0)
    scores = inputs.q.double() @ rows.T * inputs.softmax_scale
    assert_matches(out, scores.softmax(-1) @ rows[:, :512], factor=8.0)
