"""A replica for a loop of the user's own: gradients and their update apart, and the module at hand in between."""

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor, nn

from lockstep.core.random import OPTIMIZER, seed_of
from lockstep.replicas.module import ModuleReplica
from lockstep.replicas.module_capture import CapturableModuleReplica
from lockstep.replicas.replica import AllGatherTensors, BatchSummary, Leaf, Shard


class AccumulatedSum(NamedTuple):
    """Gradients before an update, summed over one batch or several; parameters with the numbers `used` got some."""

    total: Tensor
    divisor: float
    used: frozenset[int]

    def plus(self, other: "AccumulatedSum") -> "AccumulatedSum":
        """Of the batches of both."""
        return AccumulatedSum(self.total + other.total, self.divisor + other.divisor, self.used | other.used)


class TrainerReplica(CapturableModuleReplica):
    """One rank's copy of a module that a `Trainer` trains."""

    _accumulated: AccumulatedSum | None = None  # gradients before an update

    def eager_forward_backward(self, shards: list[Shard], all_gather: AllGatherTensors) -> list[Leaf]:
        """With what captured steps keep, such as copies of the weights in bf16, left as their last one needed it."""
        return ModuleReplica.forward_backward(self, shards, all_gather)

    def accumulate(self, total: Tensor, batch: BatchSummary) -> None:
        """Adds a batch to those before it; the mean is in the module's parameters, for anybody to see.

        The update comes later, or never.
        """
        own, before = AccumulatedSum(total.clone(), batch.divisor, batch.used), self._accumulated
        self._accumulated = own = own if before is None else before.plus(own)
        self._gradients.put(own.total / own.divisor, own.used)
        self._buffers.merge(batch.buffers, batch.shard_sizes)
        self._is_unfinished = False

    def update_from_accumulated(self, step: int) -> None:
        """The update by the gradients that are in the parameters now."""
        self.begin_update(step)
        self._step_optimizer()
        self.end_update()
        self._accumulated = None

    def drop_accumulated(self) -> None:
        """Forgets the gradients of the batches so far."""
        self._accumulated = None
        self._gradients.clear()

    def apply(self, function: Callable[[nn.Module], Any], passes: int) -> None:
        """Calls a function of the user's, with random numbers that are the same for all replicas."""
        self.undo_step()
        with self._random.start(seed_of(self._spec.seed, passes, 1, OPTIMIZER)):
            function(self.module)
        self._buffers.keep()

    def lent(self) -> nn.Module:
        """The module for a forward pass of somebody else, which does not change its buffers."""
        if not self._is_computing:  # else its own loss asks for it
            self.undo_step()
        return self._lent.lend()


class AccumulatedGradients:
    """Stands for a replica in a step whose gradients are added to those of the batches before it, without an update."""

    def __init__(self, replica: TrainerReplica) -> None:
        self.replica = replica

    def __getattr__(self, name: str) -> Any:
        return getattr(self.replica, name)

    def forward_backward(self, shards: list[Shard], all_gather: AllGatherTensors) -> list[Leaf]:
        """Eagerly."""
        return self.replica.eager_forward_backward(shards, all_gather)

    def update(self, step: int, total: Tensor, batch: BatchSummary) -> None:
        """Accumulates instead."""
        self.replica.accumulate(total, batch)
