"""The ops around attention: their contract, and the reference against torch's own functions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from layer_calls import (
    CALLS,
    FREQUENCIES,
    NOPE,
    RANK,
    TOKENS,
    WIDTH,
    absorb_query,
    expand_values,
    linear,
    norm_rope_write,
    rms_norm,
)
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch.func import vmap
from torch.nn import functional as F

import mla_ops
from mla_ops import BackendUnavailableError, InferenceOnlyError, select
from mla_ops.backends import kernels
from mla_ops.layer_ops import LAYER_SCHEMAS
from mla_ops.rope import apply_rotary
from mla_ops.testing import assert_matches

OPS = torch.ops.mla_ops
DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
DIFFERENTIABLE = ["absorb_query", "expand_values", "linear", "rms_norm"]


def overload(op: str) -> Any:
    return getattr(OPS, op).default


def test_every_op_of_the_schemas_is_called_here() -> None:
    assert set(CALLS) == set(LAYER_SCHEMAS)
    assert set(CALLS) <= set(mla_ops.__all__)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("op", sorted(CALLS))
def test_opcheck(op: str, dtype: torch.dtype) -> None:
    torch.library.opcheck(overload(op), (), CALLS[op](dtype))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # opcheck of torch 2.14
@pytest.mark.parametrize("op", DIFFERENTIABLE)
def test_opcheck_with_gradients(op: str) -> None:
    call = CALLS[op](torch.float32)
    first_two = list(call)[:2]
    for name in first_two:
        call[name] = call[name].detach().requires_grad_()
    torch.library.opcheck(overload(op), tuple(call.values()))


@pytest.mark.parametrize("op", sorted(CALLS))
def test_op_writes_exactly_what_its_schema_marks(op: str) -> None:
    call = CALLS[op](torch.float32)
    marked = {x.name for x in overload(op)._schema.arguments if x.alias_info}
    before = {name: x.clone() for name, x in call.items() if isinstance(x, Tensor)}
    results = overload(op)(**call)
    assert {name for name, x in before.items() if not torch.equal(x, call[name])} == marked
    storages = {x.untyped_storage().data_ptr() for x in call.values() if isinstance(x, Tensor)}
    for x in (results,) if isinstance(results, Tensor) else results:
        assert x.untyped_storage().data_ptr() not in storages


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("op", sorted(CALLS))
def test_fake_gives_the_metadata_of_the_real_output(op: str, dtype: torch.dtype) -> None:
    call = CALLS[op](dtype)
    fake = overload(op)(**{name: x.to("meta") if isinstance(x, Tensor) else x for name, x in call.items()})
    real = overload(op)(**call)
    for a, b in [(real, fake)] if isinstance(real, Tensor) else zip(real, fake, strict=True):
        assert (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)


@pytest.mark.parametrize("op", sorted(CALLS))
def test_a_public_function_is_one_graph_for_all_numbers_of_tokens(op: str) -> None:
    call = CALLS[op](torch.float32)
    rows = {name for name, x in call.items() if isinstance(x, Tensor) and x.shape[0] == TOKENS}
    torch._dynamo.reset()
    compiled = torch.compile(getattr(mla_ops, op), fullgraph=True, dynamic=True, backend="aot_eager")
    for tokens in (TOKENS, 2, 5):
        now = {name: x[:1].expand(tokens, *x.shape[1:]).clone() if name in rows else x for name, x in call.items()}
        if "slot_mapping" in now:
            now["slot_mapping"] = torch.arange(tokens)
            now["kv_cache"] = torch.zeros_like(now["kv_cache"])
        again = {name: x.clone() if isinstance(x, Tensor) else x for name, x in now.items()}
        with torch._dynamo.config.patch(error_on_recompile=tokens != TOKENS), torch.no_grad():
            torch.testing.assert_close(compiled(**now), getattr(mla_ops, op)(**again), rtol=0, atol=0)
        torch.testing.assert_close(now, again, rtol=0, atol=0)


# --- formulas ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_rms_norm_is_torchs(dtype: torch.dtype) -> None:
    x, weight, eps = rms_norm(dtype).values()
    exact = F.rms_norm(x.double(), (WIDTH,), weight.double(), eps)
    assert_matches(mla_ops.rms_norm(x, weight, eps=eps), exact, factor=1.01)  # rounded once


@pytest.mark.parametrize("interleave", [True, False], ids=["pairs", "halves"])
def test_norm_rope_write_is_its_parts(interleave: bool) -> None:
    call = norm_rope_write(torch.float32) | {"interleave": interleave}
    expected_cache = call["kv_cache"].clone()
    q_a, rows = mla_ops.norm_rope_write(**call)
    kv_c, k_pe = call["latent"][:, :RANK], call["latent"][:, RANK:]
    angles = call["positions"][:, None].float() * FREQUENCIES
    k_pe = apply_rotary(k_pe, angles.cos() * 1.5, angles.sin() * 1.5, interleave=interleave)
    kv_c = F.rms_norm(kv_c.double(), (RANK,), call["kv_weight"].double(), 1e-5)
    assert_matches(q_a, F.rms_norm(call["q_a"].double(), (WIDTH,), call["q_weight"].double(), 1e-5))
    assert_matches(rows, torch.cat([kv_c, k_pe.double()], dim=-1), factor=8)
    mla_ops.write_latent_cache(rows[:, :RANK], rows[:, RANK:], expected_cache, call["slot_mapping"])
    assert torch.equal(call["kv_cache"], expected_cache)


def test_norm_rope_write_of_a_cache_without_pages_gives_the_rows() -> None:
    call = norm_rope_write(torch.float32)
    expected = mla_ops.norm_rope_write(**call)
    found = mla_ops.norm_rope_write(**call | {"kv_cache": call["kv_cache"][:0]})
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("interleave", [True, False], ids=["pairs", "halves"])
def test_absorb_query_is_its_parts(interleave: bool) -> None:
    call = absorb_query(torch.float32) | {"interleave": interleave}
    q, angles = call["q"], call["positions"][:, None].float() * FREQUENCIES
    absorbed = torch.einsum("thn,hnr->thr", q[..., :NOPE].double(), call["w_uk"].double())
    roped = apply_rotary(q[..., NOPE:], angles.cos() * 1.5, angles.sin() * 1.5, interleave=interleave)
    growth = 1 + 0.5 * torch.log1p(torch.tensor([0.0, 1.0, 40_000.0]).double())
    expected = torch.cat([absorbed, roped.double()], dim=-1) * growth[:, None, None]
    assert_matches(mla_ops.absorb_query(**call), expected, factor=8)


def test_expand_values_is_a_product_per_head() -> None:
    call = expand_values(torch.float32)
    expected = torch.einsum("thr,hvr->thv", call["latent"].double(), call["w_uv"].double()).flatten(1)
    assert_matches(mla_ops.expand_values(**call), expected)


def test_a_product_over_no_width_is_zero() -> None:
    positions, frequencies = torch.arange(2), torch.zeros(0)
    for _ in range(3):  # new memory may be zero by chance
        torch.full((2, 32), torch.nan), torch.full((2, 4, 8), torch.nan)
        assert not mla_ops.expand_values(torch.zeros(2, 4, 0), torch.zeros(4, 8, 0)).any()
        assert not mla_ops.absorb_query(torch.zeros(2, 4, 0), torch.zeros(4, 0, 8), positions, frequencies).any()


def test_linear_is_torchs_with_each_weight() -> None:
    x, weight, second, residual = linear(torch.float32).values()
    expected = torch.cat([F.linear(x.double(), weight.double()), F.linear(x.double(), second.double())], dim=1)
    assert_matches(mla_ops.linear(x, weight, second), expected)
    assert_matches(mla_ops.linear(x, weight), expected[:, :4])
    assert_matches(mla_ops.linear(x, weight, second, residual), expected + residual.double())


# --- gradients and vmap -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", DIFFERENTIABLE)
def test_gradients_are_those_of_finite_differences(op: str) -> None:
    first, second, *rest = CALLS[op](torch.float64).values()

    def function(*inputs: Tensor) -> Any:
        return overload(op)(*inputs, *rest)

    leaves = (first.requires_grad_(), second.detach().requires_grad_())
    assert gradcheck(function, leaves, fast_mode=True)
    assert gradgradcheck(function, leaves, fast_mode=True)


@pytest.fixture
def fake_backend(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A second backend, with the reference's kernels under another name."""
    monkeypatch.setitem(kernels._MODULES, "fake", "mla_ops.backends.reference")
    yield "fake"
    for key in [key for key in kernels._KERNELS if key[1] == "fake"]:
        del kernels._KERNELS[key]


