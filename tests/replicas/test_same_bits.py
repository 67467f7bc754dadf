"""P1 for modules: the same weights and buffers for every number of devices, and those of a plain loop over shards."""

import copy

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import lockstep
from lockstep.core.random import shard_seed
from lockstep.data.order import sample_order
from lockstep.models.lenet_bn import LeNetBN
from lockstep.models.resnet18 import ResNet18
from lockstep.models.transformer import Transformer
from lockstep.partition.batch import split_into_shards
from lockstep.replicas.memory_format import channels_last
from lockstep.schedules.reduction_tree import Node, sum_of

NUM_SHARDS, NUM_STEPS = 8, 10


class Gru(nn.Module):
    """A recurrent model of the user's own, with dropout between its layers and before the last one."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(30, 16)
        self.gru = nn.GRU(16, 24, num_layers=2, dropout=0.3, batch_first=True)
        self.drop = nn.Dropout(0.2)
        self.out = nn.Linear(24, 5)

    def forward(self, X):
        return self.out(self.drop(self.gru(self.embed(X))[0][:, -1]))


def images(num_samples, size):
    torch.manual_seed(7)
    return torch.rand(num_samples, 1, size, size), torch.randint(10, (num_samples,))


def tokens(num_samples, length, next_ones):
    torch.manual_seed(8)
    X = torch.randint(30, (num_samples, length))
    return X, X.roll(-1, 1) if next_ones else torch.randint(5, (num_samples,))


# model, data for one epoch, batch size. Some batches are uneven, and the last one may be short.
CASES = {
    "lenet-bn": (lambda: LeNetBN(dropout=0.5), images(10 * 21 - 3, 28), 21),
    "resnet18": (lambda: ResNet18(in_channels=1, width=16), images(10 * 20, 12), 20),
    "transformer": (lambda: Transformer(30, 12, width=16, num_heads=2, dropout=0.2), tokens(10 * 20, 12, True), 20),
    "gru": (Gru, tokens(10 * 20, 6, False), 20),
}
OPTIMIZERS = {
    "sgd": {"optimizer": "sgd", "lr": 0.02, "momentum": 0.9, "weight_decay": 1e-4},
    "adam": {"optimizer": "adam", "lr": 1e-3},
    "adamw": {"optimizer": "adamw", "lr": 1e-3, "weight_decay": 0.01},
}


SLOW = {"resnet18", "transformer"}  # with adamw they are in the quick suite
PAIRS = [
    pytest.param(case, optimizer, marks=[pytest.mark.long] if case in SLOW and optimizer != "adamw" else [])
    for case in CASES
    for optimizer in OPTIMIZERS
]


def made(case):
    torch.manual_seed(1)
    return CASES[case][0]()


@pytest.mark.parametrize(("case", "optimizer"), PAIRS)
def test_every_number_of_devices_gives_the_same_weights_and_buffers(case, optimizer):
    module, (_, data, batch_size) = made(case), CASES[case]
    results = [
        lockstep.train(
            model=module,
            data=data,
            devices=k,
            batch_size=batch_size,
            epochs=1,
            shards=NUM_SHARDS,
            quiet=True,
            **OPTIMIZERS[optimizer],
        )
        for k in (1, 2, 3, 4)
    ]
    assert [result.steps for result in results] == [NUM_STEPS] * 4
    assert len({result.weights_sha256 for result in results}) == 1
    assert len({result.buffers_sha256 for result in results}) == 1
    assert len({result.first_loss for result in results}) == 1
    assert (results[0].buffers_sha256 is not None) == (case in ("lenet-bn", "resnet18"))
    both = zip(results[0].module.parameters(), module.parameters(), strict=True)
    moved = [float((new - old).detach().abs().max()) for new, old in both]
    assert min(moved) > 0, "every parameter must have changed"


def plain_loop(module, data, batch_size, make_optimizer):
    """A loop for one device with the same shards: their gradients added, one division, one update.

    They are added in the tree's brackets. Added one after the other they differ in the last bit, and ten steps of a
    network with batch norm make that grow without bound, in any loop: to 1e-3 in five steps of ResNet-18.
    """
    module = copy.deepcopy(module).train()
    params, (X, y) = list(module.parameters()), data
    if X.ndim == 4:  # images: channels-last as on our CPU devices, for the same kernels
        module = module.to(memory_format=torch.channels_last)
    optimizer = make_optimizer(params)
    order = torch.from_numpy(sample_order(0, 0, len(X)))
    for step, chosen in enumerate(order.split(batch_size), start=1):
        gradients = []
        for number, shard in enumerate(split_into_shards(len(chosen), NUM_SHARDS)):
            torch.manual_seed(shard_seed(0, step, number))
            own = chosen[shard.start : shard.stop]
            scores = module(channels_last(X[own])).movedim(1, -1)  # classes last, for the same kernels
            losses = F.cross_entropy(scores.flatten(0, -2), y[own].flatten(), reduction="none")
            losses.reshape(len(own), -1).mean(1).sum().backward()
            gradients.append([param.grad for param in params])
            optimizer.zero_grad()
        for param, leaves in zip(params, zip(*gradients, strict=True), strict=True):
            param.grad = sum_of(Node(0, len(leaves)), leaves.__getitem__, torch.add) / len(chosen)
        optimizer.step()
        optimizer.zero_grad()
    return module


PLAIN = {
    "sgd": lambda params: torch.optim.SGD(params, 0.02, momentum=0.9, weight_decay=1e-4),
    "adam": lambda params: torch.optim.Adam(params, 1e-3),
    "adamw": lambda params: torch.optim.AdamW(params, 1e-3, weight_decay=0.01),
}


@pytest.fixture
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("optimizer", PLAIN)
@pytest.mark.parametrize("case", CASES)
def test_weights_and_buffers_are_those_of_a_plain_loop_over_the_shards(case, optimizer):
    module, (_, data, batch_size) = made(case), CASES[case]
    result = lockstep.train(
        model=module, data=data, devices=2, batch_size=batch_size, epochs=1, quiet=True, optimizer=PLAIN[optimizer]
    )
    expected = plain_loop(module, data, batch_size, PLAIN[optimizer])
    for (name, new), old in zip(result.module.state_dict().items(), expected.state_dict().values(), strict=True):
        np.testing.assert_allclose(new.numpy(), old.numpy(), rtol=1e-5, atol=1e-5, err_msg=name)
