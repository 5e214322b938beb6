"""Kernels that were built without the GPU, on the GPU: found under its keys, loaded, right."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from triton.runtime import cache as triton_cache

from capture import BuildOptions, CompileWatch, WarmupManager, WarmupReport, WarmupSpec
from capture.bundle import pack, unpack
from mla_ops.backends.triton.launch import arch_of_device
from mla_ops.warmup import spec
from tests.warmup import kernel_toy
from tests.warmup.test_ahead import CONFIG

pytestmark = pytest.mark.gpu


def run(cache: Path, made: WarmupSpec) -> WarmupReport:
    manager = WarmupManager(cache)
    report = manager.run(manager.plan(made), progress=False)
    assert report.ok, report.units
    return report


def carried(cache: Path, made: WarmupSpec, other: Path) -> None:
    """Build ``made``, and bring it to another cache as a bundle."""
    run(cache, made)
    bundle = pack(WarmupManager(cache).plan(made).directory, f"{other}.tar.zst")
    unpack(bundle.url, digest=bundle.digest, cache_dir=other, device="cuda")


def rekeyed(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on Triton's keys are those of another build of the same version."""
    key = triton_cache.triton_key()
    monkeypatch.setattr(triton_cache, "triton_key", lambda: f"{key}, built for another Python")


def test_a_kernel_built_ahead_is_launched_without_compiling(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = arch_of_device(torch.device("cuda"))
    ahead = kernel_toy.factory(BuildOptions(target=target))
    carried(cache, ahead, tmp_path / "other")
    rekeyed(monkeypatch)
    here = WarmupSpec("toy", "cuda", ahead.backend, ahead.fields, ahead.setup, kernel_toy.units(None))
    assert run(tmp_path / "other", here).compiled == 0
    x = torch.randn(4, 64, device="cuda")
    expected = torch.cat([x[:, :63] * 2, x[:, 63:]], dim=1)
    with CompileWatch() as watch:
        kernel_toy.scale_rows[(4,)](x, 64, 63, SCALE=2.0, BLOCK=64, num_warps=4)
    assert watch.compiled == 0
    assert torch.equal(x, expected)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA or HIP devices")
def test_a_cache_made_on_one_device_serves_another(cache: Path) -> None:
    def options(device: str) -> BuildOptions:
        sizes = {"layers": 2, "page_size": 16, "max_seq_len": 128, "batch_sizes": (1, 4), "backend": "triton"}
        return BuildOptions(device=device, compile=False, **sizes)  # type: ignore[arg-type]

    assert run(cache, spec(CONFIG, options("cuda:0"))).compiled > 0
    report = run(cache, spec(CONFIG, options("cuda:1")))
    assert report.compiled == 0
    assert {unit.state for unit in report.units} == {"hit"}
    assert all(bucket.verified for bucket in report.buckets)


def test_a_model_built_ahead_is_captured_and_proved_without_compiling(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"layers": 2, "page_size": 16, "max_seq_len": 128, "batch_sizes": (1, 4), "backend": "triton"}
    target = arch_of_device(torch.device("cuda"))
    carried(cache, spec(CONFIG, BuildOptions(target=target, **sizes)), tmp_path / "other")  # type: ignore[arg-type]
    rekeyed(monkeypatch)
    here = spec(CONFIG, BuildOptions(device="cuda", compile=False, **sizes))  # type: ignore[arg-type]
    report = run(tmp_path / "other", here)
    assert report.compiled == 0
    assert all(bucket.verified for bucket in report.buckets)
