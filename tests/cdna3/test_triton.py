"""Triton kernels, compiled for gfx942 and gfx950 without a GPU and run on the interpreter, against torch."""

import math

import pytest
import torch
import triton
import triton.language as tl

from .launch import WAVE_ORDERS
from .triton_launch import launch_triton

ARCHS = pytest.mark.parametrize("arch", ["gfx942", "gfx950"])


def assert_close(actual: torch.Tensor, expected: torch.Tensor, unit: float) -> None:
    """Largest error below `unit` times the largest magnitude expected; a NaN fails."""
    error = (actual.double() - expected).abs().max().item()
    assert error <= unit * max(1.0, expected.abs().max().item()), error


@triton.jit
def add(a, b, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(a + i, mask=i < n) + tl.load(b + i, mask=i < n), mask=i < n)


@ARCHS
@pytest.mark.parametrize("n", [1, 255, 256, 700])
def test_vector_add_writes_the_tail_and_nothing_else(n, arch):
    a, b = torch.randn(n), torch.randn(n)
    out = torch.full((n + 64,), 7.0)
    launch_triton(add, (triton.cdiv(n, 256),), a, b, out, n, BLOCK=256, arch=arch)
    assert torch.equal(out[:n], a + b)
    assert (out[n:] == 7).all()


@triton.jit
def matmul(a, b, out, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, BK: tl.constexpr):
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, BK)
    total = tl.zeros([M, N], tl.float32)
    for start in range(0, K, BK):
        x = tl.load(a + m[:, None] * K + start + k[None, :])
        y = tl.load(b + (start + k[:, None]) * N + n[None, :])
        total = tl.dot(x, y, total, input_precision="ieee")
    tl.store(out + m[:, None] * N + n[None, :], total)


@ARCHS
@pytest.mark.parametrize("tile", [16, 32])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=["bf16", "fp16", "fp32"])
def test_dot_uses_the_matrix_units(dtype, tile, arch):
    a, b = torch.randn(64, 64).to(dtype), torch.randn(64, 32).to(dtype)
    out = torch.full((64, 32), math.nan)
    program = launch_triton(
        matmul, (1,), a, b, out, M=64, N=32, K=64, BK=32, num_warps=2, matrix_instr_nonkdim=tile, arch=arch
    )
    assert any(name.startswith(f"v_mfma_f32_{tile}x{tile}x") for name in program.executed)
    assert_close(out, a.double() @ b.double(), 2e-6)


@triton.jit
def fp8_matmul(a, b, out, M: tl.constexpr, K: tl.constexpr):
    m, k = tl.arange(0, M), tl.arange(0, K)
    x, y = tl.load(a + m[:, None] * K + k[None, :]), tl.load(b + k[:, None] + m[None, :] * K)
    tl.store(out + m[:, None] * M + m[None, :], tl.dot(x, y))


def test_fp8_dot():
    a, b = (torch.randn(32, 64).to(torch.float8_e4m3fnuz) for _ in range(2))
    out = torch.full((32, 32), math.nan)
    program = launch_triton(fp8_matmul, (1,), a, b, out, M=32, K=64, num_warps=1)
    assert any("fp8_fp8" in name for name in program.executed)
    assert_close(out, a.double() @ b.double().T, 2e-6)


@triton.jit
def reduce_rows(x, total, top, where, COLUMNS: tl.constexpr):
    row, column = tl.program_id(0), tl.arange(0, COLUMNS)
    values = tl.load(x + row * COLUMNS + column)
    tl.store(total + row, tl.sum(values, 0))
    tl.store(top + row, tl.max(values, 0))
    tl.store(where + row, tl.argmin(values, 0))


@ARCHS
@pytest.mark.parametrize("warps", [1, 4])
def test_reductions(warps, arch):
    x = torch.randn(3, 512)
    total, top, where = torch.empty(3), torch.empty(3), torch.empty(3, dtype=torch.int32)
    launch_triton(reduce_rows, (3,), x, total, top, where, COLUMNS=512, num_warps=warps, arch=arch)
    assert_close(total, x.double().sum(1), 2e-6)
    assert torch.equal(top, x.amax(1))
    assert torch.equal(where, x.argmin(1).int())


@triton.jit
def softmax(x, out, n, BLOCK: tl.constexpr):
    row, column = tl.program_id(0), tl.arange(0, BLOCK)
    values = tl.load(x + row * n + column, mask=column < n, other=-float("inf")).to(tl.float32)
    exponentials = tl.exp(values - tl.max(values, 0))
    tl.store(out + row * n + column, (exponentials / tl.sum(exponentials, 0)).to(out.dtype.element_ty), mask=column < n)


