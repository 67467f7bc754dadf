"""Shards of a captured step that go through the model together, where its kernels can compute several at once."""

from collections.abc import Iterator, Sequence
from itertools import groupby

from lockstep.replicas.replica import CapturableReplica, Shard
from lockstep.runtime.engine import StepInput
from lockstep.runtime.out_of_memory import is_out_of_memory

# Kernels of one group fill the gaps of another. Eight shards of ResNet-18 (tf32, H200) take 8.2 ms in one group, 7.5 in
# two and 7.1 in four; those of ResNet-50 (bf16) 48.8, 46.3 and 45.9.
NUM_GROUPS, MIN_SHARDS, MAX_SHARDS = 4, 2, 8


def shard_groups(work: StepInput, replica: CapturableReplica, rank: int, own: Sequence[int]) -> list[range]:
    """A rank's shards, in groups that its replica computes at once; the samples must be there."""
    return [group for same in _of_one_size(work, own) for group in _groups(work, replica, rank, same)]


def _of_one_size(work: StepInput, own: Sequence[int]) -> Iterator[range]:
    """Shards that follow each other and have as many samples."""
    for _, found in groupby(own, lambda number: len(work.shards[number])):
        numbers = list(found)
        yield range(numbers[0], numbers[-1] + 1)


def _groups(work: StepInput, replica: CapturableReplica, rank: int, same: range) -> list[range]:
    size = 1
    if len(same) >= MIN_SHARDS and _go_together(work, replica, rank, same[:MIN_SHARDS]):
        size = min(max(MIN_SHARDS, -(-len(same) // NUM_GROUPS)), MAX_SHARDS)
    return [same[start : start + size] for start in range(0, len(same), size)]


def _go_together(work: StepInput, replica: CapturableReplica, rank: int, numbers: range) -> bool:
    try:
        return replica.go_together([_fetch(work, rank, number) for number in numbers])
    except Exception as problem:
        if not is_out_of_memory(problem):
            raise
        return False  # shards one by one need less, or it is said then what would


def _fetch(work: StepInput, rank: int, number: int) -> Shard:
    samples = work.shards[number]
    return Shard(number, len(samples), *work.batch.fetch(rank, samples.start, samples.stop))
