"""The keyed order of samples: a function of (seed, epoch) alone, never of what was drawn before.

`RandomState` is numpy's frozen generator: its streams are the same in every version; `default_rng` does not promise it.
"""

import numpy as np

from lockstep.core.layout import Array


def keyed_random(*key: int) -> np.random.RandomState:
    """Random numbers that depend on `key` only; each entry from 0 to 2**32 - 1."""
    return np.random.RandomState(list(key))


def sample_order(seed: int, epoch: int, num_samples: int) -> Array:
    """A permutation of the sample numbers for one epoch.

    >>> sample_order(seed=0, epoch=1, num_samples=5)
    array([0, 3, 4, 1, 2])
    """
    return keyed_random(seed, epoch, 0).permutation(num_samples).astype(np.int64)
