"""Capture a decode step by batch size, prove each graph, replay.

    python examples/03_graph_runner.py

Uses a GPU where there is one; on a CPU the same runner calls the step instead of replaying a graph.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from capture import GraphRunner, VerificationError, default_batch_sizes

MAX_BATCH_SIZE = 8
NUM_SLOTS = 256
HIDDEN = 64


class LastTokenMixer(nn.Module):
    """Mixes each request's new token with the one it wrote before, held in a cache by slot."""

    cache: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.register_buffer("cache", torch.zeros(NUM_SLOTS + 1, HIDDEN), persistent=False)

    def forward(self, x: Tensor, slots: Tensor) -> Tensor:
        """x: ``[B, hidden]``; slots: ``[B]`` int64, the last slot takes what must not be kept."""
        previous = self.cache[slots]
        out: Tensor = self.project(x) + previous
        self.cache.index_copy_(0, slots, x.masked_fill(slots[:, None] == NUM_SLOTS, 0))
        return out


def main() -> None:
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    mixer = LastTokenMixer().to(device)

    runner = GraphRunner(
        mixer,
        batch_sizes=default_batch_sizes(MAX_BATCH_SIZE),
        example_inputs={
            "x": torch.randn(MAX_BATCH_SIZE, HIDDEN, device=device),
            "slots": torch.randperm(NUM_SLOTS, device=device)[:MAX_BATCH_SIZE],
        },
        batch_dims={"x": 0, "slots": 0},
        pad_values={"slots": NUM_SLOTS},  # pad rows write zeros to the slot that nobody reads
        state={"cache": mixer.cache[:NUM_SLOTS]},
    )
    with runner:
        report = runner.capture()  # verify=True: every graph is proved against eager
        for bucket in report.buckets:
            print(f"batch {bucket.batch_size}: {bucket.capture_seconds:.4f} s, verified={bucket.verified}")

        x = torch.randn(3, HIDDEN, device=device)
        slots = torch.tensor([5, 200, 17], device=device)
        view = runner(x=x, slots=slots)  # padded to the bucket of 4; the first 3 rows come back
        copy = runner(x=x, slots=slots, clone=True)
        print(f"{tuple(view.shape)}: the second step read what the first wrote: {torch.equal(view, copy)}")

        runner(x=x[:1], slots=slots[:1] + 1)
        print(f"the next call overwrote the view, not the clone: {not torch.equal(view, copy)}")

    # A step that lets pad rows reach live rows is found before it serves anyone.
    mixed = GraphRunner(
        lambda x: x / x.abs().max(),
        batch_sizes=[4, 8],
        example_inputs={"x": torch.randn(MAX_BATCH_SIZE, HIDDEN, device=device)},
        batch_dims={"x": 0},
    )
    try:
        mixed.capture()
    except VerificationError as error:
        print(f"refused: {error.report.failures[0]}")


if __name__ == "__main__":
    main()