@pytest.mark.parametrize("op", DIFFERENTIABLE)
def test_a_backend_without_a_backward_refuses_a_gradient(op: str, fake_backend: str) -> None:
    call = CALLS[op](torch.float32)
    call[next(iter(call))].requires_grad_()
    with pytest.raises(InferenceOnlyError, match=rf'{op} with backend="fake" is for inference and has no gradient'):
        overload(op)(**call, backend=fake_backend)
    with torch.no_grad():
        overload(op)(**call, backend=fake_backend)


@pytest.mark.parametrize("name", ["second", "residual"])
def test_linear_refuses_a_gradient_of_all_but_the_first_product(name: str) -> None:
    call = linear(torch.float32)
    call[name].requires_grad_()
    with pytest.raises(InferenceOnlyError, match="no gradient of a second weight or a residual"):
        mla_ops.linear(**call)


def test_absorb_query_refuses_a_gradient_of_its_frequencies() -> None:
    call = absorb_query(torch.float32)
    call["inv_freq"] = call["inv_freq"].clone().requires_grad_()
    with pytest.raises(InferenceOnlyError, match="absorb_query has no gradient of inv_freq; detach it"):
        mla_ops.absorb_query(**call, backend="reference")


@pytest.mark.parametrize("name", ["q_a", "latent", "q_weight", "kv_weight", "kv_cache"])
def test_norm_rope_write_refuses_a_gradient(name: str) -> None:
    call = norm_rope_write(torch.float32)
    call[name].requires_grad_()
    with pytest.raises(InferenceOnlyError, match="writes in place and has no gradient"):
        mla_ops.norm_rope_write(**call)


