"""What one rank does in each phase of a step; every engine runs the same functions."""

import sysconfig
from pathlib import Path

from lockstep.backends import Backend, LossSum, Tensor
from lockstep.device import Device
from lockstep.engines.engine import Batch
from lockstep.exchange.nodes import Node, maximal_nodes, sum_of
from lockstep.exchange.schedule import Round, Schedule
from lockstep.layout import Layout
from lockstep.split.batch import part_ranges

NOT_THE_USERS = (sysconfig.get_path("stdlib"), str(Path(__file__).parents[1]), "<")
Held = dict[tuple[int, Node], Tensor]  # (chunk, node) -> that part of the vector, on the rank's device


def add_up_own_shards(
    backend: Backend,
    loss_sum: LossSum,
    layout: Layout,
    flat: Tensor,
    batch: Batch,
    rank: int,
    shards: list[range],
    own: range,
) -> tuple[dict[Node, Tensor], list[float]]:
    """The rank's nodes and its shards' losses. Shards are computed one by one and added as soon as they can be."""
    losses: list[Tensor] = []

    def leaf(number: int) -> Tensor:
        X, y = batch.fetch(rank, shards[number].start, shards[number].stop)
        loss, gradient = backend.value_and_grad(loss_sum, layout, flat, X, y)
        losses.append(loss)
        return gradient

    nodes = {node: sum_of(node, leaf, backend.add) for node in maximal_nodes(own, len(shards))}
    return nodes, [float(loss) for loss in losses]


def cut_into_chunks(backend: Backend, nodes: dict[Node, Tensor], size: int, schedule: Schedule) -> Held:
    """What the rank holds when the exchange begins: each of its nodes, cut into the schedule's chunks."""
    places = part_ranges(size, schedule.num_chunks)
    return {
        (chunk, node): backend.chunk(vector, place.start, place.stop)
        for node, vector in nodes.items()
        for chunk, place in enumerate(places)
    }


def take_part(backend: Backend, device: Device, rank: int, round_: Round, held: list[Held]) -> None:
    """The rank's share of one round: it copies what is sent to it, then does its additions.

    `held` has the entries of all ranks. A rank writes to its own only, and reads of the others' only what was there
    when the round began.
    """
    mine = held[rank]
    for source, target, chunk, node in round_.transfers:
        if target == rank:
            mine[chunk, node] = backend.copy_to(held[source][chunk, node], device)
    for addition in round_.additions:
        if addition.rank == rank:
            chunk = addition.chunk
            mine[chunk, addition.node] = backend.add(mine[chunk, addition.left], mine[chunk, addition.right])


def total_of(backend: Backend, held: Held, schedule: Schedule) -> Tensor:
    """The rank's total, in one piece, once the rounds are over."""
    chunks = [held[chunk, node] for chunk, node in enumerate(schedule.totals)]
    return chunks[0] if len(chunks) == 1 else backend.concat(chunks)


def user_source_line(error: BaseException) -> str:
    """`file:line` of the last place in the user's own code that `error` went through, or nothing."""
    where, trace = "", error.__traceback__
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if not file.startswith(NOT_THE_USERS) and not {"site-packages", "dist-packages"} & set(Path(file).parts):
            where = f"{file}:{trace.tb_lineno}"
        trace = trace.tb_next
    return where
