"""What ranks that are threads hand to each other by reference: its memory is not used again while somebody reads it."""

import pytest
import torch

from lockstep.backends import load_backend
from lockstep.backends.torch import TorchBackend
from lockstep.core.device import Device
from lockstep.replicas.replica import StageTensors
from lockstep.runtime.thread_transport import ThreadGroup
from lockstep.runtime.transport import GroupKey, TransferGroup
from lockstep.schedules.instructions import ACTIVATION_GRADIENTS, GRADIENTS, PARAMETERS

DEVICES = [Device("cpu:0"), Device("cpu:1")]


@pytest.mark.parametrize("memories", [["cpu:0", "cpu:0"], ["cpu:0", "cpu:1"]], ids=["one memory", "two memories"])
@pytest.mark.parametrize(
    ("channel", "sent"),
    [
        (GRADIENTS, torch.ones(3)),
        (PARAMETERS, torch.ones(3)),
        (ACTIVATION_GRADIENTS, StageTensors([torch.ones(3), None, torch.ones(2)])),
    ],
    ids=["gradients", "parameters", "activation gradients"],
)
def test_who_receives_a_tensor_records_that_its_stream_reads_it(monkeypatch, memories, channel, sent):
    recorded = []
    monkeypatch.setattr(TorchBackend, "record_stream", lambda self, value: recorded.append(value))
    group = ThreadGroup(load_backend("torch"), DEVICES, [Device(memory) for memory in memories], timeout=10.0)
    key = GroupKey(channel, 0, 0)
    group.transport(0).start(TransferGroup(key, [(1, sent)], []))
    receiver = group.transport(1)
    receiver.start(TransferGroup(key, [], [(0, None)]))
    receiver.finish(key)
    values = sent.values if isinstance(sent, StageTensors) else [sent]
    assert [id(value) for value in recorded] == [id(value) for value in values]
