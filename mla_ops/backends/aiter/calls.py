"""How our arguments reach AITER's parameters, whatever its version.

The parameters that every version has in front go by position; their names are checked. Everything else goes by
keyword, if this version has it. A keyword that it lacks may be left out only if our value is what the version does
anyway; any other value is refused, never dropped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from mla_ops.backends.aiter.contract import Contract, Signature
from mla_ops.errors import BackendUnavailableError

__all__ = ["BoundCall", "decode_call", "metadata_call", "metadata_info_call", "prefill_call", "write_call"]

# Each name, or the names that it has had.
_DECODE = ("q", "kv_buffer", "o", "qo_indptr", "kv_indptr", "kv_indices", "kv_last_page_lens", "max_seqlen_q")
_PREFILL = ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
_WRITE = ("kv_c", "k_pe", "kv_cache", "slot_mapping", "kv_cache_dtype", "scale")
_METADATA_INFO = ("batch_size", "max_seqlen_qo", "num_head_qo", "q_dtype", "kv_dtype", "is_sparse")
_METADATA_HEADS = ("num_heads_per_head_k", "num_heads_k", "is_causal")
# C++'s order. Versions before 0.1.8 give the second and the third of them each other's name in Python: by keyword
# the two buffers would be swapped, silently.
_METADATA_BUFFERS = (
    ("work_metadata_ptrs",),
    ("work_info_set", "work_indptr"),
    ("work_indptr", "work_info", "work_info_set"),
    ("reduce_indptr",),
    ("reduce_final_map",),
    ("reduce_partial_map",),
)


class BoundCall(NamedTuple):
    """The arguments of one call."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def _unavailable(reason: str) -> BackendUnavailableError:
    return BackendUnavailableError("aiter", reason, 'use a released AITER that mla_ops knows, or backend="triton"')


def _bind(
    contract: Contract,
    function: str,
    names: Sequence[str | tuple[str, ...]],
    values: Sequence[Any],
    keywords: Mapping[str, tuple[Any, Any]],
) -> BoundCall:
    """Bind ``values`` to the leading parameters ``names``, and ``keywords`` (value, what its absence means)."""
    signature = contract.functions.get(function)
    if signature is None:
        raise _unavailable(f"this AITER has no {function}")
    for position, expected in enumerate(names):
        allowed = (expected,) if isinstance(expected, str) else expected
        got = signature.names[position] if position < len(signature.names) else "nothing"
        if got not in allowed:
            raise _unavailable(f"parameter {position} of this AITER's {function} is {got}, not {' or '.join(allowed)}")
    kwargs = {}
    for name, (value, neutral) in keywords.items():
        if name in signature:
            kwargs[name] = value
        elif value is not neutral and value != neutral:
            raise _unavailable(f"this AITER's {function} has no parameter {name}, which must be {value!r} here")
    _refuse_unknown_required(signature, function, {*signature.names[: len(names)], *kwargs})
    return BoundCall(tuple(values), kwargs)


def _refuse_unknown_required(signature: Signature, function: str, given: set[str]) -> None:
    missing = [name for name in signature.names[: signature.required] if name not in given]
    if missing:
        raise _unavailable(f"this AITER's {function} has the new required argument {missing[0]!r}")


