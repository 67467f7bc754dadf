"""The promises on a GPU, and with the same GPU listed more than once. Skipped where there is none."""

import numpy as np
import pytest
import torch

import lockstep
from lockstep.backends import load_backend
from lockstep.config import RunConfig
from lockstep.core.device import Device
from lockstep.runtime.inprocess import InProcess
from lockstep.training.run import run
from lockstep.training.sweep_file import Sweep

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU is visible on this machine"),
]
TORCH = load_backend("torch")


def weights_of(devices, **settings):
    config = RunConfig(**{"data": "fashion-mnist-mini", "num_epochs": 2, "devices": devices, **settings})
    return run(config, quiet=True).weights_sha256


@pytest.mark.parametrize("batch_size", [256, 100, 7])
def test_one_gpu_listed_k_times_gives_the_same_bits(batch_size):
    alone = weights_of("cuda:0", batch_size=batch_size)
    for k in range(2, 9):
        assert weights_of(",".join(["cuda:0"] * k), batch_size=batch_size) == alone, k


@pytest.mark.parametrize("exchange", ["gather", "sharded", "tree"])
def test_every_exchange_that_keeps_the_tree_gives_the_same_bits(exchange):
    assert weights_of("cuda:0,cuda:0,cuda:0", exchange=exchange) == weights_of("cuda:0")


def test_a_run_repeats_itself():
    assert len({weights_of("cuda:0,cuda:0") for _ in range(5)}) == 1


def test_ranks_on_one_gpu_have_streams_of_their_own_and_share_the_data():
    twice = [Device("cuda:0")] * 2
    with InProcess(TORCH, twice) as engine:
        streams = engine.each("look", lambda rank, device: torch.cuda.current_stream().cuda_stream)
        placed = engine.copy_to_devices(np.arange(10))
        start = np.ones(4, np.float32)
        replicas = engine.each("replicate", lambda rank, device: TORCH.copy_to(TORCH.from_numpy(start, device), device))
    assert len(set(streams)) == 2
    assert placed[0].data_ptr() == placed[1].data_ptr()
    assert replicas[0].data_ptr() != replicas[1].data_ptr()
    assert all(replica.is_cuda for replica in replicas)


def test_the_texts_functions_work_there():
    assert lockstep.try_gpu(0) == "cuda:0"
    params = [torch.from_numpy(array) for array in lockstep.init_lenet(0).values()]
    devices = ["cuda:0", "cuda:0"]
    device_params = [lockstep.get_params(params, device) for device in devices]
    X, y = torch.rand(40, 1, 28, 28), torch.arange(40) % 10
    lockstep.train_batch(X, y, device_params, devices, lr=0.2)
    assert all(torch.equal(a, b) for a, b in zip(*device_params, strict=True))
    assert 0 <= lockstep.evaluate_accuracy(X, y, device_params, devices) <= 1
    data = [torch.full((3,), float(i + 1), device="cuda:0") for i in range(3)]
    lockstep.allreduce(data)
    assert all(entry.tolist() == [6, 6, 6] for entry in data)


def test_settings_are_as_before_afterwards():
    before = torch.backends.cudnn.deterministic, torch.backends.cudnn.allow_tf32, torch.backends.cudnn.benchmark
    weights_of("cuda:0", num_epochs=1)
    after = torch.backends.cudnn.deterministic, torch.backends.cudnn.allow_tf32, torch.backends.cudnn.benchmark
    assert after == before


def test_a_gpu_that_is_not_there_is_refused():
    with pytest.raises(lockstep.LockstepError, match="There is no cuda:99: this machine has cuda:0"):
        weights_of("cuda:99")


def test_what_the_caller_still_computes_is_waited_for():
    """The batch and the parameters may still be on their way on the caller's stream when `train_batch` is called."""
    params = [torch.from_numpy(array) for array in lockstep.init_lenet(0).values()]
    X_host, y = torch.rand(64, 1, 28, 28), torch.arange(64, device="cuda:0") % 10

    def weights(busy):
        device_params = [lockstep.get_params(params, "cuda:0")]
        for _ in range(5):
            X = torch.zeros(64, 1, 28, 28, device="cuda:0")
            if busy:
                torch.cuda._sleep(20_000_000)  # cycles: about 10 ms on the caller's stream, before X gets its values
            X += X_host.to("cuda:0", non_blocking=True)
            lockstep.train_batch(X, y, device_params, ["cuda:0"], lr=0.5)
        return [param.detach().cpu() for param in device_params[0]]

    assert all(torch.equal(a, b) for a, b in zip(weights(busy=True), weights(busy=False), strict=True))


def test_a_users_tf32_setting_does_not_reach_the_run():
    alone = weights_of("cuda:0", num_epochs=1)
    torch.set_float32_matmul_precision("high")
    try:
        assert weights_of("cuda:0", num_epochs=1) == alone
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision("highest")


def test_a_grid_stays_on_one_kind_of_device():
    base = RunConfig(data="fashion-mnist-mini", num_epochs=1)
    too_many = torch.cuda.device_count() + 1
    runs = Sweep(base, {"devices": f"1,{too_many}", "batch_size": 256}).runs()
    assert all(str(config.devices).startswith("cuda:0") for config in runs)
