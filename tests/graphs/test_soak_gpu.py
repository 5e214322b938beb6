"""A thousand random replays of MLA's step for each backend, and a soak: no growth, no compilation.

``--soak-minutes 10`` soaks for ten minutes.
"""

from __future__ import annotations

import importlib.util
import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from capture import BuildOptions, GraphRunner, no_compile
from capture.tolerance import distance, same_bits
from mla_ops import MLAConfig
from mla_ops.decode_step import DecodeStep

pytestmark = pytest.mark.gpu

CONFIG = MLAConfig(
    hidden_size=512, num_heads=16, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128
)
SIZES = (1, 2, 4, 8, 16, 32)
QUERY_LENS = (1, 2, 4)
REPLAYS = 1000
_SILENCE = 20.0  # seconds between two lines of the soak, with -s
_MIB = 2**20


@pytest.fixture(params=["reference", "triton", "flash_mla"])
def runners(request: pytest.FixtureRequest) -> Iterator[dict[int, GraphRunner]]:
    """A captured runner for each query length, over one pool."""
    backend = request.param
    if backend == "flash_mla" and importlib.util.find_spec("flash_mla") is None:
        pytest.skip("needs flash_mla (pip install sgl-flash-mla)")
    if backend == "flash_mla" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("flash_mla needs sm_90")
    pool = torch.cuda.graph_pool_handle()
    made = {}
    for query_len in QUERY_LENS:
        options = BuildOptions(batch_sizes=SIZES, query_len=query_len, backend=backend, device="cuda", max_seq_len=2048)
        step = DecodeStep(CONFIG, options, num_layers=2, pages_per_request=32)
        made[query_len] = GraphRunner(
            step,
            batch_sizes=SIZES,
            example_inputs=step.inputs(SIZES[-1], step.generator),
            batch_dims={"hidden_states": 0, "block_table": 0, "seq_lens": 0},
            state={f"layer {index}": layer for index, layer in enumerate(step.cache.layers)},
            make_inputs=step.inputs,
            poison_state=step.poison,
            pool=pool,
        )
        made[query_len].capture()
    yield made
    for runner in made.values():
        runner.close()


def eager_at_the_buckets_shape(runner: GraphRunner, inputs: dict[str, Tensor], size: int, bucket: int) -> Tensor:
    runner.static_inputs.fill(inputs, size, bucket)
    views = {name: view.clone() for name, view in runner.static_inputs.views(bucket).items()}
    out: Tensor = runner.step(**views)[: size * runner.step.options.query_len]
    return out.clone()


def test_a_thousand_random_replays_equal_eager(runners: dict[int, GraphRunner]) -> None:
    generator = torch.Generator("cuda").manual_seed(random.getrandbits(32))
    bitwise, wrong = 0, []
    with torch.no_grad():
        for index in range(REPLAYS):
            runner = runners[random.choice(QUERY_LENS)]
            size = random.randint(1, SIZES[-1])
            bucket = min(bucket for bucket in SIZES if bucket >= size)
            inputs = runner.step.inputs(size, generator)
            wanted = eager_at_the_buckets_shape(runner, inputs, size, bucket)
            got = runner(**inputs)
            bitwise += same_bits(got, wanted)
            found = distance(got, wanted)
            if not found.ok:
                wrong.append(f"replay {index}, query_len {runner.step.options.query_len}, {size} live: {found.reason}")
    assert not wrong, wrong[:5]
    assert bitwise == REPLAYS  # the same kernels on the same shapes


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_soak_at_changing_batch_sizes_grows_nothing_and_compiles_nothing(
    runners: dict[int, GraphRunner], request: pytest.FixtureRequest
) -> None:
    generator = torch.Generator("cuda").manual_seed(random.getrandbits(32))
    prepared = [
        (runner, [runner.step.inputs(size, generator) for size in range(1, SIZES[-1] + 1)])
        for runner in runners.values()
    ]

    def serve(calls: int) -> None:
        for _ in range(calls):
            runner, inputs = random.choice(prepared)
            runner(**random.choice(inputs))
        torch.cuda.synchronize()

    def memory() -> dict[str, int]:
        return {
            "allocated": torch.cuda.memory_allocated(),
            "reserved": torch.cuda.memory_reserved(),
            "resident": resident_bytes(),
        }

    serve(2000)  # every size has been seen
    before, begun, served, spoken = memory(), time.monotonic(), 0, time.monotonic()
    name, minutes = request.node.name, request.config.getoption("--soak-minutes")

    def say(what: str) -> dict[str, int]:
        growth = {kind: now - before[kind] for kind, now in memory().items()}
        print(f"{name}: {what} {served} replays in {time.monotonic() - begun:.0f} s, bytes grown: {growth}", flush=True)
        return growth

    with no_compile():
        while time.monotonic() < begun + 60 * minutes:
            serve(500)
            served += 500
            if time.monotonic() - spoken > _SILENCE:
                say("so far")
                spoken = time.monotonic()
    growth = say("done, no compilation:")
    assert served
    assert growth["allocated"] <= 0
    assert growth["reserved"] <= 0
    assert growth["resident"] <= 16 * _MIB
