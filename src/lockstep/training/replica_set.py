"""The replicas of a run: those of this process, and which rank holds which part of the model."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from lockstep.core.layout import Array
from lockstep.parallel.combined import StageShape
from lockstep.partition.grid import Grid
from lockstep.partition.placement import Placement
from lockstep.replicas.replica import Replica, ReplicaState
from lockstep.runtime.engine import Engine


class ReplicaSet:
    """The local replicas and the placement of all. Reading the whole model is a collective where ranks hold parts."""

    def __init__(
        self,
        engine: Engine,
        local: Sequence[Replica],
        placement: Placement | None = None,
        names: Iterable[str] = (),  # of all parameters and buffers, in model order, where ranks hold parts
    ) -> None:
        self.engine, self.local, self._names = engine, list(local), list(names)
        self.placement = placement or Placement(Grid(data=engine.num_ranks))

    def weights(self) -> dict[str, Array]:
        """All parameters and buffers by name."""
        if self.placement.is_replicated:
            return self.local[0].arrays()
        return self._in_order(merged(self._of_all(lambda replica: replica.arrays(), self.placement.owners)))

    def averaged(self) -> dict[str, Array]:
        """Their moving average, where there is one."""
        if self.placement.is_replicated:
            return self.local[0].averaged()
        return self._in_order(merged(self._of_all(lambda replica: replica.averaged(), self.placement.owners)))

    def snapshot(self) -> Callable[[], dict[str, Array]]:
        """All parameters and buffers as they are now, for whoever asks for them later; only the last one is kept."""
        if self.placement.is_replicated:
            return self.local[0].snapshot()
        weights = self.weights()
        return lambda: weights

    def is_finite(self) -> bool:
        """Whether all parameters are finite numbers; all ranks say the same."""
        own = [replica.is_finite() for replica in self.local]
        return all(own if self.placement.is_replicated else self.engine.all_gather(own))

    def state(self) -> ReplicaState:
        """The optimizer's state of all parameters."""
        if self.placement.every_rank_has_all:
            return self.local[0].state_dict()
        ranks = range(self.engine.num_ranks) if self.placement.shards_update else self.placement.owners
        found = self._of_all(lambda replica: replica.state_dict()._asdict(), ranks)
        return merged_state([ReplicaState(**one) for one in found])

    def local_weights(self) -> dict[str, Array]:
        """The parameters and buffers that this process holds."""
        if self.placement.is_replicated:
            return self.local[0].arrays()
        return self._in_order(merged([replica.arrays() for replica in self.local]))

    def local_state(self) -> ReplicaState:
        """The optimizer's state of the parameters that this process updates."""
        replicas = self.local[:1] if self.placement.every_rank_has_all else self.local
        return merged_state([replica.state_dict() for replica in replicas])

    def shapes(self) -> tuple[tuple[StageShape, ...], ...]:
        """The stages of each part of the model, from the ranks that hold them. A collective."""
        own = []
        for rank, replica in zip(self.engine.local_ranks, self.local, strict=True):
            stages = self.placement.part_of(rank).stages
            own.append([_plain_shape(replica, stage, len(stages)) for stage in stages])
        shares_update, found = self.placement.shards_update, self.engine.all_gather(own)
        return tuple(
            tuple(
                StageShape(stage, range(*entries), tuple(range(*one) for one in owned) if shares_update else ())
                for stage, entries, owned in found[rank]
            )
            for rank in self.placement.owners
        )

    def num_bytes(self) -> list[dict[str, int]]:
        """The memory of parameters, a gradient, and the optimizer's state, on each rank. A collective."""
        return self.engine.all_gather([replica.num_bytes() for replica in self.local])

    def _of_all(self, read: Callable[[Replica], dict[str, Any]], ranks: Iterable[int]) -> list[dict[str, Any]]:
        """What is read from the replicas of these ranks."""
        wanted = set(ranks)
        local = zip(self.engine.local_ranks, self.local, strict=True)
        found = self.engine.all_gather([read(replica) if rank in wanted else {} for rank, replica in local])
        return [found[rank] for rank in sorted(wanted)]

    def _in_order(self, arrays: dict[str, Any]) -> dict[str, Any]:
        return {name: arrays[name] for name in [*self._names, *arrays] if name in arrays}


def _plain_shape(replica: Any, stage: int, num_stages: int) -> list[Any]:
    """The stage, its entries, and those that each rank updates, as plain values."""
    entries = replica.entries_of(stage) if num_stages > 1 else replica.entries
    owned = replica.owned_of(stage) if num_stages > 1 else replica.owned
    return [stage, [entries.start, entries.stop], [[own.start, own.stop] for own in owned]]


def merged_state(states: Sequence[ReplicaState]) -> ReplicaState:
    """The units of all, and what they have in common; a rank that updates nothing does not know it."""
    common = next((state.common for state in states if state.common), {})
    return ReplicaState(merged([state.units for state in states]), common)


def merged(dicts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The entries of all dicts, in order."""
    return {name: value for one in dicts for name, value in one.items()}
