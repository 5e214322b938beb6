"""The Triton backend's own kernels as gfx942 and gfx950 code: their objects run here and match the reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import mla_ops
from mla_ops.backends.triton import cache, configs, decode, merge, prefill
from mla_ops.backends.triton.launch import Launch
from mla_ops.testing import assert_matches, make_decode_inputs, make_prefill_inputs

from .triton_launch import launch_triton

UNITS = 2  # compute units of the device that is played: enough for shares that cross requests


@pytest.fixture(params=["gfx942", "gfx950"])
def arch(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The backend's launchers take the CPU for this chip, and their launches run in the interpreter."""
    name: str = request.param
    for module in (cache, decode, merge, prefill):
        for attribute, value in (("arch_of", name), ("compute_units", UNITS)):
            if hasattr(module, attribute):
                monkeypatch.setattr(module, attribute, lambda tensor, value=value: value)
    monkeypatch.setenv(
        "TRITON_DEFAULT_FP_FUSION", "1"
    )  # its default is announced to change; a knob would stay in os.environ

    def run(self: Launch) -> None:
        launch_triton(self.kernel, self.grid, arch=name, **self.args, **self.options)

    monkeypatch.setattr(Launch, "run", run)
    return name


def in_fp64(arguments: dict[str, Any]) -> dict[str, Any]:
    return {k: v.double() if isinstance(v, torch.Tensor) and v.is_floating_point() else v for k, v in arguments.items()}


@pytest.mark.parametrize(
    ("query_len", "page_size", "dtype"),
    [
        pytest.param(1, 16, torch.bfloat16, id="q1-page16-bf16"),
        pytest.param(2, 3, torch.float16, id="q2-page3-fp16"),
    ],
)
def test_decode(arch: str, query_len: int, page_size: int, dtype: torch.dtype) -> None:
    x = make_decode_inputs(
        [0, 1, 40],
        num_heads=16,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        query_lens=query_len,
        page_size=page_size,
        dtype=dtype,
    ).arguments()
    assert configs.decode_config(arch, 16, dtype, dtype).kernel == "portable"
    exact, low = mla_ops.mla_decode(**in_fp64(x)), mla_ops.mla_decode(**x)
    out = torch.ops.mla_ops.mla_decode(
        *(x[name] for name in ("q", "kv_cache", "qo_indptr", "kv_indptr", "kv_indices", "kv_last_page_lens")),
        *([], query_len, 0, x["softmax_scale"], None, None, "triton", 512),
    )
    assert_matches(out[0], exact.out, low_precision=low.out)
    assert_matches(out[1], exact.lse, low_precision=low.lse)


def test_prefill(arch: str) -> None:
    x = make_prefill_inputs(
        [20, 1], [24, 0], num_heads=1, qk_head_dim=192, v_head_dim=128, dtype=torch.bfloat16
    )._asdict()
    exact, low = mla_ops.mla_prefill(**in_fp64(x)), mla_ops.mla_prefill(**x)
    out = torch.ops.mla_ops.mla_prefill(*x.values(), True, "triton")
    assert_matches(out[0], exact.out, low_precision=low.out)
    assert_matches(out[1], exact.lse, low_precision=low.lse)


def test_a_written_row_is_read_back(arch: str) -> None:
    rows = torch.randn(3, 576).bfloat16()
    kv_cache = torch.full((2, 4, 576), torch.nan).bfloat16()
    slots = torch.tensor([5, -1, 2])
    torch.ops.mla_ops.write_latent_cache(rows[:, :512], rows[:, 512:], kv_cache, slots, None, "triton")
    written = kv_cache.view(-1, 576)
    assert torch.equal(written[[5, 2]], rows[[0, 2]])
    assert written[[0, 1, 3, 4, 6, 7]].isnan().all()


@pytest.mark.parametrize("arch", ["gfx942"], indirect=True)  # the interpreter has gfx942's conversions to fp8 alone
def test_nan_is_written_to_an_fp8_cache_as_nan_and_the_rest_saturated(arch: str) -> None:
    rows = torch.randn(1, 576).bfloat16()
    rows[0, 3], rows[0, 4], rows[0, 5] = torch.nan, torch.inf, -1e30
    written, scale, slots = (
        torch.zeros(1, 2, 576, dtype=torch.float8_e4m3fnuz),
        torch.full((1,), 0.5),
        torch.tensor([1]),
    )
    expected = written.clone()
    for cache_of, backend in ((expected, "reference"), (written, "triton")):
        torch.ops.mla_ops.write_latent_cache(rows[:, :512], rows[:, 512:], cache_of, slots, scale, backend)
    assert expected.float().isnan().sum() == 1
    assert torch.equal(written.view(torch.uint8), expected.view(torch.uint8))
