"""Forward and backward passes of a stage: what arrives for a shard, what is kept of it, and what leaves.

Activations are kept here from the moment they arrive, or are computed, until they are used, or have left.
"""

from collections.abc import Callable
from typing import Any

from lockstep.replicas.replica import AllGatherTensors, Evaluated, Leaf, PartReplica, Shard, StageTensors
from lockstep.schedules.instructions import (
    Activation,
    ActivationGradient,
    Backward,
    Evaluate,
    Forward,
    Schedule,
)

Fetch = Callable[[int], Shard]  # a shard by its number, with its samples


class PartPasses:
    """The passes of one rank in one step."""

    def __init__(self, schedule: Schedule, all_gather: AllGatherTensors) -> None:
        self._last_stage, self._all_gather = len(schedule.stages) - 1, all_gather
        self._values: dict[Activation | ActivationGradient, StageTensors] = {}
        self.evaluated: list[Evaluated] = []  # of the samples that have gone through the last stage

    def forward(self, instruction: Forward, replica: PartReplica, fetch: Fetch) -> None:
        """Takes a shard through the stage."""
        number, stage = instruction
        shard = self._shard(number, stage, fetch)
        found = replica.forward(shard, stage, self._arrived(number, stage), self._all_gather)
        if found is not None:
            self._values[Activation(number, stage)] = found

    def backward(self, instruction: Backward, replica: PartReplica) -> Leaf:
        """Takes it back."""
        number, stage, _ = instruction
        arrived = self._values.pop(ActivationGradient(number, stage), None)
        self._values.pop(Activation(number, stage), None)
        leaf, gradients = replica.backward(number, stage, None if arrived is None else arrived.values)
        if stage > 0:
            self._values[ActivationGradient(number, stage - 1)] = StageTensors(gradients)
        return leaf

    def evaluate(self, instruction: Evaluate, replica: PartReplica, fetch: Fetch) -> None:
        """Takes samples through the stage to evaluate them."""
        number, stage = instruction
        shard = self._shard(number, stage, fetch)
        found = replica.evaluate_stage(shard, stage, self._arrived(number, stage), self._all_gather)
        if isinstance(found, Evaluated):
            self.evaluated.append(found)
        else:
            self._values[Activation(number, stage)] = found

    def outgoing(self, value: Activation | ActivationGradient) -> StageTensors:
        """What is to be sent; a gradient is not needed here any more, an activation until the shard comes back."""
        return self._values.pop(value) if isinstance(value, ActivationGradient) else self._values[value]

    def put(self, value: Any, cut: Any) -> None:
        """Keeps what has arrived."""
        self._values[value] = cut

    def _arrived(self, number: int, stage: int) -> StageTensors | None:
        return self._values.pop(Activation(number, stage - 1)) if stage > 0 else None

    def _shard(self, number: int, stage: int, fetch: Fetch) -> Shard:
        """The first stage needs the samples, the last their targets."""
        if stage in (0, self._last_stage):
            return fetch(number)
        return Shard(number, 0, None, None)
