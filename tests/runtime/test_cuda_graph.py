"""Captured steps without a GPU, by the capture of conftest.py."""

import time

import pytest
import torch
from torch import nn

import lockstep
from lockstep.backends.torch import TorchBackend
from lockstep.core.errors import OutOfMemory, RunError
from lockstep.replicas import gradients
from lockstep.replicas.half_weights import HalfWeights


def net_with_everything():
    return nn.Sequential(
        nn.Conv2d(1, 4, 5, stride=3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Dropout(0.3), nn.Linear(256, 10)
    )


SETTINGS = {"data": "fashion-mnist-mini", "num_epochs": 2, "batch_size": 300, "lr": 0.1, "quiet": True}


@pytest.mark.parametrize("devices", ["cpu:0", "cpu:0,cpu:1,cpu:2"])
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
def test_captured_steps_give_the_bits_of_eager_steps(capture, how, devices):
    expected = lockstep.train(**{**SETTINGS, **how}, devices="cpu:0,cpu:1", capture=False)
    assert capture.num_captured == 0
    found = lockstep.train(**{**SETTINGS, **how}, devices=devices)
    # 300 samples, and what is left at the end of an epoch; once more when the update is the same from then on
    assert capture.num_captured == (3 if how.get("momentum") and "model" not in how else 2)
    assert capture.num_replayed == found.steps
    assert found.weights_sha256 == expected.weights_sha256
    assert found.buffers_sha256 == expected.buffers_sha256
    assert [done.train_loss for done in found.history] == [done.train_loss for done in expected.history]
    assert found.first_loss == expected.first_loss


def test_captured_steps_cast_weights_once_and_give_the_bits_of_eager_steps(capture, monkeypatch):
    made, init = [], HalfWeights.__init__

    def note(self, params):
        init(self, params)
        made.append(len(params))

    monkeypatch.setattr(HalfWeights, "__init__", note)
    how = {**SETTINGS, "model": net_with_everything, "precision": "bf16", "num_epochs": 1}
    found = lockstep.train(**how, devices="cpu:0,cpu:1")
    assert capture.num_replayed == found.steps
    assert 4 in made  # weights and biases of the convolution and of the linear layer; batch norm's are not cast
    assert found.weights_sha256 == lockstep.train(**how, devices="cpu:0", capture=False).weights_sha256


class Tied(nn.Module):
    """Looks rows up in a matrix, and multiplies by it."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(30, 16)

    def forward(self, X):
        return nn.functional.linear(self.tokens(X), self.tokens.weight).transpose(1, 2)


@pytest.mark.parametrize("devices", ["cpu:0", "cpu:0,cpu:1,cpu:2"])
@pytest.mark.parametrize("kind", ["capture", "rank_capture"])
def test_a_tied_weights_gradient_in_two_parts_has_the_bits_of_eager_steps(request, monkeypatch, kind, devices):
    capture, parts = request.getfixturevalue(kind), []
    find = gradients.tied_weights
    monkeypatch.setattr(gradients, "tied_weights", lambda *graph: parts.append(find(*graph)) or parts[-1])
    tokens = torch.arange(960).view(80, 12) * 7 % 30
    how = {"data": (tokens, tokens.roll(1, 1)), "model": Tied, "batch_size": 20, "lr": 0.1, "num_epochs": 2}
    found = lockstep.train(**how, precision="bf16", devices=devices, quiet=True)
    assert capture.num_replayed
    assert {len(each) for each in parts} == {1}
    eager = lockstep.train(**how, precision="bf16", devices="cpu:0", capture=False, quiet=True)
    assert found.weights_sha256 == eager.weights_sha256


class SlowAtFirst(nn.Module):
    """Like kernels that are compiled when they are first used."""

    def __init__(self):
        super().__init__()
        self.layer, self.seconds = nn.Linear(12, 3), [0.5]

    def forward(self, X):
        while self.seconds:
            time.sleep(self.seconds.pop())
        return self.layer(X)


def test_the_first_use_of_kernels_is_not_counted_as_time_of_an_epoch(capture):
    X, y = torch.rand(40, 12), torch.arange(40) % 3
    found = lockstep.train(model=SlowAtFirst, data=(X, y), batch_size=20, devices="cpu:0", epochs=1, quiet=True)
    assert capture.num_replayed
    assert found.history[0].seconds < 0.4


class HostEvents:
    """Events of a device that has done everything at once."""

    record = staticmethod(time.monotonic)

    @staticmethod
    def seconds(event):
        return event


@pytest.mark.parametrize("devices", ["cpu:0", "cpu:0,cpu:1"])
@pytest.mark.parametrize("model", ["lenet", net_with_everything])
def test_a_traced_run_is_captured_too(capture, monkeypatch, model, devices):
    monkeypatch.setattr(TorchBackend, "timed", lambda self, device: HostEvents())
    expected = lockstep.train(**SETTINGS, model=model, devices=devices)
    capture.num_replayed = 0
    found = lockstep.train(**SETTINGS, model=model, devices=devices, trace=True)
    assert found.weights_sha256 == expected.weights_sha256
    assert found.buffers_sha256 == expected.buffers_sha256
    assert capture.num_replayed >= found.steps
    rows = {e["tid"]: e["args"]["name"] for e in found.trace if e["name"] == "thread_name"}
    on_gpu = [e for e in found.trace if e["ph"] == "X" and rows[e["tid"]] == "rank 0, on the GPU"]
    replays = [e["args"]["step"] for e in on_gpu if e["name"] == "forward and backward"]
    assert replays == [*range(1, found.steps + 1)]
    explanation = lockstep.explain(found)
    assert explanation.notes == []  # one large shard was measured, too
    assert explanation.num_steps == found.steps - 2  # those with a capture do not count
    total = explanation.perfect_ms + sum(explanation.parts.values()) + explanation.rest_ms
    assert total == pytest.approx(explanation.step_ms, rel=1e-3)


def test_a_traced_run_whose_ranks_capture_their_own_shards_is_captured_too(rank_capture, monkeypatch):
    monkeypatch.setattr(TorchBackend, "timed", lambda self, device: HostEvents())
    expected = lockstep.train(**SETTINGS, model=net_with_everything, devices=2)
    found = lockstep.train(**SETTINGS, model=net_with_everything, devices=2, trace=True)
    assert (found.weights_sha256, found.buffers_sha256) == (expected.weights_sha256, expected.buffers_sha256)
    names = {e["name"] for e in found.trace if e["ph"] == "X" and e["args"].get("step") == found.steps}
    assert {"forward and backward", "exchange", "update"} <= names
    assert "forward" not in names  # a replay shows no passes
    explanation = lockstep.explain(found)
    assert explanation.perfect_ms > 0


class Squares(torch.utils.data.Dataset):
    """Samples that are loaded one by one; 200 of them are batches of 64 and one of 8."""

    def __len__(self):
        return 200

    def __getitem__(self, number):
        return torch.rand(6, generator=torch.Generator().manual_seed(number)), number % 3


@pytest.mark.parametrize("devices", ["cpu:0", "cpu:0,cpu:1,cpu:2"])
@pytest.mark.parametrize("kind", ["capture", "rank_capture"])
def test_loaded_samples_reach_captured_steps(request, kind, devices):
    found = request.getfixturevalue(kind)

    def train(**how):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 3))
        how = {"batch_size": 64, "epochs": 2, "lr": 0.1, "workers": 0, "quiet": True, **how}
        return lockstep.train(model=model, data=Squares(), **how)

    captured = train(devices=devices)
    num_captures = 3 if kind == "rank_capture" and devices != "cpu:0" else 1
    assert found.num_replayed == num_captures * captured.steps
    assert captured.weights_sha256 == train(devices="cpu:0", capture=False).weights_sha256


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("devices", ["cpu:0", "cpu:0,cpu:1"])
@pytest.mark.parametrize("kind", ["capture", "rank_capture"])
def test_a_loop_that_takes_gradients_between_captured_steps_has_the_bits_of_eager_steps(
    request, kind, devices, precision
):
    found = request.getfixturevalue(kind)
    draw = torch.Generator().manual_seed(0)
    batches = [(torch.rand(32, 1, 28, 28, generator=draw), torch.arange(32) % 10) for _ in range(8)]

    def train(**how):
        torch.manual_seed(1)
        model = net_with_everything()
        with lockstep.Trainer(model, optimizer="adamw", lr=0.1, precision=precision, **how) as trainer:
            for number, batch in enumerate(batches):
                if number % 3:
                    trainer.step(batch)
                else:
                    trainer.gradients(batch)
                    trainer.update()
            return trainer.weights_sha256

    expected = train(devices="cpu:0", capture=False)
    assert found.num_replayed == 0
    assert train(devices=devices) == expected
    assert found.num_replayed > 0


@pytest.mark.parametrize("engine", ["inprocess", "processes"])
@pytest.mark.parametrize("model", ["lenet", net_with_everything])
@pytest.mark.parametrize("exchange", ["sharded", "ring"])
def test_ranks_that_capture_their_own_shards_give_the_bits_of_eager_steps(rank_capture, model, engine, exchange):
    how = {**SETTINGS, "model": model, "devices": "cpu:0,cpu:1,cpu:2", "exchange": exchange}
    expected = lockstep.train(**how, capture=False)
    assert rank_capture.num_captured == 0
    found = lockstep.train(**how, engine=engine)
    assert found.weights_sha256 == expected.weights_sha256
    assert found.buffers_sha256 == expected.buffers_sha256
    assert [done.train_loss for done in found.history] == [done.train_loss for done in expected.history]
    if engine == "inprocess":  # processes count for themselves
        assert rank_capture.num_captured == 3 * 2  # by each rank: 300 samples, and what is left at the end of an epoch
        assert rank_capture.num_replayed == 3 * found.steps


def test_a_captured_run_is_saved_and_resumed_in_mid_epoch(capture, tmp_path):
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
    """Its buffer changes with every shard, which cannot be captured."""

    def __init__(self):
        super().__init__()
        self.out = nn.Linear(784, 10)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, X):
        self.calls += 1
        return self.out(X.flatten(1))


def test_what_cannot_be_captured_runs_eagerly_and_says_why(capture, capsys):
    expected = lockstep.train(**SETTINGS, model=Counting, capture=False)
    found = lockstep.train(**{**SETTINGS, "quiet": False}, model=Counting)
    assert found.weights_sha256 == expected.weights_sha256
    assert found.buffers_sha256 == expected.buffers_sha256
    assert capture.num_replayed == 0
    assert "CUDA graph capture is off, running eagerly: the model changes its buffer calls" in capsys.readouterr().err


def test_a_loss_that_is_no_number_is_noticed_though_the_host_is_ahead(capture):
    with pytest.raises(RunError, match=r"epoch 1, step \d+: the loss is NaN or infinite"):
        lockstep.train(**{**SETTINGS, "lr": 1e20})


class Large(nn.Linear):
    """Does not fit with more than ten samples."""

    def __init__(self):
        super().__init__(784, 10)

    def forward(self, X):
        if len(X) > 10:
            raise MemoryError
        return super().forward(X.flatten(1))


@pytest.mark.parametrize("devices", ["cpu:0", "cpu:0,cpu:1"])
@pytest.mark.parametrize("kind", ["capture", "rank_capture"])
def test_a_shard_that_does_not_fit_is_said_with_a_number_that_does(request, kind, devices):
    request.getfixturevalue(kind)
    with pytest.raises(OutOfMemory, match=r"a shard of 38 samples does not fit.*A shard of 10 does: use --shards 30"):
        lockstep.train(**SETTINGS, model=Large, devices=devices)


class Remembering(nn.Module):
    """Counts its calls in a plain attribute, which every rank would have for itself."""

    def __init__(self):
        super().__init__()
        self.out, self.calls = nn.Linear(784, 10), 0

    def forward(self, X):
        self.calls += 1
        return self.out(X.flatten(1)) / self.calls


def test_what_an_eager_step_refuses_a_captured_one_refuses_too(capture):
    with pytest.raises(RunError, match="The model changes its attribute calls in the forward pass"):
        lockstep.train(**SETTINGS, model=Remembering)
    assert capture.num_replayed == 0
