"""The contract: schemas, fakes and entries of the ``torch.ops.mla_ops`` operators.

Each op is one opaque boundary: Dynamo sees the schema and the fake, never a backend. ``Library`` with hand-written
schemas, because its dispatch costs a tenth of ``custom_op``'s for a mutating op of twenty arguments. The entry
checks metadata, answers empty inputs, and hands over to the backend named in the call, imported when first chosen.
Autograd and vmap rules are in :mod:`mla_ops.transforms`.

Letters: T query tokens, B requests, H heads, R kv_lora_rank, P qk_rope_head_dim, D = R + P.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mla_ops import transforms, validation
from mla_ops.backends.kernels import backend_kernel, bound_kernel
from mla_ops.signatures import READY, alignment, remember, signature
from mla_ops.validation import FLOAT8_DTYPES, infer_kv_lora_rank, output_dtype

__all__ = ["SCHEMAS", "apart", "decode", "define", "op_fingerprint", "write"]

SCHEMAS = {
    "mla_decode": (
        "(Tensor q, Tensor kv_cache, Tensor qo_indptr, Tensor kv_indptr, Tensor kv_indices,"
        " Tensor kv_last_page_lens, Tensor[] backend_state, SymInt max_seqlen_q, SymInt num_kv_splits,"
        " float softmax_scale, Tensor? q_scale=None, Tensor? kv_scale=None, str backend='reference',"
        " SymInt? kv_lora_rank=None) -> (Tensor out, Tensor lse)"
    ),
    "mla_decode.out": (
        "(Tensor q, Tensor kv_cache, Tensor qo_indptr, Tensor kv_indptr, Tensor kv_indices,"
        " Tensor kv_last_page_lens, Tensor[] backend_state, SymInt max_seqlen_q, SymInt num_kv_splits,"
        " float softmax_scale, Tensor? q_scale=None, Tensor? kv_scale=None, str backend='reference',"
        " SymInt? kv_lora_rank=None, *, Tensor(a!) out, Tensor(b!) lse) -> ()"
    ),
    "mla_prefill": (
        "(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k, SymInt max_seqlen_q,"
        " SymInt max_seqlen_k, float softmax_scale, bool causal, str backend='reference')"
        " -> (Tensor out, Tensor lse)"
    ),
    "write_latent_cache": (
        "(Tensor kv_c, Tensor k_pe, Tensor(a!) kv_cache, Tensor slot_mapping, Tensor? kv_scale=None,"
        " str backend='reference') -> ()"
    ),
    "gather_latent_cache": (
        "(Tensor kv_cache, Tensor kv_indptr, Tensor kv_indices, Tensor kv_last_page_lens, Tensor cu_seqlens,"
        " SymInt num_tokens, Tensor? seq_starts=None, Tensor? kv_scale=None, ScalarType? dtype=None,"
        " str backend='reference') -> Tensor"
    ),
    "merge_attn_states": (
        "(Tensor out_a, Tensor lse_a, Tensor out_b, Tensor lse_b, str backend='reference') -> (Tensor out, Tensor lse)"
    ),
}
"""Op name and overload to schema. ``Tensor(a!)`` on exactly what is written; nothing returned aliases an input."""

_LIBRARY = torch.library.Library("mla_ops", "DEF")  # type: ignore[no-untyped-call]
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)


# --- mla_decode -------------------------------------------------------------------------------------------------


def decode(
    q: Tensor,
    kv_cache: Tensor,
    qo_indptr: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    kv_last_page_lens: Tensor,
    backend_state: Sequence[Tensor],
    max_seqlen_q: int,
    num_kv_splits: int,
    softmax_scale: float,
    q_scale: Tensor | None = None,
    kv_scale: Tensor | None = None,
    backend: str = "reference",
    kv_lora_rank: int | None = None,
) -> tuple[Tensor, Tensor]:
    """The kernel of ``mla_decode``, for a call that :func:`mla_ops.transforms.goes_straight` to it."""
    rank, kernel = _ready_decode(
        q, kv_cache, qo_indptr, kv_indptr, kv_indices, kv_last_page_lens, backend_state, max_seqlen_q, num_kv_splits,
        softmax_scale, q_scale, kv_scale, backend, kv_lora_rank,
    )  # fmt: skip
    result: tuple[Tensor, Tensor] = kernel(
        q, kv_cache, qo_indptr, kv_indptr, kv_indices, kv_last_page_lens, backend_state, max_seqlen_q, num_kv_splits,
        softmax_scale, _scale_of(q, q_scale), _scale_of(kv_cache, kv_scale), rank,
    )  # fmt: skip
    return result


def _scale_of(x: Tensor, scale: Tensor | None) -> Tensor | None:
    """None for what is not fp8: a write has not divided it by its scale."""
    return scale if x.dtype in FLOAT8_DTYPES else None


def _ready_decode(
    q: Tensor,
    kv_cache: Tensor,
    qo_indptr: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    kv_last_page_lens: Tensor,
    backend_state: Sequence[Tensor],
    max_seqlen_q: int,
    num_kv_splits: int,
    softmax_scale: float,
    q_scale: Tensor | None = None,
    kv_scale: Tensor | None = None,
    backend: str = "reference",
    kv_lora_rank: int | None = None,
) -> tuple[int, Callable[..., Any]]:
    """kv_lora_rank and the kernel for a call, whose arguments have been checked."""
    tensors = (q, kv_cache, qo_indptr, kv_indptr, kv_last_page_lens, q_scale, kv_scale)
    key = (
        *("mla_decode", backend, max_seqlen_q, num_kv_splits, softmax_scale, kv_lora_rank, *signature(tensors)),
        # Its length is new at each step and is not looked at
        *(kv_indices.dim(), kv_indices.numel() > 0, kv_indices.is_contiguous(), kv_indices.dtype, kv_indices.device),
        alignment(kv_indices),
    )
    ready: tuple[int, Callable[..., Any]] | None = READY.get(key)
    if ready is not None:
        return ready
    lists = (qo_indptr, kv_indptr, kv_indices, kv_last_page_lens)
    validation.check_mla_decode(q, kv_cache, *lists, max_seqlen_q, num_kv_splits, q_scale, kv_scale)
    rank = infer_kv_lora_rank(q.shape[2], kv_lora_rank)
    kernel = bound_kernel("mla_decode", backend)
    if not (q.numel() and kv_cache.numel() and kv_indices.numel() and kv_last_page_lens.numel()):
        return remember(key, (rank, lambda q, *_: _no_keys(q, rank)))
    return remember(key, (rank, kernel))


def _no_keys(q: Tensor, width: int) -> tuple[Tensor, Tensor]:
    out = q.new_zeros(q.shape[0], q.shape[1], width, dtype=output_dtype(q))
    return out, q.new_full((q.shape[0], q.shape[1]), -torch.inf, dtype=torch.float32)


def _mla_decode_fake(
    q: Tensor,
    kv_cache: Tensor,
    qo_indptr: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    kv_last_page_lens: Tensor,
    backend_state: Sequence[Tensor],
    max_seqlen_q: int,
    num_kv_splits: int,
    softmax_scale: float,
    q_scale: Tensor | None = None,
    kv_scale: Tensor | None = None,
    backend: str = "reference",
    kv_lora_rank: int | None = None,
) -> tuple[Tensor, Tensor]:
    lists = (qo_indptr, kv_indptr, kv_indices, kv_last_page_lens)
    validation.check_mla_decode(q, kv_cache, *lists, max_seqlen_q, num_kv_splits, q_scale, kv_scale)
    rank = infer_kv_lora_rank(q.shape[2], kv_lora_rank)
    out = q.new_empty(q.shape[0], q.shape[1], rank, dtype=output_dtype(q))
    return out, q.new_empty(q.shape[0], q.shape[1], dtype=torch.float32)


def _mla_decode_out(*args: Any, out: Tensor, lse: Tensor, **kwargs: Any) -> None:
    rank, kernel = _ready_decode(*args, **kwargs)
    validation.check_mla_decode_out(args[0], out, lse, rank)
    scales = map(_scale_of, args[:2], (*args[10:12], None, None))
    result = kernel(*args[:10], *scales, rank)  # whole before out is written: see apart
    out.copy_(result[0])
    lse.copy_(result[1])


def _mla_decode_out_fake(*args: Any, out: Tensor, lse: Tensor, **kwargs: Any) -> None:
    expected = _mla_decode_fake(*args, **kwargs)
    validation.check_mla_decode_out(args[0], out, lse, expected[0].shape[2])


# --- mla_prefill ------------------------------------------------------------------------------------------------


def _mla_prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float,
    causal: bool,
    backend: str = "reference",
) -> tuple[Tensor, Tensor]:
    tensors = (q, k, v, cu_seqlens_q, cu_seqlens_k)
    key = ("mla_prefill", backend, max_seqlen_q, max_seqlen_k, *signature(tensors))
    kernel = READY.get(key)
    if kernel is None:
        validation.check_mla_prefill(*tensors, max_seqlen_q, max_seqlen_k)
        kernel = remember(key, bound_kernel("mla_prefill", backend))
    if not (q.numel() and v.numel() and cu_seqlens_q.shape[0] > 1 and max_seqlen_q and max_seqlen_k):
        return _no_keys(q, v.shape[2])
    result: tuple[Tensor, Tensor] = kernel(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal
    )
    return result


def _mla_prefill_fake(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float,
    causal: bool,
    backend: str = "reference",
) -> tuple[Tensor, Tensor]:
    validation.check_mla_prefill(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    out = q.new_empty(q.shape[0], q.shape[1], v.shape[2])
    return out, q.new_empty(q.shape[0], q.shape[1], dtype=torch.float32)


# --- write_latent_cache -----------------------------------------------------------------------------------------


def write(
    kv_c: Tensor,
    k_pe: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    kv_scale: Tensor | None = None,
    backend: str = "reference",
) -> None:
    """The kernel of ``write_latent_cache``, for a call that goes straight to it as in :func:`decode`."""
    tensors = (*apart(kv_cache, kv_c, k_pe), kv_cache, slot_mapping, kv_scale)
    key = ("write_latent_cache", backend, *signature(tensors))
    kernel = READY.get(key)
    if kernel is None:
        validation.check_write_latent_cache(*tensors)
        kernel = remember(key, bound_kernel("write_latent_cache", backend))
    if slot_mapping.numel() and kv_cache.numel():
        kernel(*tensors)
        torch.autograd.graph.increment_version(kv_cache)  # kernels write through an address, unseen by autograd


def apart(written: Tensor, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """The two, or copies of them where they share memory with what the op writes.

    Inductor turns ``op(x, x.clone())`` into ``op(x, x)`` where x is not needed afterwards (pytorch#198031). A kernel
    that writes one row while another is still to be read would then be wrong; read as a whole before, it is not.
    Before a signature is taken: a copy may have other strides.
    """
    memory = written.untyped_storage().data_ptr()
    return (
        first.clone() if first.untyped_storage().data_ptr() == memory else first,
        second.clone() if second.untyped_storage().data_ptr() == memory else second,
    )


def _write_latent_cache_fake(
    kv_c: Tensor,
    k_pe: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    kv_scale: Tensor | None = None,
    backend: str = "reference",
) -> None:
    validation.check_write_latent_cache(kv_c, k_pe, kv_cache, slot_mapping, kv_scale)


# --- gather_latent_cache ----------------------------------------------------------------------------------------


def _gather_latent_cache(
    kv_cache: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    kv_last_page_lens: Tensor,
    cu_seqlens: Tensor,
    num_tokens: int,
    seq_starts: Tensor | None = None,
    kv_scale: Tensor | None = None,
    dtype: torch.dtype | None = None,
    backend: str = "reference",
) -> Tensor:
    lists = (kv_indptr, kv_indices, kv_last_page_lens, cu_seqlens, seq_starts)
    validation.check_gather_latent_cache(kv_cache, *lists, num_tokens, kv_scale, dtype)
    kernel = backend_kernel("gather_latent_cache", backend)
    if not (num_tokens and kv_cache.numel() and kv_indices.numel() and kv_last_page_lens.numel()):
        return kv_cache.new_zeros(num_tokens, kv_cache.shape[2], dtype=dtype or kv_cache.dtype)
    result: Tensor = kernel(kv_cache, *lists, num_tokens, _scale_of(kv_cache, kv_scale), dtype)
    return result


def _gather_latent_cache_fake(
    kv_cache: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    kv_last_page_lens: Tensor,
    cu_seqlens: Tensor,
    num_tokens: int,
    seq_starts: Tensor | None = None,
    kv_scale: Tensor | None = None,
    dtype: torch.dtype | None = None,
    backend: str = "reference",
) -> Tensor:
    lists = (kv_indptr, kv_indices, kv_last_page_lens, cu_seqlens, seq_starts)
    validation.check_gather_latent_cache(kv_cache, *lists, num_tokens, kv_scale, dtype)
    return kv_cache.new_empty(num_tokens, kv_cache.shape[2], dtype=dtype or kv_cache.dtype)


# --- merge_attn_states ------------------------------------------------------------------------------------------


def _merge_attn_states(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor, backend: str = "reference"
) -> tuple[Tensor, Tensor]:
    validation.check_merge_attn_states(out_a, lse_a, out_b, lse_b)
    kernel = backend_kernel("merge_attn_states", backend if out_a.numel() else "reference")
    result: tuple[Tensor, Tensor] = kernel(out_a, lse_a, out_b, lse_b)
    return result


def _merge_attn_states_fake(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor, backend: str = "reference"
) -> tuple[Tensor, Tensor]:
    validation.check_merge_attn_states(out_a, lse_a, out_b, lse_b)
    return out_a.new_empty(out_a.shape), lse_a.new_empty(lse_a.shape)


_ENTRIES: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "mla_decode": (decode, _mla_decode_fake),
    "mla_decode.out": (_mla_decode_out, _mla_decode_out_fake),
    "mla_prefill": (_mla_prefill, _mla_prefill_fake),
    "write_latent_cache": (write, _write_latent_cache_fake),
    "gather_latent_cache": (_gather_latent_cache, _gather_latent_cache_fake),
    "merge_attn_states": (_merge_attn_states, _merge_attn_states_fake),
}


def op_fingerprint() -> str:
    """Hash of the ops' schemas, fakes and checks.

    Torch's compile caches key a graph by the names of its custom ops and by nothing of what these mean: after a
    change of a schema or of a fake a cached graph is silently wrong (pytorch#187319). So it is part of their key,
    through ``torch.compiler.config.cache_key_tag``, and of the warm-up cache's fingerprint.
    """
    digest = hashlib.sha256()
    for path in (Path(__file__), Path(validation.__file__), Path(validation.__file__).with_name("layer_ops.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def define(
    schemas: Mapping[str, str], entries: Mapping[str, tuple[Callable[..., Any], Callable[..., Any]]]
) -> torch.library.Library:
    """Define ops with their entries and fakes; the library, for their transforms."""
    for name, schema in schemas.items():
        _LIBRARY.define(name + schema, tags=_TAGS)  # type: ignore[no-untyped-call]
        entry, fake = entries[name]
        _LIBRARY.impl(name, entry, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
        torch.library.register_fake(f"mla_ops::{name}", fake, lib=_LIBRARY)
    return _LIBRARY


def _tag_compile_caches() -> None:
    tag, ours = torch.compiler.config.cache_key_tag, f"mla_ops:{op_fingerprint()}"
    if ours not in tag.split("|"):
        torch.compiler.config.cache_key_tag = f"{tag}|{ours}" if tag else ours


transforms.register(define(SCHEMAS, _ENTRIES), {name: entry for name, (entry, _) in _ENTRIES.items()})
_tag_compile_caches()
