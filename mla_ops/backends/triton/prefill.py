# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""Ragged multi-head attention with different widths of qk and v, neither padded."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from mla_ops.backends.triton.configs import PrefillConfig, prefill_config
from mla_ops.backends.triton.launch import Launch, arch_of, heads_lie_near, refuse
from mla_ops.backends.triton.prefill_hopper import prefill_hopper_kernel
from mla_ops.backends.widths import is_served, split_width

__all__ = ["mla_prefill", "prefill_launch"]

LN_2: tl.constexpr = tl.constexpr(0.6931471805599453)
_LOG2_E = math.log2(math.e)


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
    """Ragged multi-head attention with different widths of qk and v. See :func:`mla_ops.mla_prefill`.

    Raises:
        BackendUnavailableError: float64, or a width that is no sum of at most two powers of two.
    """
    if q.dtype == torch.float64:
        raise refuse("the kernels accumulate in float32 and q is float64")
    if split_width(q.shape[2]) is None or not is_served(v.shape[2]):
        raise refuse(
            "qk_head_dim must be a power of two or a sum of two, and v_head_dim a power of two, all at least 16, "
            f"got {q.shape[2]} and {v.shape[2]}"
        )
    if softmax_scale <= 0:
        raise refuse(f"the kernels take the largest score before they scale it, and softmax_scale is {softmax_scale}")
    config = prefill_config(arch_of(q), q.dtype)
    q, k, v = (x if heads_lie_near(x) else x.contiguous() for x in (q, k, v))
    out = q.new_empty(q.shape[0], q.shape[1], v.shape[2])
    lse = q.new_empty(q.shape[0], q.shape[1], dtype=torch.float32)
    prefill_launch(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal, out, lse, config
    ).run()
    return out, lse


def prefill_launch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float,
    causal: bool,
    out: Tensor,
    lse: Tensor,
    config: PrefillConfig,
) -> Launch:
    """The launch of a prefill into contiguous ``out`` [T, H, V] and ``lse`` [T, H] by ``config``."""
    num_requests = cu_seqlens_q.shape[0] - 1
    widths = split_width(q.shape[2])
    assert widths is not None, f"q is {q.shape[2]} wide"
    wide, narrow = widths
    if config.kernel == "hopper" and not (num_requests and _hopper_can(q, k, v, wide, narrow)):
        config = prefill_config("*", q.dtype)
    args = {
        "q": q,
        "k": k,
        "v": v,
        "cu_seqlens_q": cu_seqlens_q,
        "cu_seqlens_k": cu_seqlens_k,
        "out": out,
        "lse": lse,
        "softmax_scale_log2": softmax_scale * _LOG2_E,
        "num_tokens": q.shape[0],
        "num_requests": num_requests,
        "num_heads": q.shape[1],
        "max_seqlen_q": max_seqlen_q,
        "max_seqlen_k": max_seqlen_k,
        "stride_q": q.stride(0),
        "stride_q_head": q.stride(1),
        "stride_k": k.stride(0),
        "stride_k_head": k.stride(1),
        "stride_v": v.stride(0),
        "stride_v_head": v.stride(1),
        "WIDE": wide,
        "NARROW": narrow,
        "V": v.shape[2],
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "CAUSAL": causal,
        "PRECISION": "ieee",
    }
    grid = (triton.cdiv(max_seqlen_q, config.block_m), q.shape[1], max(1, num_requests))
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages, **dict(config.extra)}
    return Launch(prefill_hopper_kernel if config.kernel == "hopper" else prefill_kernel, grid, args, options)


def _hopper_can(q: Tensor, k: Tensor, v: Tensor, wide: int, narrow: int) -> bool:
    """Whether three tiles fit the shared memory and rows are of 16-byte pieces."""
    aligned = not any(x.data_ptr() % 16 or x.stride(0) % 16 or x.stride(1) % 16 for x in (q, k, v))
    return aligned and 64 <= wide <= 128 and narrow <= 64 and 64 <= v.shape[2] <= 128


