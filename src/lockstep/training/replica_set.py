"""The replicas of a run: those of this process, and which rank holds which part of the model."""

from collections.abc import Callable, Sequence
from typing import Any

from lockstep.core.layout import Array
from lockstep.partition.placement import Placement
from lockstep.replicas.replica import Replica
from lockstep.runtime.engine import Engine


class ReplicaSet:
    """The local replicas and the placement of all. Reading the whole model is a collective where ranks hold parts."""

    def __init__(self, engine: Engine, local: Sequence[Replica], placement: Placement | None = None) -> None:
        self.engine, self.local = engine, list(local)
        self.placement = placement or Placement.replicated(self.local[0].entries, engine.num_ranks)

    def weights(self) -> dict[str, Array]:
        """All parameters and buffers by name."""
        return merged(self._of_owners(lambda replica: replica.arrays()))

    def snapshot(self) -> Callable[[], dict[str, Array]]:
        """All parameters and buffers as they are now, for whoever asks for them later; only the last one is kept."""
        if self.placement.is_replicated:
            return self.local[0].snapshot()
        weights = self.weights()
        return lambda: weights

    def is_finite(self) -> bool:
        """Whether all parameters are finite numbers, as far as this process holds them."""
        return all(replica.is_finite() for replica in self._local_parts())

    def states(self) -> dict[str, Any]:
        """The optimizer's state of each part, by `part_name`."""
        return merged(self._of_owners(lambda replica: {part_name(replica.entries): replica.state_dict()}))

    def local_weights(self) -> dict[str, Array]:
        """The parameters and buffers that this process holds."""
        return merged([replica.arrays() for replica in self._local_parts()])

    def local_states(self) -> dict[str, Any]:
        """The optimizer's state of the parts that this process holds."""
        return {part_name(replica.entries): replica.state_dict() for replica in self._local_parts()}

    def _local_parts(self) -> list[Replica]:
        """One local replica of each part, in the order of the parts."""
        first = {replica.entries: replica for replica in reversed(self.local)}
        return sorted(first.values(), key=lambda replica: replica.entries.start)

    def _of_owners(self, read: Callable[[Replica], dict[str, Any]]) -> list[dict[str, Any]]:
        """What is read from the owner of each part, in the order of the parts."""
        if self.placement.is_replicated:
            return [read(self.local[0])]
        owners = self.placement.owners
        local = zip(self.engine.local_ranks, self.local, strict=True)
        found = self.engine.all_gather([read(replica) if rank in owners else {} for rank, replica in local])
        return [found[rank] for rank in owners]


def part_name(entries: range) -> str:
    """The name of a part in a checkpoint."""
    return f"{entries.start}:{entries.stop}"


def merged(dicts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The entries of all dicts, in order."""
    return {name: value for one in dicts for name, value in one.items()}
