"""Replicas must be equal to the bit. They are compared by hash, and one that differs is named.

What makes a replica drift is outside of the program: a bit that flipped in memory, a failing device, or code of the
user's own that treats devices differently. Its gradients may have reached the others, so healing goes back to the last
step where all were equal.
"""

from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

from lockstep.config import RunConfig
from lockstep.core.errors import RunError
from lockstep.training.checkpoint import Checkpoint, how_to_resume, unpacked
from lockstep.training.replica_set import ReplicaSet

MAX_HEALED = 10  # times in a run: what fails more often is broken


class Drift(NamedTuple):
    """Which replicas differ, and one that does not."""

    named: str  # rank, device and first parameter of each
    is_settled: bool  # whether most agree, so that it is known who is wrong
    good: int  # a rank among those that agree


def find_drift(replicas: ReplicaSet) -> Drift | None:
    """Whether a replica differs from the others of its part."""
    engine = replicas.engine
    groups = [group for group in replicas.placement.replicas() if len(group) > 1]
    if not groups:
        return None
    own = engine.each(
        "comparison of replicas", lambda rank, device, replica: list(replica.fingerprints().items()), replicas.local
    )
    found = [tuple(map(tuple, of_rank)) for of_rank in engine.all_gather(own)]
    for group in groups:
        usual, num_votes = Counter(found[rank] for rank in group).most_common(1)[0]
        different = [rank for rank in group if found[rank] != usual]
        if different:
            named = [
                f"rank {rank} ({engine.devices[rank]}), first in "
                + next(name for (name, ours), (_, theirs) in zip(found[rank], usual, strict=True) if ours != theirs)
                for rank in different
            ]
            good = next(rank for rank in group if found[rank] == usual)
            return Drift("; ".join(named), 2 * num_votes > len(group), good)
    return None


class Rollback(Exception):
    """The run has to be done again from a step where all replicas were equal."""

    def __init__(self, checkpoint: Checkpoint, sentence: str) -> None:
        super().__init__(sentence)
        self.checkpoint = checkpoint


class Healing:
    """Compares replicas; where they differ, ends the run, or with `--heal` goes back to where they were equal."""

    def __init__(self, config: RunConfig) -> None:
        self._config, self._num_healed = config, 0
        self._equal: Checkpoint | None = None  # where all replicas were last found equal

    def remember(self, checkpoint: Callable[[], Checkpoint | None]) -> None:
        """All replicas are equal now."""
        if self._config.heal:
            self._equal = checkpoint()

    def compare(self, replicas: ReplicaSet, step: int, checkpoint: Callable[[], Checkpoint | None]) -> None:
        """Raises `Rollback`, or an error, where replicas are not equal after step number `step`."""
        drift = find_drift(replicas)
        if drift is None:
            self.remember(checkpoint)
            return
        subject = "a replica is not equal to the others" if drift.is_settled else "the replicas are not equal"
        who = f"step {step}: {subject} any more: {drift.named}"
        if not self._config.heal:
            raise RunError(
                f"{who}. Look for a failing device, or for code of your own that treats devices differently; --heal "
                f"goes back by itself to where all were equal.{how_to_resume(self._config)}"
            )
        self._num_healed += 1
        if self._num_healed > MAX_HEALED:
            raise RunError(f"{who}; this has been healed {MAX_HEALED} times. A device fails, or code of your own does.")
        assert self._equal is not None, "they were equal at the beginning"
        equal = self._equal
        raise Rollback(
            unpacked(replicas.engine.broadcast(drift.good, equal.packed)),
            f"{who}. Going back to step {equal.progress.step}, where all were equal",
        )
