"""Steps with collectives: two gloo ranks here, one NCCL rank in test_runner_gpu.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from toy_step import WIDTH, example, runner_of

from capture import CaptureError, GraphCaptureError, VerificationError
from capture.ranks import Ranks

RANKS = 2


class ShardedStep:
    """A layer split over the ranks: each has its rows of the weight, and their products are summed."""

    def __init__(self, rank: int) -> None:
        torch.manual_seed(0)
        self.weight = torch.randn(WIDTH, WIDTH)
        self.rank, self.share = rank, WIDTH // RANKS
        self.wrong = False

    def __call__(self, x: Tensor, slots: Tensor) -> Tensor:
        mine = slice(self.rank * self.share, (self.rank + 1) * self.share)
        out = x[:, mine] @ self.weight[mine]
        dist.all_reduce(out)
        return out * len(x) if self.wrong else out


def captured_and_verified(rank: int, group: Any) -> None:
    step = ShardedStep(rank)
    runner = runner_of(step, process_group=group)
    report = runner.capture()
    assert report.verification is not None
    assert report.verification.ok
    torch.manual_seed(7)
    inputs = example(3)
    torch.testing.assert_close(runner(**inputs), inputs["x"] @ step.weight)
    seeds = [0] * RANKS
    dist.all_gather_object(seeds, report.verification.seed, group=group)
    assert seeds[0] == seeds[1]


def one_rank_fails_to_capture(rank: int, group: Any) -> None:
    def refuse(size: int, *arguments: Any) -> Any:
        raise GraphCaptureError(size, "no memory here")

    runner = runner_of(ShardedStep(rank), process_group=group)
    if rank == 1:
        runner._capture_one = refuse  # type: ignore[method-assign]
    with pytest.raises(GraphCaptureError, match="^no memory here" if rank else "rank 1 failed.*no memory here"):
        runner.capture()
    assert runner.captured == ()


def one_rank_is_wrong(rank: int, group: Any) -> None:
    step = ShardedStep(rank)
    step.wrong = rank == 0
    runner = runner_of(step, process_group=group)
    with pytest.raises(GraphCaptureError if rank else VerificationError, match="rank 0 failed" if rank else "pad rows"):
        runner.capture()


def batch_sizes_differ(rank: int, group: Any) -> None:
    runner = runner_of(ShardedStep(rank), (4, 8) if rank else (8,), process_group=group)
    with pytest.raises(CaptureError, match=r"batch_sizes must be the same .* rank 0: \(8,\); rank 1: \(4, 8\)"):
        runner.capture()


def _run(rank: int, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    group = dist.group.WORLD
    for check in (captured_and_verified, one_rank_fails_to_capture, one_rank_is_wrong, batch_sizes_differ):
        check(rank, group)
        assert Ranks(group).largest(rank) == 1
    dist.destroy_process_group()


def test_ranks_capture_verify_and_fail_together(tmp_path: Path) -> None:
    mp.spawn(_run, args=(str(tmp_path / "store"),), nprocs=RANKS)


def test_one_process_agrees_with_itself() -> None:
    ranks = Ranks()
    ranks.same("x", 1)
    ranks.agree(None, 1)
    assert ranks.first(3) == ranks.largest(3) == 3
    with pytest.raises(KeyError):
        ranks.agree(KeyError("mine"), 1)
