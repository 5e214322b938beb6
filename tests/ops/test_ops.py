"""The contract of the registered ops: opcheck, schemas, aliases, complete outputs, and the compile caches' key."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import mla_ops
from mla_ops.ops import SCHEMAS, op_fingerprint
from mla_ops.testing import make_decode_inputs, make_prefill_inputs

OPS = torch.ops.mla_ops
DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
ROOT = Path(mla_ops.__file__).parents[1]
Call = tuple[tuple[Any, ...], dict[str, Any]]


def decode(dtype: torch.dtype, **options: Any) -> Call:
    x = make_decode_inputs([3, 0, 5], dtype=dtype, poison=False, **options)
    tensors = (x.q, x.kv_cache, x.qo_indptr, x.kv_indptr, x.kv_indices, x.kv_last_page_lens)
    return (*tensors, [], x.max_seqlen_q, 0, x.softmax_scale, x.q_scale, x.kv_scale, "reference", x.kv_lora_rank), {}


def decode_out(dtype: torch.dtype) -> Call:
    args, _ = decode(dtype)
    q = args[0]
    return args, {"out": torch.zeros(*q.shape[:2], 32, dtype=dtype), "lse": torch.zeros(q.shape[:2])}


def prefill(dtype: torch.dtype) -> Call:
    return (*make_prefill_inputs([3, 0, 2], [4, 1, 2], dtype=dtype, poison=False), True), {}


def write(dtype: torch.dtype) -> Call:
    rows = torch.randn(3, 48).to(dtype)
    return (rows[:, :32], rows[:, 32:], torch.zeros(4, 4, 48, dtype=dtype), torch.tensor([3, -1, 9])), {}


def gather(dtype: torch.dtype) -> Call:
    x = make_decode_inputs([3, 0, 5], dtype=dtype, poison=False)
    cu_seqlens, starts = torch.tensor([0, 2, 2, 6]).int(), torch.tensor([1, 0, 0]).int()
    return (x.kv_cache, x.kv_indptr, x.kv_indices, x.kv_last_page_lens, cu_seqlens, 8, starts), {}


def merge(dtype: torch.dtype) -> Call:
    return (*(torch.randn(3, 4, 8).to(dtype), torch.randn(3, 4)) * 2,), {}


CALLS: dict[str, tuple[Any, Callable[[torch.dtype], Call]]] = {
    "mla_decode": (OPS.mla_decode.default, decode),
    "mla_decode.out": (OPS.mla_decode.out, decode_out),
    "mla_prefill": (OPS.mla_prefill.default, prefill),
    "write_latent_cache": (OPS.write_latent_cache.default, write),
    "gather_latent_cache": (OPS.gather_latent_cache.default, gather),
    "merge_attn_states": (OPS.merge_attn_states.default, merge),
}
DIFFERENTIABLE = ["gather_latent_cache", "merge_attn_states", "mla_decode", "mla_prefill"]
WRITES = {"mla_decode.out": {"out": "a", "lse": "b"}, "write_latent_cache": {"kv_cache": "a"}}


def with_grad(call: Call) -> Call:
    """Floating inputs that require a gradient; lse and scales as they are."""
    args, kwargs = call
    return tuple(
        x.detach().requires_grad_() if isinstance(x, Tensor) and x.is_floating_point() and x.numel() > 1 else x
        for x in args
    ), kwargs


def test_every_op_of_the_schemas_is_called_here() -> None:
    assert set(CALLS) == set(SCHEMAS)


# --- opcheck ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("op", sorted(CALLS))
def test_opcheck(op: str, dtype: torch.dtype) -> None:
    overload, make = CALLS[op]
    torch.library.opcheck(overload, *make(dtype))


def test_opcheck_of_a_merge_of_states_with_the_heads_outside() -> None:
    out, lse = torch.randn(4, 3, 8).transpose(0, 1), torch.randn(4, 3).T
    torch.library.opcheck(OPS.merge_attn_states.default, (out, lse, out.clone(), lse.clone()))


@pytest.mark.parametrize(("heads", "width"), [(0, 8), (4, 0)])
def test_a_merge_of_empty_states_has_the_metadata_and_lse_of_any(heads: int, width: int) -> None:
    out, lse = torch.zeros(3, heads, width), torch.randn(heads, 3).T
    merged = mla_ops.merge_attn_states(out, lse, out, lse)
    assert (merged.out.shape, merged.lse.is_contiguous()) == (out.shape, True)
    assert torch.allclose(merged.lse, lse + math.log(2))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # opcheck of torch 2.14
@pytest.mark.parametrize("op", DIFFERENTIABLE)
def test_opcheck_with_gradients(op: str) -> None:
    overload, make = CALLS[op]
    torch.library.opcheck(overload, *with_grad(make(torch.float32)))


@pytest.mark.parametrize("kv_dtype", [torch.float8_e4m3fn, torch.float8_e4m3fnuz], ids=str)
def test_opcheck_of_an_fp8_cache(kv_dtype: torch.dtype) -> None:
    # The schema test compares inputs by arithmetic that a CPU does not have for fp8: the other dtypes have it
    tests = ("test_faketensor", "test_autograd_registration", "test_aot_dispatch_dynamic")
    torch.library.opcheck(OPS.mla_decode.default, *decode(torch.bfloat16, kv_dtype=kv_dtype), test_utils=tests)
    args, _ = write(torch.bfloat16)
    args = (*args[:2], args[2].to(kv_dtype), args[3], torch.ones(1))
    torch.library.opcheck(OPS.write_latent_cache.default, args, {}, test_utils=tests)


def test_opcheck_of_strided_queries_and_cache() -> None:
    args, _ = decode(torch.float32, query_lens=2)
    q, cache = torch.randn(args[0].shape[0], 8, 64)[:, ::2, 8:56], torch.randn(args[1].shape[0], 8, 64)[:, ::2, :48]
    torch.library.opcheck(OPS.mla_decode.default, (q, cache, *args[2:]), {})


# --- schemas ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", sorted(CALLS))
def test_schema_marks_exactly_what_is_written(op: str) -> None:
    schema = CALLS[op][0]._schema
    marked = {x.name: next(iter(x.alias_info.before_set)) for x in schema.arguments if x.alias_info}
    assert marked == WRITES.get(op, {})
    assert all(x.alias_info.is_write for x in schema.arguments if x.alias_info)


@pytest.mark.parametrize("op", sorted(CALLS))
def test_schema_returns_no_alias(op: str) -> None:
    assert not any(x.alias_info for x in CALLS[op][0]._schema.returns)


@pytest.mark.parametrize("op", sorted(CALLS))
def test_op_writes_exactly_what_its_schema_marks(op: str) -> None:
    overload, make = CALLS[op]
    args, kwargs = make(torch.float32)
    named = dict(zip([x.name for x in overload._schema.arguments], args, strict=False)) | kwargs
    before = {name: x.clone() for name, x in named.items() if isinstance(x, Tensor)}
    overload(*args, **kwargs)
    assert {name for name, x in before.items() if not torch.equal(x, named[name])} == set(WRITES.get(op, {}))


@pytest.mark.parametrize("op", sorted(CALLS))
def test_op_returns_no_storage_of_its_inputs(op: str) -> None:
    overload, make = CALLS[op]
    args, kwargs = make(torch.float32)
    results = overload(*args, **kwargs)
    results = (results,) if isinstance(results, Tensor) else results or ()
    storages = {x.untyped_storage().data_ptr() for x in (*args, *kwargs.values()) if isinstance(x, Tensor)}
    assert not any(x.untyped_storage().data_ptr() in storages for x in results)


@pytest.mark.parametrize("op", sorted(CALLS))
def test_op_keeps_the_strides_that_a_compiled_graph_gives_it(op: str) -> None:
    tags = CALLS[op][0].tags
    assert torch.Tag.needs_exact_strides in tags
    assert torch.Tag.pt2_compliant_tag in tags


# --- outputs ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("poison", [float("nan"), 1e30])
def test_decode_writes_every_element_of_its_output_buffers(poison: float) -> None:
    x = make_decode_inputs([3, 0, 5, 1], query_lens=2)
    expected = mla_ops.mla_decode(**x.arguments())
    out, lse = torch.full_like(expected.out, poison), torch.full_like(expected.lse, poison)
    result = mla_ops.mla_decode(**x.arguments(), out=(out, lse))
    assert result.out is out
    assert torch.equal(out, expected.out)
    assert torch.equal(lse, expected.lse)


@pytest.mark.parametrize("op", sorted(set(CALLS) - set(WRITES)))
def test_op_is_deterministic_and_leaves_nothing_unwritten(op: str) -> None:
    """Freshly allocated memory is filled with NaN, so what is left unwritten shows."""
    overload, make = CALLS[op]
    args, kwargs = make(torch.float32)
    torch.use_deterministic_algorithms(True)
    try:
        first, second = overload(*args, **kwargs), overload(*args, **kwargs)
    finally:
        torch.use_deterministic_algorithms(False)
    pairs = [(first, second)] if isinstance(first, Tensor) else zip(first, second, strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("op", sorted(set(CALLS) - set(WRITES)))
def test_fake_gives_the_metadata_of_the_real_output(op: str, dtype: torch.dtype) -> None:
    overload, make = CALLS[op]
    args, kwargs = make(dtype)
    real = overload(*args, **kwargs)
    fake = overload(*(x.to("meta") if isinstance(x, Tensor) else x for x in args), **kwargs)
    for a, b in [(real, fake)] if isinstance(real, Tensor) else zip(real, fake, strict=True):
        assert (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)


# --- compile caches ---------------------------------------------------------------------------------------------


def cache_key_tag(before: str, tmp_path: Path) -> str:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HOME": str(tmp_path), "TORCH_COMPILE_CACHE_KEY_TAG": before}
    code = "import mla_ops, torch; print(torch.compiler.config.cache_key_tag)"
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True, timeout=120
    )
    return done.stdout.strip()


@pytest.mark.parametrize("before", ["", "mine"])
def test_cache_key_tag_holds_the_fingerprint_and_the_users_own_tag(before: str, tmp_path: Path) -> None:
    tag = cache_key_tag(before, tmp_path)
    assert tag == "|".join(filter(None, [before, f"mla_ops:{op_fingerprint()}"]))


def test_fingerprint_changes_with_a_schema(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = Path(mla_ops.ops.__file__).read_text()
    changed = tmp_path / "ops.py"
    changed.write_text(re.sub(r"Tensor\(a!\) kv_cache", "Tensor kv_cache", source, count=1))
    before = op_fingerprint()
    monkeypatch.setattr(mla_ops.ops, "__file__", str(changed))
    assert op_fingerprint() != before
    changed.write_text(source)
    assert op_fingerprint() == before


# --- dispatch ---------------------------------------------------------------------------------------------------


class Seen(TorchDispatchMode):
    """Notes the ops that come by."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("grad", [True, False], ids=["grad mode", "no grad"])
