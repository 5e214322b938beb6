"""Matrix instructions against a plain product: every type, both tile sizes, vector and accumulator registers."""

import numpy as np
import pytest
import torch

from .assemble import run_wave
from .errors import UnsupportedInstructionError

TYPES = {
    "f32": torch.float32,
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "i8": torch.int8,
    "fp8": torch.float8_e4m3fnuz,
    "bf8": torch.float8_e5m2fnuz,
}
CASES = [
    ("f32_16x16x4_f32", 16, 4, "f32", "f32"),
    ("f32_32x32x2_f32", 32, 2, "f32", "f32"),
    ("f32_16x16x16_f16", 16, 16, "f16", "f16"),
    ("f32_32x32x8_f16", 32, 8, "f16", "f16"),
    ("f32_16x16x16_bf16", 16, 16, "bf16", "bf16"),
    ("f32_32x32x8_bf16", 32, 8, "bf16", "bf16"),
    ("i32_16x16x32_i8", 16, 32, "i8", "i8"),
    ("i32_32x32x16_i8", 32, 16, "i8", "i8"),
    ("f32_16x16x32_fp8_fp8", 16, 32, "fp8", "fp8"),
    ("f32_32x32x16_fp8_bf8", 32, 16, "fp8", "bf8"),
]


def matrix(rng, rows: int, columns: int, kind: str) -> torch.Tensor:
    if kind == "i8":
        return torch.from_numpy(rng.integers(-128, 128, (rows, columns), np.int8))
    return torch.from_numpy(rng.standard_normal((rows, columns))).to(TYPES[kind])


def lanes_of(operand: torch.Tensor) -> np.ndarray:
    """Rows [size, depth] of A, or columns of B, to dwords [registers, 64]; lane = group * size + row."""
    size = len(operand)
    groups = 64 // size
    grouped = operand.view(torch.uint8).reshape(size, groups, -1).transpose(0, 1).reshape(64, -1)
    return np.ascontiguousarray(grouped.numpy().view(np.uint32).T)


def element(size: int, register: int, lane: int) -> tuple[int, int]:
    """Row and column of C and D: rows go four registers at a time, then over the lane groups."""
    return 8 * (register // 4) * (size // 32) + 4 * (lane // size) + register % 4, lane % size


def spread(size: int, values: np.ndarray) -> np.ndarray:
    """[size, size] to registers [size * size / 64, 64]."""
    return np.array([[values[element(size, r, lane)] for lane in range(64)] for r in range(size * size // 64)])


def registers(kind: str, first: int, rows: np.ndarray) -> dict[str, np.ndarray]:
    return {f"{kind}{first + i}": np.ascontiguousarray(row) for i, row in enumerate(rows)}


def span(kind: str, first: int, count: int) -> str:
    return f"{kind}[{first}:{first + count - 1}]" if count > 1 else f"{kind}{first}"


@pytest.mark.parametrize("file", ["v", "a"])
@pytest.mark.parametrize(("name", "size", "depth", "kind_a", "kind_b"), CASES, ids=[case[0] for case in CASES])
def test_product_of_tiles(name, size, depth, kind_a, kind_b, file, rng):
    a, b = matrix(rng, size, depth, kind_a), matrix(rng, size, depth, kind_b)
    integer = name.startswith("i32")
    c = (
        rng.integers(-1000, 1000, (size, size)).astype(np.int32)
        if integer
        else rng.standard_normal((size, size)).astype(np.float32)
    )
    lanes_a, lanes_b, lanes_c = lanes_of(a), lanes_of(b), spread(size, c)
    count = len(lanes_c)
    initial = registers(file, 0, lanes_a) | registers("v", 8, lanes_b) | registers(file, 16, lanes_c)
    operands = span(file, 0, len(lanes_a)), span("v", 8, len(lanes_b)), span(file, 16, count)
    target = span(file, 64, count)
    # EXEC does not matter to a matrix instruction.
    wave = run_wave(f"v_mfma_{name} {target}, {', '.join(operands)}", initial, exec_mask=1)
    base = 64 + (256 if file == "a" else 0)
    actual = wave.vector[base : base + count].view(c.dtype)
    exact = a.to(torch.float64) @ b.to(torch.float64).T + torch.from_numpy(c)
    np.testing.assert_array_equal(actual, spread(size, exact.numpy()).astype(c.dtype))


def test_constant_addend_and_result_over_its_own_addend(rng):
    a, b = matrix(rng, 16, 16, "bf16"), matrix(rng, 16, 16, "bf16")
    initial = registers("v", 0, lanes_of(a)) | registers("v", 2, lanes_of(b))
    text = (
        "v_mfma_f32_16x16x16_bf16 v[4:7], v[0:1], v[2:3], 1.0\nv_mfma_f32_16x16x16_bf16 v[4:7], v[0:1], v[2:3], v[4:7]"
    )
    wave = run_wave(text, initial)
    product = (a.double() @ b.double().T).numpy()
    once = (product + 1).astype(np.float32)
    np.testing.assert_array_equal(wave.vector[4:8].view(np.float32), spread(16, (product + once).astype(np.float32)))


def test_gfx950_tiles_are_twice_as_deep(rng):
    a, b = matrix(rng, 16, 32, "bf16"), matrix(rng, 16, 32, "bf16")
    initial = registers("v", 0, lanes_of(a)) | registers("v", 4, lanes_of(b))
    wave = run_wave("v_mfma_f32_16x16x32_bf16 v[8:11], v[0:3], v[4:7], 0", initial, arch="gfx950")
    expected = (a.double() @ b.double().T).numpy().astype(np.float32)
    np.testing.assert_array_equal(wave.vector[8:12].view(np.float32), spread(16, expected))


@pytest.mark.parametrize(
    "text",
    [
        "v_mfma_f32_4x4x4_16b_f16 v[0:3], v[4:5], v[6:7], v[0:3]",
        "v_mfma_f32_16x16x4_4b_f16 v[0:15], v[16:17], v[18:19], v[0:15]",
        "v_mfma_f32_16x16x16_f16 v[0:3], v[4:5], v[6:7], v[0:3] cbsz:1 abid:1",
    ],
)
def test_other_forms_are_refused(text):
    with pytest.raises(UnsupportedInstructionError, match=r"v_mfma_.* at pc"):
        run_wave(text)
