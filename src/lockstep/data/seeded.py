"""All random numbers that a user's function or dataset may draw, seeded by a key and restored afterwards."""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from lockstep.core.random import keyed_random


@contextmanager
def seeded(*key: int) -> Iterator[None]:
    """Seeds Python's, numpy's and PyTorch's random numbers by the key; afterwards they are as they were."""
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    keyed = keyed_random(*key)
    random.seed(int(keyed.randint(0, 2**31)))
    np.random.seed(keyed.randint(0, 2**31))
    torch.default_generator.manual_seed(int(keyed.randint(0, 2**31)))
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
        torch.set_rng_state(before[2])
