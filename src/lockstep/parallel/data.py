"""Splitting the data: every rank computes its own shards with the whole model, and gradients are all-reduced.

What a rank does, here with shards 0 to 3 of 8 on rank 0 of 2, two buckets, and the exchange `sharded`:

    compute    forward and backward of 0, of 1;  0+1;  of 2;  of 3, which fills the buckets from the last one on
    exchange   bucket 0: 2+3, (0+1)+(2+3);  send rank 1 its chunk, receive mine;  add;  send it, receive the other
               bucket 1: the same, while bucket 0 is communicated, and while the backward pass goes on
    update     the total, divided once by the number of samples
"""

from collections.abc import Sequence
from functools import lru_cache, partial
from typing import NamedTuple

from lockstep.schedules.exchanges import NATIVE, collective_for
from lockstep.schedules.instructions import (
    Add,
    AllGather,
    AllReduce,
    ForwardBackward,
    Instruction,
    Partial,
    RankProgram,
    Schedule,
    Update,
    WaitForBackward,
)
from lockstep.schedules.reduction_tree import Node, children, left_of_last_leaf, maximal_nodes


class DataParallel(NamedTuple):
    """What a data-parallel step depends on."""

    shards: tuple[range, ...]  # of each rank
    entries: range  # of the flat parameter vector: what all ranks hold
    buckets: tuple[range, ...]  # of these entries, in the order in which backward fills them: from the end
    exchange: str = "sharded"
    together: bool = False  # a rank's shards go through the model together (batch norm over the whole batch)
    max_addends: int = 2  # of one addition; more: all shards are computed first, and added by fused kernels


@lru_cache(maxsize=256)  # engines keep what they made for a schedule as long as they get the same object
def data_parallel(step: DataParallel) -> Schedule:
    """The schedule of a step that splits the batch: the same tree of additions for any number of ranks.

    >>> one = DataParallel((range(2),), range(10), (range(10),))
    >>> data_parallel(one).programs[0].compute
    (ForwardBackward(shards=range(0, 1)), ForwardBackward(shards=range(1, 2)), AllGather())
    """
    if step.exchange == NATIVE:  # one call for the whole vector
        step = step._replace(buckets=(step.entries,))
    num_shards = sum(map(len, step.shards))
    programs, ranks = [], range(len(step.shards))
    for rank, own in enumerate(step.shards):
        made, total = exchange(step, rank, ranks)
        programs.append(RankProgram((*compute(step, own), AllGather()), made, (Update(total),), step.entries))
    return Schedule(tuple(programs), num_shards, overlaps=len(step.buckets) > 1)


def compute(step: DataParallel, own: range) -> list[Instruction]:
    """The rank's shards. All but the last leaf are added here as soon as they can be; so few vectors are alive."""
    if not own:
        return []
    if step.together:
        return [ForwardBackward(own)]
    if step.max_addends > 2:
        return [ForwardBackward(range(shard, shard + 1)) for shard in own]
    return [
        instruction
        for shard in own
        for instruction in (ForwardBackward(range(shard, shard + 1)), *additions_after(step, own, shard))
    ]


def additions_after(step: DataParallel, own: range, shard: int) -> list[Instruction]:
    """What can be added once the gradient of `shard` is there, and those before it; the last leaf waits.

    >>> step = DataParallel((range(4),), range(10), (range(10),))
    >>> [[tuple(add.total.node) for add in additions_after(step, range(4), shard)] for shard in range(4)]
    [[], [(0, 2)], [], []]
    """
    if shard == own[-1] or not step.entries:
        return []
    nodes = maximal_nodes(range(own.start, shard + 1), sum(map(len, step.shards)))
    before = maximal_nodes(range(own.start, shard), sum(map(len, step.shards)))
    node, made = nodes[-1], list[Instruction]()
    while node not in before and node.num_leaves > 1:
        left, right = children(node)
        made.append(_addition(node, [left, right], step.entries))
        node = right
    return made[::-1]


def complete(step: DataParallel, own: range, bucket: range) -> list[Instruction]:
    """Makes the rank's nodes of a bucket from what `compute` leaves."""
    if not own or not step.entries:
        return []
    nodes, wait = maximal_nodes(own, sum(map(len, step.shards))), list[Instruction]()
    if len(step.buckets) > 1:
        wait.append(WaitForBackward(Partial(Node(own[-1], 1), bucket)))
    if step.together or step.max_addends > 2:
        return wait + [add for node in nodes for add in _sums(node, step.max_addends, bucket)]
    return wait + [
        _addition(node, list(children(node)), bucket)
        for node in reversed([_rest(nodes[-1], left) for left in left_of_last_leaf(nodes[-1])])
    ]


def exchange(
    step: DataParallel, number: int, ranks: Sequence[int], first_bucket: int = 0
) -> tuple[tuple[Instruction, ...], tuple[Partial, ...]]:
    """The all-reduce that number `number` of `ranks` does, bucket by bucket, and the parts of the total.

    They are all the ranks that hold these entries; each has its own of the shards. Buckets are numbered from
    `first_bucket` on.
    """
    own, num_shards = step.shards[number], sum(map(len, step.shards))
    prepare = partial(complete, step, own)
    if step.exchange == NATIVE:
        total, nodes = Partial(Node(0, num_shards), step.entries), maximal_nodes(own, num_shards)
        reduce = AllReduce(total, tuple(Partial(node, step.entries) for node in nodes))
        return (*prepare(step.entries), reduce), (total,)
    collective = collective_for(step.exchange, step.shards)
    made = collective.instructions(number, step.buckets, prepare, ranks, first_bucket)
    return tuple(made), collective.total_of(step.buckets)


def _sums(node: Node, max_addends: int, entries: range) -> list[Instruction]:
    """The additions that make `node` from its leaves, up to `max_addends` at a time."""
    if node.num_leaves == 1:
        return []
    if node.num_leaves <= max_addends:
        return [_addition(node, [Node(node.first + n, 1) for n in range(node.num_leaves)], entries)]
    left, right = children(node)
    sums = [*_sums(left, max_addends, entries), *_sums(right, max_addends, entries)]
    return [*sums, _addition(node, [left, right], entries)]


def _rest(node: Node, left: Node) -> Node:
    """From `left` to the end of `node`: what comes out when the last leaf's sum so far is added to `left`."""
    return Node(left.first, node.first + node.num_leaves - left.first)


def _addition(total: Node, parts: list[Node], entries: range) -> Add:
    return Add(Partial(total, entries), tuple(Partial(part, entries) for part in parts))
