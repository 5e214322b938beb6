"""What a replayed decode step costs the host and leaves idle on the device, beside eager and ``reduce-overhead``.

    python -m benchmarks.replay --model deepseek-v3 --layers 4 --batch-sizes 1,8,32,128

Host microseconds are medians of single calls on an idle device, from the call to its return. A period is that of calls
back to back; what of it is not the replay itself is idle. ``update inside`` has ``DecodePlan.update`` in the graph;
``update outside`` calls it before the replay, at a launch for each of its small kernels. Last, what each bucket cost.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import print_table
from capture import BuildOptions, CaptureReport, GraphRunner
from mla_ops.config import MLAConfig
from mla_ops.decode_step import DecodeStep
from mla_ops.plan import DecodeMetadata

_CALLS = 50
_SPIN = 100_000_000  # device cycles: longer than the host takes to enqueue the calls behind them

Call = Callable[[], Any]


class UpdatedOutside:
    """The blocks of a step, without the update of its plan."""

    def __init__(self, step: DecodeStep) -> None:
        self.step = step

    def __call__(self, hidden_states: Tensor) -> Tensor:
        metadata = self.step.plan.at(hidden_states.shape[0] // self.step.options.query_len)
        for block, kv_cache in zip(self.step.run_blocks, self.step.cache.layers, strict=True):
            hidden_states = block(hidden_states, metadata.positions, kv_cache, metadata)
        return hidden_states

    def runner(self) -> GraphRunner:
        """A runner of the blocks; not verified, for the plan is not among its inputs."""
        largest = max(self.step.options.batch_sizes)
        hidden = self.step.inputs(largest, self.step.generator)["hidden_states"]
        return GraphRunner(
            self,
            batch_sizes=self.step.options.batch_sizes,
            example_inputs={"hidden_states": hidden},
            batch_dims={"hidden_states": 0},
        )


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def host_us(call: Call, device: torch.device) -> float:
    """Median microseconds from a call to its return, the device idle before."""
    times = []
    for _ in range(_CALLS + 5):
        synchronize(device)
        start = time.perf_counter()
        call()
        times.append((time.perf_counter() - start) * 1e6)
    synchronize(device)
    return statistics.median(times[5:])


def device_us(call: Call, calls: int, *, queued: bool) -> float:
    """Microseconds of a call on the device; ``queued``: all calls wait behind a spinning kernel first."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    if queued:
        torch.cuda._sleep(_SPIN)  # type: ignore[no-untyped-call]
    start.record()
    for _ in range(calls):
        call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e3 / calls


def row(name: str, batch_size: int, call: Call, replay: Call | None, device: torch.device) -> dict[str, Any]:
    """One line: a whole call, and the replay that it holds if it has one."""
    for _ in range(5):
        call()
    line: dict[str, Any] = {"what": name, "B": batch_size, "host us": host_us(call, device)}
    if replay is not None:
        line["replay alone, host us"] = host_us(replay, device)
    if device.type == "cuda":
        line["period us"] = device_us(call, _CALLS, queued=False)
        busy = device_us(replay or call, 5, queued=True)
        line |= {"device us": busy, "idle us": max(0.0, line["period us"] - busy)}
    return line


def measure(step: DecodeStep, inside: GraphRunner, outside: GraphRunner, reduce_overhead: bool) -> list[dict[str, Any]]:
    """Every form at every bucket."""
    rows, device = [], inside.device

    def run_blocks(hidden_states: Tensor, metadata: DecodeMetadata) -> Tensor:
        for block, kv_cache in zip(step.run_blocks, step.cache.layers, strict=True):
            hidden_states = block(hidden_states, metadata.positions, kv_cache, metadata)
        return hidden_states

    compiled = torch.compile(run_blocks, mode="reduce-overhead")
    for size in step.options.batch_sizes:
        inputs = step.inputs(size, step.generator)
        hidden = inputs.pop("hidden_states")
        update = partial(step.plan.update, **inputs)

        def served(inputs: dict[str, Any] = inputs, hidden: Tensor = hidden) -> None:
            inside(hidden_states=hidden, **inputs)

        def updated(update: Call = update, hidden: Tensor = hidden) -> None:
            update()
            outside(hidden_states=hidden)

        rows += [
            row("graph, update inside", size, served, partial(inside.replay, size), device),
            row("graph, update outside", size, updated, partial(outside.replay, size), device),
            row("plan.update alone", size, update, None, device),
            row("eager", size, partial(step, hidden, **inputs), None, device),
        ]
        if reduce_overhead:
            rows.append(row("reduce-overhead", size, partial(compiled, hidden, step.plan.at(size)), None, device))
    return rows


def bucket_rows(report: CaptureReport) -> list[dict[str, Any]]:
    return [
        {
            "bucket": bucket.batch_size,
            "capture s": bucket.capture_seconds,
            "pool MiB": bucket.memory.pool / 2**20,
            "graph MiB": bucket.memory.graph / 2**20,
        }
        for bucket in report.buckets
    ]


def main() -> None:
    """Capture, measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="deepseek-v3", help="a preset")
    parser.add_argument("--tp", type=int, default=8)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch-sizes", default="1,8,32,128")
    parser.add_argument("--query-len", type=int, default=1)
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--pages", type=int, default=16, help="most pages of a request (default: 16)")
    parser.add_argument("--compiled", action="store_true", help="capture the compiled blocks")
    parser.add_argument("--no-reduce-overhead", action="store_true", help="leave that row out: it compiles")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    config = MLAConfig.preset(args.model).shard(args.tp)
    options = BuildOptions(
        batch_sizes=tuple(map(int, args.batch_sizes.split(","))),
        query_len=args.query_len,
        dtype=args.dtype,
        backend=args.backend,
        device=args.device,
    )
    step = DecodeStep(config, options, args.layers, pages_per_request=args.pages)
    if args.compiled:
        step.compile()
    inside, outside = step.runner(), UpdatedOutside(step).runner()
    with torch.no_grad():
        report = inside.capture(verify=False)
        outside.capture(verify=False)
        rows = measure(step, inside, outside, not args.no_reduce_overhead)
    if args.json:
        print(json.dumps({"backend": step.plan.choice.name, "rows": rows, "buckets": bucket_rows(report)}))
        return
    print(f"{args.model}, layers {args.layers}, tp {args.tp}, {step.plan.choice.name}: {step.plan.choice.reason}")
    print_table(rows)
    print_table(bucket_rows(report))


if __name__ == "__main__":
    main()
