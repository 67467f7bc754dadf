"""Samples that stay on the devices: those of a captured batch, where each rank has a copy of its own."""

import numpy as np
import pytest
import torch

from lockstep.backends import load_backend
from lockstep.core.device import Device
from lockstep.data import resident
from lockstep.data.resident import ResidentData


class TwoDevices:
    """Two ranks of one process, as if each had memory of its own."""

    backend = load_backend("torch")
    devices, num_ranks, local_ranks = [Device("cpu:0"), Device("cpu:1")], 2, range(2)

    def copy_to_devices(self, array):
        return [torch.from_numpy(array.copy()) for _ in self.devices]


@pytest.mark.parametrize("most", [0, 1 << 20], ids=["shard by shard", "at once"])
def test_every_rank_fetches_the_samples_of_a_static_batch(monkeypatch, most):
    monkeypatch.setattr(resident, "GATHERED_BYTES", most)
    X, y = np.arange(640, dtype=np.float32).reshape(10, 64), np.arange(10)
    source = ResidentData(TwoDevices(), X, y)
    order = np.array([3, 1, 4, 0, 5, 9, 2, 6, 8, 7])
    batches = list(source.batches(order, 6, split=lambda size: [range(size)]))
    for first, batch in zip((0, 6), batches, strict=True):
        for rank in range(2):
            static = batch.static(rank)
            static.fill()
            static.gather()
            for start, stop in ((0, 2), (2, batch.num_samples)):
                expected = order[first + start : first + stop]
                found_X, found_y = static.fetch(rank, start, stop)
                assert torch.equal(found_X, torch.from_numpy(X[expected]))
                assert found_y.tolist() == expected.tolist()
