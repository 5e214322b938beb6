"""Shared fixtures: a fresh seed for each test, printed when the test fails, and the gate for GPU tests."""

from __future__ import annotations

import gc

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA or HIP device")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def seed() -> int:
    """Seeds torch afresh for each test; pytest shows the printed line of a failed one."""
    value = torch.seed() % 2**31
    torch.manual_seed(value)
    print(f"seed {value}")
    return value


def pytest_collection_finish() -> None:
    gc.freeze()  # captures collect garbage; what was imported need not be walked each time
