"""What a bound call gives its kernel is what an unbound one gives it, and of this call: its addresses, its results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The kernels' arguments by name, of launches that a stand-in for a GPU takes; tensors as their addresses."""
    from mla_ops.backends.triton import cache, heads, launch, products, rows

    seen: list[dict[str, Any]] = []

    class Compiled:
        function = packed_metadata = None

        def __init__(self, names: list[str]) -> None:
            self.names = names

        def run(self, *values: Any) -> None:  # a grid of three, the stream, and five of Triton's own come first
            seen.append(dict(zip(self.names, values[9:], strict=True)))

    def run(self: launch.Launch) -> Compiled:
        names = [name for name, _ in launch._parameters(self.kernel)]
        values = [self.args[name] for name in names]
        seen.append({n: x.data_ptr() if isinstance(x, Tensor) else x for n, x in zip(names, values, strict=True)})
        return Compiled(names)

    for module in (cache, heads, products, rows):
        monkeypatch.setattr(module, "arch_of", lambda x: "sm_90")
    monkeypatch.setattr(launch.Launch, "run", run)
    monkeypatch.setattr(launch, "bound_stream", lambda device: 7)
    monkeypatch.setattr(
        launch, "empty_strided", lambda shape, strides, dtype: torch.empty_strided(shape, strides, dtype=dtype)
    )
    return seen


def half(*shape: int) -> Tensor:
    return torch.randn(shape).bfloat16()


def front(width: int, dtype: torch.dtype) -> tuple[Any, ...]:
    both, slots = half(3, width + 96), torch.randint(0, 64, (3,))
    scale = torch.ones(1) if dtype == FP8 else None
    return (
        *(both[:, :width], both[:, width:], half(width), half(64), torch.arange(3), torch.rand(16)),
        *(torch.zeros(4, 16, 96).to(dtype), slots, 1e-5, 1.25, False, scale),
    )


CALLS: dict[str, tuple[str, Callable[[], tuple[Any, ...]]]] = {
    "rms_norm": ("rms_norm", lambda: (half(3, 64), half(64), 1e-5)),
    "norm_rope_write": ("norm_rope_write", lambda: front(128, torch.bfloat16)),
    "norm_rope_write of fp8": ("norm_rope_write", lambda: front(128, FP8)),
    "norm_rope_write without q_a": ("norm_rope_write", lambda: front(0, torch.bfloat16)),
    "absorb_query": (
        "absorb_query",
        lambda: (half(3, 2, 96), half(2, 64, 64), torch.arange(3), torch.rand(16), 1.25, True, 0.5, 8),
    ),
    "expand_values": ("expand_values", lambda: (half(3, 2, 64), half(2, 32, 64))),
    "linear": ("linear", lambda: (half(1, 512), half(64, 512), None, None)),
    "linear of two": ("linear", lambda: (half(3, 512), half(64, 512), half(32, 512), None)),
    "linear and a residual": ("linear", lambda: (half(3, 512), half(64, 512), None, half(3, 64))),
    "write_latent_cache": (
        "write_latent_cache",
        lambda: (half(3, 64), half(3, 32), torch.zeros(4, 16, 96).to(FP8), torch.arange(3), torch.ones(1)),
    ),
}


@pytest.mark.parametrize("case", sorted(CALLS))
def test_a_bound_call_launches_what_an_unbound_one_would(case: str, launches: list[dict[str, Any]]) -> None:
    from mla_ops.backends.triton import BOUND

    op, make = CALLS[case]
    first, second = make(), make()
    bound, unbound = BOUND[op](), BOUND[op]()
    bound(*first)
    results, expected = bound(*second), unbound(*second)
    _, found, wanted = launches
    written = [(results, expected)] if isinstance(results, Tensor) else list(zip(results, expected, strict=True))
    for ours, theirs in written:
        assert (ours.shape, ours.stride(), ours.dtype) == (theirs.shape, theirs.stride(), theirs.dtype)
    moved = {theirs.data_ptr(): ours.data_ptr() for ours, theirs in written}
    pointers = {x.data_ptr() for x in (*second, *(theirs for _, theirs in written)) if isinstance(x, Tensor)}
    assert list(found) == list(wanted)
    for name, value in wanted.items():
        if op == "linear" and second[2] is None and name == "second":
            assert found[name] is None  # not followed
        elif value in pointers and not isinstance(value, bool):
            assert found[name] == moved.get(value, value), name
        elif value is not None:  # what is left out of the code may be given
            assert found[name] == value, name


@pytest.mark.parametrize("follows", [True, False], ids=["one storage", "apart"])
def test_many_rows_are_torchs_product_whatever_lies_where(follows: bool, launches: list[dict[str, Any]]) -> None:
    from mla_ops.backends.triton import BOUND

    bound = BOUND["linear"]()
    for together in (follows, not follows, follows):  # no part of a signature
        x, both, residual = torch.randn(40, 16), torch.randn(12, 16), torch.randn(40, 12)
        weights = (both[:8], both[8:]) if together else (both[:8].clone(), both[8:].clone())
        torch.testing.assert_close(bound(x, *weights, None), x @ both.T)
        torch.testing.assert_close(bound(x, *weights, residual), x @ both.T + residual)
    assert not launches
