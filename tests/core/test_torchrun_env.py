"""Who started this process: torchrun, a program that works like it (Ray Train), or nobody."""

import sys
from types import SimpleNamespace

import pytest

from lockstep.core.torchrun_env import VARIABLES, prints_result, torchrun_env

VALUES = {"RANK": "1", "WORLD_SIZE": "3", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "3", "MASTER_PORT": "29500"}


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    for name in (*VARIABLES, "TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def variables(monkeypatch):
    for name, value in {**VALUES, "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def group(monkeypatch):
    """Makes this program have joined a process group, or not."""

    def have(is_initialized):
        distributed = SimpleNamespace(is_available=lambda: True, is_initialized=lambda: is_initialized)
        monkeypatch.setitem(sys.modules, "torch.distributed", distributed)

    return have


def test_without_variables_it_is_alone(group):
    group(True)
    assert torchrun_env() is None
    assert prints_result()


def test_variables_alone_are_not_enough(variables, group):
    group(False)
    assert torchrun_env() is None


def test_variables_and_a_process_group_are_a_rank_of_ray_train(variables, group):
    group(True)
    found = torchrun_env()
    assert (found.rank, found.size, found.local_size, found.host, found.port) == (1, 3, 3, "127.0.0.1", 29500)
    assert not found.is_restarted
    assert not prints_result()


def test_torchrun_needs_no_process_group(variables, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "2")
    found = torchrun_env()
    assert found.is_restarted
    assert found.attempt.endswith("/2/3")
