"""Replicas must be equal to the bit. They are compared by hash, and one that differs is named.

What makes a replica drift is outside of the program: a bit that flipped in memory, a failing device, or code of the
user's own that treats devices differently. Its gradients may have reached the others, so healing goes back to the last
step where all were equal.
"""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from lockstep.runtime import Engine, Replica


class Drift(NamedTuple):
    """Which replicas differ, and one that does not."""

    named: str  # rank, device and first parameter of each
    is_settled: bool  # whether most agree, so that it is known who is wrong
    good: int  # a rank among those that agree


def find_drift(engine: Engine, replicas: Sequence[Replica], names: list[str]) -> Drift | None:
    """Whether a replica differs from the others; `names` are those of its parameters and buffers."""
    if engine.num_ranks == 1:
        return None
    own = engine.each("comparison of replicas", lambda rank, device, replica: replica.fingerprints(), replicas)
    found = [tuple(of_rank) for of_rank in engine.gather(own)]
    usual, num_votes = Counter(found).most_common(1)[0]
    if num_votes == engine.num_ranks:
        return None

    def described(rank: int) -> str:
        first = next(name for name, ours, theirs in zip(names, found[rank], usual, strict=True) if ours != theirs)
        return f"rank {rank} ({engine.devices[rank]}), first in {first}"

    different = [rank for rank in range(engine.num_ranks) if found[rank] != usual]
    return Drift("; ".join(map(described, different)), 2 * num_votes > engine.num_ranks, found.index(usual))
