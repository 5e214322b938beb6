"""The kernels run on a GPU where there is one, else under Triton's interpreter in a process of its own.

The interpreter must be asked for before triton is first imported, which other tests of a session do. So here the
tests of kernels skip themselves without a GPU, and ``test_interpreter.py`` runs them in a process that has the
environment variable.
"""

from __future__ import annotations

import os

import pytest
import torch


@pytest.fixture
def device() -> torch.device:
    """Where the kernels run."""
    if torch.cuda.is_available():
        return torch.device("cuda")
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("without a GPU test_interpreter.py runs this in a process of its own")
    return torch.device("cpu")
