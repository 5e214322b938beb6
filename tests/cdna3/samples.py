"""Inputs with edge values, and expectations computed lane by lane on Python numbers."""

from collections.abc import Callable

import numpy as np

from .machine import Wave
from .operands import DTYPES

__all__ = ["assert_same", "lane_by_lane", "result", "samples"]

_EDGES = {
    "u": [0, 1, 2, 3, 7, 8, 12, 13, 15, 16, 31, 32, 33, 63, 64, 127, 128, 255, 256, -1, -2],
    "i": [0, 1, 2, 15, 16, 31, 32, 127, -1, -2, -128, -32768, 32767],
    "f": [0.0, -0.0, 1.0, -1.0, 0.5, 1.5, 2.5, -2.5, np.inf, -np.inf, np.nan, 3.999, 255.0, -255.5],
}


def samples(kind: str, rng: np.random.Generator) -> np.ndarray:
    """[64] of a kind such as "u32" or "f16": edge values and random ones, shuffled."""
    dtype = np.dtype(DTYPES[kind])
    if kind[0] == "f":
        info = np.finfo(dtype)
        limits = np.array([info.max, info.min, info.tiny, info.smallest_subnormal], dtype)
        random = (rng.standard_normal(64) * 2.0 ** rng.integers(-12, 13, 64)).astype(dtype)
        edges = np.concatenate([np.array(_EDGES["f"], dtype), limits])
    else:
        info = np.iinfo(dtype)
        random = rng.integers(info.min, info.max, 64, dtype, endpoint=True)
        edges = np.array([*_EDGES[kind[0]], info.max, info.max // 2 + 1, info.min]).astype(object)
        edges = np.array([int(e) & (1 << 8 * dtype.itemsize) - 1 for e in edges], f"u{dtype.itemsize}").view(dtype)
    return rng.permutation(np.concatenate([edges, random])[:64])


def lane_by_lane(oracle: Callable, kind: str, *inputs: np.ndarray) -> np.ndarray:
    """`oracle` on the Python numbers of each lane; integer results are cut to the width of `kind`."""
    dtype = np.dtype(DTYPES[kind])
    results = [oracle(*(value.item() for value in lane)) for lane in zip(*inputs, strict=True)]
    if kind[0] == "f":
        with np.errstate(all="ignore"):
            return np.array(results, np.float64).astype(dtype)
    return np.array([int(r) & (1 << 8 * dtype.itemsize) - 1 for r in results], f"u{dtype.itemsize}").view(dtype)


def result(wave: Wave, register: int, kind: str) -> np.ndarray:
    """Vector register (or pair, for 64-bit kinds) as `kind`; of 16-bit kinds the low half."""
    dtype = np.dtype(DTYPES[kind])
    if dtype.itemsize == 8:
        return np.ascontiguousarray(wave.vector[register : register + 2].T).view(dtype)[:, 0]
    if dtype.itemsize == 2:
        return wave.vector[register].astype(np.uint16).view(dtype)
    return wave.vector[register].view(dtype)


def assert_same(actual: np.ndarray, expected: np.ndarray) -> None:
    """Equal in every bit, except that any NaN equals any NaN."""
    np.testing.assert_array_equal(actual, expected)
    if actual.dtype.kind == "f":
        number = ~np.isnan(expected)
        np.testing.assert_array_equal(np.signbit(actual[number]), np.signbit(expected[number]))
