"""A replica whose updates are put off: gradients are held, and added up over several batches."""

from typing import Any

from lockstep.backends import Tensor
from lockstep.replicas.module import ModuleReplica
from lockstep.replicas.replica import AllGatherTensors, BatchSummary, Leaf, Shard


class HeldGradients:
    """Stands for a replica in a step without an update."""

    def __init__(self, replica: Any) -> None:
        self.replica = replica

    def __getattr__(self, name: str) -> Any:
        return getattr(self.replica, name)

    def forward_backward(self, shards: list[Shard], all_gather: AllGatherTensors) -> list[Leaf]:
        """Eagerly: what captured steps keep, such as copies of the weights in bf16, is as their last one needed it."""
        return ModuleReplica.forward_backward(self.replica, shards, all_gather)

    def update(self, step: int, total: Tensor, batch: BatchSummary) -> None:
        """Holds the gradients instead."""
        self.replica.hold_gradients(total, batch)
