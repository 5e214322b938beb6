"""The ops over AITER: what it may be asked, how, and what it leaves undone.

Each op is one call of AITER behind our own boundary: its ops mark every argument as written, which in a compiled
graph copies the cache. Gathering cached rows and merging states have no counterpart in AITER that serves MLA's
latent rows; they are the reference's, in plain PyTorch, which runs on any device and can be captured.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from mla_ops.backends.aiter import runtime as aiter_runtime
from mla_ops.backends.aiter.capabilities import DecodeRow, DecodeShape, Refusal, dtype_name, find_decode_row
from mla_ops.backends.aiter.runtime import Runtime
from mla_ops.backends.aiter.state import DecodeState, TokenLists, choose_splits, expand_pages, persistent_mode, work_of
from mla_ops.backends.reference import gather_latent_cache, merge_attn_states
from mla_ops.config import MLAConfig
from mla_ops.errors import BackendUnavailableError
from mla_ops.validation import FLOAT8_DTYPES, output_dtype

__all__ = [
    "check_prefill",
    "decode_row",
    "describe",
    "gather_latent_cache",
    "make_decode_state",
    "merge_attn_states",
    "mla_decode",
    "mla_prefill",
    "write_latent_cache",
]

# The decode kernels have these two numbers built in.
_KV_LORA_RANK, _LATENT_DIM = 512, 576
_PREFILL_DIMS = (192, 128)
# Their offsets are 32 bits wide (ROCm/aiter#5765).
_MAX_BYTES = 2**32


def _refuse(refusal: Refusal) -> BackendUnavailableError:
    return BackendUnavailableError("aiter", refusal.reason, refusal.remedy)


def _runtime_for(device: torch.device) -> tuple[Runtime, str]:
    """The installed AITER, and the architecture to call it for."""
    arch = aiter_runtime.arch_of(device)
    if arch is None:
        raise _refuse(Refusal(f"{device} is not an AMD GPU under ROCm", "move the tensors to one"))
    runtime = aiter_runtime.installed_runtime()
    if refusal := runtime.refusal(arch, aiter_runtime.compute_units(device)):
        raise _refuse(refusal)
    return runtime, arch


@functools.lru_cache(maxsize=256)
def _row(runtime: Runtime, shape: DecodeShape) -> DecodeRow | Refusal:
    """Looked up once per shape: every layer asks in every eager step."""
    return find_decode_row(runtime.table(shape.arch), shape, runtime.installation.version)


def decode_row(
    device: torch.device,
    *,
    num_heads: int,
    query_len: int,
    latent_dim: int,
    kv_lora_rank: int,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    persistent: bool | None = None,
) -> DecodeRow:
    """The kernel that decodes this.

    Args:
        persistent: the mode; what the user asked for where ``None``.

    Raises:
        BackendUnavailableError: there is none; says why and what would work.
    """
    runtime, arch = _runtime_for(device)
    if (kv_lora_rank, latent_dim) != (_KV_LORA_RANK, _LATENT_DIM):
        raise _refuse(
            Refusal(f"AITER's decode has rows of 512 + 64 built in, not {kv_lora_rank} + {latent_dim - kv_lora_rank}")
        )
    names = [dtype_name(each, arch) for each in (dtype, kv_dtype)]
    for name in names:
        if isinstance(name, Refusal):
            raise _refuse(name)
    q_type, kv_type = map(str, names)
    shape = DecodeShape(
        *(arch, q_type, kv_type, num_heads, query_len), persistent_mode() if persistent is None else persistent
    )
    row = _row(runtime, shape)
    if isinstance(row, Refusal):
        raise _refuse(row)
    return row


def describe(device: torch.device) -> str:
    """The AITER that serves ``device``, in words.

    Raises:
        BackendUnavailableError: none does.
    """
    runtime, arch = _runtime_for(device)
    return f"AITER {runtime.installation.version} on {arch}"


def check_prefill(device: torch.device, *, qk_head_dim: int, v_head_dim: int, dtype: torch.dtype) -> None:
    """Refuse a prefill that AITER does not serve.

    Raises:
        BackendUnavailableError: says why and what would work.
    """
    runtime, _ = _runtime_for(device)
    refusal = runtime.prefill_refusal()
    if (qk_head_dim, v_head_dim) != _PREFILL_DIMS:
        refusal = Refusal(f"AITER's prefill is used for heads of 192 and 128 here, not {qk_head_dim} and {v_head_dim}")
    elif dtype not in (torch.bfloat16, torch.float16):
        refusal = Refusal(f"AITER's prefill has no kernel for {dtype}", "use bfloat16")
    if refusal is not None:
        raise _refuse(refusal)


def make_decode_state(
    config: MLAConfig,
    *,
    max_batch_size: int,
    max_pages: int,
    page_size: int,
    query_len: int,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    num_kv_splits: int,
    qo_indptr: Tensor,
    **_: object,
) -> DecodeState:
    """The state of a decode plan; see :class:`DecodeState`.

    Raises:
        BackendUnavailableError: as :func:`decode_row`.
    """
    device = qo_indptr.device
    persistent = persistent_mode()
    row = decode_row(
        device,
        num_heads=config.num_heads,
        query_len=query_len,
        latent_dim=config.latent_dim,
        kv_lora_rank=config.kv_lora_rank,
        dtype=dtype,
        kv_dtype=kv_dtype,
        persistent=persistent,
    )
    return DecodeState(
        aiter_runtime.installed_runtime(),
        aiter_runtime.compute_units(device),
        max_batch_size=max_batch_size,
        max_pages=max_pages,
        page_size=page_size,
        query_len=query_len,
        num_heads=row.num_heads,
        min_splits=row.min_splits,
        num_kv_splits=num_kv_splits,
        q_dtype=dtype,
        kv_dtype=kv_dtype,
        qo_indptr=qo_indptr,
        persistent=persistent,
    )


def _check_cache(kv_cache: Tensor) -> None:
    if not kv_cache.is_contiguous():
        raise ValueError(f"kv_cache must be contiguous for AITER, got strides {kv_cache.stride()}; use .contiguous()")
    if kv_cache.numel() * kv_cache.element_size() >= _MAX_BYTES:
        size = kv_cache.numel() * kv_cache.element_size()
        raise _refuse(
            Refusal(
                f"kv_cache has {size >> 20} MiB, and the offsets of AITER's kernels end at 4 GiB",
                'make the cache of a layer smaller, or use backend="triton"',
            )
        )


def mla_decode(
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
    q_scale: Tensor | None,
    kv_scale: Tensor | None,
    kv_lora_rank: int,
) -> tuple[Tensor, Tensor]:
    """``mla_decode_fwd``. See :func:`mla_ops.mla_decode`.

    Every request must have ``max_seqlen_q`` query tokens: the kernels step over q by that number. The LSE of a
    persistent call is NaN where AITER has no kernel that writes it (all of gfx942 but one).
    """
    tokens, num_heads, latent_dim = q.shape
    batch_size, work = qo_indptr.shape[0] - 1, work_of(backend_state)
    row = decode_row(
        q.device,
        num_heads=num_heads,
        query_len=max_seqlen_q,
        latent_dim=latent_dim,
        kv_lora_rank=kv_lora_rank,
        dtype=q.dtype,
        kv_dtype=kv_cache.dtype,
        persistent=bool(work),
    )
    _check_cache(kv_cache)
    if tokens != batch_size * max_seqlen_q:
        raise ValueError(
            f"q must have max_seqlen_q={max_seqlen_q} rows for each of the {batch_size} requests for AITER, got "
            f'{tokens}; use backend="triton" for ragged queries'
        )
    runtime = aiter_runtime.installed_runtime()
    if work:
        expected = runtime.metadata_buffers(batch_size, max_seqlen_q, row.num_heads, q.dtype, kv_cache.dtype)
        if [(tuple(x.shape), x.dtype) for x in work] != expected:
            # AITER sizes what it writes by the dtypes of the call, not by the buffers
            raise ValueError(
                f"backend_state was not planned for {batch_size} requests of {q.dtype} over a cache of "
                f"{kv_cache.dtype}; make the DecodePlan with these dtypes (dtype, kv_dtype)"
            )
    if backend_state:
        lists, splits_indptr = TokenLists(*backend_state[:4]), backend_state[4]
    else:
        entries = kv_indices.shape[0] * kv_cache.shape[1] + batch_size  # one for each request without keys
        device = q.device
        num_kv_splits = num_kv_splits or choose_splits(
            batch_size, entries // batch_size, aiter_runtime.compute_units(device)
        )
        num_kv_splits = max(num_kv_splits, row.min_splits)
        lists = expand_pages(
            *(qo_indptr, kv_indptr, kv_indices, kv_last_page_lens, kv_cache.shape[1], tokens),
            torch.arange(entries, dtype=torch.int32, device=device),
        )
        splits_indptr = torch.arange(batch_size + 1, dtype=torch.int32, device=device) * num_kv_splits
    # Pages of one row, and nothing else, are right in these kernels (ROCm/aiter#3095).
    rows = kv_cache.view(-1, 1, 1, latent_dim)
    padding = row.num_heads - num_heads
    queries = torch.nn.functional.pad(q, (0, 0, 0, padding)) if padding else q.contiguous()
    out = q.new_empty(tokens, row.num_heads, kv_lora_rank, dtype=output_dtype(q))
    leading = (queries, rows, out, qo_indptr, *lists[:3], max_seqlen_q)
    lse: Tensor | None
    if work:
        lse = runtime.decode_persistent(
            leading,
            sm_scale=softmax_scale,
            q_scale=q_scale,
            kv_scale=kv_scale,
            work=work,
            return_lse=row.writes_lse,
        )
    else:
        lse = runtime.decode(
            leading,
            sm_scale=softmax_scale,
            num_kv_splits=num_kv_splits,
            splits_indptr=splits_indptr,
            q_scale=q_scale,
            kv_scale=kv_scale,
        )
    if lse is None:
        lse = q.new_full((tokens, row.num_heads), torch.nan, dtype=torch.float32)
    if padding:
        out, lse = out[:, :num_heads].contiguous(), lse[:, :num_heads].contiguous()
    out.masked_fill_(lists.keyless[:, None, None], 0.0)
    return out, lse.masked_fill(lists.keyless[:, None], -torch.inf)


def mla_prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float,
    causal: bool,
) -> tuple[Tensor, Tensor]:
    """``flash_attn_varlen_func``. See :func:`mla_ops.mla_prefill`."""
    check_prefill(q.device, qk_head_dim=q.shape[2], v_head_dim=v.shape[2], dtype=q.dtype)
    if max(x.numel() * x.element_size() for x in (k, v)) >= _MAX_BYTES:
        raise _refuse(
            Refusal("k or v has 4 GiB or more, past the offsets of AITER's kernels", "prefill in smaller chunks")
        )
    leading = (q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    out, lse = aiter_runtime.installed_runtime().prefill(leading, softmax_scale=softmax_scale, causal=causal)

    token = torch.arange(q.shape[0], dtype=torch.int32, device=q.device)
    last = cu_seqlens_q.shape[0] - 2
    request = torch.searchsorted(cu_seqlens_q[1:], token, right=True, out_int32=True).clamp_(max=last)
    seen = cu_seqlens_k[request + 1] - cu_seqlens_k[request]
    if causal:
        seen = seen - (cu_seqlens_q[request + 1] - token) + 1
    keyless = (seen <= 0) | (token >= cu_seqlens_q[-1])
    return out.masked_fill(keyless[:, None, None], 0.0), lse.T.masked_fill(keyless[:, None], -torch.inf)


def write_latent_cache(
    kv_c: Tensor, k_pe: Tensor, kv_cache: Tensor, slot_mapping: Tensor, kv_scale: Tensor | None
) -> None:
    """``concat_and_cache_mla``. See :func:`mla_ops.write_latent_cache`."""
    _, arch = _runtime_for(kv_c.device)
    if kv_c.dtype not in (torch.bfloat16, torch.float16):
        raise _refuse(Refusal(f"AITER's cache write has no kernel for {kv_c.dtype}", "use bfloat16"))
    fp8 = kv_cache.dtype in FLOAT8_DTYPES
    if fp8 and isinstance(name := dtype_name(kv_cache.dtype, arch), Refusal):
        raise _refuse(name)
    _check_cache(kv_cache)
    # The kernel skips negative slots and checks no upper bound.
    rows = kv_cache.shape[0] * kv_cache.shape[1]
    slots = slot_mapping.masked_fill(slot_mapping >= rows, -1)
    scale = kv_c.new_ones(1, dtype=torch.float32) if kv_scale is None else kv_scale
    values = (kv_c, k_pe, kv_cache, slots, "fp8" if fp8 else "auto", scale)
    aiter_runtime.installed_runtime().write(values)
