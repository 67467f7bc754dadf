"""A replica for a loop of the user's own: gradients and their update apart, and the module at hand in between."""

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor, nn

from lockstep.core.random import OPTIMIZER, seed_of
from lockstep.replicas.module_capture import CapturableModuleReplica
from lockstep.replicas.replica import BatchSummary


class HeldSum(NamedTuple):
    """Gradients before an update, summed over one batch or several; parameters with the numbers `used` got some."""

    total: Tensor
    divisor: float
    used: frozenset[int]

    def plus(self, other: "HeldSum") -> "HeldSum":
        """Of the batches of both."""
        return HeldSum(self.total + other.total, self.divisor + other.divisor, self.used | other.used)


class TrainerReplica(CapturableModuleReplica):
    """One rank's copy of a module that a `Trainer` trains."""

    _held: HeldSum | None = None  # gradients before an update

    def hold_gradients(self, total: Tensor, batch: BatchSummary) -> None:
        """Adds a batch to those whose gradients are held; the mean is in the module's parameters, for anybody to see.

        The update comes later, or never.
        """
        held = HeldSum(total.clone(), batch.divisor, batch.used)
        self._held = held = held if self._held is None else self._held.plus(held)
        self._gradients.put(held.total / held.divisor, held.used)
        self._buffers.merge(batch.buffers, batch.shard_sizes)
        self._is_unfinished = False

    def update_held(self, step: int) -> None:
        """The update by the gradients that are in the parameters now."""
        self.begin_update(step)
        self._step_optimizer()
        self.end_update()
        self._held = None

    def drop_held(self) -> None:
        """Forgets the gradients that are held."""
        self._held = None
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
