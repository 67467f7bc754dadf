"""The step that splits the data. START HERE: split the batch, gradients on each device, all-reduce, update."""

from collections.abc import Sequence

from lockstep.engines import Batch, Engine, Replica
from lockstep.split.batch import split_into_shards


def train_step(
    engine: Engine, replicas: Sequence[Replica], step: int, batch: Batch, num_shards: int
) -> list[list[float]]:
    """Updates every replica on the whole of `batch`, with the same bits for any number of ranks; gives the losses."""
    shards = split_into_shards(batch.num_samples, num_shards)
    gradients = engine.forward_backward(replicas, step, batch, shards)
    totals = engine.exchange(gradients)
    engine.update(replicas, step, totals, gradients, shards)
    return gradients.losses
