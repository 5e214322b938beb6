"""The specification: every op in plain PyTorch, on any device.

Letters: T query tokens, B requests, H heads, R kv_lora_rank, P qk_rope_head_dim, D = R + P, S keys.
float64 inside for float32 inputs, float32 for the half types. Empty inputs are answered at the ops' entry and
never come here. Nothing here reads a tensor on the host, so that
a step that uses it can be captured; nothing is left unwritten, and no masked key, NaN or not, reaches a result.
The absorbed form is :func:`mla_decode` and the naive one :func:`mla_prefill`; a test holds them to each other.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mla_ops.backends.reference_layer import (
    absorb_query,
    compute_dtype,
    expand_values,
    linear,
    norm_rope_rows,
    rms_norm,
)
from mla_ops.validation import FLOAT8_DTYPES, output_dtype

__all__ = [
    "absorb_query",
    "decode_formula",
    "expand_values",
    "gather_latent_cache",
    "linear",
    "merge_attn_states",
    "mla_decode",
    "mla_prefill",
    "norm_rope_write",
    "rms_norm",
    "write_latent_cache",
]

# Requests and query rows are worked off in groups whose scratch stays about this size.
_SCRATCH_BYTES = 256 << 20


def _dequantised(x: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    # Only fp8 was divided by a scale
    return x.to(dtype) if scale is None or x.dtype not in FLOAT8_DTYPES else x.to(dtype) * scale.to(dtype)


def _rows_of_requests(indptr: Tensor, width: int, total: int) -> Tensor:
    """[B, width] row of each request's i-th token; ``total`` where it has none."""
    rows = indptr[:-1, None] + torch.arange(width, device=indptr.device, dtype=torch.int64)
    return rows.where(rows < indptr[1:, None], total)


def _take_rows(x: Tensor, rows: Tensor) -> Tensor:
    """x[rows], and zeros where the row is ``len(x)``."""
    return torch.cat([x, x.new_zeros(1, *x.shape[1:])])[rows]


def _put_rows(values: Tensor, rows: Tensor, total: int, fill: float, dtype: torch.dtype) -> Tensor:
    """[total, ...] with values[i] at rows[i] and ``fill`` elsewhere; what goes to row ``total`` is dropped."""
    result = values.new_full((total + 1, *values.shape[rows.dim() :]), fill, dtype=dtype)
    result = result.index_put((rows.reshape(-1),), values.flatten(0, rows.dim() - 1).to(dtype))
    return result[:total]


