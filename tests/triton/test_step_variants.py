"""What a warm-up compiles is what a step launches: the same constants, alignments and divisibilities."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import mla_ops
from capture import BuildOptions

# What the kernels exempt from specialisation.
EXEMPT = {
    *("softmax_scale_log2", "num_requests", "num_heads", "max_seqlen_q", "programs", "num_tokens", "num_rows"),
    *("num_slots", "page_size", "scaling_window"),
    *("requests", "width", "stride_request", "stride_page", "stride_lens", "most_requests", "max_pages", "query_len"),
}


def specialisation(launch: Any) -> tuple[object, ...]:
    """What Triton specialises a launch's code to."""
    parts: list[object] = [launch.name, *sorted(launch.options.items())]
    for name, value in launch.args.items():
        if isinstance(value, Tensor):
            parts.append((name, value.dtype, value.data_ptr() % 16 == 0))
        elif name in EXEMPT:
            continue
        elif isinstance(value, int) and not name.isupper():
            parts.append((name, value == 1, value % 16 == 0))
        elif isinstance(value, float) and not name.isupper():
            parts.append((name, float))  # never by value
        else:
            parts.append((name, str(value)))
    return tuple(parts)


CONFIGS = {
    "deepseek-v3": dataclasses.replace(mla_ops.PRESETS["deepseek-v3"], hidden_size=512, q_lora_rank=512),
    "mistral-small-4": dataclasses.replace(mla_ops.PRESETS["mistral-small-4"], hidden_size=512, q_lora_rank=512),
    "minicpm3": dataclasses.replace(mla_ops.PRESETS["minicpm3"], hidden_size=512, q_lora_rank=512),
    "two heads of rank 64": mla_ops.MLAConfig(
        hidden_size=64, num_heads=2, kv_lora_rank=64, qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=32
    ),
}


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="this is the process with the interpreter")
@pytest.mark.parametrize("model", CONFIGS)
def test_a_step_launches_nothing_that_variants_does_not_list(model: str) -> None:
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-m", "tests.triton.test_step_variants", model],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        cwd=root,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    launched, unlisted = map(int, done.stdout.split())
    assert launched > 8
    assert unlisted == 0


def main() -> None:
    """Record the launches of a decode step at several sizes, as on an H200, without running them."""
    from mla_ops.backends.triton import cache, decode, heads, launch, merge, prefill, products, rows, variants
    from mla_ops.decode_step import DecodeStep

    for module in (cache, decode, heads, merge, prefill, products, rows):
        for name, value in (("arch_of", "sm_90"), ("compute_units", 132)):
            if hasattr(module, name):
                setattr(module, name, lambda tensor, value=value: value)
    launched = set()
    launch.Launch.run = lambda self: launched.add(specialisation(self))  # type: ignore[method-assign]
    config = CONFIGS[sys.argv[1]]
    options = BuildOptions(batch_sizes=(1, 2, 8, 9, 40), dtype="bfloat16", backend="triton", compile=False)
    step = DecodeStep(config, options, 1)
    step.plan.device = torch.device("cuda")  # where an update is a kernel
    table = torch.zeros(40, step.plan.max_pages, dtype=torch.int32)
    with torch.no_grad():
        for step.plan._table in (table, None):
            step.plan._write = step.plan._writer()
            for size in options.batch_sizes:
                step(**step.inputs(size, step.generator))
    listed = {specialisation(x) for x in variants(config, dtype=torch.bfloat16, arch="sm_90")}
    print(len(launched), len(launched - listed))


if __name__ == "__main__":
    main()
