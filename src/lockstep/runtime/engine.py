"""What an engine offers: it runs the ranks of a schedule. Lists have one entry for each rank of this process."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, Self

from lockstep.backends import Backend, Tensor
from lockstep.core.device import Device
from lockstep.core.layout import Array
from lockstep.core.tracing import Trace
from lockstep.data.batch import Batch
from lockstep.replicas.replica import BatchSummary, Evaluated, Leaf, Replica
from lockstep.schedules.instructions import Evaluate, Forward, ForwardBackward, Schedule

COMPUTES = {ForwardBackward, Forward, Evaluate}


class StepInput(NamedTuple):
    """What a schedule is run on."""

    step: int  # counts from 1
    batch: Batch
    shards: list[range]  # the samples of each shard


class RankResult(NamedTuple):
    """What the shards of one rank leave besides gradients."""

    losses: list[Any]  # one for each shard, summed over its samples
    buffers: list[Any]  # one for each shard of a model that has buffers
    used: list[int]  # numbers of the parameters that got a gradient
    seconds: float  # that the rank took for its shards
    weights: list[Any]  # one for each shard, where the loss has weights of its own
    norms: dict[str, float] | None = None  # of the gradients that the rank updates by, where clipping needs all

    @classmethod
    def of_leaves(cls, leaves: Sequence[Leaf], seconds: float) -> Self:
        """From what its shards gave; a stage that is not the last has no losses."""
        return cls(
            losses=[leaf.loss for leaf in leaves if leaf.loss is not None],
            buffers=[leaf.buffers for leaf in leaves if leaf.buffers is not None],
            used=sorted(frozenset[int]().union(*(leaf.used for leaf in leaves))),
            seconds=seconds if leaves else 0.0,
            weights=[leaf.weight for leaf in leaves if leaf.weight is not None],
        )


def ranks_together(schedule: Schedule, rank: int) -> Sequence[int]:
    """The ranks that this one exchanges tensors with in mid-forward: those that share layers, or have shards."""
    return schedule.layer_group(rank) if schedule.num_layer_ranks > 1 else ranks_with_shards(schedule)


def summary_of(results: Sequence[RankResult], schedule: Schedule, rank: int, work: StepInput) -> BatchSummary:
    """What the update of one rank has to know about the whole batch: buffers are those of the part that it holds."""
    same_part = [results[other] for other in schedule.replicas_of(rank)]
    return BatchSummary(
        shard_sizes=[len(shard) for shard in work.shards],
        buffers=[buffers for other in same_part for buffers in other.buffers],
        used=frozenset(number for other in same_part for number in other.used),
        weights=weights_of([results[other] for other in schedule.ranks_with_losses()]),
    )


class StepResult(NamedTuple):
    """What a step leaves besides the updated replicas."""

    losses: list[float]  # of all shards, in shard order
    seconds: list[float]  # that each rank took for its shards
    weights: list[float] | None  # of all shards, where the loss has weights of its own

    @classmethod
    def of_ranks(cls, schedule: Schedule, results: Sequence[RankResult]) -> Self:
        """From the results of all ranks."""
        ranks = [results[rank] for rank in schedule.ranks_with_losses()]
        losses = [float(loss) for rank in ranks for loss in rank.losses]
        return cls(losses, [rank.seconds for rank in results], weights_of(ranks))


def weights_of(ranks: Sequence[RankResult]) -> list[float] | None:
    """The weights of all shards, in shard order; None where a shard's is its number of samples."""
    found = [float(weight) for rank in ranks for weight in rank.weights]
    return found or None


@dataclass
class Position:
    """The step and the phase that a rank is in, for those who wait for it."""

    phase: str = "start"
    step: int = 0
    call: str = "a run"  # what the program has called, which must be the same for all
    is_mid_update: bool = False  # some of its parameters have their new values, others perhaps not yet


class Rank(NamedTuple):
    """One participant."""

    number: int
    device: Device
    backend: Backend
    position: Position
    trace: Trace | None = None  # while a run is traced


def ranks_with_shards(schedule: Schedule) -> list[int]:
    """The ranks that have shards."""
    return [rank for rank, program in enumerate(schedule.programs) if COMPUTES.intersection(map(type, program.compute))]


def has_all_ranks(engine: "Engine") -> bool:
    """Whether this process has all ranks, so that no other waits for it."""
    return len(engine.local_ranks) == engine.num_ranks


class Engine(Protocol):
    """Runs the ranks. A context manager: leaving it ends every thread and process it started."""

    backend: Backend
    devices: list[Device]  # of all ranks
    num_ranks: int
    local_ranks: range
    traces: list[Trace]  # of the local ranks, while a run is traced

    def __enter__(self) -> Self: ...
    def __exit__(self, *error: object) -> None: ...
    def run(self, schedule: Schedule, replicas: Sequence[Replica], work: StepInput) -> StepResult:
        """Executes a step. Where nobody waits for anybody in the update, it is done, or has not happened.

        Ranks that share the update hand out their parameters after it: one that fails there `is_mid_update`.
        """
        ...

    def evaluate(self, schedule: Schedule, replicas: Sequence[Replica], work: StepInput) -> list[list[Evaluated]]:
        """What each local rank has found, of samples that go through parts of the model."""
        ...

    def use_captures(self, captures: list[Any]) -> None:
        """From now on, each local rank captures its own shards (`rank_capture.py`)."""
        ...

    def each(self, phase: str, work: Callable[..., Any], *lists: Sequence[Any]) -> list[Any]:
        """`work(rank, device, ...)` for each local rank, all at the same time, with its entries of `lists`."""
        ...

    def set_call(self, call: str) -> None:
        """Says what the program has called: the ranks of other processes must be in the same call."""
        ...

    def set_phase(self, phase: str) -> None:
        """Says what this process does between steps, for those who wait for it."""
        ...

    def copy_to_devices(self, array: Array) -> list[Tensor]:
        """Data to read from, for each local rank; ranks on the same device share it."""
        ...

    def all_gather(self, values: list[Any]) -> list[Any]:
        """The plain values (numbers, strings, arrays, lists and dicts of them) of all ranks, from the local ones'."""
        ...

    def broadcast(self, source: int, make: Callable[[], bytes]) -> bytes:
        """On every rank the bytes that `make()` gives on rank `source`."""
        ...

    def close(self) -> None: ...
