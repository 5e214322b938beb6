"""Seconds from process start to every batch size captured: ours cold and warm, beside plain ``torch.compile``.

Each row is a fresh process. ``floor`` imports torch, opens the device and makes the weights; ``torch.compile``
compiles the whole step with a dynamic batch and captures each size by hand; ``ours`` is ``WarmupManager``, which
verifies every graph as well; ``plain`` is the same without compiling: the step is captured as its ops are. Phases are
those of the warm-up report.

    python benchmarks/first_run.py --model deepseek-v3 --layers 4 --batch-sizes 1,2,4,8,16,32,64,128 --device cuda
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

WAYS = ("floor", "torch.compile cold", "torch.compile warm", "ours cold", "ours warm", "plain cold", "plain warm")
_STARTED = "MLA_BENCHMARK_STARTED"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="deepseek-v2-lite")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--batch-sizes", default="1,2,4,8")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--max-seq-len", type=int, default=8192)
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--ways", default=",".join(WAYS), help="which rows, in order (default: all)")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        print(json.dumps(_child(arguments)))
        return
    with tempfile.TemporaryDirectory() as caches:
        _run("floor", Path(caches) / "floor")  # reads the packages from the disk, so that no row pays for that
        rows = {way: _run(way, Path(caches) / way.split()[0]) for way in arguments.ways.split(",")}
    if arguments.json:
        print(json.dumps({"arguments": vars(arguments), "rows": rows}, indent=2))
    else:
        _print(rows)


def _run(way: str, cache: Path) -> dict[str, Any]:
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(cache), _STARTED: str(time.time())}
    if not way.startswith("torch"):
        environment.pop("TORCHINDUCTOR_CACHE_DIR")
        environment["MLA_WARMUP_CACHE"] = str(cache)
    command = [sys.executable, __file__, *sys.argv[1:], "--child", way]
    child = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    if child.returncode:
        return {"failed": f"exit status {child.returncode}"}
    row: dict[str, Any] = json.loads(child.stdout.splitlines()[-1])
    print(f"{way}: {json.dumps(row)}", file=sys.stderr, flush=True)
    return row


def _child(arguments: argparse.Namespace) -> dict[str, Any]:
    import torch

    from capture import BuildOptions
    from mla_ops.warmup import spec

    options = BuildOptions(
        batch_sizes=tuple(int(n) for n in arguments.batch_sizes.split(",")),
        device=arguments.device,
        dtype=arguments.dtype,
        backend=arguments.backend,
        layers=arguments.layers,
        max_seq_len=arguments.max_seq_len,
        compile=arguments.child.startswith("ours"),
    )
    work = spec(arguments.model, options)
    way: str = arguments.child
    torch.zeros(1, device=options.device)
    result: dict[str, Any] = {"backend": work.backend[0]}
    if way.startswith(("ours", "plain")):
        from capture import WarmupManager

        made: dict[str, Any] = {}
        resources = work.setup
        object.__setattr__(work, "setup", lambda: made.setdefault("resources", resources()))
        manager = WarmupManager()
        report = manager.run(manager.plan(work), progress=False)
        result["seconds"] = _since_start()
        result["phases"] = {phase.name: phase.seconds for phase in report.phases}
        result["compiled"] = report.compiled
        result["compilers imported"] = [name for name in ("torch._dynamo", "torch._inductor") if name in sys.modules]
        result["failed units"] = [unit.reason for unit in report.units if unit.state == "failed"]
        runner = made["resources"].runner()
        result["replay_us"] = _replay_times(options, lambda size: runner.replay(size))
        return result
    step = work.setup().step
    _synchronize(options.device)
    result["weights"] = _since_start()
    if way == "floor":
        return {**result, "seconds": result["weights"]}
    graphs = _compile_and_capture(step, options)
    result["seconds"] = _since_start()
    result["replay_us"] = _replay_times(options, lambda size: graphs[size]())
    return result


def _compile_and_capture(step: Any, options: Any) -> dict[int, Callable[[], Any]]:
    """What a user without this package writes: the whole stack compiled with a dynamic batch, a graph per size."""
    import torch

    def layers(hidden_states: torch.Tensor, metadata: Any, caches: list[torch.Tensor]) -> torch.Tensor:
        for block, kv_cache in zip(step.blocks, caches, strict=True):
            hidden_states = block(hidden_states, metadata.positions, kv_cache, metadata)
        return hidden_states

    compiled = torch.compile(layers, fullgraph=True, dynamic=True)

    def run(hidden_states: torch.Tensor, block_table: torch.Tensor, seq_lens: torch.Tensor) -> torch.Tensor:
        step.plan.update(block_table, seq_lens)
        return compiled(hidden_states, step.plan.at(seq_lens.shape[0]), step.cache.layers)

    generator = torch.Generator(options.device).manual_seed(0)
    graphs: dict[int, Callable[[], Any]] = {}
    pool = torch.cuda.graph_pool_handle() if options.device.startswith("cuda") else None
    for size in sorted(options.batch_sizes, reverse=True):
        inputs = step.inputs(size, generator)
        with torch.no_grad():
            run(**inputs)
            if pool is None:
                graphs[size] = partial(run, **inputs)
                continue
            _synchronize(options.device)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                run(**inputs)
            graphs[size] = partial(_replay, graph, inputs)
    _synchronize(options.device)
    return graphs


def _replay(graph: Any, inputs: object) -> None:
    """``inputs`` is only kept alive: the graph reads their memory."""
    graph.replay()


def _replay_times(options: Any, replay: Callable[[int], Any]) -> dict[str, float]:
    """Median microseconds of a replay at the smallest and the largest size."""
    import torch

    times = {}
    for size in sorted({min(options.batch_sizes), max(options.batch_sizes)}):
        samples = []
        with torch.no_grad():
            for _ in range(30):
                _synchronize(options.device)
                start = time.perf_counter()
                replay(size)
                _synchronize(options.device)
                samples.append(time.perf_counter() - start)
        times[str(size)] = round(sorted(samples)[len(samples) // 2] * 1e6, 1)
    return times


def _synchronize(device: str) -> None:
    import torch

    if device.startswith("cuda"):
        torch.cuda.synchronize()


def _since_start() -> float:
    return round(time.time() - float(os.environ[_STARTED]), 2)


def _print(rows: dict[str, dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("way", "seconds", "compiled", "replay us by batch size", "phases")
    for way, row in rows.items():
        phases = ", ".join(f"{name} {seconds:.2f}" for name, seconds in row.get("phases", {}).items() if seconds)
        replays = ", ".join(f"{size}: {us:,.0f}" for size, us in row.get("replay_us", {}).items())
        table.add_row(way, str(row.get("seconds", row.get("failed"))), str(row.get("compiled", "")), replays, phases)
    Console(width=200 if not sys.stdout.isatty() else None).print(table)


if __name__ == "__main__":
    main()
