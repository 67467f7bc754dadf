"""Paddle only: settings of the process, threads, random numbers."""

import paddle
import pytest

import lockstep
from lockstep.backends import load_backend
from lockstep.core.device import Device
from lockstep.core.errors import BackendError, LockstepError
from lockstep.runtime.inprocess import InProcess

PADDLE = load_backend("paddle")
CPU = Device("cpu:0")
TWO = [Device("cpu:0"), Device("cpu:1")]


def test_settings_are_restored_after_a_session():
    def num_threads():
        return paddle.get_flags("FLAGS_paddle_num_threads")["FLAGS_paddle_num_threads"]

    paddle.base.core.set_num_threads(2)
    before = num_threads(), paddle.get_device()
    with InProcess(PADDLE, TWO):
        assert num_threads() == 1
    assert (num_threads(), paddle.get_device()) == before
    paddle.base.core.set_num_threads(1)


def test_a_second_session_is_refused():
    with PADDLE.session([CPU]), pytest.raises(BackendError, match="Paddle's settings are"), PADDLE.session([CPU]):
        raise AssertionError("There are two sessions.")
    with PADDLE.session([CPU]):
        pass


def test_random_state_changes_with_a_draw_and_reading_it_draws_nothing():
    before = PADDLE.random_state()
    assert PADDLE.random_state() == before
    paddle.rand([1])
    assert PADDLE.random_state() != before


def test_a_model_that_draws_random_numbers_is_refused():
    def with_dropout(X, params):
        return paddle.nn.functional.dropout(paddle.matmul(X, params[0]))

    X, y = paddle.rand([20, 4]), paddle.arange(20) % 3
    device_params = [lockstep.get_params([paddle.zeros([4, 3])], device) for device in TWO]
    with pytest.raises(LockstepError, match="drew random numbers"):
        lockstep.train_batch(X, y, device_params, TWO, lr=1.0, net=with_dropout)
    assert all(float(params[0].abs().sum()) == 0 for params in device_params)


def test_allreduce_writes_into_the_gradients():
    """The text's Paddle edition rebinds the entry of the list instead, so device 1 keeps its own gradient."""
    gradients = [paddle.full([2], float(i + 1)) for i in range(2)]
    lockstep.allreduce(list(gradients))
    assert [gradient.tolist() for gradient in gradients] == [[3, 3], [3, 3]]


def test_replicas_get_gradients():
    (param,) = lockstep.get_params([paddle.ones([2])], "cpu:0")
    (param * 3).sum().backward()
    assert param.grad.tolist() == [3, 3]
