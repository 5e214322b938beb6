"""The kernels around attention against the reference: norms, rotation, cache write, products per head."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kernel_cases import assert_close_to_reference
from torch import Tensor

from mla_ops import MLAConfig
from mla_ops.rope import inverse_frequencies

OPS = torch.ops.mla_ops
YARN = MLAConfig.preset("deepseek-v3")
# Heads, N, R, P, V
LAYOUTS = {
    "deepseek": (3, 128, 512, 64, 128),
    "mistral": (2, 64, 256, 64, 128),
    "minicpm": (5, 64, 256, 32, 64),
    "nope": (2, 192, 512, 0, 192),
    "n-96": (3, 96, 64, 16, 96),
    "odd": (1, 12, 40, 6, 10),
}


def frequencies(rope: int, device: torch.device) -> Tensor:
    return inverse_frequencies(YARN)[: rope // 2].to(device)


def assert_as_reference(op: str, *args: Any) -> None:
    """``op`` by the kernels, by the reference, and by the reference in float64."""
    found, low = (getattr(OPS, op)(*args, backend) for backend in ("triton", "reference"))
    weights = {i for i, x in enumerate(args) if isinstance(x, Tensor) and x.dtype == args[0].dtype and i < 2}
    exact = getattr(OPS, op)(*(x.double() if i in weights else x for i, x in enumerate(args)), "reference")
    assert found.shape == low.shape
    assert found.is_contiguous()
    assert_close_to_reference(found, exact, low)


@pytest.mark.parametrize("width", [1, 40, 1536, 7168])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_rms_norm(width: int, dtype: torch.dtype, device: torch.device) -> None:
    rows = torch.randn(3, 2 * width, device=device).to(dtype)[:, :width]
    assert_as_reference("rms_norm", rows, torch.randn(width, device=device).to(dtype), 1e-6)


@pytest.mark.parametrize("tokens", [1, 7, 17])
@pytest.mark.parametrize(("width", "first", "second"), [(64, 48, 0), (192, 40, 7), (12, 5, 3)])
def test_linear(width: int, first: int, second: int, tokens: int, device: torch.device) -> None:
    x, both = torch.randn(tokens, width, device=device), torch.randn(first + second, width, device=device)
    weights = [both[:first].clone(), both[first:].clone() if second else None]
    residual = torch.randn(tokens, first + second, device=device)
    for args in ((*weights, None), (*weights, residual), (both[:first], both[first:] if second else None, residual)):
        found, low = (OPS.linear(x, *args, backend) for backend in ("triton", "reference"))
        exact = OPS.linear(x.double(), *(None if y is None else y.double() for y in args))
        assert_close_to_reference(found, exact, low)


@pytest.mark.parametrize("interleave", [True, False], ids=["pairs", "halves"])
@pytest.mark.parametrize("tokens", [1, 3, 17, 70])
@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_absorb_query(layout: str, tokens: int, interleave: bool, device: torch.device) -> None:
    heads, nope, rank, rope, width = LAYOUTS[layout]
    q = torch.randn(tokens + 1, heads, nope + rope, device=device)
    q[-1] = torch.nan  # behind the last token
    weight = torch.randn(heads, nope + width, rank, device=device)[:, :nope]
    positions = torch.randint(0, 163_840, (tokens,), device=device)
    beta, window = (0.1, 8192) if layout == "mistral" else (0.0, 1)
    args = (q[:tokens], weight, positions, frequencies(rope, device), 1.25, interleave, beta, window)
    assert_as_reference("absorb_query", *args)


@pytest.mark.parametrize("tokens", [1, 3, 17, 70])
@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_expand_values(layout: str, tokens: int, device: torch.device) -> None:
    heads, nope, rank, _, width = LAYOUTS[layout]
    latent = torch.randn(tokens, heads, rank, device=device)
    weight = torch.randn(heads, nope + width, rank, device=device)[:, nope:]
    assert_as_reference("expand_values", latent, weight)


@pytest.mark.parametrize("interleave", [True, False], ids=["pairs", "halves"])
@pytest.mark.parametrize(("width", "rank", "rope"), [(1536, 512, 64), (0, 256, 32), (24, 512, 0), (7, 40, 6)])
def test_norm_rope_write(width: int, rank: int, rope: int, interleave: bool, device: torch.device) -> None:
    both = torch.randn(6, width + rank + rope, device=device)  # as one product with both weights gives them
    q_weight, kv_weight = torch.randn(width, device=device), torch.randn(rank, device=device)
    positions = torch.tensor([0, 1, 163_839, 77, 100_000, 8191], device=device)
    slots = torch.tensor([3, -1, 17, 0, 79, 80], device=device)  # 80 is behind the last
    before = torch.randn(5, 16, rank + rope, device=device)
    results = []
    for backend, dtype in (("triton", torch.float32), ("reference", torch.float32), ("reference", torch.float64)):
        q_a, latent = both[:, :width].to(dtype), both[:, width:].to(dtype)
        cache = before.to(dtype, copy=True)
        made = OPS.norm_rope_write(
            q_a, latent, q_weight.to(dtype), kv_weight.to(dtype), positions, frequencies(rope, device), cache, slots,
            1e-6, 1.25, interleave, None, backend,
        )  # fmt: skip
        results.append((*made, cache))
    for found, low, exact in zip(*results, strict=True):
        assert_close_to_reference(found, exact, low)
    rows, cache = results[0][1:]
    written = [3, 17, 0, 79]
    assert torch.equal(cache.flatten(0, 1)[written], rows[[0, 2, 3, 4]])
    untouched = [i for i in range(80) if i not in written]
    assert torch.equal(cache.flatten(0, 1)[untouched], before.flatten(0, 1)[untouched])
