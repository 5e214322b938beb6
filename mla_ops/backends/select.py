"""Which backend serves a request, and why."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from mla_ops.backends.widths import is_served, split_width
from mla_ops.config import MLAConfig
from mla_ops.errors import BackendUnavailableError

__all__ = ["BACKENDS", "Choice", "Op", "resolve", "select"]

BACKENDS = ("aiter", "flash_mla", "reference", "triton")

Op = Literal["decode", "prefill", "cache", "layer"]
"""What is to be served: attention in one form or the other, reads and writes of the cache, or the ops around it."""


# Requests x query tokens x heads up to which a decode by the Triton kernels takes no longer than FlashMLA's, which has
# to make a schedule too: measured on an H200 at 16, 64 and 128 heads and 128 to 16,384 keys (docs/triton.md).
_FEW_ROWS = 256


@dataclass(frozen=True)
class Choice:
    """A backend and the reason for it.

    Attributes:
        few: the backend of decode steps of so few rows (requests x query tokens x heads) that it is the faster one
            there, and how many that are at most; None where ``name`` serves all.
    """

    name: str
    reason: str
    few: tuple[str, int] | None = None

    def of(self, rows: int) -> str:
        """The backend of a step of ``rows`` rows."""
        return self.few[0] if self.few is not None and rows <= self.few[1] else self.name


@dataclass(frozen=True)
class _Request:
    device: torch.device
    dtype: torch.dtype
    kv_dtype: torch.dtype
    op: Op
    num_heads: int
    widths: tuple[int, int]
    query_len: int


def select(
    config: MLAConfig | None,
    device: torch.device | str,
    dtype: torch.dtype,
    *,
    backend: str = "auto",
    op: Op = "decode",
    num_heads: int | None = None,
    widths: tuple[int, int] | None = None,
    query_len: int = 1,
    page_size: int | None = None,
    kv_dtype: torch.dtype | None = None,
) -> Choice:
    """Choose a backend.

    Args:
        config: the dimensions, or ``None`` where ``num_heads`` and ``widths`` say them.
        device: where the tensors are.
        dtype: of the queries.
        backend: ``"auto"``, or the name of one, which then serves or raises: nothing falls back silently.
        op: what it is to serve.
        num_heads: the config's where ``None``.
        widths: ``(latent_dim, kv_lora_rank)`` for decode, ``(qk_head_dim, v_head_dim)`` for prefill; the config's
            where ``None``.
        query_len: query tokens of each request in decode.
        page_size: rows per page; auto takes FlashMLA only where it is known.
        kv_dtype: of the cache; ``dtype`` where ``None``.

    Raises:
        BackendUnavailableError: the backend that was asked for cannot serve; says why and what would work.
        ValueError: no backend has that name.
    """
    device = torch.device(device)
    if backend not in ("auto", *BACKENDS):
        raise ValueError(f"backend must be auto, {', '.join(BACKENDS)}, got {backend!r}")
    if not dtype.is_floating_point:
        raise BackendUnavailableError(backend, f"queries of {dtype} are not floating point", "use bfloat16")
    if backend == "reference":
        return Choice("reference", "asked for")
    if backend == "auto" and device.type == "cpu":
        return Choice("reference", "the device is a CPU")
    before = ""
    if op == "layer" and backend in ("aiter", "flash_mla"):
        raise BackendUnavailableError(backend, "it serves attention and the cache only", 'use backend="triton"')
    if backend == "aiter" or (backend == "auto" and op != "layer" and torch.version.hip is not None):
        if config is not None:
            decode, prefill = (config.latent_dim, config.kv_lora_rank), (config.qk_head_dim, config.v_head_dim)
            num_heads, widths = num_heads or config.num_heads, widths or (prefill if op == "prefill" else decode)
        elif widths is None:
            op = "cache"
        request = _Request(device, dtype, kv_dtype or dtype, op, num_heads or 1, widths or (0, 0), query_len)
        try:
            return Choice("aiter", _aiter_reason(request))
        except BackendUnavailableError as error:
            if backend == "aiter":
                raise
            before = f"AITER does not serve this ({error.reason}); "
    elif backend == "flash_mla" or (backend == "auto" and op == "decode" and page_size is not None):
        refused = _flash_mla_refusal(config, device, dtype, page_size, kv_dtype)
        if refused is None and backend == "flash_mla":
            return Choice("flash_mla", "asked for")
        if refused is None and _triton_refusal(config, device, dtype, op, widths) is None:
            reason = f"the fastest decode on sm_90, but for triton's of up to {_FEW_ROWS} rows"
            return Choice("flash_mla", reason, ("triton", _FEW_ROWS))
        if refused is None:
            return Choice("flash_mla", "the fastest decode on sm_90")
        if backend == "flash_mla":
            raise BackendUnavailableError("flash_mla", refused, 'use backend="triton"')
        before = f"FlashMLA does not serve this ({refused}); "
    refusal = _triton_refusal(config, device, dtype, op, widths)
    if refusal is None:
        served = "asked for" if backend == "triton" else f"its kernels serve {dtype} on {device.type}"
        return Choice("triton", before + served)
    if backend == "triton":
        raise BackendUnavailableError("triton", refusal, 'use backend="reference"')
    return Choice("reference", f"{before}the triton backend cannot serve: {refusal}")


def resolve(backend: str, like: Tensor, **request: Any) -> str:
    """``backend``, or for ``"auto"`` the name of what :func:`select` takes for such a tensor.

    For a tensor that no backend takes that is one whose checks say so.
    """
    if backend != "auto":
        return backend
    return select(None, like.device, like.dtype, **request).name if like.is_floating_point() else "reference"


def _aiter_reason(request: _Request) -> str:
    """Why AITER serves the request.

    Raises:
        BackendUnavailableError: it does not.
    """
    from mla_ops.backends import aiter

    where = aiter.describe(request.device)
    if request.op == "cache":
        return where
    if request.op == "prefill":
        qk_head_dim, v_head_dim = request.widths
        aiter.check_prefill(request.device, qk_head_dim=qk_head_dim, v_head_dim=v_head_dim, dtype=request.dtype)
        return f"{where}, flash_attn_varlen_func"
    latent_dim, kv_lora_rank = request.widths
    row = aiter.decode_row(
        request.device,
        num_heads=request.num_heads,
        query_len=request.query_len,
        latent_dim=latent_dim,
        kv_lora_rank=kv_lora_rank,
        dtype=request.dtype,
        kv_dtype=request.kv_dtype,
    )
    padded = f", {request.num_heads} heads padded to {row.num_heads}" if row.num_heads != request.num_heads else ""
    return f"{where}, {row.code_object}{padded}"


def _flash_mla_refusal(
    config: MLAConfig | None,
    device: torch.device,
    dtype: torch.dtype,
    page_size: int | None,
    kv_dtype: torch.dtype | None,
) -> str | None:
    from mla_ops.backends import flash_mla  # here: it selects the backend of its other ops

    widths = None if config is None else (config.latent_dim, config.kv_lora_rank)
    return flash_mla.refusal(device, dtype, widths=widths, page_size=page_size, kv_dtype=kv_dtype)


def _triton_refusal(
    config: MLAConfig | None, device: torch.device, dtype: torch.dtype, op: Op, widths: tuple[int, int] | None
) -> str | None:
    """Why our own kernels cannot serve, or None. Does not import triton."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    interpreted = device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"
    if device.type != "cuda" and not interpreted:
        return f"its kernels cannot run on {device.type}"
    if dtype == torch.float64:
        return "its kernels accumulate in float32 and the queries are float64"
    powers: dict[str, int] = {}  # what must be a power of two
    qk_head_dim = 0
    if config is not None:
        powers = {name: getattr(config, name) for name in ("kv_lora_rank", "qk_rope_head_dim", "v_head_dim")}
        qk_head_dim = config.qk_head_dim
    elif widths is not None and op == "decode":
        powers = {"kv_lora_rank": widths[1], "qk_rope_head_dim": widths[0] - widths[1]}
    elif widths is not None and op == "prefill":
        qk_head_dim, powers = widths[0], {"v_head_dim": widths[1]}
    for name, width in powers.items():
        if not is_served(width) and (name, width) != ("qk_rope_head_dim", 0):
            return f"{name} must be a power of two and at least 16, got {width}"
    if op == "prefill" and qk_head_dim and split_width(qk_head_dim) is None:
        return f"qk_head_dim must be a power of two or a sum of two, all at least 16, got {qk_head_dim}"
    return None
