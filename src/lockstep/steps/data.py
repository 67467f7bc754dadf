"""The step that splits the data: replicate, split the batch, gradients on each device, all-reduce, update."""

from collections.abc import Callable

from lockstep.backends import LossSum, Tensor
from lockstep.engines import Batch, Engine
from lockstep.layout import Layout
from lockstep.split.batch import split_into_shards


def train_step(
    engine: Engine,
    loss_sum: LossSum,
    layout: Layout,
    replicas: list[Tensor],
    batch: Batch,
    num_shards: int,
    rule: Callable[[Tensor, Tensor], Tensor],
) -> tuple[list[Tensor], list[list[float]]]:
    """Every replica after one update on the whole of `batch`, the same bits for any number of ranks; and the losses."""
    shards = split_into_shards(batch.num_samples, num_shards)
    gradients = engine.forward_backward(loss_sum, layout, replicas, batch, shards)
    totals = engine.exchange(gradients)
    return engine.update(rule, replicas, totals, batch.num_samples), gradients.losses
