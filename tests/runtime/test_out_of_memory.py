"""Memory: the peak is told, and a shard that does not fit says what would."""

import threading

import pytest
import torch
from torch import nn

import lockstep
from lockstep.core.errors import OutOfMemory

SETTINGS = {"batch_size": 32, "epochs": 1, "quiet": True}


class Small(nn.Linear):
    """A model on a device with memory for a few samples."""

    def __init__(self, room, said="CUDA out of memory. Tried to allocate 2.00 GiB."):
        super().__init__(6, 3)
        self.room, self.said = room, said

    def forward(self, x):
        if self.training and len(x) > self.room:
            raise torch.OutOfMemoryError(self.said)
        return super().forward(x)


@pytest.mark.parametrize(("room", "shards", "fits"), [(5, 2, 8), (1, 8, 32), (7, 4, 8), (2, 3, 16)])
def test_what_would_fit_is_found_by_trying(vectors, room, shards, fits):
    X, y = vectors
    with pytest.raises(OutOfMemory) as refused:
        lockstep.train(model=Small(room), data=(X[:32], y[:32]), devices=2, shards=shards, **SETTINGS)
    said = str(refused.value)
    size = -(-32 // shards)
    assert said.startswith(
        f"rank 0 (cpu:0), during forward and backward: a shard of {size} samples does not fit into memory."
    )
    assert f"use --shards {fits} (this changes the weights)" in said
    assert "The framework reported: CUDA out of memory. Tried to allocate 2.00 GiB. (at " in said
    assert "test_out_of_memory.py" in said
    assert threading.active_count() == 1
    lockstep.train(model=Small(room), data=(X[:32], y[:32]), devices=2, shards=fits, **SETTINGS)


def test_where_one_sample_is_too_many_that_is_said(vectors):
    with pytest.raises(OutOfMemory, match="Not even one sample does"):
        lockstep.train(model=Small(0), data=vectors, devices=1, **SETTINGS)


def test_what_cannot_be_tried_is_not_claimed(vectors):
    class SmallNorm(Small):
        def __init__(self):
            super().__init__(2)
            self.norm = nn.BatchNorm1d(6)

        def forward(self, x):
            return super().forward(self.norm(x))

    with pytest.raises(OutOfMemory, match="More shards need less of it: try --shards 16"):
        lockstep.train(model=SmallNorm(), data=vectors, devices=2, batch_norm="sync", **SETTINGS)
    assert threading.active_count() == 1


def test_the_peak_is_told(vectors, capsys):
    result = lockstep.train(model=nn.Linear(6, 3), data=vectors, devices=2, batch_size=32, epochs=1)
    assert list(result.peak_memory) == ["cpu"]
    assert 1e7 < result.peak_memory["cpu"] < 1e11
    assert "peak memory: cpu " in capsys.readouterr().err
