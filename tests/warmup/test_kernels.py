from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import triton
from triton.runtime import cache as triton_cache
from triton.runtime import driver

from capture import BuildOptions, CompileWatch, WarmupManager, WarmupReport, WarmupSpec
from capture import warmup as warmup_module
from capture.bundle import pack, unpack
from capture.errors import BundleError
from capture.fingerprint import environment_fields
from capture.kernels import KernelBuildUnit, prebuilt_kernels, target_driver
from tests.warmup import kernel_toy

TARGETS = ("gfx942", "gfx950", "sm_90")


@pytest.fixture(autouse=True)
def explicit_fusion(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")  # unset, Triton 3.9 warns that its default will change


def install_another_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if libtriton.so were another file, as it is for each Python version: every key of Triton's changes."""
    monkeypatch.setattr(triton_cache, "triton_key", lambda: "another libtriton")


@pytest.fixture
def on_gfx942(monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine's fields, but for a gfx942."""
    fields = {**environment_fields("cpu"), "arch": "gfx942:sramecc+:xnack-"}
    monkeypatch.setattr(warmup_module, "environment_fields", lambda device: fields)
    monkeypatch.setattr("capture.bundle.environment_fields", lambda device: fields)


def run(cache: Path, target: str | None = None) -> WarmupReport:
    manager = WarmupManager(cache)
    report = manager.run(manager.plan(kernel_toy.factory(BuildOptions(target=target))), progress=False)
    assert report.ok, report.units
    return report


def states(report: WarmupReport) -> list[str]:
    return [unit.state for unit in report.units]


@pytest.mark.parametrize("target", TARGETS)
def test_kernels_are_built_for_a_gpu_that_is_not_there(target: str, cache: Path) -> None:
    cold, warm = run(cache, target), run(cache, target)
    assert (cold.compiled, states(cold)) == (2, ["built", "built"])
    assert (warm.compiled, states(warm)) == (0, ["hit", "hit"])
    assert cold.device["arch"] == target
    suffix = "cubin" if target.startswith("sm") else "hsaco"
    assert len(list(cache.glob(f"*/triton/*/scale_rows.{suffix}"))) == 2


def test_targets_share_a_cache_and_nothing_in_it(cache: Path) -> None:
    assert [run(cache, target).compiled for target in TARGETS] == [2, 2, 2]
    assert [run(cache, target).compiled for target in TARGETS] == [0, 0, 0]
    assert len({path.parents[2] for path in cache.glob("*/triton/*/scale_rows.json")}) == 3


@pytest.mark.usefixtures("on_gfx942")
def test_the_target_machine_compiles_nothing(cache: Path) -> None:
    run(cache, "gfx942")
    first, second = run(cache), run(cache)
    assert (first.compiled, second.compiled) == (0, 0)
    assert all("was built ahead" in unit.reason for unit in first.units)
    assert states(second) == ["hit", "hit"]
    assert not second.quarantined


@pytest.mark.usefixtures("on_gfx942")
def test_what_launches_kernels_built_ahead_is_made_side_by_side(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(cache, "gfx942")
    monkeypatch.setattr("capture.workers.usable_cores", lambda: 2)
    monkeypatch.setattr("capture.kernels.build_launcher", lambda kernel, backend: print(os.getpid(), file=log))
    with tempfile.TemporaryFile("w+", buffering=1) as log:
        report = run(cache)
        log.seek(0)
        made_by = set(log.read().split())
    assert report.compiled == 0
    assert all("was built ahead" in unit.reason and unit.worker is not None for unit in report.units)
    assert made_by
    assert str(os.getpid()) not in made_by


@pytest.mark.usefixtures("on_gfx942")
def test_another_build_of_the_same_triton_is_served_too(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(cache, "gfx942")
    install_another_triton(monkeypatch)
    assert [run(cache).compiled for _ in range(2)] == [0, 0]


@pytest.mark.usefixtures("on_gfx942")
def test_a_warm_cache_survives_another_build_of_the_same_triton(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(cache).compiled == 2
    install_another_triton(monkeypatch)
    moved, warm = run(cache), run(cache)
    assert (moved.compiled, states(moved)) == (0, ["hit", "hit"])
    assert (warm.compiled, [unit.reason for unit in warm.units]) == (0, ["", ""])


@pytest.mark.usefixtures("on_gfx942")
def test_a_bundle_of_kernels_is_carried_to_the_target(cache: Path, tmp_path: Path) -> None:
    run(cache, "gfx942")
    directory = WarmupManager(cache).plan(kernel_toy.factory(BuildOptions(target="gfx942"))).directory
    bundle = pack(directory, str(tmp_path / "kernels.tar.zst"))
    shutil.rmtree(cache)
    other = tmp_path / "other"
    unpack(bundle.url, digest=bundle.digest, cache_dir=other, device="cpu")
    report = run(other)
    assert (report.compiled, len(report.units)) == (0, 2)


@pytest.mark.usefixtures("on_gfx942")
def test_a_bundle_of_kernels_for_another_target_is_refused(cache: Path, tmp_path: Path) -> None:
    run(cache, "sm_90")
    directory = WarmupManager(cache).plan(kernel_toy.factory(BuildOptions(target="sm_90"))).directory
    bundle = pack(directory, str(tmp_path / "kernels.tar.zst"))
    with pytest.raises(BundleError, match="target is 'gfx942' here and 'sm_90' there"):
        unpack(bundle.url, digest=bundle.digest, cache_dir=tmp_path / "other", device="cpu")


@pytest.mark.usefixtures("on_gfx942")
def test_damaged_kernels_are_not_taken(cache: Path) -> None:
    run(cache, "gfx942")
    path = next(cache.glob("*/triton/*/scale_rows.hsaco"))
    path.write_bytes(bytes(path.stat().st_size))
    report = run(cache)
    assert report.compiled == 2
    assert [note for note in report.notes if "is damaged and not used" in note]


CHANGES: dict[str, dict[str, Any]] = {
    "dtype": {"dtype": torch.bfloat16},
    "constant": {"scale": 3.0},
    "option": {"warps": 8},
    "block": {"block": 32},
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_a_kernel_that_differs_is_compiled(
    change: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert _compilations({"dtype": torch.float32}, change, tmp_path, monkeypatch) == 1
    assert _compilations({"dtype": torch.float32}, {}, tmp_path, monkeypatch) == 0


def _compilations(first: Any, change: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """Compilations of a kernel where the first was built ahead, under the keys of another Triton."""
    ahead, here = tmp_path / "ahead", tmp_path / "here"
    shutil.rmtree(here, ignore_errors=True)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(ahead))
    KernelBuildUnit(key="ahead", compile=lambda: kernel_toy.launch(**first), target="sm_90").build(None)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(here))
    install_another_triton(monkeypatch)
    with CompileWatch() as watch, prebuilt_kernels([ahead]):
        unit = KernelBuildUnit(key="k", compile=lambda: kernel_toy.launch(**{**first, **change}), target="sm_90")
        unit.build(None)
    return watch.compiled


def test_another_version_of_triton_is_another_entry(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = kernel_toy.factory(BuildOptions(target="sm_90"))
    before = WarmupManager(cache).plan(spec).fingerprint
    monkeypatch.setattr("capture.fingerprint._version_of", lambda names: "99.0")
    assert [row[0] for row in before.diff(WarmupManager(cache).plan(spec).fingerprint)] == ["triton"]


@pytest.mark.usefixtures("on_gfx942")
def test_a_moved_cache_keeps_its_kernels(cache: Path, tmp_path: Path) -> None:
    run(cache)
    cache.rename(tmp_path / "moved")
    report = run(tmp_path / "moved")
    assert (report.compiled, states(report)) == (0, ["hit", "hit"])
    groups = list((tmp_path / "moved").glob("*/triton/*/__grp__*.json"))
    assert all(str(path.parent) in path.read_text() for path in groups)
    assert not report.quarantined


def test_a_record_holds_no_path_and_no_library_hash(cache: Path) -> None:
    run(cache, "gfx942")
    records = [json.loads(path.read_bytes()) for path in cache.glob("*/triton/*/record.json")]
    assert len(records) == 2
    for record in records:
        assert record["triton"] == triton.__version__
        assert str(Path(triton.__file__).parent) not in json.dumps(record)


@pytest.mark.parametrize("target", ["", "cpu", "gfx", "sm_", "sm_1", "sm90", "sm_90a", "volta", "gfx942:xnack-"])
def test_an_unknown_target_is_refused(target: str) -> None:
    with pytest.raises(ValueError, match="target must be such as"), target_driver(target):
        pass
    with pytest.raises(ValueError, match="target must be such as"):
        BuildOptions(target=target)


def test_the_driver_and_the_hooks_are_as_before(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    calls: list[str] = []
    monkeypatch.setattr(triton.knobs.runtime, "jit_cache_hook", lambda **call: calls.append("before"))
    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", lambda **call: calls.append("after"))
    hooks = (triton.knobs.runtime.jit_cache_hook, triton.knobs.runtime.jit_post_compile_hook)
    active = driver._active
    kernel_toy.units("sm_90")[0].build(None)
    assert driver._active is active
    assert (triton.knobs.runtime.jit_cache_hook, triton.knobs.runtime.jit_post_compile_hook) == hooks
    assert calls == ["before", "after"]


class _Launcher:
    """As a version of Triton has it that compiles what launches a kernel."""

    def __init__(self, src: Any, metadata: Any) -> None:
        path = Path(os.environ["TRITON_CACHE_DIR"], "key-of-the-launcher", "launcher.so")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(str(src.fn.arg_names).encode())


@pytest.mark.usefixtures("on_gfx942")
def test_what_launches_a_kernel_is_built_by_the_worker_and_checked_like_any_file(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = SimpleNamespace(make_launcher=lambda: "", HIPLauncher=_Launcher)
    monkeypatch.setitem(sys.modules, "triton.backends.amd.driver", made)
    monkeypatch.setattr("capture.workers.usable_cores", lambda: 2)
    assert all(unit.worker is not None for unit in run(cache).units)
    (path,) = cache.glob("*/triton/key-of-the-launcher/launcher.so")
    assert "x_ptr" in path.read_text()
    path.write_bytes(b"damaged")
    assert any(path.name in line for line in run(cache).quarantined)


def test_a_failed_compilation_fails_its_unit_alone(cache: Path) -> None:
    def fail() -> None:
        raise RuntimeError("no such instruction")

    good, other = kernel_toy.units("sm_90")
    bad = KernelBuildUnit(key="bad", compile=fail, target="sm_90")
    spec = kernel_toy.factory(BuildOptions(target="sm_90"))
    manager = WarmupManager(cache)
    mixed = type(spec)("toy", "cpu", spec.backend, spec.fields, spec.setup, (good, bad, other), target="sm_90")
    assert states(manager.run(manager.plan(mixed), progress=False)) == ["built", "failed", "built"]


def test_a_kernel_that_the_process_had_already_is_in_the_cache_too(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    units = kernel_toy.units(None)
    spec = WarmupSpec("toy", "cpu", ("toy", ""), {}, lambda: None, units)
    with target_driver("sm_90"):
        monkeypatch.setenv("TRITON_CACHE_DIR", str(cache / "users"))
        for unit in units:
            unit.compile()  # as a model that ran before the warm-up did
        monkeypatch.delenv("TRITON_CACHE_DIR")
        manager = WarmupManager(cache, workers=0)
        report = manager.run(manager.plan(spec), progress=False)
    assert states(report) == ["built", "built"]
    assert all(unit.bytes for unit in report.units)


def test_what_setup_compiles_is_said(cache: Path) -> None:
    toy = kernel_toy.units(None)[0]
    with target_driver("sm_90"):
        manager = WarmupManager(cache, workers=0)
        spec = WarmupSpec("toy", "cpu", ("toy", ""), {}, toy.compile, ())
        report = manager.run(manager.plan(spec), progress=False)
    assert any(note.startswith("setup compiled") and "scale_rows" in note for note in report.notes), report.notes
