"""What a rank has of the step that is under way. Every step has a new one, so nothing of it can leak into the next."""

import time
from collections.abc import Sequence
from typing import NamedTuple

from lockstep.backends import Backend, Tensor
from lockstep.replicas.replica import Leaf, Replica
from lockstep.runtime.bucket_queue import BucketQueue
from lockstep.runtime.engine import StepInput
from lockstep.runtime.part_passes import PartPasses
from lockstep.runtime.partial_sums import PartialSums


class Computed(NamedTuple):
    """What the shards of a rank, and its additions before anything is communicated, have left."""

    leaves: list[Leaf]  # without their gradients
    sums: PartialSums
    num_done: int  # instructions of the exchange


class StepState:
    """The values of one rank in one step."""

    def __init__(self, backend: Backend, passes: PartPasses, bucket_ranges: Sequence[range]) -> None:
        self.began = time.perf_counter()
        self.work: StepInput | None = None  # None where only an exchange is run
        self.replica: Replica | None = None
        self.sums = PartialSums(backend)
        self.passes = passes  # of stages
        self.buckets = BucketQueue(bucket_ranges)
        self.leaves: list[Leaf] = []  # of the shards so far, without their gradients
        self.stage_leaves: dict[int, Leaf] = {}  # the same of stages, by shard
        self.num_done = 0  # instructions of the exchange that were done with the shards
        self.norms: dict[str, float] | None = None  # of all gradients, once they are gathered
        self.total: Tensor | None = None  # once the exchange is over

    def computed(self) -> Computed:
        """What there is so far."""
        return Computed(self.leaves, self.sums, self.num_done)

    def continue_from(self, computed: Computed) -> None:
        """A replay has filled the memory of `computed` once more."""
        self.leaves, self.num_done = computed.leaves, computed.num_done
        self.sums = computed.sums.copy()  # a step drops its sums, and the next one needs them again
