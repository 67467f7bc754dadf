"""Large vectors are used again once nobody refers to them: never before, and only during a session."""

import threading

import pytest
import torch

from lockstep.backends.torch.large_vectors import MIN_BYTES, empty_vector, large_vectors_kept, memory_for_result

CPU, SIZE = torch.device("cpu"), MIN_BYTES // 4


@pytest.fixture
def session():
    with large_vectors_kept():
        yield


def test_memory_is_used_again_when_nobody_refers_to_it(session):
    first = empty_vector(SIZE, CPU)
    address = first.data_ptr()
    assert empty_vector(SIZE, CPU).data_ptr() != address
    del first
    assert empty_vector(SIZE, CPU).data_ptr() == address
    assert empty_vector(SIZE + 1, CPU).data_ptr() != address


@pytest.mark.parametrize("use", [lambda v: v[5:7], lambda v: v.view(2, -1), lambda v: v.detach(), lambda v: v.numpy()])
def test_a_part_of_it_that_somebody_has_keeps_it(session, use):
    vector = empty_vector(SIZE, CPU)
    address, part = vector.data_ptr(), use(vector)
    del vector
    assert empty_vector(SIZE, CPU).data_ptr() != address
    del part
    assert empty_vector(SIZE, CPU).data_ptr() == address


def test_a_gradient_that_another_thread_has_keeps_it(session):
    param = torch.nn.Parameter(torch.zeros(SIZE))
    param.grad = empty_vector(SIZE, CPU)
    address, others = param.grad.data_ptr(), []
    thread = threading.Thread(target=lambda: others.append(param.grad))
    thread.start()
    thread.join()
    param.grad = None
    assert empty_vector(SIZE, CPU).data_ptr() != address
    others.clear()
    assert empty_vector(SIZE, CPU).data_ptr() == address


def test_threads_have_vectors_of_their_own(session):
    mine, theirs = empty_vector(SIZE, CPU).data_ptr(), []
    thread = threading.Thread(target=lambda: theirs.append(empty_vector(SIZE, CPU)))
    thread.start()
    thread.join()
    assert theirs[0].data_ptr() != mine


def test_results_have_such_memory_where_they_fit(session):
    one = torch.ones(SIZE)
    total = torch.add(one, one, out=memory_for_result(one))
    assert total.sum() == 2 * SIZE
    for other in (one.double(), one.view(2, -1)):
        assert memory_for_result(other) is None


def test_nothing_is_kept_outside_of_a_session_nor_of_small_ones():
    kept = empty_vector(SIZE, CPU).untyped_storage()
    with large_vectors_kept():
        small = empty_vector(SIZE - 1, CPU)
        address = empty_vector(SIZE, CPU).data_ptr()
        assert empty_vector(SIZE, CPU).data_ptr() == address  # kept until here
    from lockstep.backends.torch.large_vectors import _THREAD

    assert not _THREAD.__dict__
    assert len(small) == SIZE - 1
    assert len(kept) == 4 * SIZE
