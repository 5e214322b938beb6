"""`mla-warmup doctor` on a machine without AITER, with the wrong one, with the wheel, and under the fake ROCm."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from capture.cli import main
from mla_ops.backends.aiter import diagnosis, runtime
from mla_ops.backends.aiter.contract import Installation, locate
from mla_ops.doctor import diagnose

from .fake_rocm import Launches


def text() -> str:
    return diagnose().render()


def test_without_aiter_and_without_a_gpu_nothing_is_wrong(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = diagnosis.importlib.util.find_spec
    monkeypatch.setattr(diagnosis.importlib.util, "find_spec", lambda name: None if name == "aiter" else real(name))
    assert main(["doctor"]) == 0
    shown = capsys.readouterr().out
    assert "AITER is not installed" in shown
    assert "the reference backend serves" in shown


def test_the_wrong_aiter_is_a_problem_with_its_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "aiter").mkdir()
    (tmp_path / "aiter" / "__init__.py").touch()
    monkeypatch.setattr(diagnosis, "locate", lambda: locate(tmp_path / "aiter"))
    monkeypatch.syspath_prepend(str(tmp_path))
    assert main(["doctor", "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    (problem,) = [row for row in document["findings"] if row["state"] == "problem"]
    assert "async iterators" in problem["found"]
    assert "pip uninstall aiter" in problem["remedy"]


def test_with_the_wheel_it_says_what_could_be_served(
    installation: Installation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(diagnosis, "locate", lambda: installation)
    shown = text()
    assert "0.1.7.post2.dev18" in shown
    assert "no AMD GPU is visible" in shown
    assert (
        "gfx942     bf16 over a bf16 cache, query tokens by heads: 8 heads: 1, 2, 3, 4; 16 heads: 1, 2, 3, 4" in shown
    )
    assert "mla-warmup build" in shown


def test_under_the_fake_rocm_it_looks_at_that_gpu(
    installation: Installation, fake_gpu: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(diagnosis, "locate", lambda: installation)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "AMD Instinct MI300X")
    monkeypatch.setenv("GPU_ARCHS", "gfx950")
    diagnosed = diagnose()
    assert not diagnosed.ok
    assert "GPU_ARCHS=gfx950 is set and the device has gfx942" in diagnosed.render()
    assert "gfx950     " not in diagnosed.render()
    assert runtime.arch_of(torch.device("cuda")) == "gfx942"
