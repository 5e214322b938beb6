"""``mla_ops.warmup.spec``: the MLA decode step as units, through the command and in fresh processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from capture import BuildOptions, VerificationError
from mla_ops import MLAConfig
from mla_ops.decode_step import DecodeStep
from mla_ops.warmup import spec

CONFIG = {
    "model_type": "deepseek_v3",
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "rope_scaling": {"type": "yarn", "factor": 4, "original_max_position_embeddings": 32, "mscale_all_dim": 1.0},
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG))
    return path


def options(**changes: Any) -> BuildOptions:
    return BuildOptions(
        **{"batch_sizes": (1, 2, 3), "page_size": 4, "dtype": "float32", "max_seq_len": 64, "compile": False, **changes}
    )


def build(model: Path, tmp_path: Path, *more: str, command: str = "build") -> tuple[int, dict[str, Any], str]:
    arguments = ["--model", str(model), "--batch-sizes", "1,2", "--dtype", "float32", "--device", "cpu"]
    arguments += ["--max-seq-len", "64", "--page-size", "4", "--cache-dir", str(tmp_path / "cache"), "--json", *more]
    done = subprocess.run(
        [sys.executable, "-m", "capture.cli", command, *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "2"},
        check=False,
    )
    return done.returncode, json.loads(done.stdout), done.stderr


def test_second_process_is_warm_and_a_flipped_byte_is_rebuilt(model: Path, tmp_path: Path) -> None:
    """The main job: cold, warm, status, and damage, each in a process of its own."""
    code, cold, _ = build(model, tmp_path)
    assert (code, cold["cold"]) == (0, True)
    assert cold["compiled"] >= 1
    assert [bucket["batch_size"] for bucket in cold["buckets"]] == [1, 2]
    assert all(bucket["verified"] for bucket in cold["buckets"])
    assert [phase["name"] for phase in cold["phases"]] == [
        *("import", "context", "weights", "kernels", "compile", "capture", "verify")
    ]

    code, warm, _ = build(model, tmp_path)
    assert (code, warm["cold"], warm["compiled"]) == (0, False, 0)
    assert {unit["state"] for unit in warm["units"]} == {"hit"}
    assert warm["fingerprint"] == cold["fingerprint"]

    code, status, _ = build(model, tmp_path, command="status")
    assert code == 0
    assert {unit["state"] for unit in status["units"]} == {"hit"}

    files = [path for path in (tmp_path / "cache").rglob("*") if path.is_file() and "inductor" in path.parts]
    damaged = max(files, key=lambda path: path.stat().st_size)
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(content)
    code, rebuilt, said = build(model, tmp_path)
    assert code == 0
    assert any(damaged.name in line for line in rebuilt["quarantined"])
    assert damaged.name in said
    assert rebuilt["compiled"] >= 1
    assert build(model, tmp_path)[1]["compiled"] == 0


@pytest.mark.parametrize("query_len", [1, 2])
def test_every_graph_of_the_step_is_proved(query_len: int) -> None:
    config = MLAConfig.from_hf(CONFIG)
    runner = DecodeStep(config, options(query_len=query_len), 2).runner()
    report = runner.capture(verify=True)
    assert report.verification is not None
    assert report.verification.ok
    assert all(bucket.bitwise for bucket in report.verification.buckets)


@pytest.mark.parametrize("kv_dtype", ["float8_e4m3fn", "float8_e4m3fnuz"])
def test_a_step_over_an_fp8_cache_is_proved(kv_dtype: str) -> None:
    DecodeStep(MLAConfig.from_hf(CONFIG), options(kv_dtype=kv_dtype), 1).runner().capture()


def test_a_step_with_frozen_lengths_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The proof can fail: a plan that keeps the lengths of its first update."""
    step = DecodeStep(MLAConfig.from_hf(CONFIG), options(), 1)
    update, first = step.plan.update, []

    def frozen(block_table: torch.Tensor, seq_lens: torch.Tensor) -> None:
        first.append(seq_lens.clone().fill_(5))
        update(block_table, first[0][: len(seq_lens)] if len(first[0]) >= len(seq_lens) else seq_lens)

    monkeypatch.setattr(step.plan, "update", frozen)
    with pytest.raises(VerificationError):
        step.runner().capture()


