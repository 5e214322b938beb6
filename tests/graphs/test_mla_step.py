"""MLA's decode step under GraphRunner and verify: the paged cache, a plan that is updated inside the graph."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from recorded_graph import RecordedGraph
from torch import Tensor

from capture import BuildOptions, GraphRunner, VerificationError
from mla_ops import DecodePlan, DeepseekMLA, MLAConfig
from mla_ops.decode_step import DecodeStep

CONFIG = MLAConfig(hidden_size=64, num_heads=2, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16)
PAGE_SIZE, PAGES = 4, 3
SIZES = (1, 3, 8)


@pytest.fixture(autouse=True)
def _recorded_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("capture.runner.EagerGraph", RecordedGraph)


def decode_step(query_len: int, dtype: str = "float32") -> DecodeStep:
    options = BuildOptions(
        batch_sizes=SIZES, query_len=query_len, dtype=dtype, page_size=PAGE_SIZE, max_seq_len=4 * PAGE_SIZE
    )
    return DecodeStep(CONFIG, options, num_layers=2)


@pytest.mark.parametrize("query_len", [1, 2, 4])
def test_decode_step_is_proved_at_other_lengths_pages_and_fillings(query_len: int) -> None:
    report = decode_step(query_len).runner().capture().verification
    assert report is not None
    assert report.failures == ()


def test_runners_of_several_query_lengths_work_on_one_cache_in_turn() -> None:
    single, drafted = decode_step(1), decode_step(2)
    drafted.blocks, drafted.run_blocks, drafted.cache = single.blocks, single.run_blocks, single.cache
    runners = {1: single.runner(), 2: drafted.runner()}
    for runner in runners.values():
        runner.capture(verify=False)
    generator = torch.Generator().manual_seed(3)
    for query_len, batch_size in [(1, 3), (2, 2), (1, 8), (2, 7), (1, 1)]:
        step = runners[query_len].step
        inputs = step.inputs(batch_size, generator)
        before = [layer.clone() for layer in single.cache.layers]
        got = runners[query_len](**inputs, clone=True)
        written = [layer.clone() for layer in single.cache.layers]
        for layer, old in zip(single.cache.layers, before, strict=True):
            layer.copy_(old)
        torch.testing.assert_close(got, step(**inputs))
        for layer, new in zip(single.cache.layers, written, strict=True):
            torch.testing.assert_close(layer, new)


def runner_around(step: DecodeStep, call: Callable[..., Tensor]) -> GraphRunner:
    runner = step.runner()
    runner.step = call
    return runner


def test_an_operation_over_all_rows_after_attention_is_not_poisoned_by_pads() -> None:
    step = decode_step(1)
    attention = step.blocks[0].self_attn

    def quantised(hidden_states: Tensor, block_table: Tensor, seq_lens: Tensor) -> Tensor:
        step.plan.update(block_table, seq_lens)
        metadata = step.plan.at(len(seq_lens))
        out = attention(hidden_states, metadata.positions, step.cache.layers[0], metadata)
        return out / out.abs().amax()

    report = runner_around(step, quantised).capture().verification
    assert report is not None
    assert report.ok


def test_one_that_reads_the_pads_own_rows_is_found() -> None:
    step = decode_step(1)

    def mixed(hidden_states: Tensor, block_table: Tensor, seq_lens: Tensor) -> Tensor:
        return step(hidden_states, block_table, seq_lens) / hidden_states.abs().amax()

    with pytest.raises(VerificationError, match="eager with pad rows differs from eager without"):
        runner_around(step, mixed).capture()


class MultiStep:
    """Several decode steps in one graph; the plan moves on inside of it.

    ``hidden_states [B, hidden]``, ``block_table [B, pages]``, ``seq_lens [B]``: the lengths of the first step.
    """

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.attention = DeepseekMLA(CONFIG).requires_grad_(False)
        self.plan = DecodePlan(
            CONFIG,
            max_batch_size=8,
            max_seq_len=PAGES * PAGE_SIZE,
            page_size=PAGE_SIZE,
            device="cpu",
            dtype=torch.float32,
        )
        self.cache = torch.randn(8 * PAGES, PAGE_SIZE, CONFIG.latent_dim)

    def __call__(self, hidden_states: Tensor, block_table: Tensor, seq_lens: Tensor) -> Tensor:
        outs, live = [], (seq_lens > 0).int()
        for index in range(self.steps):
            self.plan.update(block_table, seq_lens + index * live)
            metadata = self.plan.at(len(seq_lens))
            hidden_states = self.attention(hidden_states, metadata.positions, self.cache, metadata)
            outs.append(hidden_states)
        return torch.stack(outs, 1)

    def inputs(self, batch_size: int, generator: torch.Generator) -> dict[str, Tensor]:
        room = PAGES * PAGE_SIZE - self.steps + 1
        return {
            "hidden_states": torch.randn(batch_size, CONFIG.hidden_size, generator=generator),
            "block_table": torch.randperm(8 * PAGES, generator=generator)[: batch_size * PAGES].view(-1, PAGES).int(),
            "seq_lens": torch.randint(1, room + 1, (batch_size,), generator=generator, dtype=torch.int32),
        }

    def runner(self) -> GraphRunner:
        return GraphRunner(
            self,
            batch_sizes=SIZES,
            example_inputs=self.inputs(8, torch.Generator()),
            batch_dims={"hidden_states": 0, "block_table": 0, "seq_lens": 0},
            state={"cache": self.cache},
            make_inputs=self.inputs,
        )


@pytest.mark.parametrize("steps", [1, 4])
def test_lengths_may_advance_inside_a_graph_of_several_steps(steps: int) -> None:
    multi = MultiStep(steps)
    runner = multi.runner()
    assert runner.capture().verification
    inputs = multi.inputs(3, torch.Generator().manual_seed(1))
    before = multi.cache.clone()
    out = runner(**inputs, clone=True)
    cache, hidden = multi.cache.clone(), inputs["hidden_states"]
    multi.cache.copy_(before)
    single = MultiStep(1)
    single.attention, single.cache = multi.attention, multi.cache
    for index in range(steps):
        hidden = single(hidden, inputs["block_table"], inputs["seq_lens"] + index)[:, 0]
        torch.testing.assert_close(out[:, index], hidden)
    torch.testing.assert_close(cache, multi.cache)


def test_each_of_several_steps_writes_a_row_of_its_own() -> None:
    multi = MultiStep(3)
    runner = multi.runner()
    runner.capture(verify=False)
    inputs = multi.inputs(2, torch.Generator().manual_seed(1))
    before = multi.cache.clone()
    runner(**inputs)
    assert int((multi.cache != before).any(-1).sum()) == 2 * 3
