"""An engine with a thread for each rank, for collectives without processes."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from lockstep.core.device import Device


class Ranks:
    """What the ranks share: a value of each, and a barrier."""

    def __init__(self, num_ranks):
        self.num_ranks, self.values = num_ranks, [None] * num_ranks
        self.barrier = threading.Barrier(num_ranks, timeout=20)
        self.num_broadcasts = 0


class RankEngine:
    """The engine of one rank, as the engine `processes` has it: the other ranks are elsewhere."""

    def __init__(self, ranks, rank):
        self._ranks, self._rank = ranks, rank
        self.num_ranks, self.local_ranks = ranks.num_ranks, range(rank, rank + 1)
        self.devices = [Device(f"cpu:{number}") for number in range(ranks.num_ranks)]

    def all_gather(self, values):
        (self._ranks.values[self._rank],) = values
        self._ranks.barrier.wait()
        found = list(self._ranks.values)
        self._ranks.barrier.wait()
        return found

    def broadcast(self, source, make):
        self._ranks.num_broadcasts += self._rank == source
        return self.all_gather([make() if self._rank == source else b""])[source]

    def each(self, phase, work, *lists):
        return [work(self._rank, self.devices[self._rank], *(entries[0] for entries in lists))]


@pytest.fixture
def on_ranks():
    """`on_ranks(k, work)`: the results of `work(engine)` on k ranks, and the number of broadcasts."""

    def run(num_ranks, work):
        ranks = Ranks(num_ranks)
        with ThreadPoolExecutor(num_ranks) as threads:
            futures = [threads.submit(work, RankEngine(ranks, rank)) for rank in range(num_ranks)]
            return [future.result() for future in futures], ranks.num_broadcasts

    return run


@pytest.fixture(scope="module", autouse=True)
def no_curves():
    """Runs in this process draw no curve.png, which would take half of their time; tests/report draws them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lockstep.report.run_picture.curve_png", lambda *_: (b"no curve", ""))
        yield
