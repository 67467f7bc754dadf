"""The text's program in numpy, which has no edition: LeNet forward and backward, as loops over the kernel."""

import numpy as np


def conv(X, W, b):
    rows, columns = X.shape[2] - W.shape[2] + 1, X.shape[3] - W.shape[3] + 1
    out = np.zeros((len(X), len(W), rows, columns), np.float32) + b.reshape(1, -1, 1, 1)
    for i in range(W.shape[2]):
        for j in range(W.shape[3]):
            out += np.einsum("ncrs,oc->nors", X[:, :, i : i + rows, j : j + columns], W[:, :, i, j], optimize=True)
    return out


def conv_back(X, W, g):
    rows, columns = g.shape[2:]
    dX, dW = np.zeros_like(X), np.zeros_like(W)
    for i in range(W.shape[2]):
        for j in range(W.shape[3]):
            window = X[:, :, i : i + rows, j : j + columns]
            dW[:, :, i, j] = np.einsum("nors,ncrs->oc", g, window, optimize=True)
            dX[:, :, i : i + rows, j : j + columns] += np.einsum("nors,oc->ncrs", g, W[:, :, i, j], optimize=True)
    return dX, dW, g.sum((0, 2, 3))


def pool(X):
    rows, columns = X.shape[2] // 2 * 2, X.shape[3] // 2 * 2
    return sum(X[:, :, i:rows:2, j:columns:2] for i in range(2) for j in range(2)) / 4


def pool_back(X, g):
    dX, rows, columns = np.zeros_like(X), X.shape[2] // 2 * 2, X.shape[3] // 2 * 2
    for i in range(2):
        for j in range(2):
            dX[:, :, i:rows:2, j:columns:2] = g / 4
    return dX


def gradients(params, X, y):
    W1, b1, W2, b2, W3, b3, W4, b4 = params
    a1 = conv(X, W1, b1)
    h1 = pool(np.maximum(a1, 0))
    a2 = conv(h1, W2, b2)
    h2 = pool(np.maximum(a2, 0)).reshape(len(X), -1)
    a3 = h2 @ W3 + b3
    h3 = np.maximum(a3, 0)
    scores = h3 @ W4 + b4
    p = np.exp(scores - scores.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    d4 = p - np.eye(10, dtype=np.float32)[y]
    d3 = (d4 @ W4.T) * (a3 > 0)
    d2 = pool_back(a2, (d3 @ W3.T).reshape(len(X), 50, 4, 4)) * (a2 > 0)
    dh1, dW2, db2 = conv_back(h1, W2, d2)
    _, dW1, db1 = conv_back(X, W1, pool_back(a1, dh1) * (a1 > 0))
    return [dW1, db1, dW2, db2, h2.T @ d3, d3.sum(0), h3.T @ d4, d4.sum(0)]


def train(start, batches, num_devices, lr):
    replicas = [[array.copy() for array in start] for _ in range(num_devices)]
    for X, y in batches:
        X_parts, y_parts = np.array_split(X, num_devices), np.array_split(y, num_devices)
        grads = [gradients(*work) for work in zip(replicas, X_parts, y_parts, strict=True)]
        for place, same in enumerate(zip(*grads, strict=True)):
            total = sum(same[1:], start=same[0])
            for params in replicas:
                params[place] -= np.float32(lr) * total / np.float32(len(X))
    return replicas[0]