def _attend(scores: Tensor, visible: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Softmax over the visible keys times v; 0 and -inf for a row that sees none. [.., S], [.., S], [.., S, V]"""
    scores = scores.masked_fill(~visible, -torch.inf)
    lse = scores.logsumexp(-1)
    shift = lse.masked_fill(lse.isneginf(), 0.0)
    return (scores - shift[..., None]).exp() @ v, lse


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
    """Paged attention over latent rows, K and V in one. See :func:`mla_ops.mla_decode`.

    ``backend_state`` is empty, or holds ``[max_pages]`` int32 ``arange(max_pages)``: a bound on the pages of one
    request, as the shape of a tensor. Without it one request is taken to own all of ``kv_indices``.
    """
    # Reading the longest page list is no synchronisation on a CPU, and saves the work on what is masked
    if q.is_cpu and not torch._C._len_torch_dispatch_stack() and torch._C._functorch.maybe_current_level() is None:
        longest = int((kv_indptr[1:] - kv_indptr[:-1]).max().clamp(min=1))
        page_of = backend_state[0][:longest] if backend_state else torch.arange(longest, dtype=torch.int32)
        backend_state = [page_of]
    return decode_formula(
        *(q, kv_cache, qo_indptr, kv_indptr, kv_indices, kv_last_page_lens, backend_state, max_seqlen_q),
        *(softmax_scale, q_scale, kv_scale, kv_lora_rank),
    )


def decode_formula(
    q: Tensor,
    kv_cache: Tensor,
    qo_indptr: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    kv_last_page_lens: Tensor,
    backend_state: Sequence[Tensor],
    max_seqlen_q: int,
    softmax_scale: float,
    q_scale: Tensor | None,
    kv_scale: Tensor | None,
    kv_lora_rank: int,
) -> tuple[Tensor, Tensor]:
    """:func:`mla_decode` in operations that trace and differentiate; its arguments but ``num_kv_splits``."""
    tokens, heads, latent_dim = q.shape
    page_size = kv_cache.shape[1]
    compute = compute_dtype(q.dtype)
    page_of = backend_state[0] if backend_state else torch.arange(len(kv_indices), device=q.device)

    entries = kv_indptr[:-1, None] + page_of.to(torch.int64)  # [B, pages of a request]
    listed = entries < kv_indptr[1:, None]
    pages = kv_indices[entries.clamp(0, len(kv_indices) - 1)].where(listed, 0)
    num_pages = kv_indptr[1:] - kv_indptr[:-1]
    kv_lens = torch.where(num_pages > 0, (num_pages - 1) * page_size + kv_last_page_lens, 0)

    rows = _rows_of_requests(qo_indptr, max_seqlen_q, tokens)  # [B, Q]
    queries = _dequantised(_take_rows(q, rows), q_scale, compute)  # [B, Q, H, D]
    key = torch.arange(page_of.shape[0] * page_size, device=q.device)
    # The last query sees the last key: query i of n sees keys before kv_len - (n - 1 - i).
    query = torch.arange(max_seqlen_q, device=q.device)
    seen = kv_lens[:, None] - (qo_indptr[1:] - qo_indptr[:-1])[:, None] + 1 + query  # [B, Q]

    bytes_of_request = max(1, key.numel() * (latent_dim + max_seqlen_q * heads) * compute.itemsize)
    group = max(1, _SCRATCH_BYTES // bytes_of_request)
    outs: list[Tensor] = []
    lses: list[Tensor] = []
    for low in range(0, rows.shape[0], group):
        part = slice(low, low + group)
        in_request = key < kv_lens[part, None]  # [b, S]
        kv = _dequantised(kv_cache[pages[part]].flatten(1, 2), kv_scale, compute)  # [b, S, D]
        kv = kv.masked_fill(~in_request[..., None], 0.0)  # NaN in an unused slot must not meet a weight of 0
        scores = queries[part].flatten(1, 2) @ kv.mT * softmax_scale  # [b, Q * H, S]
        visible = (key < seen[part, :, None]) & in_request[:, None]
        visible = visible[:, :, None].expand(-1, -1, heads, -1).flatten(1, 2)
        out, lse = _attend(scores, visible, kv[..., :kv_lora_rank])
        outs.append(out.view(-1, max_seqlen_q, heads, kv_lora_rank))
        lses.append(lse.view(-1, max_seqlen_q, heads))
    out = _put_rows(torch.cat(outs), rows, tokens, 0.0, output_dtype(q))
    return out, _put_rows(torch.cat(lses), rows, tokens, -torch.inf, torch.float32)


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
    """Ragged multi-head attention with different widths of qk and v. See :func:`mla_ops.mla_prefill`."""
    tokens, heads, _ = q.shape
    compute = compute_dtype(q.dtype)
    rows = _rows_of_requests(cu_seqlens_q, max_seqlen_q, tokens)  # [B, Q]
    key_rows = _rows_of_requests(cu_seqlens_k, max_seqlen_k, k.shape[0])  # [B, K]
    key = torch.arange(max_seqlen_k, device=q.device)
    # Bottom-right aligned: the last query sees the last key.
    shift = (cu_seqlens_k[1:] - cu_seqlens_k[:-1]) - (cu_seqlens_q[1:] - cu_seqlens_q[:-1])
    block = max(1, _SCRATCH_BYTES // (heads * max_seqlen_k * compute.itemsize))
    outs: list[Tensor] = []
    lses: list[Tensor] = []
    for request in range(rows.shape[0]):
        keys = _take_rows(k, key_rows[request]).to(compute).transpose(0, 1)  # [H, K, N + P]
        values = _take_rows(v, key_rows[request]).to(compute).transpose(0, 1)  # [H, K, V]
        in_request = key_rows[request] < k.shape[0]
        for low in range(0, max_seqlen_q, block):
            part = rows[request, low : low + block]
            scores = _take_rows(q, part).to(compute).transpose(0, 1) @ keys.mT * softmax_scale  # [H, q, K]
            visible = in_request.expand(part.shape[0], -1)
            if causal:
                query = torch.arange(low, low + part.shape[0], device=q.device)
                visible = visible & (key <= (query + shift[request])[:, None])
            out, lse = _attend(scores, visible, values)
            outs.append(out.transpose(0, 1))
            lses.append(lse.transpose(0, 1))
    rows = rows.reshape(-1)
    out = _put_rows(torch.cat(outs), rows, tokens, 0.0, q.dtype)
    return out, _put_rows(torch.cat(lses), rows, tokens, -torch.inf, torch.float32)


def write_latent_cache(
    kv_c: Tensor, k_pe: Tensor, kv_cache: Tensor, slot_mapping: Tensor, kv_scale: Tensor | None
) -> None:
    """Store latent rows into their slots, in place. See :func:`mla_ops.write_latent_cache`."""
    pages, page_size, _ = kv_cache.shape
    live = (slot_mapping >= 0) & (slot_mapping < pages * page_size)
    # A dropped row writes what some live row writes, where that one does: no row is left out (that would need
    # the host) and no slot gets two values. With no live row, all write slot 0's own value.
    source = torch.where(live, torch.arange(live.shape[0], device=live.device), live.long().argmax())
    slot = slot_mapping.where(live, 0)[source]
    row = torch.cat([kv_c, k_pe], dim=-1)
    if kv_cache.dtype in FLOAT8_DTYPES:
        assert kv_scale is not None  # checked at the entry
        limit = torch.finfo(kv_cache.dtype).max
        row = (row.float() / kv_scale).clamp(-limit, limit).to(kv_cache.dtype)
    target = kv_cache.view(torch.uint8) if kv_cache.dtype in FLOAT8_DTYPES else kv_cache
    index = (slot // page_size, slot % page_size)
    row = row.view(target.dtype)[source].where(live.any(), target[index])
    target.index_put_(index, row)


def norm_rope_write(
    q_a: Tensor,
    latent: Tensor,
    q_weight: Tensor,
    kv_weight: Tensor,
    positions: Tensor,
    inv_freq: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    eps: float,
    rope_scale: float,
    interleave: bool,
    kv_scale: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Norm and rotate rows, and write the latent ones. See :func:`mla_ops.norm_rope_write`."""
    kv_c, k_pe = norm_rope_rows(latent, kv_weight, positions, inv_freq, eps, rope_scale, interleave)
    if kv_cache.numel():
        write_latent_cache(kv_c, k_pe, kv_cache, slot_mapping, kv_scale)
    return rms_norm(q_a, q_weight, eps), torch.cat([kv_c, k_pe], dim=-1)


def gather_latent_cache(
    kv_cache: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    kv_last_page_lens: Tensor,
    cu_seqlens: Tensor,
    seq_starts: Tensor | None,
    num_tokens: int,
    kv_scale: Tensor | None,
    dtype: torch.dtype | None,
) -> Tensor:
    """Cached rows of each request, one after another. See :func:`mla_ops.gather_latent_cache`."""
    page_size = kv_cache.shape[1]
    token = torch.arange(num_tokens, device=kv_cache.device)
    request = torch.searchsorted(cu_seqlens[1:], token.to(cu_seqlens.dtype), right=True)
    request = request.clamp(max=kv_last_page_lens.shape[0] - 1)
    position = token - cu_seqlens[request]
    if seq_starts is not None:
        position = position + seq_starts[request]
    num_pages = kv_indptr[request + 1] - kv_indptr[request]
    kv_lens = torch.where(num_pages > 0, (num_pages - 1) * page_size + kv_last_page_lens[request], 0)
    live = (token >= cu_seqlens[0]) & (token < cu_seqlens[-1]) & (position >= 0) & (position < kv_lens)
    entry = (kv_indptr[request] + position // page_size).where(live, 0)
    page = kv_indices[entry].where(live, 0)
    rows = kv_cache[page, (position % page_size).where(live, 0)]
    result = _dequantised(rows, kv_scale, compute_dtype(dtype or kv_cache.dtype))
    return result.masked_fill(~live[:, None], 0.0).to(dtype or kv_cache.dtype)


def merge_attn_states(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Exact merge of attention over two disjoint sets of keys. See :func:`mla_ops.merge_attn_states`."""
    compute = compute_dtype(out_a.dtype)
    lse_a, lse_b = lse_a.to(compute), lse_b.to(compute)
    keyless = lse_a.isneginf() & lse_b.isneginf()  # the gradient of logaddexp is NaN there
    shift = torch.logaddexp(lse_a.masked_fill(keyless, 0.0), lse_b.masked_fill(keyless, 0.0))
    lse = shift.masked_fill(keyless, -torch.inf)
    merged = torch.zeros_like(out_a, dtype=compute)
    for out, part in ((out_a, lse_a), (out_b, lse_b)):
        empty = part.isneginf()[..., None]  # a side without keys may hold anything, NaN included
        merged = merged + out.to(compute).masked_fill(empty, 0.0) * (part - shift).exp()[..., None]
    # Sums have the strides of what is added
    return merged.to(out_a.dtype).contiguous(), lse.float().contiguous()
