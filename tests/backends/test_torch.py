"""The torch backend against its protocol, and against numpy."""

import contextlib
import importlib.util
import inspect
import threading

import numpy as np
import pytest
import torch

import lockstep.backends.torch
from lockstep.backends import backend_of, devices_for, load_backend, places_for
from lockstep.backends.protocol import Backend, Ops
from lockstep.device import Device, Hardware
from lockstep.errors import BackendError, ConfigError, DeviceError
from lockstep.layout import Layout

TORCH = load_backend("torch")
CPU = Device("cpu:0")
PRECISIONS = {
    "cuda.matmul": torch.backends.cuda.matmul,
    "cudnn.conv": torch.backends.cudnn.conv,
    "cudnn.rnn": torch.backends.cudnn.rnn,
    "mkldnn.matmul": torch.backends.mkldnn.matmul,
    "mkldnn.conv": torch.backends.mkldnn.conv,
}


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
    with pytest.raises(BackendError) as refused:
        load_backend("missing_framework")
    assert str(refused.value) == (
        "The backend 'missing_framework' needs the package missing_framework, which is not installed. "
        "Install it: pip install missing_framework."
    )


def load_again_with(monkeypatch, version):
    """Loads a second copy of the backend's file, as if PyTorch were of this version."""
    monkeypatch.setattr(torch, "__version__", version)
    spec = importlib.util.spec_from_file_location("second_copy", lockstep.backends.torch.__file__)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("version", ["2.8.0", "2.8.1+cu128", "1.13.1", "0.4.0"])
def test_a_pytorch_that_is_too_old_is_refused(monkeypatch, version):
    with pytest.raises(BackendError) as refused:
        load_again_with(monkeypatch, version)
    assert str(refused.value) == f"PyTorch {version} is too old for Lockstep. Install 2.9 or newer."


@pytest.mark.parametrize("version", ["2.9.0", "2.9.0a0+git1234567", "2.10.0+cpu", "3.0.0"])
def test_a_new_pytorch_is_good(monkeypatch, version):
    assert load_again_with(monkeypatch, version).BACKEND.version() == version


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


def test_named_devices_must_be_there_and_the_cpu_may_come_twice():
    assert places_for(NoGpu(), ("cpu", "cpu:0", "cpu:1")) == ["cpu:0", "cpu:0", "cpu:1"]
    assert places_for(TwoGpus(), ["cuda:1", "cuda"]) == ["cuda:1", "cuda:0"]
    assert all(isinstance(place, Device) for place in places_for(NoGpu(), ["cpu"]))


@pytest.mark.parametrize(
    ("backend", "names", "sentence"),
    [
        (NoGpu(), ["cuda"], "There is no cuda:0: no GPU is visible on this machine"),
        (TwoGpus(), ["cuda:2"], "There is no cuda:2: this machine has cuda:0, cuda:1"),
        (TwoGpus(), ["cpu:0", "cuda:0"], "cpu:0, cuda:0 mixes CPU and GPU"),
        (TwoGpus(), [], "The list of devices is empty"),
        (TwoGpus(), ["gpu"], "'gpu' is not the name of a device"),
    ],
)
def test_named_devices_that_cannot_be_are_refused(backend, names, sentence):
    with pytest.raises(DeviceError) as refused:
        places_for(backend, names)
    assert str(refused.value).startswith(sentence)


# --- the settings of the process


def precisions():
    return {name: operation.fp32_precision for name, operation in PRECISIONS.items()}


def process_settings():
    return {
        **precisions(),
        "num_threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "warn_only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "fill": torch.utils.deterministic.fill_uninitialized_memory,
        "cudnn.deterministic": torch.backends.cudnn.deterministic,
        "cudnn.benchmark": torch.backends.cudnn.benchmark,
    }


def change(settings):
    torch.set_num_threads(settings["num_threads"])
    torch.use_deterministic_algorithms(settings["deterministic"], warn_only=settings["warn_only"])
    torch.utils.deterministic.fill_uninitialized_memory = settings["fill"]
    torch.backends.cudnn.deterministic = settings["cudnn.deterministic"]
    torch.backends.cudnn.benchmark = settings["cudnn.benchmark"]
    for name, operation in PRECISIONS.items():
        operation.fp32_precision = settings[name]


