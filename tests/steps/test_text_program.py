"""The text's own program, restated in PyTorch: with one shard Lockstep must do the same."""

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from lockstep.config import RunConfig
from lockstep.data import load_dataset
from lockstep.data.order import sample_order
from lockstep.epochs import prepare, train
from lockstep.models.lenet import init_lenet
from lockstep.models.model import Model


def text_lenet(X, params):
    W1, b1, W2, b2, W3, b3, W4, b4 = params
    h1 = F.avg_pool2d(F.relu(F.conv2d(X, W1, b1)), kernel_size=2, stride=2)
    h2 = F.avg_pool2d(F.relu(F.conv2d(h1, W2, b2)), kernel_size=2, stride=2)
    h3 = F.relu(torch.mm(h2.reshape(h2.shape[0], -1), W3) + b3)
    return torch.mm(h3, W4) + b4


def text_train_batch(X, y, device_params, lr):
    """Split, backward on each device, all-reduce by adding to device 0, SGD on each device."""
    k = len(device_params)
    losses = [
        F.cross_entropy(text_lenet(X_part, params), y_part, reduction="none").sum()
        for X_part, y_part, params in zip(X.chunk(k), y.chunk(k), device_params, strict=True)
    ]
    for loss in losses:
        loss.backward()
    with torch.no_grad():
        for grads in zip(*[[p.grad for p in params] for params in device_params], strict=True):
            for other in grads[1:]:
                grads[0].add_(other)
            for other in grads[1:]:
                other.copy_(grads[0])
        for params in device_params:
            for p in params:
                p -= lr * p.grad / X.shape[0]
                p.grad.zero_()


def after_text_program(start, num_steps, num_devices, lr, batch_size=100, seed=0):
    data = load_dataset("fashion-mnist-mini")
    replicas = [[torch.from_numpy(a.copy()).requires_grad_() for a in start.values()] for _ in range(num_devices)]
    X_all, y_all = torch.from_numpy(data.X_train).float() / 255, torch.from_numpy(data.y_train)
    order = torch.from_numpy(sample_order(seed, 0, len(X_all)))
    for step in range(num_steps):
        chosen = order[step * batch_size : (step + 1) * batch_size]
        text_train_batch(X_all[chosen], y_all[chosen], replicas, lr)
    return [param.detach().numpy() for param in replicas[0]]


# The text's own settings, and weights that are large enough for all layers to learn. With both large weights and
# a large learning rate rounding grows so fast that the text's program disagrees with itself on 1 and 2 devices.
@pytest.mark.parametrize(("scale", "lr"), [(1, 0.2), (5, 0.05)])
@pytest.mark.parametrize("num_devices", [1, 2])
def test_with_one_shard_the_weights_after_20_steps_are_the_texts(scale, lr, num_devices):
    start = {name: scale * array for name, array in init_lenet(0).items()}
    config = RunConfig(
        data="fashion-mnist-mini", num_shards=1, devices=1, num_epochs=1, batch_size=100, learning_rate=lr
    )
    prepared = prepare(config)
    model = prepared.model
    scaled = Model(model.name, lambda seed: start, model.forward, model.sample_shape, model.num_classes)
    *_, done = train(config, prepared._replace(model=scaled))
    assert done.result.steps == 20
    expected = after_text_program(start, num_steps=20, num_devices=num_devices, lr=lr)
    for (name, array), reference in zip(done.result.params.items(), expected, strict=True):
        np.testing.assert_allclose(array, reference, rtol=0, atol=1e-6, err_msg=name)
    moved = max(abs(array - start[name]).max() for name, array in done.result.params.items())
    assert moved > 0.005, "the weights must have moved for the comparison to mean anything"
