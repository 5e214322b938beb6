"""The 8-bit floats and bf16 against torch's types, and the instructions that convert to and from them."""

import numpy as np
import pytest
import torch

from . import floats
from .assemble import run_wave
from .samples import assert_same, samples

TORCH = {
    ("fp8", "gfx942"): torch.float8_e4m3fnuz,
    ("bf8", "gfx942"): torch.float8_e5m2fnuz,
    ("fp8", "gfx950"): torch.float8_e4m3fn,
    ("bf8", "gfx950"): torch.float8_e5m2,
}
FORMATS = pytest.mark.parametrize(("kind", "arch"), TORCH, ids=["-".join(key) for key in TORCH])


@FORMATS
def test_every_code_has_the_value_that_torch_gives_it(kind, arch):
    codes = torch.arange(256, dtype=torch.uint8)
    assert_same(floats.fp8_values(kind, arch), codes.view(TORCH[kind, arch]).float().numpy())


@FORMATS
def test_encoding_rounds_to_nearest_even(kind, arch, rng):
    values, torch_type = floats.fp8_values(kind, arch), TORCH[kind, arch]
    finite = np.sort(values[np.isfinite(values)].astype(np.float64))
    ties = (finite[1:] + finite[:-1]) / 2
    inputs = np.concatenate([finite, ties, rng.uniform(finite[0], finite[-1], 500), rng.standard_normal(500)]).astype(
        np.float32
    )
    expected = torch.from_numpy(inputs).to(torch_type).view(torch.uint8).numpy()
    assert_same(floats.fp8_encode(inputs, kind, arch), expected.astype(np.uint32))


@FORMATS
def test_what_does_not_fit_becomes_infinity_or_nan(kind, arch):
    with np.errstate(over="ignore"):
        inputs = np.array([1e9, -1e9, np.inf, np.nan], np.float32)
    decoded = floats.fp8_values(kind, arch)[floats.fp8_encode(inputs, kind, arch)]
    expected = [np.inf, -np.inf, np.inf, np.nan] if (kind, arch) == ("bf8", "gfx950") else [np.nan] * 4
    np.testing.assert_array_equal(decoded, np.array(expected, np.float32))


def test_bf16_rounds_as_torch_does(rng):
    inputs = np.concatenate([samples("f32", rng) for _ in range(8)])
    expected = torch.from_numpy(inputs).bfloat16().view(torch.int16).numpy().view(np.uint16)
    number = ~np.isnan(inputs)
    assert_same(floats.bf16_from_f32(inputs)[number], expected[number].astype(np.uint32))
    assert np.isnan(floats.f32_from_bf16(floats.bf16_from_f32(inputs)[~number])).all()


@FORMATS
def test_conversion_instructions_use_the_format_of_their_target(kind, arch, rng):
    a, b = (rng.standard_normal(64).astype(np.float32) for _ in range(2))
    text = f"""
    v_cvt_pk_{kind}_f32 v2, v0, v1
    v_cvt_pk_{kind}_f32 v2, v1, v0 op_sel:[0,0,1]
    v_cvt_pk_f32_{kind} v[4:5], v2
    v_cvt_pk_f32_{kind}_sdwa v[6:7], v2 src0_sel:WORD_1
    v_cvt_f32_{kind}_sdwa v8, v2 src0_sel:BYTE_3"""
    wave = run_wave(text, {"v0": a, "v1": b}, arch=arch)
    rounded = [torch.from_numpy(x).to(TORCH[kind, arch]).float().numpy() for x in (a, b)]
    for register, expected in zip((4, 5, 6, 7, 8), (*rounded, *reversed(rounded), rounded[0]), strict=True):
        np.testing.assert_array_equal(wave.vector[register].view(np.float32), expected)


@pytest.mark.parametrize("kind", ["fp8", "bf8"])
@pytest.mark.parametrize(
    ("target", "dtype"), [("f32", torch.float32), ("f16", torch.float16), ("bf16", torch.bfloat16)]
)
def test_scaled_conversions_multiply_by_a_power_of_two(target, dtype, kind, rng):
    codes = torch.from_numpy(rng.standard_normal((64, 4))).to(TORCH[kind, "gfx950"])
    registers = {"v0": codes.view(torch.int32)[:, 0].numpy(), "v1": np.float32(3.0).view(np.uint32).item()}
    width = dtype.itemsize
    destination = "v[4:5]" if width == 4 else "v4"
    text = f"v_cvt_scalef32_pk_{target}_{kind} {destination}, v0, v1 op_sel:[1,0,0]"
    wave = run_wave(text, registers, arch="gfx950")
    pair = torch.from_numpy(wave.vector[4 : 4 + width // 2].T.flatten().view(np.int32)).view(dtype).view(64, 2)
    assert torch.equal(pair, (codes[:, 2:].float() * 2).to(dtype))
