"""Rotary position against complex numbers and against Hugging Face's YaRN."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from transformers import DeepseekV3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from mla_ops import MLAConfig
from mla_ops.rope import RotaryEmbedding, apply_rotary, attention_scaling, inverse_frequencies
from mla_ops.testing import assert_matches

PLAIN = MLAConfig(hidden_size=64, num_heads=2, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=64, v_head_dim=16)
YARN: dict[str, Any] = {"factor": 40.0, "original_max_position_embeddings": 4096}


def yarn(**options: Any) -> MLAConfig:
    return dataclasses.replace(PLAIN, rope_scaling={**YARN, **options}, max_position_embeddings=163840)


@pytest.mark.parametrize("interleave", [True, False], ids=["adjacent", "halves"])
def test_rotation_is_multiplication_by_complex_numbers(interleave: bool) -> None:
    x, positions = torch.randn(5, 3, 64, dtype=torch.float64), torch.randint(0, 100_000, (5,))
    cos, sin = RotaryEmbedding(PLAIN)(positions)
    pairs = x.unflatten(-1, (32, 2)) if interleave else x.unflatten(-1, (2, 32)).mT
    turned = torch.view_as_complex(pairs.contiguous()) * torch.complex(cos.double(), sin.double())[:, None]
    real = torch.view_as_real(turned)
    expected = (real if interleave else real.mT).flatten(-2)
    assert_matches(apply_rotary(x.float(), cos, sin, interleave=interleave), expected)


def test_dot_products_depend_on_distance_only() -> None:
    q, k, rope = torch.randn(1, 64), torch.randn(1, 64), RotaryEmbedding(PLAIN)

    def score(i: int, j: int) -> float:
        a, b = (apply_rotary(x, *rope(torch.tensor([position])), interleave=True) for x, position in ((q, i), (k, j)))
        return float((a * b).sum())

    assert score(7, 3) == pytest.approx(score(1007, 1003), abs=1e-3)


def test_position_zero_turns_nothing() -> None:
    x = torch.randn(4, 2, 64)
    cos, sin = RotaryEmbedding(PLAIN)(torch.zeros(4, dtype=torch.int64))
    for interleave in (True, False):
        assert torch.equal(apply_rotary(x, cos, sin, interleave=interleave), x)


SCALINGS: list[dict[str, Any]] = [
    {"mscale": 1.0, "mscale_all_dim": 1.0},
    {"mscale": 0.707, "mscale_all_dim": 1.0},
    {"mscale": 1.0},
    {},
    {"beta_fast": 1.0, "beta_slow": 1.0},
    {"beta_fast": 16.0, "beta_slow": 2.0},
    {"attention_factor": 1.3},
    {"truncate": False},
    {"factor": 1.0},
]


@pytest.mark.parametrize("scaling", SCALINGS, ids=str)
@pytest.mark.parametrize("width", [32, 64])
def test_yarn_is_that_of_transformers(scaling: dict[str, Any], width: int) -> None:
    config = dataclasses.replace(yarn(**scaling), qk_rope_head_dim=width)
    hf = DeepseekV3Config(
        qk_rope_head_dim=width,
        head_dim=width,
        max_position_embeddings=163840,
        rope_parameters={"rope_type": "yarn", "rope_theta": 10000.0, **YARN, **scaling},
    )
    frequencies, factor = ROPE_INIT_FUNCTIONS["yarn"](hf, torch.device("cpu"))
    torch.testing.assert_close(inverse_frequencies(config), frequencies, rtol=1e-6, atol=0)
    assert attention_scaling(config) == pytest.approx(factor, rel=1e-12)


def test_frequencies_without_scaling_are_powers_of_theta() -> None:
    expected = torch.tensor([10000.0 ** (-2 * i / 64) for i in range(32)])
    torch.testing.assert_close(inverse_frequencies(PLAIN), expected, rtol=1e-6, atol=0)


def test_yarns_two_corrections_are_apart() -> None:
    """mscale_all_dim alone scales the softmax; the ratio of both scales cos and sin; equal ones leave those alone."""
    mscale = 0.1 * math.log(40) + 1
    both = yarn(mscale=1.0, mscale_all_dim=1.0)
    assert attention_scaling(both) == 1.0
    assert both.softmax_scale == pytest.approx(80**-0.5 * mscale**2)
    cosine_only = yarn(mscale=1.0)
    assert attention_scaling(cosine_only) == pytest.approx(mscale)
    assert cosine_only.softmax_scale == pytest.approx(80**-0.5)
    cos, _ = RotaryEmbedding(cosine_only)(torch.zeros(1, dtype=torch.int64))
    assert cos[0, 0] == pytest.approx(mscale)


def test_moving_to_bfloat16_keeps_the_frequencies() -> None:
    rope = RotaryEmbedding(yarn()).to(torch.bfloat16)
    assert torch.equal(rope.inv_freq, inverse_frequencies(yarn()))
    cos, sin = rope(torch.tensor([100_000]))
    assert cos.dtype == sin.dtype == torch.float32


def test_to_empty_and_to_meta_and_back_give_the_frequencies() -> None:
    rope = RotaryEmbedding(yarn(), device="meta")
    assert rope.inv_freq.is_meta
    assert torch.equal(rope.to_empty(device="cpu").inv_freq, inverse_frequencies(yarn()))


def test_a_move_that_moves_nothing_keeps_the_tensor() -> None:
    """A captured graph reads it where it is, as it does the parameters, which such a move keeps too."""
    rope = RotaryEmbedding(yarn())
    inv_freq = rope.inv_freq
    assert rope.to("cpu").float().inv_freq is inv_freq


def test_frequencies_are_not_in_the_state_dict() -> None:
    assert not RotaryEmbedding(PLAIN).state_dict()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_rotation_keeps_the_dtype_and_turns_in_float32(dtype: torch.dtype) -> None:
    x = torch.randn(3, 2, 64).to(dtype)
    cos, sin = RotaryEmbedding(PLAIN)(torch.tensor([0, 9, 50_000]))
    exact = apply_rotary(x.float(), cos, sin, interleave=True)
    result = apply_rotary(x, cos, sin, interleave=True)
    assert result.dtype == dtype
    assert torch.equal(result, exact.to(dtype))


def test_a_layer_without_rotary_width_has_no_frequencies() -> None:
    nope = dataclasses.replace(PLAIN, qk_rope_head_dim=0)
    cos, sin = RotaryEmbedding(nope)(torch.arange(3))
    assert cos.shape == sin.shape == (3, 0)
