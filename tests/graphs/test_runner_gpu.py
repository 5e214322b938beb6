"""GraphRunner's rules that only a device with graphs can show."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from toy_step import SLOTS, WIDTH, ToyStep, example, runner_of

from capture import CompileForbiddenError, GraphCaptureError, GraphRunner, VerificationError, no_compile, verify
from capture.graphs import capture_stream

pytestmark = pytest.mark.gpu


def captured(step: Any, **options: Any) -> GraphRunner:
    runner = runner_of(step, **options)
    runner.capture()
    return runner


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("batch_size", [1, 3, 4, 7, 8])
def test_replay_equals_eager_in_result_and_state(dtype: torch.dtype, batch_size: int) -> None:
    runner = captured(ToyStep("cuda", dtype))
    bucket = min(size for size in runner.captured if size >= batch_size)
    inputs = example(batch_size, "cuda", dtype)
    pads = bucket - batch_size
    padded = {
        "x": torch.cat([inputs["x"], inputs["x"].new_zeros(pads, WIDTH)]),
        "slots": torch.cat([inputs["slots"], inputs["slots"].new_full((pads,), -1)]),
    }
    wanted = runner.step(**padded)[:batch_size].clone()
    wanted_cache = runner.step.cache.clone()
    runner.step.cache.zero_()
    assert torch.equal(runner(**inputs), wanted)
    assert torch.equal(runner.step.cache, wanted_cache)


def test_every_graph_is_verified_bitwise_and_reports_its_memory() -> None:
    report = runner_of(ToyStep("cuda")).capture()
    assert report.verification is not None
    assert all(bucket.bitwise for bucket in report.verification.buckets)
    assert all(bucket.verified and bucket.memory_bytes >= 0 for bucket in report.buckets)
    assert report.buckets[0].memory.pool > 0


def test_calls_from_other_streams_are_ordered_one_after_the_other() -> None:
    def slow(x: Tensor, slots: Tensor) -> Tensor:
        torch.cuda._sleep(2_000_000)
        return x * 2

    runner = captured(slow, example_inputs=example(8, "cuda"))
    streams = [torch.cuda.Stream() for _ in range(3)]
    for stream in streams:
        stream.wait_stream(torch.cuda.current_stream())
    inputs = [example(5, "cuda") for _ in range(9)]
    torch.cuda.synchronize()
    results = []
    for index, call in enumerate(inputs):
        with torch.cuda.stream(streams[index % 3]):
            results.append(runner(**call, clone=True))
    torch.cuda.synchronize()
    for result, call in zip(results, inputs, strict=True):
        assert torch.equal(result, call["x"] * 2)


def test_input_of_an_earlier_call_is_not_overwritten_while_its_replay_runs() -> None:
    def slow(x: Tensor, slots: Tensor) -> Tensor:
        torch.cuda._sleep(20_000_000)
        return x + 1

    runner = captured(slow, example_inputs=example(8, "cuda"))
    first, second = example(8, "cuda"), example(8, "cuda")
    torch.cuda.synchronize()
    out = runner(**first, clone=True)
    with torch.cuda.stream(torch.cuda.Stream()):
        runner(**second)
    torch.cuda.synchronize()
    assert torch.equal(out, first["x"] + 1)


def test_call_returns_before_the_device_is_done() -> None:
    def slow(x: Tensor, slots: Tensor) -> Tensor:
        torch.cuda._sleep(200_000_000)
        return x + 1

    runner = runner_of(slow, batch_sizes=(8,), example_inputs=example(8, "cuda"))
    runner.capture(verify=False)
    inputs = example(5, "cuda")
    runner(**inputs)
    torch.cuda.synchronize()
    runner(**inputs)
    event = torch.cuda.Event()
    event.record()
    assert not event.query()
    torch.cuda.synchronize()


@pytest.mark.parametrize(
    "step",
    [
        lambda x, slots: x * x.max().item(),
        lambda x, slots: x if x.sum() > 0 else -x,
        lambda x, slots: x * x.tolist()[0][0],
        lambda x, slots: x + x.cpu().to(x.device),
        lambda x, slots: torch.cuda.synchronize() or x * 2,
    ],
    ids=["item", "bool", "tolist", "cpu", "synchronize"],
)
def test_host_sync_in_the_step_is_named_and_the_device_stays_usable(step: Any) -> None:
    def decode_step(x: Tensor, slots: Tensor) -> Tensor:
        return step(x, slots)

    with pytest.raises(GraphCaptureError, match="decode_step for a batch of 8 failed"):
        captured(decode_step, example_inputs=example(8, "cuda"))
    runner = captured(ToyStep("cuda"))
    assert runner(**example(3, "cuda")).isfinite().all()


def test_out_of_memory_says_how_much_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    def step(x: Tensor, slots: Tensor) -> Tensor:
        if torch.cuda.is_current_stream_capturing() and len(x) == 4:
            raise torch.OutOfMemoryError("planted")
        return x * 2

    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1_000, 2_000))
    with pytest.raises(GraphCaptureError, match=r"capturing a batch of 4 \(1,000 of 2,000 bytes free on cuda"):
        captured(step, example_inputs=example(8, "cuda"))


def test_real_out_of_memory_is_explained_and_leaves_the_device_usable() -> None:
    def step(x: Tensor, slots: Tensor) -> Tensor:
        if torch.cuda.is_current_stream_capturing():
            return x + torch.empty(2**50, dtype=torch.uint8, device=x.device)[:1]
        return x * 2

    with pytest.raises(GraphCaptureError, match="out of memory while capturing a batch of 8"):
        captured(step, example_inputs=example(8, "cuda"))
    assert captured(ToyStep("cuda"))(**example(3, "cuda")).isfinite().all()


def test_another_thread_may_synchronize_during_the_capture() -> None:
    stop, syncs = threading.Event(), []

    def watchdog() -> None:
        stream = torch.cuda.Stream()
        while not stop.is_set():
            with torch.cuda.stream(stream):
                torch.ones(8, device="cuda").sum().item()
            event = torch.cuda.Event()
            event.record(stream)
            event.query()
            stream.synchronize()
            syncs.append(1)

    thread = threading.Thread(target=watchdog)
    thread.start()
    try:
        runner = captured(ToyStep("cuda"), batch_sizes=tuple(range(1, 17)))
    finally:
        stop.set()
        thread.join()
    assert syncs
    assert runner(**example(3, "cuda")).isfinite().all()


def test_close_returns_the_memory_of_graphs_and_buffers() -> None:
    def step(x: Tensor, slots: Tensor) -> Tensor:
        big = torch.full((len(x), 2**22), 2.0, device=x.device)
        return x * big[:, :1] * big[:, 1:2]

    def reserved() -> int:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved()

    captured(ToyStep("cuda")).close()  # BLAS workspaces and the like stay
    before = reserved()
    runner = captured(step, example_inputs=example(8, "cuda"))
    assert reserved() >= before + 8 * 2**22 * 4
    runner.close()
    runner.close()
    assert reserved() <= before + 2**21  # a segment of small blocks may have come to stay


def test_smaller_graphs_live_in_the_memory_of_the_largest() -> None:
    def step(x: Tensor, slots: Tensor) -> Tensor:
        return x * torch.full((len(x), 2**20), 2.0, device=x.device)[:, :1]

    def pool_bytes(batch_sizes: tuple[int, ...]) -> int:
        before = torch.cuda.memory_reserved()
        runner = runner_of(step, batch_sizes, example_inputs=example(32, "cuda"))
        runner.capture(verify=False)
        torch.cuda.empty_cache()
        grown = torch.cuda.memory_reserved() - before
        runner.close()
        return grown

    torch.cuda.empty_cache()
    alone = pool_bytes((32,))
    assert pool_bytes((8, 16, 24, 32)) <= alone + 2**23


def test_two_runners_share_one_pool() -> None:
    pool = torch.cuda.graph_pool_handle()
    first, second = captured(ToyStep("cuda"), pool=pool), captured(ToyStep("cuda"), pool=pool)
    inputs = example(3, "cuda")
    wanted = second(**inputs, clone=True)
    first(**inputs)
    first.close()
    assert torch.equal(second(**inputs), wanted)


@pytest.mark.parametrize("kind", ["frozen", "rebound"])
def test_graph_that_froze_a_value_or_an_address_is_found(kind: str) -> None:
    values = {"number": 0, "tensor": torch.zeros(1, device="cuda")}

    def inputs(batch_size: int, generator: torch.Generator) -> dict[str, Tensor]:
        values["number"] += 1
        values["tensor"] = torch.rand(1, device="cuda", generator=generator)
        return {
            "x": torch.randn(batch_size, WIDTH, device="cuda", generator=generator),
            "slots": torch.randperm(SLOTS, device="cuda", generator=generator)[:batch_size],
        }

    def step(x: Tensor, slots: Tensor) -> Tensor:
        return x * (values["number"] if kind == "frozen" else values["tensor"])

    with pytest.raises(VerificationError, match="replay differs from eager at the same shape"):
        captured(step, example_inputs=example(8, "cuda"), make_inputs=inputs)


def test_side_stream_that_is_not_joined_fails_the_capture() -> None:
    side = torch.cuda.Stream()

    def step(x: Tensor, slots: Tensor) -> Tensor:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            x * 3
        return x * 2

    with pytest.raises(GraphCaptureError, match="failed"):
        captured(step, example_inputs=example(8, "cuda"))
    assert captured(ToyStep("cuda"))(**example(3, "cuda")).isfinite().all()


def test_metadata_that_the_allocator_got_back_after_the_capture_is_found() -> None:
    kept: dict[int, Tensor] = {}

    def step(x: Tensor, slots: Tensor) -> Tensor:
        if len(x) not in kept:
            kept[len(x)] = torch.full((WIDTH,), float(len(x)), device=x.device)
        return x * kept[len(x)] / len(x)

    runner = runner_of(step, (8,), example_inputs=example(8, "cuda"))
    runner.capture(verify=False)
    kept.clear()  # as a cache of few entries does in time
    with torch.cuda.stream(capture_stream(runner.device)):  # whose blocks are reused on it alone
        junk = [torch.full((WIDTH,), 1e9, device="cuda") for _ in range(200)]  # lands where the metadata was
    torch.cuda.synchronize()
    report = verify(runner)
    assert any("replay differs from eager" in failure for failure in report.failures)
    del junk


@pytest.fixture
def nccl() -> Iterator[Any]:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    dist.init_process_group(
        "nccl", init_method=f"tcp://localhost:{port}", rank=0, world_size=1, device_id=torch.device("cuda", 0)
    )
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_collective_inside_a_step_is_captured_and_verified(nccl: Any) -> None:
    def step(x: Tensor, slots: Tensor) -> Tensor:
        out = x * 2
        dist.all_reduce(out)
        return out

    runner = captured(step, example_inputs=example(8, "cuda"), process_group=nccl)
    inputs = example(5, "cuda")
    assert torch.equal(runner(**inputs), inputs["x"] * 2)
    runner.close()  # before the communicator that its graphs use


def test_memory_budget_drops_sizes_and_is_kept() -> None:
    def step(x: Tensor, slots: Tensor) -> Tensor:
        for _ in range(200):
            x = x + 1
        return x

    sizes = (1, 2, 4, 8, 16, 32)
    whole = runner_of(step, sizes, example_inputs=example(32, "cuda")).capture(verify=False)
    largest = whole.buckets[0].memory
    budget = largest.pool + 2 * largest.graph
    report = runner_of(step, sizes, example_inputs=example(32, "cuda"), memory_budget=budget).capture(verify=False)
    measured = report.buckets[0].memory
    assert report.buckets[0].batch_size == 32
    assert measured.pool + measured.graph * len(report.buckets) <= budget or not measured.graph
    assert sorted([*report.dropped, *(bucket.batch_size for bucket in report.buckets)]) == list(sizes)


def test_capture_under_a_seal_is_refused_and_leaves_the_stream_as_it_was() -> None:
    stream = torch.cuda.current_stream()
    with no_compile() as seal:
        with pytest.raises(CompileForbiddenError, match="capture of CUDA graph"):
            captured(ToyStep("cuda"))
        with pytest.raises(CompileForbiddenError), torch.cuda.graph(torch.cuda.CUDAGraph()):
            pass
    assert [event.kind for event in seal.events] == ["capture", "capture"]
    assert torch.cuda.current_stream() == stream
    assert captured(ToyStep("cuda"))(**example(3, "cuda")).isfinite().all()


def test_replays_of_any_batch_size_compile_nothing() -> None:
    runner = captured(ToyStep("cuda"))
    with no_compile() as seal:
        for batch_size in range(1, 9):
            runner(**example(batch_size, "cuda"))
    assert not seal.events


def test_input_on_the_wrong_device_is_refused() -> None:
    runner = captured(ToyStep("cuda"))
    with pytest.raises(ValueError, match=r"'x' must be on cuda:0 as at capture, got cpu"):
        runner(**example(3))


def test_device_without_index_is_the_current_one() -> None:
    runner = runner_of(lambda x, slots: x * 2, device="cuda")
    runner.capture()
    assert runner.device == torch.device("cuda", torch.cuda.current_device())
    inputs = example(3, "cuda")
    assert torch.equal(runner(**inputs), inputs["x"] * 2)
