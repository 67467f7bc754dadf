"""A replica whose updates are put off: gradients are held, and added up over several batches."""

from typing import Any

from lockstep.backends import Tensor
from lockstep.replicas.replica import BatchSummary


class HeldGradients:
    """Stands for a replica in a step without an update."""

    def __init__(self, replica: Any) -> None:
        self.replica = replica

    def __getattr__(self, name: str) -> Any:
        return getattr(self.replica, name)

    def update(self, step: int, total: Tensor, batch: BatchSummary) -> None:
        """Holds the gradients instead."""
        self.replica.hold_gradients(total, batch)
