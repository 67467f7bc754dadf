"""The text's program in MXNet."""

import mxnet
from mxnet import autograd, gluon, np, npx

npx.set_np()


def lenet(X, params):
    W1, b1, W2, b2, W3, b3, W4, b4 = params
    h1 = npx.relu(npx.convolution(data=X, weight=W1, bias=b1, kernel=(3, 3), num_filter=20))
    h1 = npx.pooling(data=h1, pool_type="avg", kernel=(2, 2), stride=(2, 2))
    h2 = npx.relu(npx.convolution(data=h1, weight=W2, bias=b2, kernel=(5, 5), num_filter=50))
    h2 = npx.pooling(data=h2, pool_type="avg", kernel=(2, 2), stride=(2, 2))
    h3 = npx.relu(np.dot(h2.reshape(h2.shape[0], -1), W3) + b3)
    return np.dot(h3, W4) + b4


def allreduce(data):
    for other in data[1:]:
        data[0][:] += other.copyto(data[0].ctx)
    for other in data[1:]:
        data[0].copyto(other)


def train(start, batches, num_devices, lr):
    devices = [mxnet.cpu(i) for i in range(num_devices)]
    loss_of = gluon.loss.SoftmaxCrossEntropyLoss()
    replicas = [[np.array(array, ctx=device) for array in start] for device in devices]
    for params in replicas:
        for param in params:
            param.attach_grad()
    for X, y in batches:
        X_parts = gluon.utils.split_and_load(np.array(X), devices, even_split=False)
        y_parts = gluon.utils.split_and_load(np.array(y, dtype=y.dtype), devices, even_split=False)
        with autograd.record():
            losses = [
                loss_of(lenet(X_part, params), y_part)
                for X_part, y_part, params in zip(X_parts, y_parts, replicas, strict=True)
            ]
        for loss in losses:
            loss.backward()
        for same in zip(*replicas, strict=True):
            allreduce([param.grad for param in same])
        for params in replicas:
            for param in params:
                param[:] = param - lr * param.grad / len(X)
    return [param.asnumpy() for param in replicas[0]]