@pytest.mark.parametrize("op", sorted(CALLS))
def test_a_dispatch_mode_sees_the_op_whole(op: str, grad: bool) -> None:
    """Autograd's kernel goes straight to the op's own, but not past what else would see the call."""
    overload, make = CALLS[op]
    args, kwargs = make(torch.float32)
    with torch.set_grad_enabled(grad), Seen() as seen:
        overload(*args, **kwargs)
    assert seen.names == [str(overload)]


def test_a_scale_of_what_is_not_fp8_changes_nothing() -> None:
    """As in a write: a cache that is not divided by its scale is not multiplied by it."""
    scale = torch.tensor([0.5])
    x = make_decode_inputs([3, 0, 5], dtype=torch.float64, poison=False)
    q = x.q.requires_grad_()
    scaled = mla_ops.mla_decode(**x._replace(q_scale=scale, kv_scale=scale).arguments(), backend="reference").out
    plain = mla_ops.mla_decode(**x.arguments(), backend="reference").out
    assert torch.equal(scaled, plain)
    assert torch.equal(*(torch.autograd.grad(out.square().sum(), q)[0] for out in (scaled, plain)))
    with torch.no_grad():
        out = torch.empty_like(plain), torch.empty(plain.shape[:2])
        mla_ops.mla_decode(**x._replace(q_scale=scale, kv_scale=scale).arguments(), backend="reference", out=out)
    assert torch.equal(out[0], plain)
    pages = (x.kv_cache, x.kv_indptr, x.kv_indices, x.kv_last_page_lens, torch.tensor([0, 3, 3, 8]).int())
    rows = [mla_ops.gather_latent_cache(*pages, num_tokens=8, kv_scale=s, backend="reference") for s in (scale, None)]
    assert torch.equal(*rows)
