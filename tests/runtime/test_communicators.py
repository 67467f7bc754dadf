"""NCCL's communicators, with Gloo in their place: it waits for all of their ranks, too."""

import pytest
import torch.distributed as dist

import lockstep
from lockstep.parallel.combined import ModelSplit, StageShape, combined
from lockstep.partition.grid import Grid
from lockstep.runtime import process_group
from lockstep.runtime.communicators import Communicator, communicators_of, name_of
from lockstep.runtime.store import prefix_store
from lockstep.schedules.instructions import ACTIVATION_GRADIENTS, ACTIVATIONS, GRADIENTS, PARAMETERS
from training.split_models import IMAGES, Residual, seeded

PROCESSES = {"engine": "processes", "timeout": 20.0}


class Coalesced:
    """Transfers that were started together."""

    def __init__(self, works):
        self._works = works

    def is_completed(self):
        return True  # `wait` waits

    def wait(self, timeout):
        return all(work.wait(timeout) for work in self._works)


class LikeNccl:
    """NCCL's side of a communicator: who starts the first group waits for all ranks of the communicator to do so."""

    def __init__(self, store, rank, communicator, seconds):
        assert rank in communicator.ranks, communicator
        number, size = communicator.ranks.index(rank), len(communicator.ranks)
        self._make = lambda: dist.ProcessGroupGloo(prefix_store(name_of(communicator), store), number, size)
        self._gloo, self._works = None, None

    def _start_coalescing(self):
        self._gloo, self._works = self._gloo or self._make(), []

    def recv(self, tensors, source, tag):
        self._works.append(self._gloo.recv(tensors, source, 0))  # in the order in which they are started, as NCCL does

    def send(self, tensors, target, tag):
        self._works.append(self._gloo.send(tensors, target, 0))

    def _end_coalescing(self):
        return Coalesced(self._works)

    def abort(self):
        self._gloo = None


@pytest.fixture
def like_nccl(monkeypatch):
    monkeypatch.setattr(process_group, "uses_nccl", lambda devices, address: True)
    monkeypatch.setattr(process_group, "connect_nccl", LikeNccl)


def weights(k, **how):
    return lockstep.train(
        model=seeded(Residual), data=(IMAGES, IMAGES), devices=",".join(f"cpu:{n}" for n in range(k)), batch_size=28,
        epochs=1, shards=4, momentum=0.9, clip_norm=0.05, checkpoint_every=0, quiet=True, **how,
    ).weights_sha256  # fmt: skip


@pytest.mark.parametrize(
    ("k", "split", "how"),
    [
        (3, "network=3", {"pipeline": "1f1b"}),
        (3, "network=3", {"pipeline": "gpipe"}),
        (4, "data=2,network=2", {"update": "sharded"}),
        (2, "network=2", {"stages": "blocks.1,head"}),  # there and back
        (3, "network=3", {"stages": "blocks.0,blocks.1,blocks.2,head"}),
    ],
    ids=str,
)
def test_nobody_waits_for_a_rank_that_does_not_use_a_lane(like_nccl, k, split, how):
    """A stage in the middle has two neighbours, the first and the last have one, and none of them has all."""
    assert weights(k, split=split, **how, **PROCESSES) == weights(1)


def test_a_pipeline_has_a_communicator_for_each_direction_of_each_cut_and_one_for_those_that_hold_the_same_stage():
    shape = tuple((StageShape(stage, range(8), (range(4), range(4, 8))),) for stage in range(2))
    split = ModelSplit(Grid(data=2, network=2), (0, 1), shape, "1f1b", gathers_norms=False)
    found = communicators_of(combined(split.step((range(2), range(2, 4)), "sharded", together=False)))
    assert found == sorted(found)
    assert set(found) == {
        *(
            Communicator(f"{channel} 0", pair)
            for channel in (ACTIVATIONS, ACTIVATION_GRADIENTS)
            for pair in ((0, 1), (2, 3))
        ),
        *(Communicator(channel, same) for channel in (GRADIENTS, PARAMETERS) for same in ((0, 2), (1, 3))),
    }


def test_ranks_are_numbered_within_their_communicator():
    communicator = Communicator("gradients", (1, 3, 5))
    assert [communicator.number_of(rank) for rank in (1, 3, 5)] == [0, 1, 2]
    assert name_of(communicator) != name_of(Communicator("gradients", (1, 3)))
