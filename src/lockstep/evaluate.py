"""Test accuracy on all devices, each sample counted exactly once: the text's fourth exercise.

The samples are cut into pieces of a fixed size whatever the number of devices, so a sample meets the same kernels, and
gets the same answer, on any of them. The count is a whole number: adding it up has no order.
"""

from lockstep.backends import Tensor
from lockstep.device import Device
from lockstep.engines import Batch, Engine
from lockstep.layout import Layout
from lockstep.models import Forward
from lockstep.split.batch import split_into_shards
from lockstep.split.ranks import split_over_ranks

PIECE = 256  # samples that go through the model together; part of the answer's definition, like the number of shards


def num_correct(
    engine: Engine, forward: Forward, layout: Layout, replicas: list[Tensor], samples: Batch
) -> int:
    """How many of the samples get their own label as the highest score."""
    pieces = split_into_shards(samples.num_samples, -(-samples.num_samples // PIECE))
    ranges = split_over_ranks(len(pieces), engine.num_ranks)
    backend = engine.backend

    def count(rank: int, device: Device, flat: Tensor) -> int:
        params = backend.unflatten(layout, flat)
        correct = 0
        for piece in pieces[ranges[rank].start : ranges[rank].stop]:
            X, y = samples.fetch(rank, piece.start, piece.stop)
            correct = correct + backend.ops.num_correct(forward(X, params), y)
        return int(correct)

    return sum(engine.gather(engine.each("evaluation", count, replicas)))
