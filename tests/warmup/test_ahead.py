"""A model's Triton kernels built without its GPU."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

pytest.importorskip("triton")

from triton.runtime import cache as triton_cache

from capture import BuildOptions, Fingerprint, WarmupManager, WarmupReport, WarmupSpec
from mla_ops import MLAConfig
from mla_ops import warmup as mla_warmup
from mla_ops.warmup import spec

CONFIG = MLAConfig(
    hidden_size=64,
    num_heads=2,
    q_lora_rank=None,
    kv_lora_rank=64,
    qk_nope_head_dim=32,
    qk_rope_head_dim=16,
    v_head_dim=32,
    max_position_embeddings=256,
)


def ahead(target: str, **options: object) -> WarmupSpec:
    return spec(CONFIG, BuildOptions(layers=1, page_size=16, target=target, **options))  # type: ignore[arg-type]


def run(cache: Path, made: WarmupSpec) -> WarmupReport:
    manager = WarmupManager(cache)
    report = manager.run(manager.plan(made), progress=False)
    assert report.ok, report.units
    return report


def test_every_kernel_of_a_model_is_built_once_and_by_a_worker(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")  # unset, Triton 3.9 warns that its default will change
    monkeypatch.setattr("capture.workers.usable_cores", lambda: 2)
    made = ahead("gfx942")
    names = {unit.key.split()[0] for unit in made.units}
    assert names >= {"decode_kernel", "merge_kernel", "write_kernel", "gather_kernel", "prefill_kernel"}
    cold = run(cache, made)
    assert cold.compiled == len(made.units)
    assert all(unit.worker is not None for unit in cold.units)
    monkeypatch.setattr(triton_cache, "triton_key", lambda: "another libtriton")
    assert run(cache, made).compiled == 0


def test_a_cache_above_2_gib_is_another_kernel_on_rocm_alone() -> None:
    def large(target: str) -> int:
        return sum("above 2 GiB" in unit.key for unit in ahead(target).units)

    assert large("gfx942") == sum("kv_cache" in unit.key for unit in ahead("gfx942").units) / 2 > 0
    assert large("sm_90") == 0


def test_both_machines_agree_on_the_fields(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mla_warmup, "_kernel_units", lambda *arguments: ())
    there = spec(CONFIG, BuildOptions(layers=1, page_size=16, device="cuda", backend="triton"))
    assert ahead("sm_90").fields == there.fields


def test_every_device_of_a_kind_has_the_same_fields_and_units(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mla_ops.backends.triton.launch.arch_of_device", lambda device: "sm_90")
    first, second = (
        spec(CONFIG, BuildOptions(layers=1, page_size=16, device=device, backend="triton"))
        for device in ("cuda:0", "cuda:1")
    )
    assert first.fields == second.fields
    assert [unit.key for unit in first.units] == [unit.key for unit in second.units]
    assert any(unit.kind == "kernel" for unit in first.units)


def test_a_backend_without_kernels_to_build_is_refused() -> None:
    with pytest.raises(ValueError, match="only the triton backend's kernels can be built ahead"):
        ahead("gfx942", backend="reference")


OPTIONS = {
    "dtype": "float16",
    "kv_dtype": "float8_e4m3fn",
    "page_size": 32,
    "query_len": 2,
    "max_seq_len": 128,
}
FIELDS = sorted(name for name in CONFIG.to_dict() if name not in ("rope_scaling", "num_heads"))


def fields(config: MLAConfig = CONFIG, **options: object) -> Fingerprint:
    chosen = BuildOptions(**{"layers": 1, "page_size": 16, "backend": "reference", **options})  # type: ignore[arg-type]
    return Fingerprint(spec(config, chosen).fields)


@pytest.mark.parametrize("name", OPTIONS)
def test_another_option_is_another_fingerprint_and_named(name: str) -> None:
    named = {row[0] for row in fields().diff(fields(**{name: OPTIONS[name]}))}
    assert named == ({"dtype", "kv_dtype"} if name == "dtype" else {name})


@pytest.mark.parametrize("name", FIELDS)
def test_another_dimension_of_a_model_is_another_fingerprint_and_named(name: str) -> None:
    value = getattr(CONFIG, name)
    changed = not value if isinstance(value, bool) else (value or 16) * 2
    other = dataclasses.replace(CONFIG, **{name: changed})
    assert f"config.{name}" in {row[0] for row in fields().diff(fields(other))}


def test_batch_sizes_and_layers_do_not_enter() -> None:
    assert fields().digest == fields(batch_sizes=(3,)).digest == fields(layers=7).digest
