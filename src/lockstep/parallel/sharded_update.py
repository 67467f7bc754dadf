"""Splitting the update: every rank updates the parameters that it owns, and hands the new values out.

A parameter server with every rank a server; ZeRO stage 1 in today's words. Each rank receives its own entries of
everybody's nodes, completes the tree for them, updates them, and sends the new values to all that hold the same part
of the model, instead of gradients. The optimizer's state of a parameter is on one rank only. The parameter is the unit
of the update, so it does not matter which rank updates it.
"""

from collections.abc import Sequence

from lockstep.parallel.data import DataParallel, complete
from lockstep.schedules.exchanges.collective import own_nodes
from lockstep.schedules.instructions import (
    PARAMETERS,
    Add,
    Communicate,
    Instruction,
    Parameters,
    Partial,
    Receive,
    Send,
    Wait,
)
from lockstep.schedules.reduction_tree import Node, children, missing_sums


def reduce_scatter(
    step: DataParallel, number: int, ranks: Sequence[int], owned: Sequence[range], group: int = 0
) -> tuple[tuple[Instruction, ...], tuple[Partial, ...]]:
    """Number `number` of `ranks` gets the total of the entries that it owns: no parts, if it owns none.

    `group` tells several such exchanges of a step apart.
    """
    num_shards, nodes, own = sum(map(len, step.shards)), own_nodes(step.shards), owned[number]
    sends = tuple(
        Send(Partial(node, owned[other]), rank)
        for other, rank in enumerate(ranks)
        if other != number and owned[other]
        for node in nodes[number]
    )
    receives = tuple(
        Receive(Partial(node, own), rank)
        for other, rank in enumerate(ranks)
        if other != number and own
        for node in nodes[other]
    )
    communicate: list[Instruction] = []
    if sends or receives:
        communicate = [Communicate(group, 0, sends, receives), Wait(group, 0)]
    known = {node for of_rank in nodes for node in of_rank}
    sums = [Add(Partial(node, own), _parts(node, own)) for node in missing_sums(known, num_shards) if own]
    total = (Partial(Node(0, num_shards), own),) if own else ()
    return (*complete(step, step.shards[number], step.entries), *communicate, *sums), total


def all_gather_parameters(
    number: int, ranks: Sequence[int], owned: Sequence[range], group: int = 0
) -> list[Instruction]:
    """Sends the new values of what number `number` of `ranks` owns to the others, and receives theirs."""
    own, others = owned[number], [other for other in range(len(ranks)) if other != number]
    sends = tuple(Send(Parameters(own), ranks[other]) for other in others if own)
    receives = tuple(Receive(Parameters(owned[other]), ranks[other]) for other in others if owned[other])
    if not sends and not receives:
        return []
    return [Communicate(group, 0, sends, receives, PARAMETERS), Wait(group, 0, PARAMETERS)]


def _parts(node: Node, entries: range) -> tuple[Partial, ...]:
    left, right = children(node)
    return Partial(left, entries), Partial(right, entries)
