"""The step that splits the data. START HERE: split the batch, gradients on each device, all-reduce, update."""

from collections.abc import Sequence

from lockstep.runtime import Batch, Engine, Exchanged, Replica
from lockstep.partition.batch import split_into_shards


def train_step(engine: Engine, replicas: Sequence[Replica], step: int, batch: Batch, num_shards: int) -> list[float]:
    """Updates every replica on the whole of `batch`, with the same bits for any number of ranks.

    Gives the summed loss of each shard, in shard order.
    """
    shards = split_into_shards(batch.num_samples, num_shards)
    exchanged = sum_gradients(engine, replicas, step, batch, shards)
    engine.update(replicas, step, exchanged, shards)
    return exchanged.losses


def sum_gradients(
    engine: Engine, replicas: Sequence[Replica], step: int, batch: Batch, shards: list[range]
) -> Exchanged:
    """On every rank the sum of all shards' gradients, and what else it has to know for the update."""
    gradients = engine.forward_backward(replicas, step, batch, shards)
    return engine.exchange(gradients)
