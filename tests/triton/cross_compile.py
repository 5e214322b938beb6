"""Compiles every variant for a target that need not be there, and prints a JSON line of its resources for each.

python cross_compile.py gfx942
"""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget

from mla_ops import MLAConfig
from mla_ops.backends.triton import variants
from mla_ops.backends.triton.launch import Launch
from mla_ops.backends.triton.ragged import pad_launch, unpad_launch

TARGETS = {
    "sm_90": GPUTarget("cuda", 90, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
    "gfx950": GPUTarget("hip", "gfx950", 64),
}


class OfflineDriver:
    """As much of a driver as a compilation asks for."""

    def __init__(self, target: GPUTarget) -> None:
        self.target = target

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def ragged_launches(config: MLAConfig) -> list[Launch]:
    """What FlashMLA's calls without a plan launch around it, which serve no other backend and are no variants."""
    rows = (config.num_heads, config.latent_dim)
    q, padded = torch.empty(2, *rows, dtype=torch.bfloat16), torch.empty(2, 1, *rows, dtype=torch.bfloat16)
    out, lse = torch.empty(2, config.num_heads, config.kv_lora_rank, dtype=torch.bfloat16), torch.empty(2, *rows[:1])
    index, lens, table = (torch.empty(shape, dtype=torch.int32) for shape in ((3,), (2,), (2, 4)))
    return [
        pad_launch(q, index, index, index, lens, padded, table, lens, page_size=64),
        unpad_launch(out.unsqueeze(1), lse.unsqueeze(2), index, out, lse),
    ]


def resources(compiled: Any) -> dict[str, int]:
    """Registers, bytes spilled and bytes of shared memory, from the disassembly or the code object's notes."""
    shared = {"shared": compiled.metadata.shared}
    if "amdgcn" in compiled.asm:
        note = compiled.asm["amdgcn"]
        keys = ("vgpr_count", "private_segment_fixed_size")
        value = {key: int(_match(rf"\.{key}:\s+(\d+)", note)[1]) for key in keys}
        return {"registers": value["vgpr_count"], "stack": value["private_segment_fixed_size"], **shared}
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        text = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True).stdout
    found = _match(r"REG:(\d+) STACK:(\d+)", text)
    return {"registers": int(found[1]), "stack": int(found[2]), **shared}


def _match(pattern: str, text: str) -> re.Match[str]:
    found = re.search(pattern, text)
    assert found, f"{pattern} is not in {text[-400:]}"
    return found


def main(arch: str) -> None:
    """Compile and print."""
    triton.runtime.driver.set_active(OfflineDriver(TARGETS[arch]))
    for heads in (16, 32, 128) if arch == "sm_90" else (16, 128):
        config = dataclasses.replace(MLAConfig.preset("deepseek-v3"), num_heads=heads)
        launches = variants(config, dtype=torch.bfloat16, arch=arch)
        if arch == "sm_90":
            of_fp8 = variants(config, dtype=torch.bfloat16, kv_dtype=torch.float8_e4m3fn, arch=arch)
            launches += [launch for launch in of_fp8 if launch.name.startswith("decode")]
            launches += ragged_launches(config)
        for launch in launches:
            print(json.dumps({"kernel": launch.name, "heads": heads, **resources(launch.compile())}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