def test_fingerprint_fields_name_the_model_and_not_the_batch_sizes() -> None:
    config = MLAConfig.from_hf(CONFIG)
    first = spec(config, options(layers=2)).fields
    assert first == spec(config, options(layers=3, batch_sizes=(1,))).fields
    for change in ({"page_size": 8}, {"query_len": 2}, {"dtype": "float16"}, {"tp": 2}, {"max_seq_len": 32}):
        assert first != spec(config, options(layers=2, **change)).fields, change


TIERS = [
    pytest.param("cpu", None, True, "the block is compiled", id="cpu"),
    pytest.param("cpu", True, True, "the block is compiled, as asked for", id="cpu, compiled"),
    pytest.param("cpu", False, False, "the block is not compiled, as asked for", id="cpu, not compiled"),
    pytest.param("cuda", None, False, "the block runs our kernels", id="cuda"),
    pytest.param("cuda", False, False, "the block runs our kernels", id="cuda, not compiled"),
    pytest.param("cuda", True, True, "the block is compiled around our kernels, as asked for", id="cuda, compiled"),
]


@pytest.mark.parametrize(("device", "asked", "compiled", "why"), TIERS)
def test_the_best_tier_is_taken_and_said(
    device: str, asked: bool | None, compiled: bool, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch = pytest.importorskip("mla_ops.backends.triton.launch")
    monkeypatch.setattr(launch, "arch_of_device", lambda device: "sm_90")
    made = spec(MLAConfig.from_hf(CONFIG), options(layers=2, device=device, compile=asked, dtype="bfloat16"))
    assert any(unit.kind == "compiled" for unit in made.units) is compiled
    assert why in made.backend[1]
    kernels = " ".join(unit.key for unit in made.units if unit.kind == "kernel")
    assert all(name in kernels for name in ("rms_norm", "absorb", "expand", "norm_rope_write")) is (device == "cuda")


def test_without_a_cxx_compiler_a_cpu_block_is_plain_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    made = spec(MLAConfig.from_hf(CONFIG), options(layers=2, compile=None))
    assert not any(unit.kind == "compiled" for unit in made.units)
    assert "the block is not compiled, because this machine has no C++ compiler" in made.backend[1]


@pytest.mark.parametrize(
    ("model", "changes", "message"),
    [
        pytest.param("nothing", {}, "model must be a preset", id="no such model"),
        pytest.param("deepseek-v3", {"tp": 3}, "tp_size must divide", id="heads"),
        pytest.param("deepseek-v3", {"dtype": "int32"}, "dtype must name a floating", id="dtype"),
        pytest.param("deepseek-v3", {"kv_dtype": "nonsense"}, "kv_dtype must name", id="kv_dtype"),
        pytest.param("deepseek-v3", {"dtype": "float8_e4m3fn"}, "dtype must name a floating", id="fp8 weights"),
        pytest.param("deepseek-v3", {"layers": 62}, "layers must be at most the model's 61, got 62", id="layers"),
        pytest.param("deepseek-v3", {"kv_dtype": "float16"}, "kv_dtype must be dtype=float32 or", id="kv_dtype alone"),
    ],
)
def test_what_does_not_fit_is_refused(model: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        spec(model, options(**{"layers": 1, **changes}))


def test_without_compile_no_compiler_is_imported(model: Path, tmp_path: Path) -> None:
    script = (
        "import sys; from capture.cli import main; "
        f"code = main(['build', '--model', {str(model)!r}, '--batch-sizes', '1', '--dtype', 'float32',"
        f" '--device', 'cpu', '--no-compile', '--quiet', '--max-seq-len', '64',"
        f" '--cache-dir', {str(tmp_path / 'cache')!r}]); "
        "print(code, [m for m in ('torch._dynamo', 'torch._inductor', 'sympy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[0] == "0 []"


@pytest.mark.parametrize(
    ("layers", "sizes", "named"),
    [(1, (4,), "1 layer, batch size 4"), (2, (1, 2), "2 layers, batch sizes 1,2")],
    ids=["one", "two"],
)
def test_unit_keys_name_layers_and_batch_sizes(layers: int, sizes: tuple[int, ...], named: str, model: Path) -> None:
    made = spec(model, options(layers=layers, batch_sizes=sizes))
    assert made.units[-2].key == f"graphs of the decode step, query_len 1, {named}"
