"""Every kernel compiles for every architecture, without its device: no spills, shared memory within the chip's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SHARED_LIMIT = {"gfx942": 64 << 10, "gfx950": 160 << 10, "sm_90": 227 << 10}
# Bytes of stack of the kernels that have any: a few words of a warpgroup, outside of its inner loop.
STACK = {
    ("sm_90", "decode_hopper_kernel"): 64,
    ("sm_90", "decode_hopper_narrow_kernel"): 32,
    ("sm_90", "prefill_hopper_kernel"): 48,
}


@pytest.mark.parametrize("arch", sorted(SHARED_LIMIT))
def test_every_variant_fits_its_chip(arch: str, tmp_path: Path) -> None:
    script = Path(__file__).with_name("cross_compile.py")
    root = script.parents[2]
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env |= {"TRITON_CACHE_DIR": str(tmp_path), "TRITON_DEFAULT_FP_FUSION": "1", "PYTHONPATH": str(root)}
    command = [sys.executable, str(script), arch]
    run = subprocess.run(command, env=env, cwd=root, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-2000:]
    lines = [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]
    around = {"rms_norm_kernel", "norm_rope_write_kernel", "absorb_kernel", "expand_kernel"}
    ragged = {"pad_kernel", "unpad_kernel"} if arch == "sm_90" else set()
    assert {line["kernel"] for line in lines} > {
        "merge_kernel",
        "merge_states_kernel",
        "write_kernel",
    } | around | ragged
    for line in lines:
        print(arch, line)
        assert line["shared"] <= SHARED_LIMIT[arch], line
        assert line["stack"] <= STACK.get((arch, line["kernel"]), 0), line
