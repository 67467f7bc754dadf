"""Replicas that hold parts of the model: weights and states, drift and evaluation over all of them."""

from typing import NamedTuple

import numpy as np
import pytest

from lockstep.core.device import Device
from lockstep.data.batch import Batch
from lockstep.partition.placement import Placement
from lockstep.replicas.replica import Measured
from lockstep.training.drift import find_drift
from lockstep.training.evaluate import EvalSpec, evaluate_batches
from lockstep.training.replica_set import ReplicaSet

FIRST, SECOND, ALL = range(0, 2), range(2, 5), range(0, 5)
TWO_STAGES = Placement((FIRST, SECOND, FIRST, SECOND))  # two replicas of each part


class Part:
    """A replica that holds some entries; entry number n is the parameter Wn."""

    def __init__(self, entries, rank=0):
        self.entries, self.rank = entries, rank
        self.weights = {f"W{entry}": np.full(2, entry, np.float32) for entry in entries}
        self.measured = []

    def arrays(self):
        return self.weights

    def state_dict(self):
        return {"rank": self.rank, "num_entries": len(self.entries)}

    def fingerprints(self):
        return {name: array.tobytes().hex() for name, array in self.weights.items()}

    def measure(self, X, y):
        self.measured += list(X)
        return Measured({"accuracy": [float((y == X % 2).sum()), len(X)], "loss": [float(X.sum()), len(X)]})


class AllRanks(NamedTuple):
    """An engine whose ranks are all in this process."""

    num_ranks: int

    @property
    def local_ranks(self):
        return range(self.num_ranks)

    @property
    def devices(self):
        return [Device(f"cpu:{rank}") for rank in self.local_ranks]

    def all_gather(self, values):
        return values

    def each(self, phase, work, *lists):
        return [work(rank, self.devices[rank], *(entries[rank] for entries in lists)) for rank in self.local_ranks]


def placed(placement):
    """The replicas of all ranks, in one process."""
    replicas = [Part(part, rank) for rank, part in enumerate(placement.parts)]
    return ReplicaSet(AllRanks(len(replicas)), replicas, placement)


def on_one_rank(engine, placement=TWO_STAGES):
    """The replica of one rank, in a process of its own. Those of the later ranks have other values."""
    (rank,) = engine.local_ranks
    replica = Part(placement.parts[rank], rank)
    if rank >= 2:
        replica.weights = {name: array + 100 for name, array in replica.weights.items()}
    return ReplicaSet(engine, [replica], placement)


def test_the_model_is_merged_from_the_owners_of_its_parts_on_every_rank(on_ranks):
    found, _ = on_ranks(4, lambda engine: (on_one_rank(engine).weights(), on_one_rank(engine).states()))
    for weights, states in found:
        assert list(weights) == ["W0", "W1", "W2", "W3", "W4"]
        assert all((weights[f"W{entry}"] == entry).all() for entry in ALL), "those of ranks 0 and 1"
        assert states == {"0:2": {"rank": 0, "num_entries": 2}, "2:5": {"rank": 1, "num_entries": 3}}


def test_the_local_part_is_read_without_the_other_ranks(on_ranks):
    found, _ = on_ranks(4, lambda engine: (on_one_rank(engine).local_weights(), on_one_rank(engine).local_states()))
    assert [list(weights) for weights, _ in found] == [["W0", "W1"], ["W2", "W3", "W4"]] * 2
    assert [list(states) for _, states in found] == [["0:2"], ["2:5"]] * 2
    assert found[3][1]["2:5"]["rank"] == 3


@pytest.mark.parametrize("parts", [(FIRST, SECOND, FIRST, SECOND), (SECOND, FIRST)])
def test_a_process_with_several_ranks_has_each_part_once_in_model_order(parts):
    replicas = placed(Placement(parts))
    assert list(replicas.local_weights()) == list(replicas.weights()) == ["W0", "W1", "W2", "W3", "W4"]
    assert replicas.local_states() == replicas.states()
    assert replicas.states()["2:5"]["rank"] == parts.index(SECOND)


def test_a_model_that_every_rank_holds_is_read_without_a_collective():
    class NoCollectives(AllRanks):
        def all_gather(self, values):
            raise AssertionError("every rank has everything")

    replicas = ReplicaSet(NoCollectives(2), [Part(ALL, 0), Part(ALL, 1)])
    assert replicas.placement == Placement((ALL, ALL))
    assert list(replicas.weights()) == list(replicas.local_weights())
    assert replicas.states() == replicas.local_states() == {"0:5": {"rank": 0, "num_entries": 5}}


# --- drift


def test_only_ranks_with_the_same_part_are_compared():
    assert find_drift(placed(TWO_STAGES)) is None
    single = placed(Placement((FIRST, SECOND)))  # nothing to compare with
    single.local[1].weights["W3"] += 1
    assert find_drift(single) is None


def test_the_rank_that_differs_from_the_others_of_its_part_is_named():
    replicas = placed(Placement((FIRST, SECOND, SECOND, FIRST, SECOND)))
    replicas.local[4].weights["W3"] += 1
    replicas.local[4].weights["W4"] += 1
    assert find_drift(replicas) == ("rank 4 (cpu:4), first in W3", True, 1)


def test_of_two_replicas_of_a_part_nobody_knows_which_is_right():
    replicas = placed(TWO_STAGES)
    replicas.local[3].weights["W2"] += 1
    named, has_majority, good = find_drift(replicas)
    assert named == "rank 3 (cpu:3), first in W2"
    assert not has_majority
    assert good == 1, "the first rank of the same part"


def test_drift_is_found_on_every_rank(on_ranks):
    found, _ = on_ranks(4, lambda engine: find_drift(on_one_rank(engine)))
    assert found == [("rank 2 (cpu:2), first in W0", False, 0)] * 4


# --- evaluation


@pytest.mark.parametrize("num_samples", [1, 10, 37])
def test_only_ranks_that_hold_the_whole_model_evaluate_and_each_sample_is_counted_once(num_samples):
    replicas = placed(Placement((ALL, FIRST, ALL, SECOND)))
    X = np.arange(num_samples)
    batch = Batch(num_samples, lambda rank, start, stop: (X[start:stop], np.zeros(stop - start)))
    metrics = evaluate_batches(replicas, [batch], EvalSpec(batch_size=4))
    assert replicas.local[1].measured == replicas.local[3].measured == []
    assert sorted(replicas.local[0].measured + replicas.local[2].measured) == list(range(num_samples))
    assert metrics == {"accuracy": -(-num_samples // 2) / num_samples, "loss": X.sum() / num_samples}