@ARCHS
@pytest.mark.parametrize(("dtype", "unit"), [(torch.float32, 4e-7), (torch.bfloat16, 2**-8)], ids=["fp32", "bf16"])
def test_softmax(dtype, unit, arch):
    x = (4 * torch.randn(2, 333)).to(dtype)
    out = torch.full_like(x, math.nan)
    launch_triton(softmax, (2,), x, out, 333, BLOCK=512, arch=arch)
    assert_close(out, x.double().softmax(1), unit)


@triton.jit
def count(counter, order, BLOCK: tl.constexpr):
    tl.store(order + tl.program_id(0), tl.atomic_add(counter, 1))


def test_atomic_counter():
    counter, order = torch.zeros(1, dtype=torch.int32), torch.full((5,), -1, dtype=torch.int32)
    launch_triton(count, (5,), counter, order, BLOCK=1)
    assert counter.item() == 5
    assert sorted(order.tolist()) == list(range(5))


@triton.jit
def mla_decode(
    q,
    kv,
    indices,
    indptr,
    out,
    lse,
    scale,
    heads,
    splits,
    BH: tl.constexpr,
    BN: tl.constexpr,
    R: tl.constexpr,
    P: tl.constexpr,
):
    """One split of paged, absorbed attention: q [B, H, R + P], kv [tokens, R + P], out fp32 [B, splits, H, R]."""
    request, head_block, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    begin = tl.load(indptr + request)
    length = tl.load(indptr + request + 1) - begin
    share = tl.cdiv(length, splits)
    first = split * share
    last = tl.minimum(first + share, length)
    h = head_block * BH + tl.arange(0, BH)
    c, r = tl.arange(0, R), tl.arange(0, P)
    rows = q + (request * heads + h[:, None]) * (R + P)
    q_c = tl.load(rows + c[None, :], mask=h[:, None] < heads, other=0.0)
    q_r = tl.load(rows + R + r[None, :], mask=h[:, None] < heads, other=0.0)
    top, total = tl.full([BH], -float("inf"), tl.float32), tl.zeros([BH], tl.float32)
    mixed = tl.zeros([BH, R], tl.float32)
    for start in range(first, last, BN):
        token = start + tl.arange(0, BN)
        page = tl.load(indices + begin + token, mask=token < last, other=0).to(tl.int64)
        k_c = tl.load(kv + page[:, None] * (R + P) + c[None, :], mask=token[:, None] < last, other=0.0)
        k_r = tl.load(kv + page[:, None] * (R + P) + R + r[None, :], mask=token[:, None] < last, other=0.0)
        scores = (tl.dot(q_c, k_c.T) + tl.dot(q_r, k_r.T)) * scale * 1.4426950408889634
        scores = tl.where(token[None, :] < last, scores, -float("inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        weights, keep = tl.exp2(scores - new_top[:, None]), tl.exp2(top - new_top)
        total = total * keep + tl.sum(weights, 1)
        mixed = mixed * keep[:, None] + tl.dot(weights.to(k_c.dtype), k_c)
        top = new_top
    where = (request * splits + split) * heads + h
    tl.store(out + where[:, None] * R + c[None, :], mixed / total[:, None], mask=h[:, None] < heads)
    tl.store(lse + where, (top + tl.log2(total)) * 0.6931471805599453, mask=h < heads)


@pytest.mark.parametrize("late", [False, True], ids=["eager", "late"])
@pytest.mark.parametrize("order", WAVE_ORDERS)
@ARCHS
def test_flash_decode_of_mla(arch, order, late):
    lengths, heads, splits, latent, rope = [40, 70], 12, 2, 512, 64
    scale = 192**-0.5
    q = torch.randn(2, heads, latent + rope).bfloat16()
    kv = torch.randn(sum(lengths) + 9, latent + rope).bfloat16()
    indices = torch.randperm(len(kv))[: sum(lengths)].int()
    indptr = torch.tensor([0, 40, 110], dtype=torch.int32)
    out, lse = torch.full((2, splits, heads, latent), math.nan), torch.full((2, splits, heads), math.nan)
    tensors = (q, kv, indices, indptr, out, lse)
    constants = {"BH": 16, "BN": 32, "R": latent, "P": rope}
    how = {"arch": arch, "order": order, "late": late}
    launch_triton(mla_decode, (2, 1, splits), *tensors, scale, heads, splits, **constants, **how)
    weights = (lse - lse.logsumexp(1, keepdim=True)).exp()
    merged = (out * weights[..., None]).sum(1)
    for request, length in enumerate(lengths):
        keys = kv[indices[indptr[request] : indptr[request] + length].long()].double()
        scores = q[request].double() @ keys.T * scale
        weights, values = scores.softmax(1), keys[:, :latent]
        size = max(1.0, (weights @ values.abs()).max().item())  # weights are rounded to bf16, by 2**-8 at most
        assert_close(merged[request], weights @ values, 2**-8 * size)
        assert_close(lse[request].logsumexp(0), scores.logsumexp(1), 2e-6)
