"""What a run would be; on machines with fewer GPUs than devices, which are made up here."""

import pytest

from lockstep.backends import load_backend
from lockstep.config import RunConfig
from lockstep.core.device import Device
from lockstep.core.errors import ConfigError
from lockstep.training.dry_run import dry_run
from lockstep.training.resume import notes_on_devices


@pytest.fixture
def gpus(monkeypatch):
    """Makes the machine have so many GPUs."""
    backend = load_backend("torch")
    return lambda number: monkeypatch.setattr(type(backend), "num_gpus", lambda self: number)


@pytest.mark.parametrize(
    ("number", "wanted", "devices", "note"),
    [
        (1, 2, ["cuda:0", "cuda:0"], "There is 1 GPU, which is listed more than once: cuda:0, cuda:0."),
        (2, 3, ["cuda:0", "cuda:1", "cuda:0"], "There are 2 GPUs, which are listed more than once: cuda:0, cuda:1, "),
        (2, 2, ["cuda:0", "cuda:1"], ""),
        (0, 2, ["cpu:0", "cpu:1"], ""),
    ],
)
def test_fewer_gpus_than_devices_are_listed_more_than_once_and_that_is_said(gpus, number, wanted, devices, note):
    gpus(number)
    config = RunConfig(devices=wanted, data="fashion-mnist-mini", engine="inprocess")
    described = dry_run(config)
    assert described.facts["devices"] == devices
    assert any(line.startswith(note) for line in described.lines) if note else "listed" not in str(described.lines)


def test_who_lists_a_gpu_twice_need_not_be_told(gpus):
    gpus(1)
    assert notes_on_devices(RunConfig(devices="cuda:0,cuda:0"), [Device("cuda:0")] * 2) == []


def test_a_dry_run_under_torchrun_is_refused(monkeypatch):
    for name in ("RANK", "LOCAL_RANK", "MASTER_PORT"):
        monkeypatch.setenv(name, "0")
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "2")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    with pytest.raises(ConfigError, match="Leave torchrun out"):
        dry_run(RunConfig(data="fashion-mnist-mini"))
