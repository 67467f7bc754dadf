"""`lockstep.allreduce` keeps its interpreters from call to call: nothing of a call may reach the next one."""

import gc
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

import lockstep
from lockstep.backends.torch import TorchBackend
from lockstep.parallel.data import data_parallel
from lockstep.runtime import allreduce as module


def vectors(seed, size=5000, k=3):
    random = torch.Generator().manual_seed(seed)
    return [torch.rand(size, generator=random) for _ in range(k)]


def in_the_tree(data):
    first, second, third = data
    return (first + second) + third


@pytest.mark.parametrize("exchange", ["gather", "sharded", "tree"])
def test_every_call_gives_the_sum_of_its_own_tensors(exchange):
    for seed in range(3):
        data = vectors(seed)
        expected = in_the_tree(data)
        lockstep.allreduce(data, exchange)
        assert all(torch.equal(entry, expected) for entry in data)


def test_a_vector_of_several_blocks_and_a_rest(monkeypatch):
    monkeypatch.setattr(module, "BLOCK", 1024)
    data = vectors(0, size=3 * 1024 + 5)
    expected = in_the_tree(data)
    lockstep.allreduce(data)
    assert all(torch.equal(entry, expected) for entry in data)


def test_tensors_are_not_kept():
    data = vectors(0)
    lockstep.allreduce(data)
    kept = [weakref.ref(entry.untyped_storage()) for entry in data]
    arrays = [np.ones(3) for _ in range(2)]
    kept += [weakref.ref(array) for array in lockstep.allreduce(arrays)]
    del data, arrays
    gc.collect()
    assert [reference() for reference in kept] == [None] * 5


def test_what_is_kept_for_other_sizes_is_bounded():
    before = data_parallel.cache_info().maxsize
    for size in range(1, before + 50):
        lockstep.allreduce([torch.ones(size), torch.ones(size)])
    assert data_parallel.cache_info().currsize <= before <= 1000


def test_threads_do_not_disturb_each_other():
    def run(seed):
        for _ in range(30):
            data = vectors(seed)
            expected = in_the_tree(data)
            lockstep.allreduce(data)
            assert all(torch.equal(entry, expected) for entry in data)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(run, range(4)))


def test_after_an_error_the_next_call_is_right(monkeypatch):
    def fail(*arguments):
        raise RuntimeError("no more")

    with monkeypatch.context() as broken:
        broken.setattr(TorchBackend, "assign", fail)
        with pytest.raises(RuntimeError, match="no more"):
            lockstep.allreduce(vectors(0))
    data = vectors(1)
    expected = in_the_tree(data)
    lockstep.allreduce(data)
    assert all(torch.equal(entry, expected) for entry in data)