def decode_call(
    contract: Contract,
    leading: Sequence[Any],
    *,
    sm_scale: float,
    num_kv_splits: int | None,
    num_kv_splits_indptr: Tensor | None,
    q_scale: Tensor | None,
    kv_scale: Tensor | None,
    work: Sequence[Tensor] = (),
    return_lse: bool = False,
) -> BoundCall:
    """``mla_decode_fwd``.

    Args:
        contract: of the installed version.
        leading: q, kv_buffer, o, qo_indptr, kv_indptr, kv_indices, kv_last_page_lens, max_seqlen_q.
        sm_scale: of the softmax; AITER's default is that of 576-wide heads, which MLA has not.
        num_kv_splits, num_kv_splits_indptr: ours; the second only where the version takes it.
        q_scale, kv_scale: of fp8.
        work: the six buffers of :func:`metadata_call` for persistent mode.
        return_lse: whether the LSE is wanted from this call.
    """
    keywords: dict[str, tuple[Any, Any]] = {
        "page_size": (1, 1),
        "nhead_kv": (1, 1),
        "sm_scale": (sm_scale, None),
        "logit_cap": (0.0, 0.0),
        "num_kv_splits": (num_kv_splits, None),
        "q_scale": (q_scale, None),
        "kv_scale": (kv_scale, None),
        "return_lse": (return_lse, False),
        "causal": (True, True),
    }
    if num_kv_splits_indptr is not None:
        keywords["num_kv_splits_indptr"] = (num_kv_splits_indptr, None)
    if work:
        pointers, info_set, indptr, reduce_indptr, reduce_final_map, reduce_partial_map = work
        keywords |= {
            "work_meta_data": (pointers, None),
            "work_indptr": (indptr, None),
            "work_info_set": (info_set, None),
            "reduce_indptr": (reduce_indptr, None),
            "reduce_final_map": (reduce_final_map, None),
            "reduce_partial_map": (reduce_partial_map, None),
        }
    return _bind(contract, "mla_decode_fwd", _DECODE, leading, keywords)


def metadata_info_call(
    contract: Contract, batch_size: int, query_len: int, num_heads: int, q_dtype: Any, kv_dtype: Any
) -> BoundCall:
    """``get_mla_metadata_info_v1``: sizes of the six buffers. They depend on the dtypes: a wrong one is a write past
    the end of a buffer.
    """
    values = (batch_size, query_len, num_heads, q_dtype, kv_dtype, False)
    return _bind(contract, "get_mla_metadata_info_v1", _METADATA_INFO, values, {"fast_mode": (True, True)})


def metadata_call(
    contract: Contract,
    qo_indptr: Tensor,
    kv_indptr: Tensor,
    kv_last_page_lens: Tensor,
    num_heads: int,
    query_len: int,
    work: Sequence[Tensor],
    q_dtype: Any,
    kv_dtype: Any,
) -> BoundCall:
    """``get_mla_metadata_v1``: writes the six buffers, in C++'s order by position: pointers, work_info_set,
    work_indptr, reduce_indptr, reduce_final_map, reduce_partial_map.
    """
    signature = contract.functions.get("get_mla_metadata_v1")
    paged = signature is not None and "kv_last_page_lens" in signature
    names = ("seqlens_qo_indptr", "seqlens_kv_indptr", *(("kv_last_page_lens",) if paged else ()))
    values = (qo_indptr, kv_indptr, *((kv_last_page_lens,) if paged else ()), num_heads, 1, True, *work)
    keywords: dict[str, tuple[Any, Any]] = {
        "page_size": (1, 1),
        "kv_granularity": (16, None),
        "max_seqlen_qo": (query_len, None),
        "uni_seqlen_qo": (query_len, None),
        "fast_mode": (True, True),
    }
    if signature is not None and "dtype_q" in signature:
        keywords |= {"dtype_q": (q_dtype, None), "dtype_kv": (kv_dtype, None)}
    return _bind(contract, "get_mla_metadata_v1", (*names, *_METADATA_HEADS, *_METADATA_BUFFERS), values, keywords)


def prefill_call(contract: Contract, leading: Sequence[Any], *, softmax_scale: float, causal: bool) -> BoundCall:
    """``flash_attn_varlen_func`` with its LSE.

    Args:
        contract: of the installed version.
        leading: q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k.
        softmax_scale: of the softmax.
        causal: bottom-right aligned.
    """
    keywords = {"softmax_scale": (softmax_scale, None), "causal": (causal, False), "return_lse": (True, False)}
    return _bind(contract, "flash_attn_varlen_func", _PREFILL, leading, keywords)


def write_call(contract: Contract, values: Sequence[Any]) -> BoundCall:
    """``concat_and_cache_mla``: kv_c, k_pe, kv_cache, slot_mapping, kv_cache_dtype, scale."""
    return _bind(contract, "concat_and_cache_mla", _WRITE, values, {})
