"""Inputs of the decode and prefill benchmarks, and their references in float64."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["DecodeInputs", "PrefillInputs", "decode_inputs", "input_sets", "prefill_inputs"]

SCALE = 192**-0.5
_L2_BYTES = 4 * (60 << 20)


@dataclass(frozen=True)
class DecodeInputs:
    """One decode step: lengths [B] on the host and the arguments of ``mla_decode``."""

    lens: list[int]
    q: Tensor
    kv_cache: Tensor
    qo_indptr: Tensor
    kv_indptr: Tensor
    kv_indices: Tensor
    kv_last_page_lens: Tensor
    block_table: Tensor
    kv_scale: Tensor | None
    rank: int

    @property
    def bytes(self) -> int:
        """Fewest bytes that the step moves: each live latent row, q and out once."""
        row = self.kv_cache.shape[2] * self.kv_cache.itemsize
        return sum(self.lens) * row + self.q.nbytes + self.q.shape[0] * self.q.shape[1] * self.rank * 2

    @property
    def flop(self) -> int:
        """Multiplications and additions of both products."""
        return 2 * sum(self.lens) * self.q.shape[1] * (self.q.shape[2] + self.rank)

    def expected(self, requests: int = 4) -> Tensor:
        """Output [requests, H, rank] of the first requests, in float64."""
        outs = []
        for request, length in enumerate(self.lens[:requests]):
            pages = self.block_table[request, : -(-length // self.kv_cache.shape[1])].long()
            kv = self.kv_cache[pages].flatten(0, 1)[:length].double()
            if self.kv_scale is not None:
                kv = kv * self.kv_scale.double()
            scores = self.q[request].double() @ kv.mT * SCALE
            outs.append(scores.softmax(-1) @ kv[:, : self.rank])
        return torch.stack(outs)


def decode_inputs(
    lens: list[int], heads: int, page_size: int, dtype: torch.dtype, fp8: bool = False, rank: int = 512, rope: int = 64
) -> DecodeInputs:
    """Random inputs over shuffled pages; every unused slot and page is NaN."""
    device = torch.device("cuda")
    num_pages = [-(-length // page_size) for length in lens]
    total = sum(num_pages)
    kv_cache = torch.full((total + 1, page_size, rank + rope), torch.nan, device=device, dtype=dtype)
    kv_indices = torch.randperm(total, device=device).to(torch.int32) + 1
    indptr = [0]
    block_table = torch.zeros(len(lens), max(num_pages), dtype=torch.int32, device=device)
    for request, (length, pages) in enumerate(zip(lens, num_pages, strict=True)):
        mine = kv_indices[indptr[-1] : indptr[-1] + pages]
        block_table[request, :pages] = mine
        kv_cache[mine.long()] = torch.randn(pages, page_size, rank + rope, device=device, dtype=dtype)
        if length % page_size:
            kv_cache[mine[-1].long(), length % page_size :] = torch.nan
        indptr.append(indptr[-1] + pages)
    scale = torch.full((1,), 0.02, device=device) if fp8 else None
    if scale is not None:
        kv_cache = (kv_cache / scale).clamp(-448, 448).to(torch.float8_e4m3fn)

    def int32(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    return DecodeInputs(
        lens=lens,
        q=torch.randn(len(lens), heads, rank + rope, device=device, dtype=dtype),
        kv_cache=kv_cache,
        qo_indptr=int32(list(range(len(lens) + 1))),
        kv_indptr=int32(indptr),
        kv_indices=kv_indices,
        kv_last_page_lens=int32([(n - 1) % page_size + 1 for n in lens]),
        block_table=block_table,
        kv_scale=scale,
        rank=rank,
    )


def input_sets(bytes_of_one: int) -> int:
    """How many input sets exceed the last-level cache four times over."""
    return max(1, min(16, -(-_L2_BYTES // bytes_of_one)))


@dataclass(frozen=True)
class PrefillInputs:
    """One prefill of equal causal sequences."""

    length: int
    q: Tensor
    k: Tensor
    v: Tensor
    cu_seqlens: Tensor

    @property
    def flop(self) -> int:
        """Multiplications and additions of both products, the masked half not counted."""
        width = self.q.shape[2] + self.v.shape[2]
        return self.q.shape[0] * self.length * self.q.shape[1] * width

    def expected(self, rows: int = 64) -> Tensor:
        """Output [rows, H, V] of the last rows of the first sequence, in float64."""
        q = self.q[self.length - rows : self.length].double().transpose(0, 1)
        k, v = (x[: self.length].double().transpose(0, 1) for x in (self.k, self.v))
        scores = q @ k.mT * SCALE
        mask = torch.ones(rows, self.length, dtype=torch.bool, device=q.device).tril(self.length - rows)
        return (scores.masked_fill(~mask, -torch.inf).softmax(-1) @ v).transpose(0, 1)


def prefill_inputs(batch: int, length: int, heads: int, dtype: torch.dtype) -> PrefillInputs:
    """Random inputs with q and k of 192 and v of 128."""
    q, k = (torch.randn(batch * length, heads, 192, device="cuda", dtype=dtype) for _ in range(2))
    v = torch.randn(batch * length, heads, 128, device="cuda", dtype=dtype)
    cu_seqlens = torch.arange(0, batch * length + 1, length, dtype=torch.int32, device="cuda")
    return PrefillInputs(length, q, k, v, cu_seqlens)
