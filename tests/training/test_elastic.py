"""Which state the ranks of a new generation go on from."""

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from lockstep.training.checkpoint import Checkpoint, Progress
from lockstep.training.elastic import agree
from lockstep.report.events import EpochDone


def at(step, epoch):
    history = [EpochDone(number, 1.0, 1.0, 0.5) for number in range(1, epoch)]
    progress = Progress(step=step, epoch=epoch, history=history, first_loss=1.0)
    return Checkpoint({}, {}, progress, {"W": np.full(2, step, np.float32)}, None)


class Together:
    """An engine of several ranks, a thread each, that only gathers and shares."""

    def __init__(self, num_ranks):
        self.brought, self.meeting, self.num_shared = [None] * num_ranks, threading.Barrier(num_ranks, timeout=20), 0

    def of_rank(self, rank):
        return OfRank(self, rank)


class OfRank:
    def __init__(self, together, rank):
        self.together, self.rank = together, rank

    def gather(self, values):
        self.together.brought[self.rank] = values[0]
        self.together.meeting.wait()
        found = list(self.together.brought)
        self.together.meeting.wait()
        return found

    def share(self, source, make):
        self.together.num_shared += 1
        return self.gather([make() if self.rank == source else b""])[source]


def agreed(states):
    together = Together(len(states))
    with ThreadPoolExecutor(len(states)) as threads:
        futures = [threads.submit(agree, together.of_rank(rank), state) for rank, state in enumerate(states)]
        return [future.result() for future in futures], together


@pytest.mark.parametrize(
    ("places", "newest"),
    [
        ([None, None], None),
        ([(3, 1), None], (3, 1)),
        ([(3, 1), (4, 1), (3, 1)], (4, 1)),
        ([(8, 1), (8, 2), (8, 1)], (8, 2)),  # one had evaluated the epoch when another died
        ([(8, 2), (9, 2)], (9, 2)),
    ],
)
def test_all_go_on_from_the_newest_state_that_anybody_has(places, newest):
    states = [None if place is None else at(*place) for place in places]
    found, _ = agreed(states)
    assert [None if one is None else (one.progress.step, one.progress.epoch) for one in found] == [newest] * len(states)


def test_nothing_is_sent_where_all_are_at_the_same_place():
    states = [at(5, 1), at(5, 1)]
    found, together = agreed(states)
    assert all(one is own for one, own in zip(found, states, strict=True))
    assert together.num_shared == 0
