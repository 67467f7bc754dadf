"""JAX only: a fixed number of devices, compilation, immutable arrays."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lockstep
from lockstep.backends import load_backend
from lockstep.backends.hardware import cpu
from lockstep.core.device import Device
from lockstep.core.errors import BackendError

JAX = load_backend("jax")
TWO = ["cpu:0", "cpu:1"]


def test_there_is_a_device_for_each_core_and_logical_devices_beyond_share_them():
    num_cores = cpu().num_cores
    assert len(jax.devices("cpu")) == num_cores
    used = [JAX.copy_to(jnp.ones(1), device).devices() for device in lockstep.devices(num_cores + 1, backend="jax")]
    assert used[0] == used[num_cores]
    assert len(set(map(frozenset, used))) == num_cores


def run_python(program, **environment):
    return subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()


TRAIN = "print(lockstep.train(3, num_epochs=1, data='fashion-mnist-mini', backend='jax', quiet=True).weights_sha256)"


def test_if_jax_was_used_before_logical_devices_share_one_cpu_device_with_the_same_bits():
    count = "import jax; print(len(jax.devices('cpu')))"
    before = run_python(f"import jax.numpy as jnp; x = jnp.ones(2); import lockstep; {TRAIN}; {count}")
    (after,) = run_python(f"import lockstep; {TRAIN}")
    assert before == [after, "1"]


def test_a_number_of_cpu_devices_set_by_the_user_is_kept():
    program = "import lockstep; lockstep.devices(2, backend='jax'); import jax; print(len(jax.devices('cpu')))"
    assert run_python(program, JAX_NUM_CPU_DEVICES="3") == ["3"]
    assert run_python(program, XLA_FLAGS="--xla_force_host_platform_device_count=5") == ["5"]


def test_train_batch_and_evaluate_accuracy_in_a_loop_compile_once():
    traced = []

    def net(X, params):
        traced.append(X.shape)
        return X @ params[0]

    X, y = jnp.ones((8, 4)), jnp.arange(8) % 3
    params = [lockstep.get_params([jnp.ones((4, 3))], device) for device in TWO]
    for _ in range(4):
        lockstep.train_batch(X, y, params, TWO, lr=0.1, net=net)
        lockstep.evaluate_accuracy(X, y, params, TWO, net=net)
    assert sorted(traced) == [(1, 4), (8, 4)]


def test_copies_have_memory_of_their_own():
    array = jnp.ones(100)
    copy = JAX.copy_to(array, Device("cpu:0"))
    assert copy.unsafe_buffer_pointer() != array.unsafe_buffer_pointer()


def test_an_array_on_several_devices_is_refused():
    if len(jax.devices("cpu")) < 2:
        pytest.skip("there is one core, and so one CPU device")
    mesh = jax.sharding.Mesh(np.array(jax.devices("cpu")[:2]), "x")
    sharded = jax.device_put(jnp.ones(4), jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x")))
    with pytest.raises(BackendError, match="Give one that is on a single CPU device or GPU"):
        lockstep.allreduce([sharded, sharded])


def test_allreduce_replaces_the_entries_of_the_list():
    data = [jnp.ones(2), 2 * jnp.ones(2)]
    originals = list(data)
    lockstep.allreduce(data)
    assert [entry.tolist() for entry in data] == [[3, 3], [3, 3]]
    assert [entry.tolist() for entry in originals] == [[1, 1], [2, 2]]


def test_compiled_functions_use_full_float32_precision():
    seen = []
    JAX.compile(lambda x: seen.append(jax.config.jax_default_matmul_precision) or x)(jnp.ones(1))
    assert seen == ["highest"]
    assert jax.config.jax_default_matmul_precision is None


def test_a_compiled_function_takes_several_shapes():
    double = JAX.compile(lambda x: x + x)
    for size in (1, 3, 1):
        np.testing.assert_array_equal(double(jnp.ones(size)), 2 * np.ones(size))
