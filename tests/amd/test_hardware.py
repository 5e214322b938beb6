"""AITER's kernels on the GPU that they are for: right, graph-safe, and how fast."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import mla_ops
from mla_ops import BackendUnavailableError, DecodePlan, MLAConfig
from mla_ops.backends.aiter.probe import ProbeShape, run_probe
from mla_ops.testing import assert_matches, make_prefill_inputs

pytestmark = pytest.mark.amd

HEADS = [8, 16, 32, 64, 128]


class Step:
    """A decode step over static buffers, with AITER and with the reference."""

    def __init__(self, heads: int, query_len: int, batch: int, longest: int) -> None:
        config = MLAConfig.preset("deepseek-v3").shard(128 // heads)
        self.make = {
            "max_batch_size": batch,
            "max_seq_len": longest,
            "query_len": query_len,
            "page_size": 64,
            "device": "cuda",
            "dtype": torch.bfloat16,
        }
        try:
            self.plan = DecodePlan(config, **self.make, backend="aiter")
        except BackendUnavailableError as error:
            pytest.skip(error.reason)
        self.reference = DecodePlan(config, **self.make, backend="reference")
        self.scale = config.softmax_scale
        pages = batch * self.plan.max_pages
        self.pool = torch.randn(pages + 1, 64, 576, device="cuda").bfloat16()
        self.table = (torch.randperm(pages, device="cuda") + 1).int().view(batch, -1)
        self.lens = torch.full((batch,), longest, dtype=torch.int32, device="cuda")
        self.q = torch.randn(batch * query_len, heads, 576, device="cuda").bfloat16()

    def run(self, plan: DecodePlan, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor]:
        plan.update(self.table, self.lens)
        m = plan.at(self.lens.shape[0])
        return mla_ops.mla_decode(
            *(self.q.to(dtype), self.pool.to(dtype), m.qo_indptr, m.kv_indptr, m.kv_indices, m.kv_last_page_lens),
            softmax_scale=self.scale,
            max_seqlen_q=m.max_seqlen_q,
            num_kv_splits=m.num_kv_splits,
            backend_state=m.backend_state,
            backend=m.backend,
        )

    def check(self, out: Tensor, lse: Tensor) -> None:
        expected, expected_lse = self.run(self.reference, torch.float64)
        low, _ = self.run(self.reference)
        assert_matches(out, expected, low_precision=low)
        assert_matches(lse, expected_lse, factor=16.0)

    def shuffle(self) -> None:
        """Other lengths, pages, queries and rows, in place."""
        self.lens.copy_(torch.randint(0, int(self.plan.max_seq_len) + 1, self.lens.shape, device="cuda"))
        self.table.copy_(self.table.flatten()[torch.randperm(self.table.numel(), device="cuda")].view_as(self.table))
        self.q.normal_()
        self.pool.normal_()


@pytest.mark.parametrize("splits", [0, 1, 2, 3, 16])
@pytest.mark.parametrize("query_len", [1, 2, 4])
@pytest.mark.parametrize("heads", HEADS)
def test_decode_in_a_process_of_its_own(heads: int, query_len: int, splits: int) -> None:
    Step(heads, query_len, 1, 64)
    run_probe(ProbeShape(heads, query_len, splits=splits))


@pytest.mark.parametrize("query_len", [1, 2, 4])
@pytest.mark.parametrize("heads", HEADS)
def test_a_captured_step_is_right_for_other_lengths_and_pages(heads: int, query_len: int) -> None:
    step = Step(heads, query_len, 8, 2048)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            step.run(step.plan)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        out, lse = step.run(step.plan)
    for _ in range(4):
        step.shuffle()
        out.fill_(torch.nan)
        lse.fill_(torch.nan)
        graph.replay()
        first = out.clone()
        step.check(out, lse)
        graph.replay()
        assert torch.equal(out, first)


@pytest.mark.parametrize("lengths", [[5], [1, 0, 300]], ids=str)
def test_prefill(lengths: list[int]) -> None:
    inputs = make_prefill_inputs(
        lengths, num_heads=16, qk_head_dim=192, v_head_dim=128, dtype=torch.bfloat16, device="cuda"
    )
    out, lse = mla_ops.mla_prefill(**inputs._asdict(), backend="aiter")
    exact = inputs._asdict() | {name: getattr(inputs, name).double() for name in "qkv"}
    expected, expected_lse = mla_ops.mla_prefill(**exact, backend="reference")
    low, _ = mla_ops.mla_prefill(**inputs._asdict(), backend="reference")
    assert_matches(out, expected, low_precision=low)
    assert_matches(lse, expected_lse, factor=16.0)


def test_the_cache_write_is_bitwise_the_references() -> None:
    rows = (torch.randn(5, 512, device="cuda").bfloat16(), torch.randn(5, 64, device="cuda").bfloat16())
    slots = torch.tensor([7, -1, 0, 99, 64], device="cuda")  # 99 is past the end
    ours, theirs = (torch.zeros(5, 16, 576, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    mla_ops.write_latent_cache(*rows, ours, slots, backend="aiter")
    mla_ops.write_latent_cache(*rows, theirs, slots, backend="reference")
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize(("batch", "longest"), [(1, 32768), (32, 4096), (128, 4096)])
@pytest.mark.parametrize("heads", [16, 128])
def test_how_long_a_step_takes(
    heads: int, batch: int, longest: int, record_property: Callable[[str, object], None]
) -> None:
    step = Step(heads, 1, batch, longest)
    for _ in range(5):
        step.run(step.plan)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(50):
        step.run(step.plan)
    end.record()
    end.synchronize()
    record_property("microseconds", start.elapsed_time(end) * 1e3 / 50)
