"""AITER's decode, its own gfx942 machine code and its Triton merge, against attention in float64.

Cases are (heads, query_len), by which AITER's dispatcher picks the kernel: subQ16, m16x4 for more queries, subQ128.
"""

from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import pytest
import torch

from ..cdna3.errors import MemoryFault
from ..cdna3.launch import WAVE_ORDERS
from ..cdna3.program import Program
from ..cdna3.triton_launch import launch_triton
from . import stage1
from .stage1 import KERNARG_SLOTS, pack_kernarg, run_stage1, select_kernel

LATENT, ROPE = 512, 64
SCALE = 192**-0.5
CASES = [(16, 1), (16, 2), (16, 4), (128, 1)]
IDS = ["subQ16", "m16x4-q2", "m16x4-q4", "subQ128"]
SPARE_PAGES = 40


@dataclass
class Step:
    """One decode step and the buffers that stage 1 fills; every element that it must write starts as NaN."""

    lengths: list[int]
    heads: int
    query_len: int
    splits: int
    q: torch.Tensor
    kv: torch.Tensor
    kv_indptr: torch.Tensor
    kv_indices: torch.Tensor
    split_data: torch.Tensor
    split_lse: torch.Tensor

    @staticmethod
    def random(lengths: list[int], heads: int, query_len: int, splits: int) -> "Step":
        """Pages of one token, shuffled, with no index to spare; pages that nobody owns hold NaN, except page 0."""
        tokens, queries = sum(lengths), len(lengths) * query_len
        pages = torch.randperm(tokens + SPARE_PAGES)
        kv = torch.randn(len(pages), 1, 1, LATENT + ROPE).bfloat16()
        spare = pages[tokens:]
        kv[spare[spare != 0]] = torch.nan
        return Step(
            lengths,
            heads,
            query_len,
            splits,
            q=torch.randn(queries, heads, LATENT + ROPE).bfloat16(),
            kv=kv,
            kv_indptr=torch.tensor([0, *accumulate(lengths)], dtype=torch.int32),
            kv_indices=pages[:tokens].int(),
            split_data=torch.full((queries, splits, heads, LATENT), torch.nan),
            split_lse=torch.full((queries, splits, heads, 1), torch.nan),
        )

    @property
    def requests(self) -> torch.Tensor:
        """int32 [B + 1]: 0, 1, 2, ..."""
        return torch.arange(len(self.lengths) + 1, dtype=torch.int32)

    def run(self, load_program, **how) -> None:
        run_stage1(
            load_program,
            self.q,
            self.kv,
            qo_indptr=self.requests * self.query_len,
            kv_indptr=self.kv_indptr,
            kv_indices=self.kv_indices,
            kv_last_page_lens=torch.ones(len(self.lengths), dtype=torch.int32),
            num_kv_splits_indptr=self.requests * self.splits,
            max_seqlen_q=self.query_len,
            softmax_scale=SCALE,
            split_data=self.split_data,
            split_lse=self.split_lse,
            output=torch.full((len(self.q), self.heads, LATENT), torch.nan, dtype=torch.bfloat16),
            **how,
        )

    def merge_by(self, stage2_kernel) -> torch.Tensor:
        """AITER's own merge, launched as its `mla_decode_fwd` does: bf16 [queries, H, 512]."""
        out = torch.full((len(self.q), self.heads, LATENT), torch.nan, dtype=torch.bfloat16)
        kernel = select_kernel(self.heads, self.query_len)
        launch_triton(
            stage2_kernel,
            (len(self.lengths), self.heads),
            self.split_data,
            self.split_lse,
            out,
            self.requests * self.query_len,
            self.kv_indptr,
            self.requests * self.splits,
            *(self.split_lse.stride(axis) for axis in (0, 2, 1)),
            *out.stride()[:2],
            MAYBE_FINAL_OUT=kernel.bf16_when_unsplit,
            BATCH_NUM=len(self.lengths),
            BLOCK_DV=LATENT,
            Lv=LATENT,
            mgc=kernel.kv_block,
            num_warps=4,
            num_stages=2,
            waves_per_eu=4,
        )
        return out

    def attention(self, request: int, query: int, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Attention of one query token over `tokens` of its request in fp64: out [H, 512], LSE [H], and size [H, 512].

        Size is attention over the magnitudes of the values. Rounding the weights to bf16, and then the result, moves
        the result by at most `2**-8` of it each.
        """
        pages = self.kv_indices[self.kv_indptr[request] :].numpy()[tokens]
        keys = self.kv[torch.from_numpy(pages).long(), 0, 0].double().numpy()
        scores = self.q[request * self.query_len + query].double().numpy() @ keys.T * SCALE
        top = scores.max(1, keepdims=True)
        weights = np.exp(scores - top)
        total = weights.sum(1, keepdims=True)
        weights, values = weights / total, keys[:, :LATENT]
        return weights @ values, (top + np.log(total))[:, 0], weights @ np.abs(values)

    def partials(self) -> tuple[np.ndarray, np.ndarray]:
        """What stage 1 left: out fp64 [queries, splits, H, 512], LSE fp64 [queries, splits, H]."""
        out = self.split_data
        if self.splits == 1 and select_kernel(self.heads, self.query_len).bf16_when_unsplit:
            out = out.view(torch.bfloat16).flatten()[: out.numel()].view(out.shape)
        return out.double().numpy(), self.split_lse[..., 0].double().numpy()

    def check(self) -> None:
        """Every split against its own tokens, the merge against all of them, and that the rest was left alone."""
        kernel = select_kernel(self.heads, self.query_len)
        out, lse = self.partials()
        writes_lse = not (self.splits == 1 and kernel.bf16_when_unsplit)
        if not writes_lse:
            assert np.isnan(lse).all()
        for request, length in enumerate(self.lengths):
            blocks = np.arange(length) // kernel.kv_block
            for query in range(self.query_len):
                row = request * self.query_len + query
                visible = np.arange(length) < length - (self.query_len - 1 - query)
                for split in range(self.splits):
                    mine = blocks % self.splits == split
                    if not mine.any():
                        assert np.isnan(out[row, split]).all()
                    elif not (mine & visible).any():
                        assert not out[row, split].any()
                        assert np.isneginf(lse[row, split]).all()
                    else:
                        expected = self.attention(request, query, np.flatnonzero(mine & visible))
                        assert_close(out[row, split], expected[0], 2**-7 * expected[2])
                        if writes_lse:
                            assert_close(lse[row, split], expected[1], 2e-6 * np.maximum(1.0, np.abs(expected[1])))
                if writes_lse:
                    # AITER's stage 2 takes as many splits as there are blocks, and so does not see what was left alone.
                    used = min(self.splits, -(-length // kernel.kv_block))
                    merged = merge(out[row, :used], lse[row, :used])
                    expected = self.attention(request, query, np.flatnonzero(visible))
                    assert_close(merged[0], expected[0], 2**-7 * expected[2])
                    assert_close(merged[1], expected[1], 2e-6 * np.maximum(1.0, np.abs(expected[1])))


def merge(out: np.ndarray, lse: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Splits [S, H, 512] and [S, H] to one by their log-sum-exp."""
    total = np.logaddexp.reduce(lse, 0)
    return (out * np.exp(lse - total)[..., None]).sum(0), total


def assert_close(actual: np.ndarray, expected: np.ndarray, bound: np.ndarray) -> None:
    """Every element within its bound; a NaN fails."""
    over = np.abs(actual - expected) / bound
    assert over.max() <= 1, f"{over.max():.2f} times the bound"


def ragged(heads: int, query_len: int) -> list[int]:
    """The shortest request, one full KV block of the kernel, and one token past two blocks."""
    block = select_kernel(heads, query_len).kv_block
    return [query_len, block, 2 * block + 1]


def run_and_check(step: Step, load_program, **how) -> None:
    step.run(load_program, **how)
    step.check()


@pytest.mark.parametrize("splits", [1, 2, 3, 4])
@pytest.mark.parametrize(("heads", "query_len"), CASES, ids=IDS)
def test_splits_and_their_merge_match_attention(heads, query_len, splits, load_program):
    run_and_check(Step.random(ragged(heads, query_len), heads, query_len, splits), load_program)


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize(("heads", "query_len"), CASES, ids=IDS)
def test_both_stages_of_aiter_make_attention(heads, query_len, splits, load_program, stage2_kernel):
    step = Step.random([70, query_len] if heads == 16 else [39], heads, query_len, splits)
    step.run(load_program)
    out = step.merge_by(stage2_kernel).double().numpy()
    for request, length in enumerate(step.lengths):
        for query in range(query_len):
            visible = np.arange(length - (query_len - 1 - query))
            expected, _, size = step.attention(request, query, visible)
            assert_close(out[request * query_len + query], expected, 2**-7 * size)


@pytest.mark.parametrize("order", WAVE_ORDERS[1:])
@pytest.mark.parametrize(("heads", "query_len"), CASES, ids=IDS)
def test_the_order_of_waves_does_not_matter(heads, query_len, order, load_program):
    step = Step.random(ragged(heads, query_len)[1:], heads, query_len, 2)
    again = Step(**{**vars(step), "split_data": step.split_data.clone(), "split_lse": step.split_lse.clone()})
    step.run(load_program)
    again.run(load_program, order=order)
    again.check()
    assert torch.equal(again.split_data.view(torch.int32), step.split_data.view(torch.int32))
    assert torch.equal(again.split_lse.view(torch.int32), step.split_lse.view(torch.int32))


def test_a_long_request_beside_a_short_one(load_program):
    run_and_check(Step.random([700, 3], 16, 1, 4), load_program)


@pytest.mark.parametrize("order", WAVE_ORDERS)
def test_subq16_waits_for_every_load(order, load_program):
    run_and_check(Step.random([330, 64], 16, 1, 1), load_program, order=order, late=True)


@pytest.mark.parametrize(("heads", "query_len"), CASES[1:], ids=IDS[1:])
def test_up_to_three_blocks_a_split_wait_for_every_load(heads, query_len, load_program):
    run_and_check(Step.random([48], heads, query_len, 1), load_program, late=True)


# Before their main loop m16x4 and subQ128 wait with vmcnt(19) where it takes 18: the page indices of a split's fourth
# block are read before any wait guarantees that they arrived. On hardware the load is about one block's work old then.
SHORT_WAITS = {
    "mla_dec_stage1_bf16_a16w16_subQ128_mqa128.co": 0x2860,
    "mla_a16w16_qh16_m16x4_n16x1_coex0_mask1.co": 0x30DC,
}
VMCNT_19, VMCNT_18 = 0xBF8C4073, 0xBF8C4072


@pytest.mark.xfail(raises=AssertionError, reason="AITER reads page indices that it has not waited for")
@pytest.mark.parametrize(("heads", "query_len"), CASES[1:], ids=IDS[1:])
def test_a_fourth_block_waits_for_its_page_indices(heads, query_len, load_program):
    run_and_check(Step.random([64], heads, query_len, 1), load_program, late=True)


@pytest.mark.parametrize(("heads", "query_len"), CASES[1:], ids=IDS[1:])
def test_a_fourth_block_is_right_once_the_wait_is_mended(heads, query_len, load_program):
    def load_mended(name: str) -> Program:
        program = load_program.__wrapped__(name)
        waits = program.code.image[SHORT_WAITS[name] :][:4].view(np.uint32)
        assert waits[0] == VMCNT_19
        waits[0] = VMCNT_18
        return program

    run_and_check(Step.random([64, 130], heads, query_len, 1), load_mended, late=True)


@pytest.mark.parametrize(
    "swap",
    [
        ("R", "LSE"),
        ("Q", "KV"),
        ("LTP", "QTP"),
        ("LTD", "LTL"),
        ("s_MQA", "s_kv_split"),
        ("s_Q_Bs", "s_Bs"),
        ("scalar", "scalar"),
    ],
    ids="-".join,
)
def test_a_wrong_argument_is_noticed(swap, load_program, monkeypatch):
    def packed_wrongly(values: dict[str, int | float]) -> bytes:
        first, second = swap
        wrong = values | {first: values[second], second: values[first]}
        if first == second:
            wrong[first] = 1.05 * values[first]
        return pack_kernarg({name: wrong[name] for name in KERNARG_SLOTS})

    monkeypatch.setattr(stage1, "pack_kernarg", packed_wrongly)
    with pytest.raises((AssertionError, MemoryFault)):
        run_and_check(Step.random([70, 5], 16, 1, 2), load_program)


@pytest.mark.parametrize(("heads", "query_len"), CASES, ids=IDS)
def test_page_zero_must_be_finite(heads, query_len, load_program):
    # Past the end of a request the kernels read index 0 and give page 0 the weight zero: 0 * NaN.
    block = select_kernel(heads, query_len).kv_block
    for length, spoiled in ((2 * block, False), (2 * block - 1, True)):
        step = Step.random([length], heads, query_len, 1)
        step.kv_indices[step.kv_indices == 0] = spare = SPARE_PAGES + length - 1
        step.kv[spare] = torch.randn(LATENT + ROPE).bfloat16()
        step.kv[0] = torch.nan
        step.run(load_program)
        assert np.isnan(step.partials()[0]).any() == spoiled


def test_a_page_outside_the_cache_is_a_fault_that_names_the_cache(load_program):
    step = Step.random([70], 16, 1, 1)
    # The cache becomes the front of a larger allocation, so that what lies behind it is nobody's.
    step.kv = torch.cat([step.kv, step.kv])[: len(step.kv)]
    step.kv_indices[69] = len(step.kv) + 3
    with pytest.raises(MemoryFault, match=r"buffer_load_dword\w* .*at pc 0x[0-9a-f]+: .* nearest is 'KV' of"):
        step.run(load_program)
