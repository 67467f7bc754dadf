"""What is JAX's own: a fixed number of devices, compilation, arrays that cannot be changed."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lockstep
from lockstep.backends import load_backend
from lockstep.backends.hardware import cpu
from lockstep.backends.jax import _gradient_of
from lockstep.device import Device
from lockstep.layout import layout_of
from lockstep.models import CrossEntropySum
from lockstep.models.lenet import init_lenet, lenet

JAX = load_backend("jax")
TWO = ["cpu:0", "cpu:1"]


def test_there_is_a_device_for_each_core_and_logical_devices_beyond_share_them():
    num_cores = cpu().num_cores
    assert len(jax.devices("cpu")) == num_cores
    places = [JAX.copy_to(jnp.ones(1), device).devices() for device in lockstep.devices(num_cores + 1, backend="jax")]
    assert places[0] == places[num_cores]
    assert len(set(map(frozenset, places))) == num_cores


def test_where_jax_was_used_before_all_logical_devices_share_its_one_device():
    program = """
import jax.numpy as jnp
x = jnp.ones(2)
import lockstep
print([entry.tolist() for entry in lockstep.allreduce([jnp.ones(2), jnp.ones(2)])])
print(len(lockstep.train(3, num_epochs=1, data="fashion-mnist-mini", backend="jax", quiet=True).devices))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["[[2.0, 2.0], [2.0, 2.0]]", "3"]


def test_a_loop_over_train_batch_compiles_once():
    X, y = jnp.ones((8, 1, 28, 28)), jnp.arange(8)
    params = [lockstep.get_params([jnp.asarray(a) for a in lockstep.init_lenet(seed=0).values()], d) for d in TWO]
    lockstep.train_batch(X, y, params, TWO, lr=0.1)
    before = _gradient_of.cache_info()
    for _ in range(3):
        lockstep.train_batch(X, y, params, TWO, lr=0.1)
    after = _gradient_of.cache_info()
    assert after.misses == before.misses
    assert after.hits > before.hits


def test_the_list_is_changed_where_the_arrays_cannot_be():
    data = [jnp.ones(2), 2 * jnp.ones(2)]
    originals = list(data)
    lockstep.allreduce(data)
    assert [entry.tolist() for entry in data] == [[3, 3], [3, 3]]
    assert [entry.tolist() for entry in originals] == [[1, 1], [2, 2]]


def test_float32_means_float32_in_what_is_captured():
    seen = []
    JAX.capture(lambda x: seen.append(jax.config.jax_default_matmul_precision) or x)(jnp.ones(1))
    assert seen == ["highest"]
    assert jax.config.jax_default_matmul_precision is None


def test_a_captured_function_follows_the_shapes_it_is_given():
    double = JAX.capture(lambda x: x + x)
    for size in (1, 3, 1):
        np.testing.assert_array_equal(double(jnp.ones(size)), 2 * np.ones(size))


# --- on a GPU ---

needs_gpu = pytest.mark.skipif(len(JAX.hardware()) == 1, reason="needs a GPU that JAX can use, and there is none")


@pytest.mark.cuda
@needs_gpu
def test_one_gpu_listed_once_and_twice_gives_the_same_bits_and_so_does_another_run(lockstep):
    settings = ("--backend", "jax", "--data", "fashion-mnist-mini", "--batch-size", 100, "--epochs", 2, "--json")
    lists = ("cuda:0", "cuda:0,cuda:0", "cuda:0,cuda:0,cuda:0", "cuda:0")
    answers = [lockstep("train", *settings, "--devices", places).json for places in lists]
    assert len({answer["weights_sha256"] for answer in answers}) == 1


@pytest.mark.cuda
@needs_gpu
def test_value_and_gradient_on_a_gpu_are_the_oracles():
    """In full float32: in the GPU's reduced precision the difference would be a hundred times as large."""
    oracle, gpu = load_backend("numpy"), Device("cuda:0")
    start = {name: 5 * array for name, array in init_lenet(seed=1).items()}
    layout, loss_sum = layout_of(start), CrossEntropySum(lenet)
    flat = layout.flatten(list(start.values()))
    X, y = np.random.RandomState(0).rand(12, 1, 28, 28).astype(np.float32), np.arange(12) % 10
    _, expected = oracle.value_and_grad(loss_sum, layout, flat, X, y)
    _, found = JAX.value_and_grad(loss_sum, layout, *(JAX.from_numpy(array, gpu) for array in (flat, X, y)))
    assert JAX.device_of(found) == gpu
    np.testing.assert_allclose(JAX.to_numpy(found), expected, rtol=0, atol=2e-5)
