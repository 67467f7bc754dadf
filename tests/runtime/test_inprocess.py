"""The in-process engine: real copies, work at the same time, errors that name the rank, nothing left behind."""

import os
import threading

import numpy as np
import pytest
import torch

from lockstep.backends import load_backend
from lockstep.core.device import Device
from lockstep.core.errors import BackendError, RankError
from lockstep.runtime.inprocess import InProcess

TORCH = load_backend("torch")
FOUR = [Device(f"cpu:{i}") for i in range(4)]


def test_work_of_different_devices_overlaps():
    """Each rank waits for all the others: this ends only if all of them run at the same time."""
    meeting = threading.Barrier(4, timeout=20)
    with InProcess(TORCH, FOUR) as engine:
        engine.each("meet", lambda rank, device: meeting.wait())
    assert not meeting.broken


def test_each_rank_has_one_thread_of_its_own_with_one_intra_op_thread():
    with InProcess(TORCH, FOUR) as engine:
        seen = engine.each("look", lambda rank, device: (threading.get_ident(), torch.get_num_threads()))
        again = engine.each("look", lambda rank, device: (threading.get_ident(), torch.get_num_threads()))
    assert seen == again
    assert len({ident for ident, _ in seen}) == 4
    assert {num_threads for _, num_threads in seen} == {1}


def test_replicas_are_real_copies():
    start = np.ones(8, np.float32)
    with InProcess(TORCH, FOUR) as engine:
        replicas = engine.each("replicate", lambda rank, device: TORCH.copy_to(TORCH.from_numpy(start, device), device))
        replicas[0].zero_()
    assert len({replica.data_ptr() for replica in replicas}) == 4
    assert all(bool((replica == 1).all()) for replica in replicas[1:])
    assert (start == 1).all()


def test_data_is_placed_once_for_all_logical_devices():
    with InProcess(TORCH, FOUR) as engine:
        placed = engine.copy_to_devices(np.arange(100))
    assert len({tensor.data_ptr() for tensor in placed}) == 1


def test_settings_are_as_before_afterwards_and_threads_are_gone():
    before = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled(), threading.active_count()
    filled = torch.utils.deterministic.fill_uninitialized_memory
    with InProcess(TORCH, FOUR) as engine:
        assert torch.are_deterministic_algorithms_enabled()
        engine.close()
        engine.close()  # twice does no harm
    after = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled(), threading.active_count()
    assert after == before
    assert torch.utils.deterministic.fill_uninitialized_memory == filled


def test_an_error_names_the_rank_the_device_the_phase_and_the_users_line():
    def users_model(rank, device):
        if rank == 2:
            raise ValueError("the shapes do not fit")  # the line that must be named

    before = threading.active_count()
    with (
        pytest.raises(
            RankError, match=r"rank 2 \(cpu:2\), during forward: ValueError: the shapes do not fit"
        ) as caught,
        InProcess(TORCH, FOUR) as engine,
    ):
        engine.each("forward", users_model)
    line = users_model.__code__.co_firstlineno + 2
    assert f"test_inprocess.py:{line})" in str(caught.value)
    assert isinstance(caught.value.__cause__, ValueError)
    assert threading.active_count() == before


def test_an_engine_that_cannot_start_leaves_nothing_behind(monkeypatch):
    def fails(device):
        raise RuntimeError("no such device")

    monkeypatch.setattr(TORCH, "start_worker", fails)
    before = threading.active_count(), torch.are_deterministic_algorithms_enabled()
    with pytest.raises(RankError, match=r"rank 0 \(cpu:0\), during start"), InProcess(TORCH, FOUR):
        pytest.fail("the engine must not be entered")
    assert (threading.active_count(), torch.are_deterministic_algorithms_enabled()) == before


def test_a_line_of_the_standard_library_is_not_the_users():
    import statistics

    def users_model(rank, device):
        return statistics.mean([])

    with pytest.raises(RankError, match=r"test_inprocess\.py:\d+\)"), InProcess(TORCH, FOUR) as engine:
        engine.each("forward", users_model)


def test_of_two_runs_in_one_process_the_second_is_refused():
    with (
        InProcess(TORCH, FOUR[:1]),
        pytest.raises(BackendError, match="Another run is under way in this process"),
        InProcess(TORCH, FOUR[:1]),
    ):
        pytest.fail("the second engine must not be entered")
    with InProcess(TORCH, FOUR[:1]) as engine:
        assert engine.num_ranks == 1


def test_ranks_that_take_up_all_cores_have_one_each_and_others_stay_free():
    cores = os.sched_getaffinity(0)
    for num_ranks in (len(cores), len(cores) + 1):
        with InProcess(TORCH, [Device(f"cpu:{n}") for n in range(num_ranks)], pins=True) as engine:
            found = engine.each("look", lambda rank, device: os.sched_getaffinity(0))
        if num_ranks == len(cores):
            assert found == [{core} for core in sorted(cores)]
        else:
            assert all(core == cores for core in found)
    assert os.sched_getaffinity(0) == cores
