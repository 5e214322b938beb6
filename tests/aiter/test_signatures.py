"""Proof a: every call that we make binds to every AITER signature from 0.1.1 on, and lands where it is meant to.

`signatures.json` lists the signatures that each function has had, with the first release that had them.
"""

from __future__ import annotations

import ast
import inspect
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mla_ops.backends.aiter import calls
from mla_ops.backends.aiter.contract import Contract, Installation, parse_signature
from mla_ops.errors import BackendUnavailableError

SIGNATURES: dict[str, list[dict[str, str]]] = json.loads((Path(__file__).parent / "signatures.json").read_text())
CPP_BUFFERS = (
    *("work_metadata_ptrs", "work_info_set", "work_indptr"),
    *("reduce_indptr", "reduce_final_map", "reduce_partial_map"),
)


def versions(function: str) -> Any:
    rows = SIGNATURES[function]
    return pytest.mark.parametrize("text", [row["signature"] for row in rows], ids=[row["since"] for row in rows])


def contract_of(function: str, text: str) -> Contract:
    (definition,) = ast.parse(f"def {function}{text}: pass").body
    assert isinstance(definition, ast.FunctionDef)
    own = ("num_kv_splits", "num_kv_splits_indptr")
    return Contract({function: parse_signature(definition)}, True, own, False, False)


def bind(function: str, text: str, call: calls.BoundCall) -> dict[str, Any]:
    """What Python would bind, over a real function of that signature."""
    namespace: dict[str, Any] = {}
    exec(f"def {function}{text}: pass", namespace)
    return dict(inspect.signature(namespace[function]).bind(*call.args, **call.kwargs).arguments)


DECODE = ("q", "kv_buffer", "o", "qo_indptr", "kv_indptr", "kv_indices", "kv_last_page_lens", "max_seqlen_q")


@versions("mla_decode_fwd")
def test_the_decode_call_lands_on_the_intended_parameters(text: str) -> None:
    contract = contract_of("mla_decode_fwd", text)
    splits = {"num_kv_splits": 4, "num_kv_splits_indptr": "indptr" if "num_kv_splits_indptr" in text else None}
    call = calls.decode_call(contract, DECODE, sm_scale=0.125, **splits, q_scale=None, kv_scale=None)
    bound = bind("mla_decode_fwd", text, call)
    assert {name: bound[name] for name in DECODE} == dict(zip(DECODE, DECODE, strict=True))
    assert bound["sm_scale"] == 0.125
    assert bound["num_kv_splits"] == 4
    assert bound.get("num_kv_splits_indptr") == splits["num_kv_splits_indptr"]
    assert bound.get("page_size", 1) == 1
    assert bound.get("nhead_kv", 1) == 1
    assert bound.get("causal", True) is True


@versions("mla_decode_fwd")
def test_the_persistent_decode_call_lands_or_is_refused(text: str) -> None:
    contract = contract_of("mla_decode_fwd", text)
    arguments = {"sm_scale": 0.125, "num_kv_splits": 304, "num_kv_splits_indptr": None, "q_scale": 1, "kv_scale": 2}
    if "work_meta_data" not in text:
        with pytest.raises(BackendUnavailableError, match="has no parameter"):
            calls.decode_call(contract, DECODE, **arguments, work=CPP_BUFFERS)
        return
    bound = bind("mla_decode_fwd", text, calls.decode_call(contract, DECODE, **arguments, work=CPP_BUFFERS))
    assert bound["work_meta_data"] == "work_metadata_ptrs"
    assert {name: bound[name] for name in CPP_BUFFERS[1:]} == {name: name for name in CPP_BUFFERS[1:]}
    assert (bound["q_scale"], bound["kv_scale"], bound["sm_scale"]) == (1, 2, 0.125)


@versions("get_mla_metadata_v1")
def test_the_metadata_buffers_go_by_position_in_the_order_of_cpp(text: str) -> None:
    """0.1.6.post2 to 0.1.7.post5 name two of them the wrong way round in Python."""
    contract = contract_of("get_mla_metadata_v1", text)
    call = calls.metadata_call(contract, "qo", "kv", "lens", 16, 2, CPP_BUFFERS, "dq", "dkv")  # type: ignore[arg-type]
    lens = ("lens",) if "kv_last_page_lens" in text else ()
    assert call.args == ("qo", "kv", *lens, 16, 1, True, *CPP_BUFFERS)
    assert not set(call.kwargs) & {*CPP_BUFFERS, "work_info"}
    bound = bind("get_mla_metadata_v1", text, call)
    assert (bound["max_seqlen_qo"], bound["uni_seqlen_qo"], bound["kv_granularity"]) == (2, 2, 16)
    if "dtype_q" in text:
        assert (bound["dtype_q"], bound["dtype_kv"]) == ("dq", "dkv")


