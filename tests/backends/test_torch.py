"""The torch backend against its protocol, and against numpy."""

import inspect

import numpy as np
import pytest
import torch

import lockstep.backends
from lockstep.backends import backend_of, devices_for, load_backend
from lockstep.backends.protocol import Backend, Ops
from lockstep.device import Device, Hardware
from lockstep.errors import BackendError, ConfigError
from lockstep.layout import Layout

TORCH = load_backend("torch")
CPU = Device("cpu:0")


@pytest.mark.parametrize(("protocol", "real"), [(Backend, TORCH), (Ops, TORCH.ops)], ids=["Backend", "Ops"])
def test_signatures_are_the_protocols(protocol, real):
    def public(thing):
        return {name for name, value in vars(thing).items() if callable(value) and not name.startswith("_")}

    assert public(protocol) == public(type(real))
    for name in public(protocol):
        expected = list(inspect.signature(getattr(protocol, name)).parameters)[1:]
        assert list(inspect.signature(getattr(real, name)).parameters) == expected, name


def test_copy_to_always_copies():
    tensor = torch.ones(3)
    copy = TORCH.copy_to(tensor, CPU)
    copy.zero_()
    assert tensor.tolist() == [1, 1, 1]


def test_take_gathers_fresh_samples_and_turns_bytes_into_0_to_1():
    data = torch.tensor([[0], [51], [255]], dtype=torch.uint8)
    taken = TORCH.take(data, torch.tensor([2, 0, 1]), 0, 2)
    assert taken.dtype == torch.float32
    assert taken.tolist() == [[1.0], [0.0]]
    labels = TORCH.take(torch.tensor([7, 8, 9]), torch.tensor([2, 0, 1]), 1, 3)
    assert labels.tolist() == [7, 8]
    assert TORCH.take(data, torch.arange(3), 1, 3).data_ptr() % 64 == 0


def test_the_gradient_of_a_flat_vector_is_flat_and_gaps_stay_zero():
    layout = Layout(("w", "b"), ((2, 3), (2,)))
    flat = TORCH.from_numpy(layout.flatten([np.ones((2, 3), np.float32), np.ones(2, np.float32)]), CPU)
    X, y = torch.arange(6.0).reshape(2, 3), torch.zeros(2)

    def loss_sum(params, X, y):
        w, b = params
        return (X @ w.T + b).sum()

    loss, gradient = TORCH.value_and_grad(loss_sum, layout, flat, X, y)
    w, b = layout.unflatten(gradient.numpy())
    assert float(loss) == 2 * 15 + 4
    assert w.tolist() == [[3, 5, 7], [3, 5, 7]]
    assert b.tolist() == [2, 2]
    assert gradient.numel() == layout.size
    assert float(gradient.abs().sum()) == w.sum() + b.sum()


def test_hardware_ends_with_the_cpu():
    *gpus, cpu = TORCH.hardware()
    assert cpu.device == "cpu:0"
    assert cpu.num_cores >= 1
    assert cpu.num_bytes > 2**28
    assert len(gpus) == torch.cuda.device_count()


def test_a_missing_framework_is_an_error_with_the_command_that_mends_it(monkeypatch):
    monkeypatch.setitem(lockstep.backends.BACKENDS, "missing_framework", "missing_framework")
    with pytest.raises(BackendError, match=r"pip install 'lockstep\[missing_framework\]'"):
        load_backend("missing_framework")


def test_an_unknown_backend_is_refused():
    with pytest.raises(ConfigError, match="Did you mean 'torch'"):
        load_backend("troch")


def test_the_framework_is_recognised_from_a_subclass_too():
    assert backend_of(torch.nn.Parameter(torch.ones(1))) is TORCH
    with pytest.raises(BackendError, match="A ndarray is not a tensor"):
        backend_of(np.ones(1))


class TwoGpus:
    def hardware(self):
        gpus = [Hardware(Device(f"cuda:{i}"), "GPU", 2**34, 100) for i in range(2)]
        return gpus + [Hardware(CPU, "CPU", 2**34, 6)]


class NoGpu:
    def hardware(self):
        return [Hardware(CPU, "CPU", 2**34, 6)]


def test_without_a_wish_all_gpus_are_used_else_a_logical_device_for_each_core():
    assert devices_for(TwoGpus(), None) == ["cuda:0", "cuda:1"]
    assert devices_for(NoGpu(), None) == [f"cpu:{i}" for i in range(6)]
    assert devices_for(NoGpu(), None, at_most=3) == ["cpu:0", "cpu:1", "cpu:2"]
    assert devices_for(TwoGpus(), 3) == ["cpu:0", "cpu:1", "cpu:2"]
    assert devices_for(TwoGpus(), "cuda:1,cuda:1") == ["cuda:1", "cuda:1"]
