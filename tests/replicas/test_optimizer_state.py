"""The state of an optimizer: what a GPU saved, a CPU continues with."""

import torch
from torch import nn

from lockstep.optim.torch_on_gpu import GpuOptimizer
from lockstep.replicas.optimizer_state import optimizer_state, restore_optimizer

CPU = torch.device("cpu")


def trained(make):
    torch.manual_seed(0)
    layer = nn.Linear(4, 3)
    optimizer = make(layer.parameters())
    for _ in range(3):
        layer(torch.ones(2, 4)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return layer, optimizer


def test_how_a_gpu_computes_an_update_is_not_taken_over_by_a_cpu():
    def make(params):
        return torch.optim.AdamW(params, lr=0.1)

    layer, optimizer = trained(make)
    GpuOptimizer(optimizer, CPU)
    assert optimizer.param_groups[0]["fused"]
    assert optimizer.param_groups[0]["capturable"]
    again = make(layer.parameters())
    names = {id(param): name for name, param in layer.named_parameters()}
    restore_optimizer(again, None, optimizer_state(optimizer, None, names), names, CPU)
    before = layer.weight.detach().clone()
    layer(torch.ones(2, 4)).square().sum().backward()
    again.step()  # with capturable, it would be refused on a CPU
    assert not torch.equal(layer.weight, before)
    assert again.state[layer.weight]["step"] == 4


def test_a_gpus_learning_rate_is_a_tensor_during_the_update_only():
    layer = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.25)
    found = GpuOptimizer(optimizer, CPU)
    found.set_rates()
    with found.rates_on_device():
        assert torch.equal(optimizer.param_groups[0]["lr"], torch.tensor(0.25))
    assert optimizer.param_groups[0]["lr"] == 0.25
    assert isinstance(optimizer.param_groups[0]["lr"], float)
