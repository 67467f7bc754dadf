"""What is JAX's own: a fixed number of devices, compilation, arrays that cannot be changed."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np

import lockstep
from lockstep.backends import load_backend
from lockstep.backends.hardware import cpu
from lockstep.backends.jax import _gradient_of

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
