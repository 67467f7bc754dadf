"""Shards of a captured step that go through the model together, where its kernels can compute several at once."""

from collections.abc import Iterator, Sequence
from itertools import groupby

from lockstep.replicas.replica import CapturableReplica, Shard
from lockstep.runtime.engine import StepInput


def shard_groups(work: StepInput, replica: CapturableReplica, rank: int, own: Sequence[int]) -> list[range]:
    """A rank's shards, in groups that its replica computes at once; the samples must be there."""
    return [group for same in _of_one_size(work, own) for group in _groups(work, replica, rank, same)]


def _of_one_size(work: StepInput, own: Sequence[int]) -> Iterator[range]:
    """Shards that follow each other and have as many samples."""
    for _, found in groupby(own, lambda number: len(work.shards[number])):
        numbers = list(found)
        yield range(numbers[0], numbers[-1] + 1)


def _groups(work: StepInput, replica: CapturableReplica, rank: int, same: range) -> list[range]:
    shards = []
    for number in same[:2]:
        samples = work.shards[number]
        shards.append(Shard(number, len(samples), *work.batch.fetch(rank, samples.start, samples.stop)))
    together = min(replica.num_together(shards), -(-len(same) // 2))  # one group fills the gaps of the other
    return [same[start : start + together] for start in range(0, len(same), together)]
