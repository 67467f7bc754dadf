"""The text's program in JAX, which has no edition: the same functions, with new arrays instead of changes."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


def pool(X):
    return lax.reduce_window(X, 0.0, lax.add, (1, 1, 2, 2), (1, 1, 2, 2), "VALID") / 4


def lenet(X, params):
    W1, b1, W2, b2, W3, b3, W4, b4 = params
    h1 = pool(jax.nn.relu(lax.conv(X, W1, (1, 1), "VALID") + b1.reshape(1, -1, 1, 1)))
    h2 = pool(jax.nn.relu(lax.conv(h1, W2, (1, 1), "VALID") + b2.reshape(1, -1, 1, 1)))
    h3 = jax.nn.relu(jnp.dot(h2.reshape(len(X), -1), W3) + b3)
    return jnp.dot(h3, W4) + b4


@jax.jit
@jax.grad
def gradients(params, X, y):
    return -(jax.nn.log_softmax(lenet(X, params)) * jax.nn.one_hot(y, 10)).sum()


def train(start, batches, num_devices, lr):
    with jax.default_device(jax.devices("cpu")[0]):  # also where there is a GPU
        return train_here(start, batches, num_devices, lr)


def train_here(start, batches, num_devices, lr):
    replicas = [[jnp.array(array) for array in start] for _ in range(num_devices)]
    for X, y in batches:
        X_parts, y_parts = np.array_split(X, num_devices), np.array_split(y, num_devices)
        grads = [gradients(*work) for work in zip(replicas, X_parts, y_parts, strict=True)]
        totals = [sum(same[1:], start=same[0]) for same in zip(*grads, strict=True)]
        replicas = [
            [param - lr * total / len(X) for param, total in zip(params, totals, strict=True)] for params in replicas
        ]
    return [np.asarray(param) for param in replicas[0]]
