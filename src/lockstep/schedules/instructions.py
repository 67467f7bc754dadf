"""What each rank does in a step, as plain data: instructions over named values.

A value is a `Partial`: the sum of the gradients of some shards (a node of the reduction tree), for a range of entries
of the flat parameter vector. Whoever holds a value holds every part of it.

Communication is started by one instruction and waited for by another, so that buckets can overlap: `Communicate` and
`Add` never wait. With batch norm over the whole batch, layers exchange statistics within `ForwardBackward`.
"""

from dataclasses import dataclass
from typing import NamedTuple

from lockstep.schedules.reduction_tree import Node


class Partial(NamedTuple):
    """The gradients of the shards in `node`, added up; the entries `entries` of the flat vector."""

    node: Node
    entries: range


class ForwardBackward(NamedTuple):
    """Computes the gradients of `shards`: leaves of the tree. Several go through the model together, layer by layer."""

    shards: range


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

    value: Partial
    to: int


class Receive(NamedTuple):
    """Receives `value` from rank `source`."""

    value: Partial
    source: int


class Communicate(NamedTuple):
    """Starts a group of sends and receives: those of one round of one bucket."""

    bucket: int
    round: int
    sends: tuple[Send, ...]
    receives: tuple[Receive, ...]


class Wait(NamedTuple):
    """Waits until the group of this bucket and round is complete; from then on its values are held."""

    bucket: int
    round: int


class AllReduce(NamedTuple):
    """`total` becomes the sum of all ranks' `parts`, by the framework's own all-reduce, in an order of its own."""

    total: Partial
    parts: tuple[Partial, ...]


class Update(NamedTuple):
    """Applies the total, whose parts these are, to the parameters, once all ranks' `AllGather` has arrived."""

    total: tuple[Partial, ...]


Instruction = ForwardBackward | AllGather | WaitForBackward | Add | Communicate | Wait | AllReduce | Update


class RankProgram(NamedTuple):
    """The instructions of one rank, by phase."""

    compute: tuple[Instruction, ...]
    exchange: tuple[Instruction, ...]
    update: tuple[Instruction, ...]


@dataclass(frozen=True, eq=False)  # compared by identity: whoever makes one keeps it
class Schedule:
    """What every rank does in a step."""

    programs: tuple[RankProgram, ...]  # by rank
    entries: range  # of the flat vector, that the gradients are of
    num_shards: int
    overlaps: bool  # the exchange runs beside `compute`, on a thread of its own; else it comes after it
