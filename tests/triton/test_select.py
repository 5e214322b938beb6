"""When our own kernels are chosen, and why not."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from mla_ops import BackendUnavailableError, MLAConfig
from mla_ops.backends.select import select

CONFIG = MLAConfig.preset("deepseek-v3")


@pytest.mark.parametrize("preset", ["deepseek-v2-lite", "deepseek-v3", "kimi-k2", "mistral-small-4", "minicpm3"])
def test_auto_chooses_them_on_a_gpu(preset: str) -> None:
    assert select(MLAConfig.preset(preset), "cuda", torch.bfloat16).name == "triton"


def test_auto_stays_with_the_reference_on_a_cpu() -> None:
    assert select(CONFIG, "cpu", torch.bfloat16).name == "reference"


def test_auto_says_why_it_does_not_choose_them() -> None:
    choice = select(CONFIG, "cuda", torch.float64)
    assert choice.name == "reference"
    assert "float64" in choice.reason


def test_what_they_cannot_serve_is_an_error_when_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(BackendUnavailableError, match="cannot run on cpu"):
        select(CONFIG, "cpu", torch.bfloat16, backend="triton")
    odd = dataclasses.replace(CONFIG, kv_lora_rank=192)
    with pytest.raises(BackendUnavailableError, match=r"kv_lora_rank.*192"):
        select(odd, "cuda", torch.bfloat16, backend="triton")
