"""The text's program in PyTorch."""

import torch
from torch.nn import functional as F


def lenet(X, params):
    W1, b1, W2, b2, W3, b3, W4, b4 = params
    h1 = F.avg_pool2d(F.relu(F.conv2d(X, W1, b1)), kernel_size=2, stride=2)
    h2 = F.avg_pool2d(F.relu(F.conv2d(h1, W2, b2)), kernel_size=2, stride=2)
    h3 = F.relu(torch.mm(h2.reshape(h2.shape[0], -1), W3) + b3)
    return torch.mm(h3, W4) + b4


def allreduce(data):
    for other in data[1:]:
        data[0][:] += other
    for other in data[1:]:
        other[:] = data[0]


def train(start, batches, num_devices, lr):
    replicas = [[torch.tensor(array, requires_grad=True) for array in start] for _ in range(num_devices)]
    for X, y in batches:
        X_parts, y_parts = torch.from_numpy(X).chunk(num_devices), torch.from_numpy(y).chunk(num_devices)
        losses = [
            F.cross_entropy(lenet(X_part, params), y_part, reduction="none").sum()
            for X_part, y_part, params in zip(X_parts, y_parts, replicas, strict=True)
        ]
        for loss in losses:
            loss.backward()
        with torch.no_grad():
            for same in zip(*replicas, strict=True):
                allreduce([param.grad for param in same])
            for params in replicas:
                for param in params:
                    param -= lr * param.grad / len(X)
                    param.grad.zero_()
    return [param.detach().numpy() for param in replicas[0]]
