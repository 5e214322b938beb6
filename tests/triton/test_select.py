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


def test_auto_takes_the_reference_for_widths_that_they_cannot_serve() -> None:
    narrow = dataclasses.replace(CONFIG, qk_nope_head_dim=24, qk_rope_head_dim=16)  # 40 is 32 and 8
    assert select(narrow, "cuda", torch.bfloat16).name == "triton"
    for choice in (
        select(narrow, "cuda", torch.bfloat16, op="prefill"),
        select(None, "cuda", torch.bfloat16, op="prefill", widths=(40, 128)),
        select(None, "cuda", torch.bfloat16, op="prefill", widths=(192, 96)),
        select(None, "cuda", torch.bfloat16, widths=(256, 192)),
        select(None, "cuda", torch.bfloat16, widths=(576, 448)),
    ):
        assert choice.name == "reference", choice
        assert "must be" in choice.reason
    for op, widths in (
        ("prefill", (192, 128)),
        ("prefill", (128, 128)),
        ("decode", (576, 512)),
        ("decode", (512, 512)),
    ):
        assert select(None, "cuda", torch.bfloat16, op=op, widths=widths).name == "triton"  # type: ignore[arg-type]


def test_a_prefill_that_they_cannot_serve_is_refused_with_its_plan() -> None:
    narrow = dataclasses.replace(CONFIG, qk_nope_head_dim=24, qk_rope_head_dim=16)
    with pytest.raises(BackendUnavailableError, match=r"qk_head_dim must be .*, got 40"):
        select(narrow, "cuda", torch.bfloat16, backend="triton", op="prefill")


def test_no_prefill_is_built_for_widths_that_they_cannot_serve() -> None:
    variants = pytest.importorskip("mla_ops.backends.triton").variants
    narrow = dataclasses.replace(CONFIG, qk_nope_head_dim=24, qk_rope_head_dim=16)
    names = [
        [launch.name for launch in variants(config, dtype=torch.bfloat16, arch="gfx942")] for config in (CONFIG, narrow)
    ]
    assert "prefill_kernel" in names[0]
    assert names[1] == [name for name in names[0] if name != "prefill_kernel"]