@pytest.mark.parametrize(
    ("op", "rows"), [("absorb_query", (0, 2)), ("expand_values", (0,)), ("linear", (0, 3)), ("rms_norm", (0,))]
)
def test_vmap_of_calls_that_share_weights_is_a_loop(op: str, rows: tuple[int, ...]) -> None:
    calls = [list(CALLS[op](torch.float32).values()) for _ in range(4)]
    shared = calls[0]
    stacked = [torch.stack([call[i] for call in calls]) for i in rows]

    def function(*inputs: Tensor) -> Any:
        args = list(shared)
        for i, x in zip(rows, inputs, strict=True):
            args[i] = x
        return overload(op)(*args)

    expected = torch.stack([function(*(x[i] for x in stacked)) for i in range(4)])
    assert_matches(vmap(function)(*stacked), expected.double())
    weights = torch.stack([call[1] for call in calls])
    with pytest.raises(InferenceOnlyError, match="for all calls, got one per call"):
        vmap(lambda weight: overload(op)(shared[0], weight, *shared[2:]))(weights)


# --- refusals ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("op", "changes", "error", "message"),
    [
        ("rms_norm", {"x": torch.zeros(3)}, ValueError, r"x must be 2-D \[T, W\]"),
        ("rms_norm", {"weight": torch.zeros(5)}, ValueError, r"weight must have 6 \(x's width\) in dim 0"),
        ("rms_norm", {"weight": torch.zeros(6).half()}, TypeError, "weight must be float32"),
        ("norm_rope_write", {"q_a": torch.zeros(4, WIDTH)}, ValueError, r"q_a must have 3 \(latent's tokens\)"),
        ("norm_rope_write", {"kv_weight": torch.zeros(9)}, ValueError, r"kv_weight must have 8"),
        ("norm_rope_write", {"positions": torch.zeros(3).int()}, TypeError, "positions must be int64"),
        ("norm_rope_write", {"slot_mapping": torch.zeros(2).long()}, ValueError, "slot_mapping must have 3"),
        ("norm_rope_write", {"kv_cache": torch.zeros(2, 4, 12).half()}, TypeError, "kv_cache must have latent's dtype"),
        (
            "norm_rope_write",
            {"kv_cache": torch.zeros(2, 4, 12).to(torch.float8_e4m3fn)},
            ValueError,
            "kv_scale must be given",
        ),
        ("absorb_query", {"q": torch.zeros(3, 2, 8)}, ValueError, r"q must have 9 \(qk_nope_head_dim"),
        ("absorb_query", {"w_uk": torch.zeros(3, 5, 8)}, ValueError, r"w_uk must have 2 \(q's heads\)"),
        ("absorb_query", {"inv_freq": torch.zeros(2).half()}, TypeError, "inv_freq must be float32"),
        ("absorb_query", {"scaling_window": 0}, ValueError, "scaling_window must be at least 1, got 0"),
        ("linear", {"second": torch.zeros(2, 5)}, ValueError, r"second must have 6 \(x's width\) in dim 1"),
        ("linear", {"residual": torch.zeros(3, 5)}, ValueError, r"residual must have 6 \(the weights' rows\) in dim 1"),
        ("expand_values", {"w_uv": torch.zeros(2, 7, 9)}, ValueError, r"w_uv must have 8 \(latent's width\)"),
        ("expand_values", {"latent": torch.zeros(3, 8, 2).mT}, ValueError, "latent must be dense in its last dim"),
    ],
)
def test_bad_input_is_an_error_that_names_the_argument(
    op: str, changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    call = CALLS[op](torch.float32) | changes
    with pytest.raises(error, match=message):
        getattr(mla_ops, op)(**call)


@pytest.mark.parametrize(
    ("op", "name"), [("rms_norm", "x"), ("linear", "x"), ("norm_rope_write", "latent"), ("absorb_query", "q")]
)
def test_auto_leaves_it_to_the_op_to_name_a_wrong_dtype(op: str, name: str) -> None:
    call = CALLS[op](torch.float32)
    with pytest.raises(TypeError, match=f"^{name} must be"):
        getattr(mla_ops, op)(**call | {name: call[name].int()})


@pytest.mark.parametrize("backend", ["aiter", "flash_mla"])
def test_backends_of_attention_alone_say_so(backend: str) -> None:
    with pytest.raises(BackendUnavailableError, match="it serves attention and the cache only"):
        select(None, "cpu", torch.float32, backend=backend, op="layer")
    with pytest.raises(BackendUnavailableError, match='it has no rms_norm; use backend="triton" or "reference"'):
        mla_ops.rms_norm(**rms_norm(torch.float32), backend=backend)
