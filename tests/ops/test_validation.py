"""Bad input is an error that names the argument, before any kernel, in eager and through ``torch.ops`` directly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import mla_ops
from mla_ops.testing import make_decode_inputs, make_prefill_inputs

Call = Callable[[dict[str, Any]], Any]


def decode_arguments() -> dict[str, Any]:
    x = make_decode_inputs([3, 5], dtype=torch.bfloat16)
    return x.arguments() | {"q_scale": torch.ones(1), "kv_scale": torch.ones(1), "backend": "reference"}


def decode_out_arguments() -> dict[str, Any]:
    arguments = decode_arguments()
    tokens, heads, _ = arguments["q"].shape
    return arguments | {"out": torch.empty(tokens, heads, 32).bfloat16(), "lse": torch.empty(tokens, heads)}


def prefill_arguments() -> dict[str, Any]:
    return make_prefill_inputs([3, 2], dtype=torch.bfloat16)._asdict() | {"causal": True, "backend": "reference"}


def write_arguments() -> dict[str, Any]:
    return {
        "kv_c": torch.randn(2, 32),
        "k_pe": torch.randn(2, 16),
        "kv_cache": torch.zeros(3, 4, 48),
        "slot_mapping": torch.tensor([1, 5]),
        "kv_scale": torch.ones(1),
        "backend": "reference",
    }


def gather_arguments() -> dict[str, Any]:
    x = make_decode_inputs([3, 5])
    names = ("kv_cache", "kv_indptr", "kv_indices", "kv_last_page_lens")
    return {name: getattr(x, name) for name in names} | {
        "cu_seqlens": torch.tensor([0, 3, 8]).int(),
        "num_tokens": 8,
        "seq_starts": torch.zeros(2).int(),
        "kv_scale": torch.ones(1),
        "backend": "reference",
    }


def merge_arguments() -> dict[str, Any]:
    return {
        "out_a": torch.randn(3, 4, 8),
        "lse_a": torch.randn(3, 4),
        "out_b": torch.randn(3, 4, 8),
        "lse_b": torch.randn(3, 4),
        "backend": "reference",
    }


def public(function: Callable[..., Any]) -> Call:
    return lambda arguments: function(**arguments)


def public_decode_out(arguments: dict[str, Any]) -> Any:
    rest = {name: x for name, x in arguments.items() if name not in ("out", "lse")}
    return mla_ops.mla_decode(**rest, out=(arguments["out"], arguments["lse"]))


def raw_decode(op: Any) -> Call:
    return lambda arguments: op(**arguments, backend_state=[], num_kv_splits=0)


OPS: dict[str, tuple[Callable[[], dict[str, Any]], Call, Call]] = {
    "mla_decode": (decode_arguments, public(mla_ops.mla_decode), raw_decode(torch.ops.mla_ops.mla_decode.default)),
    "mla_decode.out": (decode_out_arguments, public_decode_out, raw_decode(torch.ops.mla_ops.mla_decode.out)),
    "mla_prefill": (prefill_arguments, public(mla_ops.mla_prefill), public(torch.ops.mla_ops.mla_prefill)),
    "write_latent_cache": (
        write_arguments,
        public(mla_ops.write_latent_cache),
        public(torch.ops.mla_ops.write_latent_cache),
    ),
    "gather_latent_cache": (
        gather_arguments,
        public(mla_ops.gather_latent_cache),
        public(torch.ops.mla_ops.gather_latent_cache),
    ),
    "merge_attn_states": (
        merge_arguments,
        public(mla_ops.merge_attn_states),
        public(torch.ops.mla_ops.merge_attn_states),
    ),
}
# The first tensor of an op says what the others must be like: an error about a difference names the other.
LEADERS = {
    "mla_decode": "q",
    "mla_decode.out": "q",
    "mla_prefill": "q",
    "write_latent_cache": "kv_c",
    "gather_latent_cache": "kv_cache",
    "merge_attn_states": "out_a",
}
SCALES = ("q_scale", "kv_scale")
TENSORS = [(op, name) for op, (make, _, _) in OPS.items() for name, x in make().items() if isinstance(x, Tensor)]


def assert_refused(
    op: str, change: Callable[[dict[str, Any]], None], match: str, error: type[Exception] | tuple[type[Exception], ...]
) -> None:
    make, *calls = OPS[op]
    for call in calls:
        arguments = make()
        call(dict(arguments))  # so that the signature of the unchanged call has been seen
        change(arguments)
        with pytest.raises(error, match=match):
            call(arguments)


def changing(name: str, function: Callable[[Tensor], Any]) -> Callable[[dict[str, Any]], None]:
    def change(arguments: dict[str, Any]) -> None:
        arguments[name] = function(arguments[name])

    return change


@pytest.mark.parametrize("op", sorted(OPS))
def test_the_unchanged_arguments_pass(op: str) -> None:
    make, *calls = OPS[op]
    for call in calls:
        call(make())


@pytest.mark.parametrize(("op", "name"), [t for t in TENSORS if t[1] not in SCALES])
@pytest.mark.parametrize("more", [1, -1], ids=["one dim more", "one dim fewer"])
def test_a_wrong_rank_is_named(op: str, name: str, more: int) -> None:
    change = changing(name, lambda x: x[None] if more == 1 else x[0])
    assert_refused(op, change, rf"^{name} must be \d-D \[", ValueError)


@pytest.mark.parametrize(("op", "name"), TENSORS)
@pytest.mark.parametrize("dtype", [torch.int16, torch.complex64], ids=str)
def test_a_wrong_dtype_is_named(op: str, name: str, dtype: torch.dtype) -> None:
    assert_refused(op, changing(name, lambda x: x.to(dtype)), rf"^{name} must (be|have) .*got torch\.", TypeError)


@pytest.mark.parametrize(("op", "name"), [t for t in TENSORS if t[1] != LEADERS[t[0]] and t[1] not in SCALES])
def test_a_different_dtype_of_the_same_kind_is_named(op: str, name: str) -> None:
    def other(x: Tensor) -> Tensor:
        return x.to(torch.float16 if x.is_floating_point() else torch.int32 if x.dtype == torch.int64 else torch.int64)

    assert_refused(op, changing(name, other), rf"^{name} must (be|have) ", TypeError)


@pytest.mark.parametrize(("op", "name"), [t for t in TENSORS if t[1] != LEADERS[t[0]]])
def test_another_device_is_named(op: str, name: str) -> None:
    make, call, _ = OPS[op]
    arguments = make()
    arguments[name] = arguments[name].to("meta")
    leader = "kv_cache" if name == "kv_scale" else LEADERS[op]
    with pytest.raises(ValueError, match=rf"^{name} must be on {leader}'s device cpu, got meta"):
        call(arguments)


SIZES = [
    *[(op, "kv_cache", 2) for op in ("mla_decode", "mla_decode.out", "write_latent_cache")],
    *[(op, "kv_indptr", 0) for op in ("mla_decode", "mla_decode.out")],
    *[(op, "kv_last_page_lens", 0) for op in ("mla_decode", "mla_decode.out", "gather_latent_cache")],
    *[("mla_decode.out", "out", dim) for dim in (0, 1, 2)],
    *[("mla_decode.out", "lse", dim) for dim in (0, 1)],
    *[("mla_prefill", "k", dim) for dim in (1, 2)],
    *[("mla_prefill", "v", dim) for dim in (0, 1)],
    ("mla_prefill", "cu_seqlens_k", 0),
    ("write_latent_cache", "k_pe", 0),
    ("write_latent_cache", "slot_mapping", 0),
    ("gather_latent_cache", "cu_seqlens", 0),
    ("gather_latent_cache", "seq_starts", 0),
    *[("merge_attn_states", "out_b", dim) for dim in (0, 1, 2)],
    *[("merge_attn_states", name, dim) for name in ("lse_a", "lse_b") for dim in (0, 1)],
]


@pytest.mark.parametrize(("op", "name", "dim"), SIZES)
def test_a_wrong_size_is_named(op: str, name: str, dim: int) -> None:
    change = changing(name, lambda x: x.narrow(dim, 0, x.shape[dim] - 1).contiguous())
    assert_refused(op, change, rf"^{name} must have \d+ \(.*\) in dim {dim}, got shape", ValueError)


@pytest.mark.parametrize(("op", "name"), [t for t in TENSORS if t[1] in SCALES])
def test_a_scale_of_two_elements_is_named(op: str, name: str) -> None:
    assert_refused(op, changing(name, lambda x: x.repeat(2)), rf"^{name} must have one element", ValueError)


STRIDED = [
    *[("mla_decode", name) for name in ("q", "kv_cache", "qo_indptr", "kv_indptr", "kv_indices", "kv_last_page_lens")],
    *[("mla_prefill", name) for name in ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k")],
    ("write_latent_cache", "kv_cache"),
    *[("gather_latent_cache", name) for name in ("kv_cache", "kv_indptr", "kv_indices", "cu_seqlens", "seq_starts")],
]


@pytest.mark.parametrize(("op", "name"), STRIDED)
def test_a_strided_last_dim_is_named(op: str, name: str) -> None:
    change = changing(name, lambda x: x.repeat_interleave(2, -1)[..., ::2])
    assert_refused(op, change, rf"^{name} must be dense in its last dim, got strides", ValueError)


@pytest.mark.parametrize("name", ["out", "lse"])
def test_an_output_that_is_not_contiguous_is_named(name: str) -> None:
    change = changing(name, lambda x: torch.stack([x, x], 1)[:, 0])
    assert_refused("mla_decode.out", change, rf"^{name} must be contiguous, got strides", ValueError)


@pytest.mark.parametrize(
    ("op", "name", "value", "match"),
    [
        ("mla_decode", "max_seqlen_q", 0, "max_seqlen_q must be at least 1, got 0"),
        ("mla_decode", "kv_lora_rank", 0, r"kv_lora_rank must be in 1\.\.48 .*got 0"),
        ("mla_decode", "kv_lora_rank", 49, r"kv_lora_rank must be in 1\.\.48 .*got 49"),
        ("mla_decode", "kv_lora_rank", None, "kv_lora_rank must be given for a latent row of 48"),
        ("mla_prefill", "max_seqlen_q", -1, "max_seqlen_q must not be negative, got -1"),
        ("mla_prefill", "max_seqlen_k", -1, "max_seqlen_k must not be negative, got -1"),
        ("gather_latent_cache", "num_tokens", -1, "num_tokens must not be negative, got -1"),
        *[(op, "backend", "cudnn", "backend must be one of .*reference.*, got 'cudnn'") for op in sorted(OPS)],
    ],
)
def test_a_wrong_number_or_name_is_named(op: str, name: str, value: object, match: str) -> None:
    assert_refused(op, lambda arguments: arguments.update({name: value}), f"^{match}", ValueError)


def test_a_negative_number_of_splits_is_named() -> None:
    with pytest.raises(ValueError, match=r"num_kv_splits must be 0 .* or more, got -1"):
        mla_ops.mla_decode(**decode_arguments(), num_kv_splits=-1)


@pytest.mark.parametrize("op", ["mla_decode", "write_latent_cache", "gather_latent_cache"])
def test_an_fp8_cache_without_a_scale_is_refused(op: str) -> None:
    def change(arguments: dict[str, Any]) -> None:
        arguments |= {"kv_cache": arguments["kv_cache"].to(torch.float8_e4m3fn), "kv_scale": None}

    assert_refused(op, change, "kv_scale must be given for kv_cache of dtype torch.float8_e4m3fn", ValueError)


def test_fp8_queries_without_a_scale_are_refused() -> None:
    def change(arguments: dict[str, Any]) -> None:
        arguments |= {"q": arguments["q"].to(torch.float8_e4m3fn), "q_scale": None}
        arguments["kv_cache"] = arguments["kv_cache"].to(torch.float8_e4m3fn)

    assert_refused("mla_decode", change, "q_scale must be given for q of dtype torch.float8_e4m3fn", ValueError)


def test_gathering_from_an_fp8_cache_needs_a_dtype() -> None:
    change = changing("kv_cache", lambda x: x.to(torch.float8_e4m3fn))
    assert_refused("gather_latent_cache", change, "dtype must be given for a kv_cache of dtype", ValueError)


def test_gathering_to_an_integer_dtype_is_refused() -> None:
    def change(arguments: dict[str, Any]) -> None:
        arguments["dtype"] = torch.int32

    assert_refused("gather_latent_cache", change, "dtype must be a floating dtype of the model", TypeError)


@pytest.mark.parametrize("op", ["mla_decode", "mla_decode.out", "mla_prefill"])
def test_softmax_scale_has_no_default(op: str) -> None:
    make, call, raw = OPS[op]
    arguments = make()
    del arguments["softmax_scale"]
    with pytest.raises(TypeError, match="softmax_scale"):
        call(arguments)
    with pytest.raises(RuntimeError, match="softmax_scale"):
        raw(arguments)


@pytest.mark.parametrize("op", ["mla_decode", "mla_prefill", "gather_latent_cache"])
def test_an_indptr_without_an_entry_is_refused(op: str) -> None:
    name = {"mla_decode": "qo_indptr", "mla_prefill": "cu_seqlens_q", "gather_latent_cache": "kv_indptr"}[op]
    assert_refused(op, changing(name, lambda x: x[:0]), f"{name} must have B . 1 elements", ValueError)


@pytest.mark.parametrize("op", sorted(set(OPS) - {"mla_decode.out"}))
def test_auto_leaves_it_to_the_op_to_say_what_is_wrong_with_its_first_tensor(op: str) -> None:
    make, call, _ = OPS[op]
    for change, error in ((lambda x: x.int(), TypeError), (lambda x: x[0], ValueError)):
        arguments = make() | {"backend": "auto"}
        arguments[LEADERS[op]] = change(arguments[LEADERS[op]])
        with pytest.raises(error, match=f"^{LEADERS[op]} must be"):
            call(arguments)
