"""A replica of several stages of a network, an early one and a late one: each is a replica of its own."""

from collections.abc import Callable, Iterable
from typing import Any, cast

import numpy as np

from lockstep.backends import Tensor
from lockstep.core.layout import Array
from lockstep.replicas.replica import (
    AllGatherTensors,
    BatchSummary,
    Evaluated,
    Leaf,
    PartReplica,
    ReplicaState,
    Shard,
    StageTensors,
)


class ChunkedReplica:
    """The stages of one rank. Its flat vector is theirs, one after the other."""

    def __init__(self, stages: dict[int, Any]) -> None:
        self._stages: dict[int, PartReplica] = stages
        self._ranges: dict[int, range] = {}  # of the flat vector
        self._first: dict[int, int] = {}  # number of each stage's first parameter
        at = number = 0
        for stage, replica in stages.items():
            self._ranges[stage] = range(at, at + len(replica.entries))
            self._first[stage] = number
            at, number = at + len(replica.entries), number + replica.num_parameters

    @property
    def entries(self) -> range:
        return range(sum(len(entries) for entries in self._ranges.values()))

    def entries_of(self, stage: int) -> range:
        """The entries of one stage."""
        return self._ranges[stage]

    def owned_of(self, stage: int) -> list[range]:
        """The entries of a stage that each rank updates."""
        first = self._ranges[stage].start
        return [range(first + own.start, first + own.stop) for own in self._stages[stage].owned]

    def begin_step(self, step: int) -> None:
        for replica in self._stages.values():
            replica.begin_step(step)

    def forward(
        self, shard: Shard, stage: int, cut: StageTensors | None, all_gather: AllGatherTensors
    ) -> StageTensors | None:
        return self._stages[stage].forward(shard, stage, cut, all_gather)

    def backward(self, number: int, stage: int, gradients: list[Any] | None) -> tuple[Leaf, list[Any]]:
        leaf, found = self._stages[stage].backward(number, stage, gradients)
        used = frozenset(self._first[stage] + number for number in leaf.used)
        buffers = None if leaf.buffers is None else {f"{stage}/{name}": b for name, b in leaf.buffers.items()}
        return leaf._replace(used=used, buffers=buffers), found

    def evaluate_stage(
        self, shard: Shard, stage: int, cut: StageTensors | None, all_gather: AllGatherTensors
    ) -> StageTensors | Evaluated:
        return self._stages[stage].evaluate_stage(shard, stage, cut, all_gather)

    def update(self, step: int, total: Tensor | None, batch: BatchSummary) -> None:
        for stage, replica in self._stages.items():
            replica.update(step, self._part_of(stage, total), self._batch_of(stage, batch))

    def set_passes_without_update(self, number: int) -> None:
        """How many of the steps so far were no updates."""
        for replica in cast(Iterable[Any], self._stages.values()):  # of modules
            replica.set_passes_without_update(number)

    def learning_rate(self, step: int) -> float | None:
        """That of one of the last steps, where it has one."""
        return next((r for replica in self._stages.values() if (r := replica.learning_rate(step)) is not None), None)

    def gradient_norms(self, total: Tensor | None, batch: BatchSummary) -> dict[str, float]:
        found: dict[str, float] = {}
        for stage, replica in self._stages.items():
            found |= replica.gradient_norms(self._part_of(stage, total), self._batch_of(stage, batch))
        return found

    def _part_of(self, stage: int, total: Tensor | None) -> Tensor | None:
        """A stage's part of the total, which goes from the first entry that this rank updates to the last."""
        own = {each: self._updated(each) for each in self._stages}
        if total is None or not own[stage]:
            return None
        start = min(entries.start for entries in own.values() if entries)
        return total[own[stage].start - start : own[stage].stop - start]

    def _updated(self, stage: int) -> range:
        first, own = self._ranges[stage].start, self._stages[stage].updated
        return range(first + own.start, first + own.stop) if own else range(0)

    def _batch_of(self, stage: int, batch: BatchSummary) -> BatchSummary:
        """What a stage has to know about the batch."""
        prefix, first = f"{stage}/", self._first[stage]
        buffers = [
            {name.removeprefix(prefix): value for name, value in of_shard.items() if name.startswith(prefix)}
            for of_shard in batch.buffers
        ]
        numbers = range(first, first + self._stages[stage].num_parameters)
        return batch._replace(buffers=buffers, used=frozenset(n - first for n in batch.used if n in numbers))

    def parameters(self, entries: range) -> Tensor:
        stage, own = self._within(entries)
        return self._stages[stage].parameters(own)

    def set_parameters(self, entries: range, values: Tensor) -> None:
        stage, own = self._within(entries)
        self._stages[stage].set_parameters(own, values)

    def _within(self, entries: range) -> tuple[int, range]:
        """The stage that has these entries, and what they are to it."""
        stage = next(stage for stage, own in self._ranges.items() if entries.start in own)
        first = self._ranges[stage].start
        return stage, range(entries.start - first, entries.stop - first)

    def finish_update(self) -> None:
        for replica in self._stages.values():
            replica.finish_update()

    def num_bytes(self) -> dict[str, int]:
        found = [replica.num_bytes() for replica in self._stages.values()]
        return {name: sum(one[name] for one in found) for name in found[0]}

    def arrays(self) -> dict[str, Array]:
        return {name: array for replica in self._stages.values() for name, array in replica.arrays().items()}

    def snapshot(self) -> Callable[[], dict[str, Array]]:
        found = [replica.snapshot() for replica in self._stages.values()]
        return lambda: {name: array for read in found for name, array in read().items()}

    def is_finite(self) -> bool:
        return bool(np.all([replica.is_finite() for replica in self._stages.values()]))

    def fingerprints(self) -> dict[str, str]:
        return {name: text for replica in self._stages.values() for name, text in replica.fingerprints().items()}

    def averaged(self) -> dict[str, Array]:
        return {name: array for replica in self._stages.values() for name, array in replica.averaged().items()}

    def undo_step(self) -> None:
        for replica in self._stages.values():
            replica.undo_step()

    def state_dict(self) -> ReplicaState:
        found = [replica.state_dict() for replica in self._stages.values()]
        common = next((one.common for one in found if one.common), {})
        return ReplicaState({name: unit for one in found for name, unit in one.units.items()}, common)
