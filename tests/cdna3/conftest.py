"""Fresh random numbers for the tests of the interpreter."""

import numpy as np
import pytest


@pytest.fixture
def rng() -> np.random.Generator:
    """A generator with a new seed each time; the seed is printed with a failure."""
    seed = int(np.random.SeedSequence().entropy % 2**32)
    print(f"numpy seed {seed}")
    return np.random.default_rng(seed)
