"""The order of samples in an epoch: a function of (seed, epoch) alone."""

import numpy as np

from lockstep.core.layout import Array
from lockstep.core.random import keyed_random


def sample_order(seed: int, epoch: int, num_samples: int) -> Array:
    """A permutation of the sample numbers for one epoch.

    >>> sample_order(seed=0, epoch=1, num_samples=5)
    array([0, 3, 4, 1, 2])
    """
    return keyed_random(seed, epoch, 0).permutation(num_samples).astype(np.int64)
