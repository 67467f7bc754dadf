"""What each rank does in a step, as plain data: instructions over named values.

Values: a `Partial` is the sum of the gradients of some shards (a node of the reduction tree), for a range of entries of
the flat parameter vector of the part of the model that the rank holds. An `Activation` is what one stage of the network
hands to the next for a shard, an `ActivationGradient` what comes back for it. `Parameters` are new values after an
update. Whoever holds a value holds every part of it.

Communication is started by one instruction and waited for by another, so that buckets can overlap: `Communicate` and
`Add` never wait. A group of sends and receives has a channel, a number and a round. Channels do not wait for each
other, and neither do the cuts of a network, each of which has channels of its own. With batch norm over the whole
batch, and where layers are split, layers communicate within `ForwardBackward`, `Forward`, `Backward` and `Evaluate`.
"""

from dataclasses import dataclass
from typing import NamedTuple

from lockstep.schedules.reduction_tree import Node

GRADIENTS = "gradients"  # channels: number is a bucket, round one of the exchange
ACTIVATIONS = "activations"  # number is a shard, round the stage whose activation it is
ACTIVATION_GRADIENTS = "activation gradients"  # the same
PARAMETERS = "parameters"
CHANNELS = (GRADIENTS, ACTIVATIONS, ACTIVATION_GRADIENTS, PARAMETERS)


def communicator_of(channel: str, round_: int) -> str:
    """What a group's transfers queue up in: its channel, or that of its cut."""
    return f"{channel} {round_}" if channel in (ACTIVATIONS, ACTIVATION_GRADIENTS) else channel


class Partial(NamedTuple):
    """The gradients of the shards in `node`, added up; the entries `entries` of the flat vector."""

    node: Node
    entries: range


class Activation(NamedTuple):
    """What stage `stage` hands to the next one for a shard."""

    shard: int
    stage: int


class ActivationGradient(NamedTuple):
    """The gradient of `Activation(shard, stage)`, which the next stage hands back."""

    shard: int
    stage: int


class Parameters(NamedTuple):
    """The values of these entries of the flat vector after an update."""

    entries: range


Value = Partial | Activation | ActivationGradient | Parameters


class ForwardBackward(NamedTuple):
    """Computes the gradients of `shards`: leaves of the tree. Several go through the model together, layer by layer."""

    shards: range


class Forward(NamedTuple):
    """Takes a shard through a stage: from its samples, or the activation of the stage before; the last has the loss."""

    shard: int
    stage: int


class Backward(NamedTuple):
    """Takes a shard back through a stage: its gradient is a leaf of the tree, for the stage's entries of the vector."""

    shard: int
    stage: int
    entries: range


class Evaluate(NamedTuple):
    """Takes some samples through a stage to be evaluated; the last stage has their metrics."""

    shard: int
    stage: int


class AllGather(NamedTuple):
    """Starts to tell all ranks what the shards leave besides gradients: losses, buffer updates, parameters used."""


class WaitForBackward(NamedTuple):
    """Waits until the backward pass that is under way has filled these entries of its leaf."""

    leaf: Partial


class Add(NamedTuple):
    """`total` becomes the sum of `parts`, in the tree's brackets."""

    total: Partial
    parts: tuple[Partial, ...]


class Send(NamedTuple):
    """Sends a copy of `value` to rank `to`."""

    value: Value
    to: int


class Receive(NamedTuple):
    """Receives `value` from rank `source`."""

    value: Value
    source: int


class Communicate(NamedTuple):
    """Starts a group of sends and receives: those of one round of one bucket, or one activation."""

    number: int
    round: int
    sends: tuple[Send, ...]
    receives: tuple[Receive, ...]
    channel: str = GRADIENTS


class Wait(NamedTuple):
    """Waits until this group is complete; from then on its values are held."""

    number: int
    round: int
    channel: str = GRADIENTS


class AllReduce(NamedTuple):
    """`total` becomes the sum of all ranks' `parts`, by the framework's own all-reduce, in an order of its own."""

    total: Partial
    parts: tuple[Partial, ...]


class GatherNorms(NamedTuple):
    """Tells all ranks the norms of the gradients that this one updates by: clipping needs those of all parameters."""


class Update(NamedTuple):
    """Applies the total, whose parts these are, to the parameters, once all ranks' `AllGather` has arrived."""

    total: tuple[Partial, ...]


Instruction = (
    ForwardBackward | Forward | Backward | Evaluate | AllGather | WaitForBackward | Add | Communicate | Wait | AllReduce
    | GatherNorms | Update
)  # fmt: skip


class RankProgram(NamedTuple):
    """The instructions of one rank, by phase."""

    compute: tuple[Instruction, ...]
    exchange: tuple[Instruction, ...]
    update: tuple[Instruction, ...]
    entries: range  # of the flat vector of the part that it holds, that its gradients are of


@dataclass(frozen=True, eq=False)  # compared by identity: whoever makes one keeps it
class Schedule:
    """What every rank does in a step."""

    programs: tuple[RankProgram, ...]  # by rank
    num_shards: int
    overlaps: bool = False  # the exchange runs beside `compute`, on a thread of its own; else it comes after it
    num_layer_ranks: int = 1  # so many ranks, one after the other, share the layers of the same shards
    stages: tuple[int, ...] = (0,)  # for each stage of the network, its place in a pipeline of ranks

    @property
    def num_parts(self) -> int:
        """Parts of the model that ranks hold: one or more stages, and a share of their layers."""
        return (max(self.stages) + 1) * self.num_layer_ranks

    def layer_group(self, rank: int) -> range:
        """The ranks that share layers with this one."""
        first = rank - rank % self.num_layer_ranks
        return range(first, first + self.num_layer_ranks)

    def parts(self) -> list[int]:
        """The number of the part of the model that each rank holds: stages, and shares of their layers."""
        return [rank % self.num_parts for rank in range(len(self.programs))]

    def replicas_of(self, rank: int) -> list[int]:
        """The ranks that hold the same part as this one, in the order of their shards."""
        return list(range(rank % self.num_parts, len(self.programs), self.num_parts))

    def ranks_with_losses(self) -> list[int]:
        """In the order of their shards, a rank with the last stage for each of them."""
        return self.replicas_of(self.stages[-1] * self.num_layer_ranks)