@triton.jit
def _attend(
    q_w, q_n, m, l, acc, k, v, low, high, keys, visible, qk_scale, stride_k, stride_v,
    WIDE: tl.constexpr, NARROW: tl.constexpr, V: tl.constexpr, BLOCK_N: tl.constexpr, MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Online softmax of a block of query rows over keys low..high, in steps of BLOCK_N."""
    offset = tl.arange(0, BLOCK_N)
    wide = tl.arange(0, WIDE)
    column = tl.arange(0, V)
    for start in range(low, high, BLOCK_N):
        key = start + offset
        live = (key < keys)[:, None]
        k_row = k + key.to(tl.int64)[:, None] * stride_k
        # What lies behind the last key belongs to another request and may be NaN: it is never loaded.
        k_w = tl.load(k_row + wide[None, :], mask=live, other=0.0) if MASKED else tl.load(k_row + wide[None, :])
        scores = tl.dot(q_w, tl.trans(k_w), input_precision=PRECISION)
        if NARROW > 0:
            narrow = WIDE + tl.arange(0, NARROW)
            k_n = tl.load(k_row + narrow[None, :], mask=live, other=0.0) if MASKED else tl.load(k_row + narrow[None, :])
            scores = tl.dot(q_n, tl.trans(k_n), scores, input_precision=PRECISION)
        if MASKED:
            scores = tl.where(key[None, :] < visible[:, None], scores, -float("inf"))
        m_new = tl.maximum(m, tl.max(scores, 1) * qk_scale)
        # a row that sees no key yet has -inf here, and -inf - -inf is NaN
        shift = tl.where(m_new == -float("inf"), 0.0, m_new) if MASKED else m_new
        p = tl.exp2(scores * qk_scale - shift[:, None])
        alpha = tl.exp2(m - shift)
        l = l * alpha + tl.sum(p, 1)
        v_row = v + key.to(tl.int64)[:, None] * stride_v + column[None, :]
        values = tl.load(v_row, mask=live, other=0.0) if MASKED else tl.load(v_row)
        acc = acc * alpha[:, None]
        acc = tl.dot(p.to(values.dtype), values, acc, input_precision=PRECISION)
        m = m_new
    return m, l, acc


@triton.jit
def _clear_rows(out, lse, low, high, head, num_heads, V: tl.constexpr, BLOCK_M: tl.constexpr):
    for start in range(low, high, BLOCK_M):
        token = start + tl.arange(0, BLOCK_M)
        target = token.to(tl.int64) * num_heads + head
        cells = out + target[:, None] * V + tl.arange(0, V)[None, :]
        tl.store(cells, tl.zeros([BLOCK_M, V], out.dtype.element_ty), mask=(token < high)[:, None])
        tl.store(lse + target, tl.full([BLOCK_M], -float("inf"), tl.float32), mask=token < high)


@triton.jit(
    do_not_specialize=[
        "softmax_scale_log2", "num_tokens", "num_requests", "num_heads", "max_seqlen_q", "max_seqlen_k",
    ]
)  # fmt: skip
def prefill_kernel(
    q, k, v, cu_seqlens_q, cu_seqlens_k, out, lse,
    softmax_scale_log2, num_tokens, num_requests, num_heads, max_seqlen_q, max_seqlen_k,
    stride_q, stride_q_head, stride_k, stride_k_head, stride_v, stride_v_head,
    WIDE: tl.constexpr, NARROW: tl.constexpr, V: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One block of query rows of one head of one request.

    Grid (blocks of max_seqlen_q, H, B): neighbours in launch order read the same keys. The first block of the first
    request also clears the rows that no request has.
    """
    block = tl.program_id(0)
    head = tl.program_id(1)
    request = tl.program_id(2)
    if (block == 0) & (request == 0):
        _clear_rows(out, lse, 0, tl.load(cu_seqlens_q), head, num_heads, V, BLOCK_M)
        _clear_rows(out, lse, tl.load(cu_seqlens_q + num_requests), num_tokens, head, num_heads, V, BLOCK_M)
    if request < num_requests:
        first_q = tl.load(cu_seqlens_q + request)
        first_k = tl.load(cu_seqlens_k + request)
        all_queries = tl.load(cu_seqlens_q + request + 1) - first_q
        all_keys = tl.load(cu_seqlens_k + request + 1) - first_k
        queries = tl.minimum(all_queries, max_seqlen_q)
        keys = tl.minimum(all_keys, max_seqlen_k)
        if block == 0:
            _clear_rows(out, lse, first_q + queries, first_q + all_queries, head, num_heads, V, BLOCK_M)
        # The longest rows of a causal block first, so that the short ones fill the end.
        first_row = (tl.cdiv(queries, BLOCK_M) - 1 - block) * BLOCK_M
        if first_row >= 0:
            row = first_row + tl.arange(0, BLOCK_M)
            live = row < queries
            if CAUSAL:
                # Bottom-right aligned: the last query sees the last key.
                shift = all_keys - all_queries
                visible = tl.minimum(row + shift + 1, keys)
                end = tl.minimum(tl.maximum(first_row + BLOCK_M + shift, 0), keys)
                unmasked = tl.minimum(tl.maximum(first_row + shift + 1, 0), keys) // BLOCK_N * BLOCK_N
            else:
                visible = tl.full([BLOCK_M], 0, tl.int32) + keys
                end = keys
                unmasked = keys // BLOCK_N * BLOCK_N
            token = (first_q + row).to(tl.int64)
            q_row = q + token[:, None] * stride_q + head * stride_q_head
            q_w = tl.load(q_row + tl.arange(0, WIDE)[None, :], mask=live[:, None], other=0.0)
            q_n = q_w
            if NARROW > 0:
                q_n = tl.load(q_row + WIDE + tl.arange(0, NARROW)[None, :], mask=live[:, None], other=0.0)
            k_head = k + first_k.to(tl.int64) * stride_k + head * stride_k_head
            v_head = v + first_k.to(tl.int64) * stride_v + head * stride_v_head
            m = tl.full([BLOCK_M], -float("inf"), tl.float32)
            l = tl.zeros([BLOCK_M], tl.float32)
            acc = tl.zeros([BLOCK_M, V], tl.float32)
            m, l, acc = _attend(
                q_w, q_n, m, l, acc, k_head, v_head, 0, unmasked, keys, visible,
                softmax_scale_log2, stride_k, stride_v,
                WIDE, NARROW, V, BLOCK_N, False, PRECISION,
            )  # fmt: skip
            m, l, acc = _attend(
                q_w, q_n, m, l, acc, k_head, v_head, unmasked, end, keys, visible,
                softmax_scale_log2, stride_k, stride_v,
                WIDE, NARROW, V, BLOCK_N, True, PRECISION,
            )  # fmt: skip
            l = tl.where(l == 0.0, 1.0, l)  # of a row that sees no key: acc is 0 and m -inf
            acc = acc / l[:, None]
            target = token * num_heads + head
            cells = out + target[:, None] * V + tl.arange(0, V)[None, :]
            tl.store(cells, acc.to(out.dtype.element_ty), mask=live[:, None])
            tl.store(lse + target, (m + tl.log2(l)) * LN_2, mask=live)
