"""Recorded steps without a GPU: a recorder that does the work again where a real one would replay it."""

from contextlib import contextmanager, nullcontext

import pytest
import torch
from torch import nn

import lockstep
from lockstep.backends.torch import TorchBackend
from lockstep.core.errors import RunError


class Again:
    """Does what was recorded again, into the tensors of the recording; its host is as far ahead as with a GPU."""

    def __init__(self):
        self.num_recorded, self.num_replayed, self.num_forks = 0, 0, 0
        self.is_recording = False
        self.overwritten = None  # what is changed in a recording, which only asks for it, has to be as it was

    @contextmanager
    def stream(self):
        num_threads = torch.get_num_threads()
        torch.set_num_threads(1)  # as on the threads of ranks
        yield
        torch.set_num_threads(num_threads)

    @contextmanager
    def fork(self):
        self.num_forks += 1
        yield

    @staticmethod
    def beside(number):
        return nullcontext()

    @staticmethod
    def narrow():
        return False

    most_at_once = 4

    @staticmethod
    def add_up(brackets, vectors):
        return eval(brackets, {f"x{number}": vector for number, vector in enumerate(vectors)})

    def keep(self, what):
        pass

    together = staticmethod(torch.stack)

    def record(self, work, generators):
        self.num_recorded += 1
        work()
        generators()
        self.is_recording, self.overwritten = True, []
        result = work()
        for tensor, before in reversed(self.overwritten):
            tensor.copy_(before)
        self.is_recording, self.overwritten = False, None
        result = result._replace(
            totals=[total.clone() for total in result.totals],
            losses=[loss.clone() for loss in result.losses],
            rows=[{name: tensor.clone() for name, tensor in row.items()} for row in result.rows],
        )

        def replay():
            self.num_replayed += 1
            self.is_recording = True
            again = work()
            self.is_recording = False
            for old, new in zip([*result.totals, *result.losses], [*again.totals, *again.losses], strict=True):
                old.copy_(new)
            for old, new in zip(result.rows, again.rows, strict=True):
                for name in old:
                    old[name].copy_(new[name])

        return replay, result

    def read_later(self, numbers):
        found = numbers.tolist()

        class RankTimeout:
            @staticmethod
            def read():
                return found

        return RankTimeout()


@pytest.fixture
def recorder(monkeypatch):
    found = Again()
    monkeypatch.setattr(TorchBackend, "recorder", lambda self, devices: found)
    monkeypatch.setattr("lockstep.replicas.module.is_recording", lambda place: found.is_recording)
    assign = TorchBackend.assign

    def assign_and_note(self, target, source):
        if found.overwritten is not None:
            found.overwritten.append((target, target.clone()))
        return assign(self, target, source)

    monkeypatch.setattr(TorchBackend, "assign", assign_and_note)
    return found


def net_with_everything():
    return nn.Sequential(
        nn.Conv2d(1, 4, 5, stride=3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Dropout(0.3), nn.Linear(256, 10)
    )


SETTINGS = {"data": "fashion-mnist-mini", "num_epochs": 2, "batch_size": 300, "lr": 0.1, "quiet": True}


@pytest.mark.parametrize("devices", [1, 3])
@pytest.mark.parametrize(
    "how",
    [
        {},
        {"optimizer": "adam", "lr": 0.001, "schedule": "cosine", "warmup": 3},
        {"momentum": 0.9, "weight_decay": 0.01, "warmup": 3},
        {"clip_norm": 0.5},
        {"model": net_with_everything, "momentum": 0.9},
        {"model": net_with_everything, "optimizer": "adamw", "lr": 0.001, "schedule": "linear", "clip_norm": 1.0},
    ],
    ids=["lenet", "lenet-adam", "lenet-momentum", "lenet-clipped", "module", "module-adamw"],
)
def test_recorded_steps_give_the_bits_of_steps_as_they_are(recorder, how, devices):
    expected = lockstep.train(**{**SETTINGS, **how}, devices=2, capture=False)
    assert recorder.num_recorded == 0
    found = lockstep.train(**{**SETTINGS, **how}, devices=devices)
    # 300 samples, and what is left at the end of an epoch; once more when the update is the same from then on
    assert recorder.num_recorded == (3 if how.get("momentum") and "model" not in how else 2)
    assert recorder.num_replayed == found.steps
    assert found.weights_sha256 == expected.weights_sha256
    assert found.buffers_sha256 == expected.buffers_sha256
    assert [done.train_loss for done in found.history] == [done.train_loss for done in expected.history]
    assert found.first_loss == expected.first_loss


def test_a_recorded_run_is_saved_and_goes_on_in_mid_epoch(recorder, tmp_path):
    how = {**SETTINGS, "model": net_with_everything, "check_every": 2}
    expected = lockstep.train(**how, capture=False)
    seen = []

    class Stop(Exception):
        pass

    def scheduler(optimizer):
        inner = torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
        step = inner.step

        def stop_after_some(*args):
            seen.append(None)
            if len(seen) == 1 + 12:  # one when it is made
                raise Stop
            step(*args)

        inner.step = stop_after_some
        return inner

    with pytest.raises(RunError):
        lockstep.train(**how, out=tmp_path / "run", checkpoint_every=3, scheduler=scheduler)
    found = lockstep.train(**how, out=tmp_path / "run", resume=True)
    assert found.weights_sha256 == expected.weights_sha256


class Counting(nn.Module):
    """Its buffer changes with every shard, which recorded steps leave to steps as they are."""

    def __init__(self):
        super().__init__()
        self.out = nn.Linear(784, 10)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, X):
        self.calls += 1
        return self.out(X.flatten(1))


def test_what_cannot_be_recorded_is_run_as_it_is_and_said(recorder, capsys):
    expected = lockstep.train(**SETTINGS, model=Counting, capture=False)
    found = lockstep.train(**{**SETTINGS, "quiet": False}, model=Counting)
    assert found.weights_sha256 == expected.weights_sha256
    assert found.buffers_sha256 == expected.buffers_sha256
    assert recorder.num_replayed == 0
    assert "steps are not recorded, but run as they are: the model changes its buffer calls" in capsys.readouterr().err


def test_a_loss_that_is_no_number_is_noticed_though_the_host_is_ahead(recorder):
    with pytest.raises(RunError, match=r"epoch 1, step \d+: the loss is no longer a number"):
        lockstep.train(**{**SETTINGS, "lr": 1e20})


class Remembering(nn.Module):
    """Counts its calls in a plain attribute, which every rank would have for itself."""

    def __init__(self):
        super().__init__()
        self.out, self.calls = nn.Linear(784, 10), 0

    def forward(self, X):
        self.calls += 1
        return self.out(X.flatten(1)) / self.calls


def test_what_is_refused_in_a_step_as_it_is_is_refused_in_a_recorded_one(recorder):
    with pytest.raises(RunError, match="The model changes its attribute calls in the forward pass"):
        lockstep.train(**SETTINGS, model=Remembering)
    assert recorder.num_replayed == 0
