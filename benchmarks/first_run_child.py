"""One row of :mod:`benchmarks.first_run`, in a process of its own: ``WAY OPTIONS ARTIFACTS``; prints one JSON object.

Nothing heavy is imported before its way needs it: the import is a phase of what is measured.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.first_run import STARTED

if TYPE_CHECKING:
    from capture import BuildOptions, WarmupSpec

__all__ = ["main"]

_COMPILE = {"ours": None, "ours compiled": True}


def main() -> None:
    """Run the way that the command line names."""
    way, given, artifacts = sys.argv[1:]
    options = json.loads(given)
    model, options["batch_sizes"] = options.pop("model"), tuple(options["batch_sizes"])
    kind, _, state = way.rpartition(" ")
    clock = _Clock()
    if way == "floor":
        row = _floor(model, options, clock)
    elif kind in _COMPILE:
        row = _ours(model, {**options, "compile": _COMPILE[kind]}, clock)
    elif kind == "Hugging Face":
        row = _hugging_face(options, clock)
    else:
        row = _torch_compile(model, options, clock, kind, state, Path(artifacts))
    print(json.dumps(row))


class _Clock:
    """Seconds since the process was started, by phase."""

    def __init__(self) -> None:
        self.phases: dict[str, float] = {}
        self._last = float(os.environ[STARTED])

    def mark(self, phase: str, device: str = "cpu") -> None:
        """What went by since the last mark was ``phase``; of a GPU, what it was given to do is done."""
        if device.startswith("cuda"):
            import torch

            torch.cuda.synchronize()
        now = time.time()
        self.phases[phase] = round(self.phases.get(phase, 0.0) + now - self._last, 3)
        self._last = now

    def row(self, **more: Any) -> dict[str, Any]:
        return {"seconds": round(sum(self.phases.values()), 3), "phases": self.phases, **more}


def _floor(model: str, options: dict[str, Any], clock: _Clock) -> dict[str, Any]:
    import torch

    clock.mark("import")
    torch.zeros(1, device=options["device"])
    clock.mark("context", options["device"])
    work, _ = _spec(model, options)
    clock.mark("ours")
    del clock.phases["ours"]
    work.setup()
    clock.mark("weights", options["device"])
    return clock.row()


def _ours(model: str, options: dict[str, Any], clock: _Clock) -> dict[str, Any]:
    from capture import WarmupManager, prepare

    device = options["device"]
    prepare("cuda:0" if device == "cuda" else device)  # as a server would, before it imports torch
    work, made = _spec(model, options)
    setup = cache(work.setup)  # to reach the runner afterwards
    manager = WarmupManager()
    report = manager.run(manager.plan(replace(work, setup=setup)), progress=False)
    clock.mark("all", device)
    runner = setup().runner()
    return {
        "seconds": clock.phases["all"],
        "phases": {phase.name: phase.seconds for phase in report.phases},
        "compiled": report.compiled,
        "backend": list(report.backend),
        "compilers imported": [name for name in ("torch._dynamo", "torch._inductor") if name in sys.modules],
        "failed units": [unit.reason for unit in report.units if unit.state == "failed"],
        "critical path": report.critical_path_line,
        "notes": list(report.notes),
        "trials": sorted({bucket.trials for bucket in report.buckets}),
        "replay_us": _replay_times(made, lambda size: runner.replay(size)),
    }


def _torch_compile(
    model: str, options: dict[str, Any], clock: _Clock, kind: str, state: str, artifacts: Path
) -> dict[str, Any]:
    """What a user without this package writes: the whole stack compiled, a graph for each size."""
    import torch

    work, made = _spec(model, options)
    clock.mark("import")
    torch.zeros(1, device=made.device)
    clock.mark("context", made.device)
    step = work.setup().step
    clock.mark("weights", made.device)
    if kind == "mega-cache":
        torch.compiler.load_cache_artifacts(artifacts.read_bytes())
        clock.mark("load artifacts")
    graphs = _compile_and_capture(step, made, clock, dynamic=kind != "torch.compile static")
    replays = _replay_times(made, lambda size: graphs[size]())
    if kind == "torch.compile dynamic" and state == "cold":
        saved = torch.compiler.save_cache_artifacts()
        if saved is not None:
            artifacts.write_bytes(saved[0])
    return clock.row(replay_us=replays)


def _compile_and_capture(
    step: Any, options: BuildOptions, clock: _Clock, *, dynamic: bool
) -> dict[int, Callable[[], Any]]:
    import torch

    def layers(hidden_states: torch.Tensor, metadata: Any, caches: list[torch.Tensor]) -> torch.Tensor:
        for block, kv_cache in zip(step.blocks, caches, strict=True):
            hidden_states = block(hidden_states, metadata.positions, kv_cache, metadata)
        return hidden_states

    compiled = torch.compile(layers, fullgraph=True, dynamic=dynamic)
    torch._dynamo.config.recompile_limit = len(options.batch_sizes) + 8

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
            clock.mark("compile", options.device)
            if pool is None:
                graphs[size] = partial(run, **inputs)
                continue
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                run(**inputs)
            graphs[size] = partial(_replay, graph, inputs)
            clock.mark("capture", options.device)
    return graphs


def _hugging_face(options: dict[str, Any], clock: _Clock) -> dict[str, Any]:
    import torch

    try:
        from transformers import DeepseekV3Config, DeepseekV3Model, StaticCache
    except ImportError as error:
        return {"seconds": None, "word": f"skipped: {error}"}
    device, layers = options["device"], options["layers"]
    clock.mark("import")
    torch.zeros(1, device=device)
    clock.mark("context", device)
    config = DeepseekV3Config(
        num_hidden_layers=layers, first_k_dense_replace=layers, intermediate_size=64, vocab_size=256
    )
    with torch.device(device), torch.no_grad():
        torch.set_default_dtype(getattr(torch, options["dtype"]))
        model: Any = DeepseekV3Model(config)
        clock.mark("weights", device)
        step: Any = torch.compile(model, mode="reduce-overhead", fullgraph=True, dynamic=False)
        torch._dynamo.config.recompile_limit = len(options["batch_sizes"]) + 8
        for size in sorted(options["batch_sizes"], reverse=True):
            rows: Any = StaticCache(config=config, max_cache_len=192)
            tokens, position = torch.zeros(size, 1, dtype=torch.long), torch.zeros(1, dtype=torch.long)
            for _ in range(3):  # the second call records the graph, the third replays it
                step(input_ids=tokens, past_key_values=rows, cache_position=position)
            clock.mark("compile", device)
    return clock.row()


def _spec(model: str, options: dict[str, Any]) -> tuple[WarmupSpec, BuildOptions]:
    from capture import BuildOptions
    from mla_ops.warmup import spec

    made = BuildOptions(**options)
    return spec(model, made), made


def _replay(graph: Any, inputs: object) -> None:
    """``inputs`` is only kept alive: the graph reads their memory."""
    graph.replay()


def _replay_times(options: BuildOptions, replay: Callable[[int], Any]) -> dict[str, float]:
    """Median microseconds of a replay at the smallest and the largest size."""
    import torch

    times = {}
    for size in sorted({min(options.batch_sizes), max(options.batch_sizes)}):
        samples = []
        with torch.no_grad():
            for _ in range(30):
                start = time.perf_counter()
                replay(size)
                if options.device.startswith("cuda"):
                    torch.cuda.synchronize()
                samples.append(time.perf_counter() - start)
        times[str(size)] = round(sorted(samples)[len(samples) // 2] * 1e6, 1)
    return times


if __name__ == "__main__":
    main()