FIXED = {
    "deterministic": True,
    "warn_only": False,
    "fill": False,
    "cudnn.deterministic": True,
    "cudnn.benchmark": False,
    **dict.fromkeys(PRECISIONS, "ieee"),
}
THE_USERS = {
    "num_threads": 2,
    "deterministic": True,
    "warn_only": True,
    "fill": True,
    "cudnn.deterministic": False,
    "cudnn.benchmark": True,
    "cuda.matmul": "tf32",
    "cudnn.conv": "tf32",
    "cudnn.rnn": "ieee",
    "mkldnn.matmul": "bf16",
    "mkldnn.conv": "tf32",
}


@pytest.fixture(params=["as they are", "the user's"])
def settings_before(request):
    """What the process has set when a session begins; put back at the end, whatever the session did."""
    original = process_settings()
    if request.param == "the user's":
        assert THE_USERS.keys() == original.keys()
        change(THE_USERS)
        assert process_settings() == THE_USERS
    yield process_settings()
    change(original)


def test_the_operations_whose_precision_is_fixed_are_those_that_these_tests_look_at():
    assert tuple(PRECISIONS.values()) == lockstep.backends.torch._PRECISIONS


@pytest.mark.parametrize("error", [None, ZeroDivisionError, KeyboardInterrupt])
def test_a_session_fixes_the_settings_and_puts_them_back(settings_before, error):
    with pytest.raises(error) if error else contextlib.nullcontext(), TORCH.session([CPU]):
        assert process_settings() == {**FIXED, "num_threads": settings_before["num_threads"]}
        torch.set_num_threads(1)
        torch.backends.cudnn.benchmark = True
        if error:
            raise error
    assert process_settings() == settings_before


def test_float32_means_float32_in_a_session_whatever_the_user_has_chosen():
    original = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        before = precisions()
        assert (before["cuda.matmul"], before["mkldnn.matmul"]) == ("tf32", "tf32")
        with TORCH.session([CPU]):
            assert precisions() == dict.fromkeys(PRECISIONS, "ieee")
        assert precisions() == before
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision(original)


def test_a_second_session_is_refused_until_the_first_has_ended():
    with TORCH.session([CPU]):
        inside = process_settings()
        for _ in range(2):
            with pytest.raises(BackendError) as refused, TORCH.session([CPU]):
                raise AssertionError("There are two sessions.")
            assert str(refused.value) == (
                "Another run is under way in this process, and PyTorch's settings are the whole process's. "
                "Wait for it to end, or use another process."
            )
        assert process_settings() == inside
    with pytest.raises(ZeroDivisionError), TORCH.session([CPU]):
        raise ZeroDivisionError
    with TORCH.session([CPU]):
        pass


def test_a_second_session_is_refused_in_another_thread_too():
    refusals = []

    def begin():
        try:
            with TORCH.session([CPU]):
                pass
        except BackendError as refused:
            refusals.append(refused)

    for num_refused, first in ((1, TORCH.session([CPU])), (1, contextlib.nullcontext())):
        with first:
            thread = threading.Thread(target=begin)
            thread.start()
            thread.join()
        assert len(refusals) == num_refused


# --- random numbers


@pytest.mark.parametrize(
    "draw",
    [
        lambda: torch.rand(1),
        lambda: torch.randperm(3),
        lambda: torch.nn.functional.dropout(torch.ones(4)),
        lambda: torch.nn.Linear(2, 2),
    ],
    ids=["rand", "randperm", "dropout", "Linear"],
)
def test_the_random_state_changes_when_random_numbers_are_drawn(draw):
    with torch.random.fork_rng():
        before = TORCH.random_state()
        assert isinstance(before, bytes)
        draw()
        assert TORCH.random_state() != before


def test_the_random_state_stays_when_none_are_drawn():
    with torch.random.fork_rng():
        torch.manual_seed(1)
        before = TORCH.random_state()
        torch.ones(3).sum()
        torch.rand(1, generator=torch.Generator())  # the caller's own
        np.random.RandomState(0).rand()
        assert TORCH.random_state() == before
        torch.rand(1)
        torch.manual_seed(1)
        assert TORCH.random_state() == before
