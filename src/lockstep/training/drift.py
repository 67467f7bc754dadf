"""Replicas must be equal to the bit. They are compared by hash, and one that differs is named.

A replica drifts because a bit flipped in memory, a device fails, or the user's own code treats devices differently. Its
gradients may have reached the others, so healing goes back to the last step where all were equal.
"""

from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

from lockstep.config import RunConfig
from lockstep.core.errors import RunError
from lockstep.training.checkpoint import Checkpoint, how_to_resume, unpacked
from lockstep.training.replica_set import ReplicaSet

MAX_HEALED = 10  # rollbacks in a run: a device that fails more often is broken


class Drift(NamedTuple):
    """The replicas that differ from the others."""

    named: str  # rank, device and first parameter of each
    has_majority: bool  # whether more than half agree, so that it is known which are wrong
    good: int  # a rank among those that agree


def find_drift(replicas: ReplicaSet) -> Drift | None:
    """The replicas that differ from the others that hold the same part of the model, if there are any."""
    engine = replicas.engine
    grid = replicas.placement.grid
    if grid.data == 1:
        return None
    groups = [grid.replicas_of(owner) for owner in replicas.placement.owners]
    own = engine.each("drift check", lambda rank, device, replica: list(replica.fingerprints().items()), replicas.local)
    found = [tuple(map(tuple, of_rank)) for of_rank in engine.all_gather(own)]
    for group in groups:
        usual, num_equal = Counter(found[rank] for rank in group).most_common(1)[0]
        named = [
            f"rank {rank} ({engine.devices[rank]}), first in "
            + next(name for (name, ours), other in zip(found[rank], usual, strict=True) if (name, ours) != other)
            for rank in group
            if found[rank] != usual
        ]
        if named:
            good = next(rank for rank in group if found[rank] == usual)
            return Drift("; ".join(named), 2 * num_equal > len(group), good)
    return None


class Rollback(Exception):
    """The run has to be repeated from a step where all replicas were equal."""

    def __init__(self, checkpoint: Checkpoint, sentence: str) -> None:
        super().__init__(sentence)
        self.checkpoint = checkpoint


class Healing:
    """Compares replicas; where they differ, ends the run, or with `--heal` goes back to where they were equal."""

    def __init__(self, config: RunConfig, can_heal: bool = True) -> None:
        self._config, self._can_heal, self._num_healed = config, can_heal, 0
        self._equal: Checkpoint | None = None  # of the last step where all replicas were found equal

    def remember(self, checkpoint: Callable[[], Checkpoint | None]) -> None:
        """Keeps `checkpoint()` to go back to: all replicas are equal."""
        if self._config.heal:
            self._equal = checkpoint()

    def compare(self, replicas: ReplicaSet, step: int, checkpoint: Callable[[], Checkpoint | None]) -> None:
        """Raises `Rollback`, or an error, where replicas are not equal after step number `step`."""
        drift = find_drift(replicas)
        if drift is None:
            self.remember(checkpoint)
            return
        subject = "a replica is not equal to the others" if drift.has_majority else "the replicas are not equal"
        who = f"step {step}: {subject} any more: {drift.named}"
        if not self._config.heal:
            hint = "Look for a failing device, or for code of your own that treats devices differently"
            heal = "; or use --heal" if self._can_heal else ""
            raise RunError(f"{who}. {hint}{heal}.{how_to_resume(self._config)}")
        self._num_healed += 1
        if self._num_healed > MAX_HEALED:
            raise RunError(f"{who}; this has been healed {MAX_HEALED} times. Look for a failing device or a bug.")
        assert self._equal is not None, "they were equal at the start"
        equal = unpacked(replicas.engine.broadcast(drift.good, self._equal.packed))
        raise Rollback(equal, f"{who}. Going back to step {equal.progress.step}, where all were equal")
