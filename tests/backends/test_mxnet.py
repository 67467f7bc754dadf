"""MXNet only: contexts as logical devices, two array classes, empty arrays, threads, late errors."""

import os
import subprocess
import sys

import mxnet
import numpy as np
import pytest
from mxnet import autograd, npx
from mxnet import np as mxnp

import lockstep
from lockstep.backends import load_backend
from lockstep.core.device import Device
from lockstep.core.errors import RankError

MXNET = load_backend("mxnet")


def test_a_logical_device_is_a_context():
    replica = lockstep.get_params([mxnp.ones(3)], "cpu:2")
    assert replica[0].ctx == mxnet.cpu(2)
    assert MXNET.device_of(replica[0]) == "cpu:2"
    X_parts, _ = lockstep.split_batch(mxnp.ones((4, 2)), mxnp.arange(4), ["cpu:0", "cpu:1"])
    assert [part.ctx for part in X_parts] == [mxnet.cpu(0), mxnet.cpu(1)]


def test_replicas_get_gradients():
    (param,) = lockstep.get_params([mxnp.ones(2)], "cpu:1")
    with autograd.record():
        loss = (param * 3).sum()
    loss.backward()
    assert param.grad.tolist() == [3, 3]


def test_legacy_arrays_become_numpy_arrays():
    replica = lockstep.get_params([mxnet.nd.ones((2,))], "cpu:0")
    assert isinstance(replica[0], mxnp.ndarray)
    assert replica[0].tolist() == [1, 1]


@pytest.mark.parametrize("shape", [(0,), (0, 3), (0, 1, 28, 28)])
def test_empty_arrays_can_be_copied_and_read(shape):
    empty = MXNET.from_numpy(np.zeros(shape, np.float32), Device("cpu:0"))
    for tensor in (empty, MXNET.copy_to(empty, Device("cpu:1")), MXNET.chunk(empty, 0, 0), MXNET.add(empty, empty)):
        assert tensor.shape == shape
        assert MXNET.to_numpy(tensor).shape == shape
    npx.waitall()


def test_splitting_over_more_devices_than_samples_gives_empty_parts():
    X_parts, y_parts = lockstep.split_batch(mxnp.ones((1, 2)), mxnp.zeros(1), ["cpu:0", "cpu:1", "cpu:2"])
    assert [MXNET.to_numpy(part).shape for part in X_parts] == [(1, 2), (0, 2), (0, 2)]
    assert [MXNET.to_numpy(part).shape for part in y_parts] == [(1,), (0,), (0,)]


# --- intra-op threads: read when MXNet is imported ---

TRAIN = "print(lockstep.train(2, num_epochs=1, data='fashion-mnist-mini', backend='mxnet', quiet=True).weights_sha256)"


def run_python(program, num_threads):
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        env={**os.environ, "OMP_NUM_THREADS": num_threads},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_omp_num_threads_does_not_affect_the_run_and_is_not_changed():
    program = f"import lockstep, os; {TRAIN}; print(os.environ['OMP_NUM_THREADS'])"
    one, two = (run_python(program, number).stdout.split() for number in ("1", "2"))
    assert one[0] == two[0]
    assert (one[1], two[1]) == ("1", "2")


def test_a_run_is_refused_where_mxnet_was_imported_before_with_several_threads():
    refused = run_python(f"import mxnet, lockstep; {TRAIN}", "2")
    assert "was loaded before Lockstep's backend with 2 intra-op threads" in refused.stderr
    assert "Set OMP_NUM_THREADS=1 before Python starts" in refused.stderr
    assert run_python(f"import mxnet, lockstep; {TRAIN}", "1").returncode == 0


def test_an_asynchronous_error_is_not_raised_again_in_the_next_run():
    def fails_late(X, params):
        scores = mxnp.dot(X, params[0])
        return scores + npx.pick(scores, X[:, 0] > 0).reshape(-1, 1)  # `pick` expects integers, and gets booleans

    X, y, two = mxnp.ones((8, 3)), mxnp.arange(8, dtype="int64") % 4, ["cpu:0", "cpu:1"]
    params = [lockstep.get_params([mxnp.ones((3, 4))], device) for device in two]
    for _ in range(3):
        with pytest.raises(RankError, match="MXNetError"):
            lockstep.train_batch(X, y, params, two, lr=0.1, net=fails_late)
        lockstep.train_batch(X, y, params, two, lr=0.1, net=lambda X, params: mxnp.dot(X, params[0]))