@versions("get_mla_metadata_info_v1")
def test_the_metadata_sizes_are_asked_for_both_dtypes(text: str) -> None:
    contract = contract_of("get_mla_metadata_info_v1", text)
    bound = bind("get_mla_metadata_info_v1", text, calls.metadata_info_call(contract, 3, 2, 16, "dq", "dkv"))
    names = ("batch_size", "max_seqlen_qo", "num_head_qo", "q_dtype", "kv_dtype", "is_sparse")
    assert tuple(bound[name] for name in names) == (3, 2, 16, "dq", "dkv", False)


@versions("flash_attn_varlen_func")
def test_the_prefill_call_lands_on_the_intended_parameters(text: str) -> None:
    names = ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
    contract = contract_of("flash_attn_varlen_func", text)
    bound = bind("flash_attn_varlen_func", text, calls.prefill_call(contract, names, softmax_scale=0.125, causal=True))
    assert {name: bound[name] for name in names} == dict(zip(names, names, strict=True))
    assert (bound["softmax_scale"], bound["causal"], bound["return_lse"]) == (0.125, True, True)


@versions("concat_and_cache_mla")
def test_the_cache_write_lands_on_the_intended_parameters(text: str) -> None:
    names = ("kv_c", "k_pe", "kv_cache", "slot_mapping", "kv_cache_dtype", "scale")
    bound = bind("concat_and_cache_mla", text, calls.write_call(contract_of("concat_and_cache_mla", text), names))
    assert bound == dict(zip(names, names, strict=True))


@versions("mla_decode_stage1_asm_fwd")
def test_what_stage_1_writes_has_the_same_names_in_every_release(text: str) -> None:
    """The split LSEs are found by them where a version returns no LSE."""
    names = contract_of("mla_decode_stage1_asm_fwd", text).functions["mla_decode_stage1_asm_fwd"].names
    assert {"splitData", "splitLse"} <= set(names)


# --- what no version has had yet --------------------------------------------------------------------------------

NEWEST = SIGNATURES["mla_decode_fwd"][-1]["signature"]


def decode(contract: Contract, **changes: Any) -> calls.BoundCall:
    arguments = {"sm_scale": 0.125, "num_kv_splits": 2, "num_kv_splits_indptr": "i", "q_scale": None, "kv_scale": None}
    return calls.decode_call(contract, DECODE, **(arguments | changes))


def test_a_new_required_argument_is_refused_by_name() -> None:
    with pytest.raises(BackendUnavailableError, match="new required argument 'foo'"):
        decode(contract_of("mla_decode_fwd", NEWEST.replace("max_seqlen_q,", "max_seqlen_q, foo,", 1)))


def test_a_moved_parameter_is_refused_by_name() -> None:
    with pytest.raises(BackendUnavailableError, match=r"parameter 0 .* is kv_buffer, not q"):
        decode(contract_of("mla_decode_fwd", NEWEST.replace("q, kv_buffer", "kv_buffer, q", 1)))


def test_a_value_that_the_version_has_no_parameter_for_is_refused_and_never_dropped() -> None:
    with pytest.raises(BackendUnavailableError, match="no parameter return_lse, which must be True"):
        decode(contract_of("mla_decode_fwd", SIGNATURES["mla_decode_fwd"][1]["signature"]), return_lse=True)


def test_a_function_that_the_version_lacks_is_refused_by_name() -> None:
    with pytest.raises(BackendUnavailableError, match="no concat_and_cache_mla"):
        calls.write_call(contract_of("mla_decode_fwd", NEWEST), ())


# --- the wheel --------------------------------------------------------------------------------------------------


def test_the_wheel_is_read_as_what_it_is(installation: Installation) -> None:
    contract = installation.contract
    assert installation.version == "0.1.7.post2.dev18"
    assert contract.meta_outputs == ("num_kv_splits", "mgc", "num_kv_splits_indptr")
    assert contract == replace(contract, own_splits=False, returns_lse=False, prefill_needs_flydsl=False)
    assert "kv_last_page_lens" not in contract.functions["get_mla_metadata_v1"]
    assert installation.kernel_table("gfx942") is None


def test_the_order_of_the_metadata_buffers_is_that_of_the_wheels_cpp(installation: Installation) -> None:
    source = (installation.meta / "csrc/include/rocm_ops.hpp").read_text()
    definition = source[source.index("#define MLA_METADATA_PYBIND") :].split("m.def(", 2)[1]
    names = [part.split('"')[1] for part in definition.split("py::arg(")[1:]]
    assert tuple(names[5:11]) == CPP_BUFFERS
