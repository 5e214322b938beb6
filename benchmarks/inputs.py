"""Inputs of the decode and prefill benchmarks, and their references in float64."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from mla_ops import testing

__all__ = ["SCALE", "DecodeInputs", "PrefillInputs", "decode_inputs", "input_sets", "prefill_inputs"]

SCALE = 192**-0.5
_L2_BYTES = 4 * (60 << 20)


@dataclass(frozen=True)
class DecodeInputs:
    """One decode step: lengths [B] on the host and the arguments of ``mla_decode``.

    Attributes:
        made: what the tensors come from.
    """

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
    made: testing.DecodeInputs

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
        for request, q in enumerate(self.q[:requests]):
            kv = self.made.latent_rows(request)
            scores = q.double() @ kv.mT * SCALE
            outs.append(scores.softmax(-1) @ kv[:, : self.rank])
        return torch.stack(outs)


def decode_inputs(
    lens: list[int], heads: int, page_size: int, dtype: torch.dtype, fp8: bool = False, rank: int = 512, rope: int = 64
) -> DecodeInputs:
    """Random inputs over shuffled pages; every unused slot and page is NaN."""
    made = testing.make_decode_inputs(
        lens,
        num_heads=heads,
        kv_lora_rank=rank,
        qk_rope_head_dim=rope,
        page_size=page_size,
        dtype=dtype,
        kv_dtype=torch.float8_e4m3fn if fp8 else None,
        device="cuda",
        generator=_generator(),
    )
    starts = made.kv_indptr.tolist()
    pages = [made.kv_indices[first:last] for first, last in itertools.pairwise(starts)]
    return DecodeInputs(
        lens=lens,
        q=made.q[: len(lens)],
        kv_cache=made.kv_cache,
        qo_indptr=made.qo_indptr,
        kv_indptr=made.kv_indptr,
        kv_indices=made.kv_indices,
        kv_last_page_lens=made.kv_last_page_lens,
        block_table=pad_sequence(pages, batch_first=True),
        kv_scale=made.kv_scale,
        rank=rank,
        made=made,
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
    made = testing.make_prefill_inputs(
        [length] * batch, num_heads=heads, qk_head_dim=192, v_head_dim=128, dtype=dtype, device="cuda",
        generator=_generator(),
    )  # fmt: skip
    q, k, v = (rows[: batch * length] for rows in (made.q, made.k, made.v))
    return PrefillInputs(length, q, k, v, made.cu_seqlens_q)


def _generator() -> torch.Generator:
    generator = torch.Generator("cuda")
    generator.seed()
    return generator
