"""A module as a whole: whether its numbers are finite, and what may write to it while it is copied."""

import numpy as np
import pytest
import torch
from torch import nn

from lockstep.core.device import Device
from lockstep.models.losses import cross_entropy
from lockstep.replicas.module import ModuleReplica
from lockstep.replicas.module_state import are_finite, arrays_of
from lockstep.replicas.replica import BatchSummary
from lockstep.replicas.train_spec import TrainSpec


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_one_number_that_is_not_finite_is_found(number, dtype):
    tensor = torch.ones(3, 5, dtype=dtype)
    assert are_finite([torch.ones(2), tensor])
    tensor[2, 1] = number
    assert not are_finite([torch.ones(2), tensor])


def test_empty_tensors_and_integers_are_finite():
    assert are_finite([])
    assert are_finite([torch.empty(0, 3), torch.arange(4), torch.full((2,), 1e300, dtype=torch.float64)])


def test_neither_a_forward_pass_nor_an_update_writes_to_what_is_being_copied(monkeypatch):
    module, waits = nn.Linear(2, 2), []
    spec = TrainSpec(module, cross_entropy, {}, lambda named: torch.optim.SGD([p for _, p in named], lr=0.1), None, 0)
    replica = ModuleReplica(spec, Device("cpu:0"), arrays_of(module))
    monkeypatch.setattr(replica._pinned, "wait", lambda: waits.append("wait"))
    replica.begin_step(1)
    assert waits == ["wait"]
    total = torch.zeros(replica.entries.stop)
    replica.update(1, total, BatchSummary([1], [], frozenset({0, 1})))
    assert waits == ["wait", "wait"]
    assert np.array_equal(replica.arrays()["weight"], module.weight.detach().numpy())
