"""Fixtures of all tests."""

from __future__ import annotations

import gc
import os
import random

import pytest
import torch

SEED_VARIABLE = "MLA_TEST_SEED"

torch.set_num_threads(2)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA or HIP device")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def seed() -> int:
    """A fresh seed for each test, printed when it fails; set MLA_TEST_SEED to run with that one again."""
    value = int(os.environ.get(SEED_VARIABLE) or int.from_bytes(os.urandom(4), "little"))
    print(f"{SEED_VARIABLE}={value}")
    random.seed(value)
    torch.manual_seed(value)
    return value


def pytest_collection_finish() -> None:
    gc.freeze()  # captures collect garbage; what was imported need not be walked each time
