"""How many shards each rank gets: as many as the others, or as many as it has time for. The bits stay the same."""

from collections import deque
from collections.abc import Sequence
from statistics import median

from lockstep.partition.ranks import split_over_ranks

BALANCES = {
    "equal": "every device gets as many shards as the others",
    "measured": "faster devices get more shards, from measured time",
}
WINDOW = 5  # steps that a rank's speed is the median of: one that was disturbed changes nothing
MAX_TIME_RATIO = 0.95  # shards move if a step would take less than this part of its time


class Balance:
    """Equal shares."""

    def ranges(self, num_shards: int, num_ranks: int) -> tuple[range, ...]:
        """The shards of each rank."""
        return tuple(split_over_ranks(num_shards, num_ranks))

    def record_times(self, ranges: Sequence[range], seconds: Sequence[float]) -> None:
        """Takes note of the time that each rank took for its shards."""

    def pop_message(self) -> str:
        """That shards have moved since the last time, or nothing."""
        return ""


class MeasuredBalance(Balance):
    """Shares by speed. All ranks see the same times, so all of them come to the same shares."""

    def __init__(self) -> None:
        self._times: list[deque[float]] = []  # seconds per shard, of each rank
        self._counts: dict[tuple[int, int], list[int]] = {}  # (shards, ranks) -> shards of each rank
        self._message = ""

    def ranges(self, num_shards: int, num_ranks: int) -> tuple[range, ...]:
        before = self._counts.get((num_shards, num_ranks)) or [
            len(own) for own in split_over_ranks(num_shards, num_ranks)
        ]
        if len(self._times) == num_ranks and all(len(times) == WINDOW for times in self._times):
            seconds = [median(times) for times in self._times]
            counts = shares(num_shards, seconds)
            if _longest(counts, seconds) < MAX_TIME_RATIO * _longest(before, seconds):
                before = counts
                now = ", ".join(f"rank {rank} has {count}" for rank, count in enumerate(counts))
                self._message = f"shards reassigned: {now}"
        self._counts[num_shards, num_ranks] = before
        starts = [sum(before[:rank]) for rank in range(num_ranks + 1)]
        return tuple(range(starts[rank], starts[rank + 1]) for rank in range(num_ranks))

    def record_times(self, ranges: Sequence[range], seconds: Sequence[float]) -> None:
        if len(self._times) != len(ranges):
            self._times = [deque(maxlen=WINDOW) for _ in ranges]
        for times, own, taken in zip(self._times, ranges, seconds, strict=True):
            if own:
                times.append(taken / len(own))

    def pop_message(self) -> str:
        message, self._message = self._message, ""
        return message


def balance_for(name: str) -> Balance:
    """The balance called `name`."""
    return MeasuredBalance() if name == "measured" else Balance()


def shares(num_shards: int, seconds_per_shard: Sequence[float]) -> list[int]:
    """How many shards each rank gets, so that the last one is done as early as can be; one each, if there are enough.

    >>> shares(16, [1.0, 2.0])
    [11, 5]
    >>> shares(8, [1.0, 1.0, 100.0])
    [4, 3, 1]
    """
    counts = [int(rank < num_shards) for rank in range(len(seconds_per_shard))]
    for _ in range(num_shards - sum(counts)):
        done = [(count + 1) * time for count, time in zip(counts, seconds_per_shard, strict=True)]
        counts[done.index(min(done))] += 1
    return counts


def _longest(counts: Sequence[int], seconds_per_shard: Sequence[float]) -> float:
    return max(count * time for count, time in zip(counts, seconds_per_shard, strict=True))
