"""The oracle itself: its derivatives against finite differences, in double precision."""

import numpy as np
import pytest
from threadpoolctl import threadpool_info

import lockstep
from lockstep.backends import load_backend
from lockstep.backends.numpy import Traced
from lockstep.core.device import Device
from lockstep.core.errors import BackendError, RankError

NUMPY = load_backend("numpy")
OPS = NUMPY.ops
CPU = Device("cpu:0")


def random_array(*shape):
    return np.random.RandomState(len(shape)).standard_normal(shape)


@pytest.mark.parametrize(
    ("operation", "arrays"),
    [
        (OPS.conv2d, (random_array(2, 3, 6, 5), random_array(4, 3, 3, 2), random_array(4))),
        (OPS.conv2d, (random_array(1, 1, 4, 4), random_array(1, 1, 1, 1), random_array(1))),
        (OPS.relu, (random_array(3, 5),)),
        (lambda X: OPS.avg_pool2d(X, 2), (random_array(2, 2, 5, 6),)),
        (lambda X: OPS.avg_pool2d(X, 3), (random_array(2, 2, 5, 6),)),
        (OPS.flatten, (random_array(2, 3, 4),)),
        (OPS.linear, (random_array(4, 3), random_array(3, 5), random_array(5))),
        (lambda X: OPS.cross_entropy_sum(X, np.array([2, 0, 1])), (random_array(3, 4),)),
    ],
)
def test_every_derivative_equals_finite_differences(operation, arrays):
    tape = []
    inputs = [Traced(array, tape) for array in arrays]
    out = operation(*inputs)
    weights = random_array(*np.shape(out.value))  # the gradient of a weighted sum of all outputs
    for number, (traced, pull) in enumerate(out.inputs):
        found = pull(weights)
        assert traced is inputs[number]
        expected = np.zeros_like(arrays[number])
        for index in np.ndindex(expected.shape):
            moved = [[array.copy() for array in arrays] for _ in range(2)]
            moved[0][number][index] += 1e-6
            moved[1][number][index] -= 1e-6
            high, low = (np.sum(weights * operation(*these)) for these in moved)
            expected[index] = (high - low) / 2e-6
        np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-7)


def test_matrix_products_use_one_thread_in_a_session_and_as_many_as_before_after_it():
    def num_threads():
        return [library["num_threads"] for library in threadpool_info()]

    before = num_threads()
    assert before, "threadpoolctl knows the library that numpy multiplies with"
    with NUMPY.session([CPU]):
        assert set(num_threads()) == {1}
    assert num_threads() == before


def test_a_second_session_is_refused():
    with NUMPY.session([CPU]), pytest.raises(BackendError, match="Another run is under way"), NUMPY.session([CPU]):
        raise AssertionError("There are two sessions.")
    with NUMPY.session([CPU]):
        pass


def test_the_random_state_changes_when_random_numbers_are_drawn():
    for draw in (np.random.rand, np.random.randn, np.random.randn):  # randn makes two numbers and keeps the second
        before = NUMPY.random_state()
        assert NUMPY.random_state() == before
        draw()
        assert NUMPY.random_state() != before


@pytest.mark.parametrize(
    "net",
    [
        lambda X, params: X @ params[0],
        lambda X, params: OPS.linear(X, params[0], params[0][0]),
        lambda X, params: params[0].T,
        lambda X, params: np.dot(X, params[0]),
        lambda X, params: 1 - params[0],
    ],
)
def test_operators_of_numpy_are_refused_where_a_gradient_is_needed(net):
    X, y = np.ones((4, 3), np.float32), np.arange(4) % 2
    with pytest.raises(
        RankError, match=r"numpy cannot differentiate .* Write the model with .*ops .*test_numpy.py:\d+"
    ):
        lockstep.train_batch(X, y, [[np.ones((3, 2), np.float32)]], ["cpu:0"], 0.1, net=net)


def test_a_model_written_with_the_ops_trains():
    def net(X, params):
        return OPS.linear(X, *params)

    X, y = np.eye(4, dtype=np.float32), np.arange(4) % 2
    params = [[np.zeros((4, 2), np.float32), np.zeros(2, np.float32)] for _ in range(2)]
    for _ in range(30):
        lockstep.train_batch(X, y, params, ["cpu:0", "cpu:1"], 1.0, net=net)
    assert lockstep.evaluate_accuracy(X, y, params, ["cpu:0", "cpu:1"], net=net) == 1
