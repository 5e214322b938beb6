"""Heads sharded over two gloo ranks give what one rank gives."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from mla_ops import DecodePlan, DeepseekMLA, MLAConfig, PrefillPlan

CONFIG = MLAConfig(
    hidden_size=32,
    num_heads=4,
    q_lora_rank=24,
    kv_lora_rank=16,
    qk_nope_head_dim=8,
    qk_rope_head_dim=8,
    v_head_dim=8,
)
PAGE_SIZE = 4
PROMPTS = [3, 6]


@torch.no_grad()
def prefill_and_decode(layer: DeepseekMLA, config: MLAConfig, hidden: torch.Tensor) -> torch.Tensor:
    table = torch.tensor([[2, 5], [1, 3]], dtype=torch.int32)
    kv_cache = torch.full((6, PAGE_SIZE, config.latent_dim), torch.nan)
    plan = PrefillPlan.make(config, query_lens=PROMPTS, block_table=table, page_size=PAGE_SIZE, dtype=torch.float32)
    prompts = layer.prefill(hidden[: sum(PROMPTS)], plan.positions, kv_cache, plan)
    step = DecodePlan(config, max_batch_size=2, max_seq_len=8, page_size=PAGE_SIZE, device="cpu", dtype=torch.float32)
    step.update(table, torch.tensor(PROMPTS, dtype=torch.int32) + 1)
    decoded = layer(hidden[sum(PROMPTS) :], step.at(2).positions, kv_cache, step)
    return torch.cat([prompts, decoded])


def run_rank(rank: int, folder: str, state: dict[str, torch.Tensor], hidden: torch.Tensor) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    mesh = dist.init_device_mesh("cpu", (2,))
    layer = DeepseekMLA(CONFIG).requires_grad_(False)
    layer.load_state_dict(state)
    out = prefill_and_decode(layer.parallelize(mesh), CONFIG.shard(2), hidden)
    torch.save(out, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def test_two_ranks_equal_one(tmp_path: Path) -> None:
    layer = DeepseekMLA(CONFIG).requires_grad_(False)
    hidden = torch.randn(sum(PROMPTS) + 2, CONFIG.hidden_size)
    expected = prefill_and_decode(layer, CONFIG, hidden)
    mp.spawn(run_rank, args=(str(tmp_path), dict(layer.state_dict()), hidden), nprocs=2)
    for rank in range(2):
        torch.testing.assert_close(torch.load(tmp_path / f"{rank}.pt"), expected)


def test_heads_that_the_ranks_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match="tp_size must divide num_heads=4, got 3"):
        CONFIG.shard(3)
