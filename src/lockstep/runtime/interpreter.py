"""What one rank does in each phase of a step; every engine runs the same functions."""

import threading
import time
import traceback
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from typing import Any, NamedTuple

from lockstep.backends import Backend, Mark, Ready, Recorder, Tensor
from lockstep.core.device import Device
from lockstep.runtime.engine import Batch, Leaf, Meet, Replica, Shard
from lockstep.runtime.bucket_queue import LastLeaf, WayOut
from lockstep.core.errors import OutOfMemory, PeersLost, RunError
from lockstep.schedules.reduction_tree import Node, before_last, maximal_nodes, sum_at_once, sum_of
from lockstep.schedules.exchanges.collective import Round, Schedule
from lockstep.core.entry_points import user_source_line
from lockstep.partition.batch import part_ranges
from lockstep.core.tracing import span


class OwnShards(NamedTuple):
    """What forward and backward leave on one rank, beside gradients."""

    losses: list[Any]
    rows: list[Any]
    used: list[int]
    seconds: float


Held = dict[tuple[int, Node], Tensor]  # (chunk, node) -> that part of the vector, on the rank's device


def fetch_shards(
    batch: Batch, rank: int, shards: list[range], own: range, ready: Ready | None = None
) -> Iterator[Shard]:
    """The rank's own shards, each when it is asked for. `ready` is for the last of them."""
    for number in own:
        with span("data"):
            X, y = batch.fetch(rank, shards[number].start, shards[number].stop)
        yield Shard(number, len(shards[number]), X, y, ready if number == own[-1] else None)


def add_up_own_shards(
    backend: Backend,
    device: Device,
    replica: Replica,
    step: int,
    batch: Batch,
    rank: int,
    shards: list[range],
    own: range,
    meet: Meet,
    way_out: WayOut,
) -> OwnShards:
    """The rank's nodes go the way out; the rest is given back. Leaves are added as soon as they can be."""
    began = time.perf_counter()
    done: list[Leaf] = []
    if not own:
        for number in range(len(way_out.places)):
            way_out.leave(number, dict)
        return OwnShards([], [], [], 0.0)

    def ready(vector: Tensor, start: int, mark: Mark) -> None:
        last_leaf.ready(vector, start, mark)

    early = ready if len(way_out.places) > 1 else None
    leaves = replica.leaves(step, fetch_shards(batch, rank, shards, own, early), meet)

    def leaf(number: int) -> Tensor:  # asked for in the order of `own`
        gradient, *rest = next(leaves)
        done.append(Leaf(None, *rest))
        return gradient

    with span("forward and backward"):
        *whole, last = maximal_nodes(own, len(shards))
        nodes = {node: sum_of(node, leaf, backend.add) for node in whole}
        beside = [sum_of(node, leaf, backend.add) for node in before_last(last)]
        last_leaf = LastLeaf(backend, way_out, nodes, last, beside)
        gradient = leaf(own[-1])
        losses = [float(leaf.loss) for leaf in done]
        backend.synchronize(device)
        last_leaf.ready(gradient, 0, mark=nothing_to_wait_for)
    return OwnShards(losses, *_beside_gradients(done), time.perf_counter() - began)


def nothing_to_wait_for() -> Callable[[], None]:
    """The mark of what is done already."""
    return lambda: None


def compute_beside_each_other(
    recorder: Recorder, replica: Replica, step: int, batch: Batch, rank: int, shards: list[range], own: range
) -> list[Leaf]:
    """The rank's leaves in a recording: on a GPU, shards that do not wait for each other share its time."""

    def fetched() -> Generator[Shard, None, None]:
        for number in own:
            with recorder.beside(number):  # until the next one is asked for
                yield from fetch_shards(batch, rank, shards, range(number, number + 1))

    with closing(fetched()) as own_shards:  # also after an error: it has to leave the shard that it is beside
        return list(replica.leaves(step, own_shards, nobody_else))


def add_up_leaves(
    recorder: Recorder, own: range, num_shards: int, leaves: list[Leaf]
) -> tuple[dict[Node, Tensor], OwnShards]:
    """The rank's nodes from its leaves, in the order of `own`, and what else its shards leave."""

    def leaf(number: int) -> Tensor:
        return leaves[number - own.start].gradient

    nodes = {
        node: sum_at_once(node, leaf, recorder.most_at_once, recorder.add_up) for node in maximal_nodes(own, num_shards)
    }
    return nodes, OwnShards([leaf.loss for leaf in leaves], *_beside_gradients(leaves), 0.0)


def nobody_else(what: str, own: list[Tensor]) -> list[Tensor]:
    """Where ranks cannot meet in mid-phase."""
    raise RunError(f"Shards cannot wait for each other at {what} in a recording.")


def _beside_gradients(leaves: list[Leaf]) -> tuple[list[Any], list[int]]:
    """Rows, and the parameters that got a gradient."""
    rows = [leaf.row for leaf in leaves if leaf.row is not None]
    return rows, sorted(frozenset().union(*(leaf.used for leaf in leaves)))


def compute_own_shards(
    backend: Backend,
    device: Device,
    replica: Replica,
    step: int,
    batch: Batch,
    rank: int,
    shards: list[range],
    own: range,
    meet: Meet,
    way_out: WayOut,
    cancel: Callable[[], None],
) -> OwnShards:
    """`add_up_own_shards`; where memory runs out, the error says what would fit. Whoever waits to meet is sent home."""
    try:
        return add_up_own_shards(backend, device, replica, step, batch, rank, shards, own, meet, way_out)
    except BaseException as problem:
        cancel()
        if not is_out_of_memory(problem):
            raise
        where, said = user_source_line(problem), str(problem)
        traceback.clear_frames(problem.__traceback__)  # they hold what was computed so far
    size = len(shards[own.start])
    advice = what_would_fit(backend, device, replica, step, batch, rank, size, meet)
    raise OutOfMemory(rank, device, size, advice, said, where)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out: frameworks say so in different ways."""
    said = f"{type(error).__name__} {error}".lower()
    return isinstance(error, MemoryError) or any(
        words in said for words in ("outofmemory", "out of memory", "can't allocate memory", "resource_exhausted")
    )


def what_would_fit(
    backend: Backend, device: Device, replica: Replica, step: int, batch: Batch, rank: int, num_samples: int, meet: Meet
) -> str:
    """What to do when a shard of `num_samples` does not fit into the device's memory: found by trying smaller ones."""
    more = f"More shards need less of it: try --shards {-(-2 * batch.num_samples // num_samples)}"

    def try_a_shard(num_samples: int, num_vectors: int) -> None:
        X, y = batch.fetch(rank, 0, num_samples)
        leaf = next(replica.leaves(step, iter([Shard(0, num_samples, X, y)]), meet))
        beside = [backend.copy_to(leaf.gradient, device) for _ in range(num_vectors)]
        next(replica.leaves(step, iter([Shard(0, num_samples, X, y)]), meet))
        beside.clear()

    while num_samples > 1:
        num_samples = -(-num_samples // 2)
        fits = -(-batch.num_samples // num_samples)
        try:  # beside as many vectors as a step has at most: nodes of the tree, the total, the optimizer's
            try_a_shard(num_samples, fits.bit_length() + 5)
        except (threading.BrokenBarrierError, PeersLost):  # it cannot be tried without the other ranks
            return more
        except Exception as problem:  # without memory, other things go wrong too
            traceback.clear_frames(problem.__traceback__)  # they hold what was computed so far
        else:
            return f"A shard of {num_samples} does: use --shards {fits} (another run, with other bits)"
    return "Not even one sample does: use a smaller model, smaller samples, or a device with more memory"


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
