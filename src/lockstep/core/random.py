"""Random numbers that depend on a key and on nothing else, never on what was drawn before.

`RandomState` is frozen: its streams are the same in every version of numpy, which `default_rng` does not promise.
"""

import numpy as np

DROPOUT, AUGMENTATION, OPTIMIZER, SAMPLER, COLLATE = range(1, 6)  # the last part of a key: what the numbers are for


def keyed_random(*key: int) -> np.random.RandomState:
    """Random numbers that depend on `key` only; each entry from 0 to 2**32 - 1."""
    return np.random.RandomState(list(key))


def shard_seed(seed: int, step: int, shard: int) -> int:
    """The seed of a shard's random numbers. `torch.manual_seed` with it gives a plain loop the same dropout on a CPU.

    >>> shard_seed(seed=0, step=1, shard=0)
    922679666224363917
    """
    return seed_of(seed, step, shard, DROPOUT)


def seed_of(*key: int) -> int:
    """A seed that depends on every part of the key."""
    high, low = keyed_random(*key).randint(0, 2**31, 2).tolist()
    return int(high << 31 | low)
