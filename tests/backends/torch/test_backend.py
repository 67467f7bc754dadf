"""PyTorch only: memory, settings of the process, random numbers, errors without a deterministic mode."""

import contextlib
import threading

import numpy as np
import pytest
import torch

import lockstep
from lockstep.backends import load_backend
from lockstep.backends.torch import session
from lockstep.core.device import Device
from lockstep.core.errors import BackendError, RankError

TORCH = load_backend("torch")
CPU = Device("cpu:0")
PRECISIONS = {
    "cuda.matmul": torch.backends.cuda.matmul,
    "cudnn.conv": torch.backends.cudnn.conv,
    "cudnn.rnn": torch.backends.cudnn.rnn,
    "mkldnn.matmul": torch.backends.mkldnn.matmul,
    "mkldnn.conv": torch.backends.mkldnn.conv,
}


def test_samples_are_gathered_into_new_aligned_memory():
    data = torch.arange(300, dtype=torch.uint8).reshape(100, 3)
    assert all(TORCH.take(data, torch.arange(100), start, 90).data_ptr() % 64 == 0 for start in range(5))


def test_an_operation_without_a_deterministic_mode_is_named_with_the_users_line():
    def net(X, params):
        return torch.nn.functional.max_unpool1d(X @ params[0], torch.zeros(len(X), 2, dtype=torch.int64), 2)

    X, y = torch.rand(4, 3), torch.zeros(4, dtype=torch.int64)
    line = net.__code__.co_firstlineno + 1
    with pytest.raises(RankError) as failed:
        lockstep.train_batch(X, y, [[torch.ones(3, 2)]], ["cpu:0"], lr=0.1, net=net)
    assert "has no deterministic mode in PyTorch on cpu, so the weights would differ" in str(failed.value)
    assert "Use another operation" in str(failed.value)
    assert f"test_backend.py:{line}" in str(failed.value)
    assert "use_deterministic_algorithms" not in str(failed.value)


def test_other_errors_of_pytorch_are_unchanged():
    with pytest.raises(RankError, match="RuntimeError: mat1 and mat2 shapes cannot be multiplied"):
        lockstep.train_batch(
            torch.rand(4, 3),
            torch.zeros(4, dtype=torch.int64),
            [[torch.ones(2, 2)]],
            ["cpu:0"],
            lr=0.1,
            net=lambda X, params: X @ params[0],
        )


def test_all_gpus_of_the_framework_are_listed():
    assert len(TORCH.hardware()) == torch.cuda.device_count() + 1


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


@pytest.fixture(params=["default", "the user's"])
def settings_before(request):
    """The settings of the process before a session; restored at the end, whatever the session did."""
    original = process_settings()
    if request.param == "the user's":
        assert THE_USERS.keys() == original.keys()
        change(THE_USERS)
        assert process_settings() == THE_USERS
    yield process_settings()
    change(original)


def test_these_tests_check_every_operation_with_a_precision_setting():
    assert tuple(PRECISIONS.values()) == session._with_precision()


@pytest.mark.parametrize("error", [None, ZeroDivisionError, KeyboardInterrupt])
def test_a_session_sets_and_restores_the_settings(settings_before, error):
    with pytest.raises(error) if error else contextlib.nullcontext(), TORCH.session([CPU]):
        assert process_settings() == {**FIXED, "num_threads": 1}
        torch.set_num_threads(1)
        torch.backends.cudnn.benchmark = True
        if error:
            raise error
    assert process_settings() == settings_before


def test_a_session_uses_full_float32_precision_whatever_the_user_has_set():
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
                "Another run is under way in this process, and PyTorch's settings are process-wide. "
                "Wait for it to end, or use another process."
            )
        assert process_settings() == inside
    with pytest.raises(ZeroDivisionError), TORCH.session([CPU]):
        raise ZeroDivisionError
    with TORCH.session([CPU]):
        pass


def test_a_second_session_is_refused_in_another_thread_too():
    refusals = []

    def start():
        try:
            with TORCH.session([CPU]):
                pass
        except BackendError as refused:
            refusals.append(refused)

    for num_refused, first in ((1, TORCH.session([CPU])), (1, contextlib.nullcontext())):
        with first:
            thread = threading.Thread(target=start)
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


def test_whether_a_forked_process_could_use_cuda_is_asked_of_one(monkeypatch):
    assert not TORCH.why_not_fork()
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: True)
    assert "start the program with torchrun" in TORCH.why_not_fork()
