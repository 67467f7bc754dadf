"""A process for each device: the same bits as threads, for every model, exchange and number of processes."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

import lockstep
from lockstep.core.errors import BackendError, ConfigError, LockstepError
from lockstep.models.lenet_bn import LeNetBN
from lockstep.models.transformer import Transformer

HOW = {"batch_size": 32, "epochs": 2, "quiet": True}


@pytest.fixture(scope="module")
def alone(tiny):
    return lockstep.train(1, data=str(tiny), **HOW)


@pytest.mark.parametrize("k", [1, 2, 3, 4])
@pytest.mark.parametrize("exchange", ["sharded", "gather", "tree"])
def test_processes_give_the_bits_of_one_thread(tiny, alone, k, exchange):
    result = lockstep.train(k, data=str(tiny), engine="processes", exchange=exchange, **HOW)
    assert result.weights_sha256 == alone.weights_sha256
    assert [(e.epoch, e.train_loss, e.test_accuracy) for e in result.history] == [
        (e.epoch, e.train_loss, e.test_accuracy) for e in alone.history
    ]
    assert result.first_loss == alone.first_loss
    assert result.devices == [f"cpu:{rank}" for rank in range(k)]
    assert len(result.peak_memory) == k
    for name, array in alone.params.items():
        np.testing.assert_array_equal(result.params[name], array)


@pytest.mark.parametrize("exchange", ["ring", "native"])
def test_exchanges_with_an_order_of_their_own_are_close(tiny, alone, exchange):
    result = lockstep.train(3, data=str(tiny), engine="processes", exchange=exchange, **HOW)
    for name, array in alone.params.items():
        np.testing.assert_allclose(result.params[name], array, rtol=0, atol=1e-5)


@pytest.mark.parametrize("batch_size", [3, 7])
def test_batches_with_fewer_samples_than_shards_and_idle_processes(few, batch_size):
    """A batch of three leaves one of four processes without any shard."""
    settings = {"data": str(few), "batch_size": batch_size, "epochs": 1, "quiet": True, "optimizer": "adam"}
    threads = lockstep.train(1, **settings)
    processes = lockstep.train(4, engine="processes", **settings)
    assert processes.weights_sha256 == threads.weights_sha256


def images(num_samples):
    generator = torch.Generator().manual_seed(3)
    return torch.rand(num_samples, 1, 28, 28, generator=generator), torch.randint(
        10, (num_samples,), generator=generator
    )


def tokens(num_samples):
    X = torch.randint(30, (num_samples, 8), generator=torch.Generator().manual_seed(4))
    return X, X.roll(-1, 1)


class Frozen(nn.Module):
    """A frozen part, one that is not used in every batch, tied weights, and a counter."""

    def __init__(self):
        super().__init__()
        self.frozen = nn.Linear(784, 32).requires_grad_(False)
        self.a, self.b, self.out = nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 10)
        self.tied = self.out
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("largest", torch.zeros((), dtype=torch.bfloat16))

    def forward(self, X):
        h = self.frozen(X.flatten(1))
        self.calls += 1
        self.largest.copy_(torch.maximum(self.largest, h.max().bfloat16()))
        h = torch.relu(self.a(h) if X.mean() > 0.5 else self.b(h))
        return self.tied(nn.functional.dropout(h, 0.3, self.training))


MODULES = {
    "lenet-bn": (lambda: LeNetBN(dropout=0.3), images(50), {"momentum": 0.9}),
    "sync": (LeNetBN, images(50), {"batch_norm": "sync", "momentum": 0.9}),
    "transformer": (lambda: Transformer(30, 8, width=16, num_heads=2, dropout=0.2), tokens(50), {"optimizer": "adamw"}),
    "frozen": (Frozen, images(50), {"optimizer": "adam", "schedule": "cosine"}),
}


@pytest.mark.parametrize("case", MODULES)
def test_modules_of_any_kind_have_the_same_weights_and_buffers(case):
    make, data, how = MODULES[case]
    torch.manual_seed(0)
    model = make()
    before = copy.deepcopy(model.state_dict())
    found = set()
    for k, engine in ((1, "inprocess"), (2, "processes"), (3, "processes")):
        result = lockstep.train(
            model=model, data=(data, data), devices=k, engine=engine, batch_size=20, epochs=2, quiet=True, **how
        )
        found.add(
            (result.weights_sha256, result.buffers_sha256, result.history[-1].train_loss, *result.metrics.items())
        )
    assert len(found) == 1
    trained = result.module.state_dict()
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items()), "left as it was"
    assert not all(torch.equal(before[name], tensor) for name, tensor in trained.items())


class Loaded(torch.utils.data.Dataset):
    """Samples that are loaded one by one, with random numbers in each; it remembers which were loaded here."""

    def __init__(self):
        self.seen = []

    def __len__(self):
        return 50

    def __getitem__(self, number):
        self.seen.append(number)
        return torch.rand(6) + number / 50, number % 3


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("balance", ["equal", "measured"])
def test_samples_that_are_loaded_one_by_one(workers, balance):
    def trained(k, engine):
        return lockstep.train(
            model=lambda: nn.Linear(6, 3),
            data=(Loaded(), Loaded()),
            devices=k,
            engine=engine,
            workers=workers,
            balance=balance,
            batch_size=10,
            epochs=3,
            quiet=True,
        )

    one, three = trained(1, "inprocess"), trained(3, "processes")
    assert three.weights_sha256 == one.weights_sha256
    assert three.metrics == one.metrics


def test_each_process_loads_its_own_shards_only(tmp_path):
    class Told(Loaded):
        def __getitem__(self, number):
            with (tmp_path / "loaded").open("a") as out:
                out.write(f"{number}\n")
            return super().__getitem__(number)

    def num_loaded(k):
        (tmp_path / "loaded").unlink(missing_ok=True)
        data = Told()
        lockstep.train(
            model=lambda: nn.Linear(6, 3), data=data, devices=k, engine="processes", workers=0, batch_size=10, epochs=1,
            quiet=True, verify_every=0,
        )  # fmt: skip
        return len((tmp_path / "loaded").read_text().split())

    assert num_loaded(3) == num_loaded(1)


def test_a_models_own_error_comes_back_with_its_rank_and_line(vectors):
    class Wrong(nn.Linear):
        def forward(self, X):
            raise ValueError("my own mistake")

    with pytest.raises(LockstepError) as failed:
        lockstep.train(model=Wrong(6, 3), data=vectors, devices=2, engine="processes", batch_size=10, quiet=True)
    assert failed.value.exit_status == 1
    assert "during forward and backward: ValueError: my own mistake (at " in str(failed.value)
    assert f"{__file__}:" in str(failed.value)
    assert failed.value.trace.count("ValueError: my own mistake") == 1
    assert failed.value.trace.startswith('Traceback (most recent call last):\n  File "' + __file__)


@pytest.fixture
def vectors():
    generator = torch.Generator().manual_seed(0)
    return torch.rand(40, 6, generator=generator), torch.randint(3, (40,), generator=generator)


def test_what_cannot_be_is_refused_before_anything_is_started(tiny, tmp_path):
    out = tmp_path / "run"
    with pytest.raises(ConfigError, match="needs --engine processes"):
        lockstep.train(2, data=str(tiny), exchange="native", out=out)
    with pytest.raises(ConfigError, match="There is no engine for numpy called 'processes'"):
        lockstep.train(2, data=str(tiny), engine="processes", backend="numpy", out=out)
    with pytest.raises(ConfigError, match="9 devices cannot share 8 shards"):
        lockstep.train(9, data=str(tiny), engine="processes", out=out)
    assert not out.exists()


def test_workers_for_gpus_cannot_be_started_from_a_process_that_uses_one(monkeypatch):
    from lockstep.backends import load_backend
    from lockstep.core.device import Device
    from lockstep.runtime.processes import check_can_fork

    backend = load_backend("torch")
    check_can_fork(backend, [Device("cuda:0")])
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    check_can_fork(backend, [Device("cpu:0")])
    with pytest.raises(BackendError, match="Use --engine inprocess, or start the program with torchrun"):
        check_can_fork(backend, [Device("cuda:0")])
