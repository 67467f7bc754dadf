"""Map-style datasets: the same bits for any number of workers and devices, keyed augmentation, error messages."""

import gc
import multiprocessing
import os
import random
import threading
import time

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import ConcatDataset, Dataset, IterableDataset, Subset, TensorDataset

import lockstep
from lockstep.core.errors import DataError, RunError
from lockstep.data.seeded import seeded

SETTINGS = {"batch_size": 16, "epochs": 2, "quiet": True}


class Own(Dataset):
    """Vectors with noise from Python, numpy and PyTorch."""

    def __init__(self, vectors, noise=0.1):
        (self.X, self.y), self.noise = vectors, noise

    def __len__(self):
        return len(self.X)

    def __getitem__(self, i):
        noise = self.noise * (torch.randn(6) + random.random() + np.random.rand())
        return (self.X[i] + noise).float(), int(self.y[i])


def nothing_is_left():
    """No process, and no thread; a thread that feeds a queue to a killed process may take a moment to notice."""
    end = time.monotonic() + 5
    while (left := [*threading.enumerate()[1:], *multiprocessing.active_children()]) and time.monotonic() < end:
        gc.collect()
        time.sleep(0.05)
    assert left == []
    return True


def test_workers_and_devices_do_not_change_a_bit(vectors):
    module, data = nn.Linear(6, 3), Own(vectors)
    results = [
        lockstep.train(model=module, data=(data, data), devices=k, workers=workers, **SETTINGS)
        for k, workers in ((1, 0), (2, 1), (3, 2))
    ]
    assert len({(result.weights_sha256, str(result.metrics)) for result in results}) == 1
    other = lockstep.train(model=module, data=(data, data), devices=1, workers=0, seed=1, **SETTINGS)
    assert other.weights_sha256 != results[0].weights_sha256
    assert nothing_is_left()


def test_without_noise_the_weights_are_those_of_the_arrays(vectors):
    module = nn.Linear(6, 3)
    arrays = lockstep.train(model=module, data=(vectors, vectors), devices=2, **SETTINGS)
    for data in (
        Own(vectors, noise=0.0),
        TensorDataset(*vectors),
        Subset(TensorDataset(*vectors), range(40)),
        ConcatDataset([Subset(Own(vectors, 0.0), range(10)), Subset(Own(vectors, 0.0), range(10, 40))]),
    ):
        result = lockstep.train(model=module, data=(data, data), devices=2, workers=1, **SETTINGS)
        assert result.weights_sha256 == arrays.weights_sha256, type(data).__name__
        assert result.test_accuracy == arrays.test_accuracy, "each test sample counts once, however it is loaded"
        assert result.metrics["loss"] == pytest.approx(arrays.metrics["loss"], rel=1e-6)


def test_samples_are_loaded_by_other_processes(vectors, tmp_path):
    class Recorded(Own):
        def __getitem__(self, i):
            if multiprocessing.parent_process() is not None:
                (tmp_path / str(os.getpid())).touch()
            return super().__getitem__(i)

    lockstep.train(model=nn.Linear(6, 3), data=Recorded(vectors), devices=1, workers=2, **SETTINGS)
    loaders = {int(file.name) for file in tmp_path.iterdir()}
    assert len(loaders) == 2


def test_every_epoch_has_noise_of_its_own_and_the_process_keeps_its_random_numbers(vectors):
    module = nn.Linear(6, 3)
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tobytes()
    drawn = []
    for epoch, sample in ((1, 0), (2, 0), (1, 1), (1, 0)):
        with seeded(0, epoch, sample):
            drawn.append((random.random(), np.random.rand(), float(torch.rand(()))))
    assert drawn[0] == drawn[3]
    assert len(set(drawn)) == 3
    lockstep.train(model=module, data=Own(vectors), devices=1, workers=0, **SETTINGS)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert np.random.get_state()[1].tobytes() == before[2]


def test_samples_may_be_dicts_and_tuples(vectors):
    class Named(Own):
        def __getitem__(self, i):
            return {"input": self.X[i]}, self.y[i]

    result = lockstep.train(model=nn.Linear(6, 3), data=Named(vectors), devices=2, workers=1, **SETTINGS)
    assert result.steps == 6


class Fails(Own):
    def __getitem__(self, i):
        if i == 17:
            raise OSError("no such picture")
        return super().__getitem__(i)


class NoPair(Own):
    def __getitem__(self, i):
        return self.X[i]


class Ragged(Own):
    def __getitem__(self, i):
        return self.X[i, : 1 + i % 3], self.y[i]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        (
            Fails,
            r"Sample 17 of the training data cannot be loaded: OSError: no such picture \(at .*test_loader.py:\d+\)",
        ),
        (NoPair, r"Sample \d+ of the training data cannot be loaded: TypeError: it is a .*, and must be a pair"),
        (
            Ragged,
            r"Sample \d+ .* it cannot be stacked with others in a shard: shapes \[\(1,\), \(\)\] and \[\(2,\), \(\)\]",
        ),
    ],
)
def test_a_sample_that_cannot_be_loaded_is_named(vectors, kind, sentence, workers):
    with pytest.raises(RunError, match=sentence):
        lockstep.train(
            model=nn.Linear(6, 3),
            data=kind(vectors),
            devices=2,
            workers=workers,
            epochs=1,
            batch_size=40,
            shards=4,
            quiet=True,
        )
    assert nothing_is_left()


def test_the_number_of_threads_of_a_worker_does_not_change_a_sum(vectors):
    class Sums(Own):
        def __getitem__(self, i):
            return self.X[i] + torch.linspace(0, 1, 300_000).sum() * 1e-6, int(self.y[i])

    settings = {"model": nn.Linear(6, 3), "data": Sums(vectors), "devices": 1, **SETTINGS}
    hashes = {lockstep.train(workers=workers, **settings).weights_sha256 for workers in (0, 1)}
    assert len(hashes) == 1


def masked_and_centered(samples):
    """Draws as a language model's collator does, and looks at the neighbours of a sample."""
    X, y = torch.stack([x for x, _ in samples]), torch.stack([label for _, label in samples])
    return (X - X.mean(0)).masked_fill(torch.bernoulli(torch.full(X.shape, 0.2)).bool(), 0.0), y


def test_what_a_collate_fn_draws_is_keyed_by_the_shard(vectors):
    data = list(zip(*vectors, strict=True))

    def trained(**how):
        net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
        settings = {"batch_size": 16, "epochs": 2, "quiet": True, "shards": 4, "collate_fn": masked_and_centered, **how}
        return lockstep.train(model=lambda: net, data=data, **settings)

    torch.manual_seed(0)
    first = trained(devices=1, workers=0)
    torch.manual_seed(0)
    for how in ({"devices": 3, "workers": 0}, {"devices": 2, "workers": 2}, {"devices": 2, "engine": "processes"}):
        torch.manual_seed(0)
        assert trained(**how).weights_sha256 == first.weights_sha256, how
    torch.manual_seed(0)
    assert trained(devices=1, seed=1).weights_sha256 != first.weights_sha256


def test_a_data_set_with_a_generator_of_its_own_is_refused(vectors):
    class Draws(Own):
        rng = np.random.default_rng(0)

        def __getitem__(self, i):
            return self.X[i] + self.rng.random(), int(self.y[i])

    with pytest.raises(DataError, match="Sample 0 of the training data is another each time"):
        lockstep.train(model=nn.Linear(6, 3), data=Draws(vectors), devices=1, workers=0, **SETTINGS)


# PyTorch's handler of SIGCHLD raises its error wherever the program is, at times in a callback of the garbage collector
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_worker_that_exits_ends_the_run_with_an_error(vectors):
    class Dies(Own):
        def __getitem__(self, i):
            if i == 17 and multiprocessing.parent_process() is not None:
                os._exit(1)
            return super().__getitem__(i)

    with pytest.raises(
        RunError,
        match=r"data cannot be loaded: (DataLoader worker .* exited unexpectedly|a loader worker has died)",
    ):
        lockstep.train(model=nn.Linear(6, 3), data=Dies(vectors), devices=1, workers=2, **SETTINGS)
    assert nothing_is_left()


def test_bytes_of_a_data_set_are_not_divided_by_255(vectors):
    X, y = (255 * vectors[0]).to(torch.uint8), vectors[1]

    class AsFloat(nn.Linear):
        def forward(self, x):
            assert x.dtype == torch.uint8
            return super().forward(x.float())

    module, whole = AsFloat(6, 3), TensorDataset(X, y)
    results = [
        lockstep.train(model=module, data=data, devices=1, workers=0, lr=1e-4, **SETTINGS)
        for data in (whole, Subset(whole, range(40)))
    ]
    assert results[0].weights_sha256 == results[1].weights_sha256


class Stream(IterableDataset):
    def __iter__(self):
        yield torch.zeros(6), 0


class NoLength:
    def __getitem__(self, i):
        return torch.zeros(6), 0


class Empty(NoLength):
    def __len__(self):
        return 0


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (Stream(), "The training data is iterable-style: its samples come in an order of their own"),
        (NoLength(), "The training data is a NoLength without __len__"),
        (Empty(), "The training data is empty"),
        ((i for i in range(3)), "The training data is a generator without __len__"),
        ((TensorDataset(torch.rand(40, 6), torch.zeros(40)), Stream()), "The test data is iterable-style"),
    ],
)
def test_data_that_is_not_map_style_is_refused(data, sentence):
    with pytest.raises(DataError) as refused:
        lockstep.train(model=nn.Linear(6, 3), data=data, devices=1, **SETTINGS)
    assert str(refused.value).startswith(sentence)
    assert nothing_is_left()


def test_a_pair_of_lists_of_samples(vectors):
    X, y = vectors
    samples = [(x, int(label)) for x, label in zip(X, y, strict=True)]
    results = [
        lockstep.train(model=nn.Linear(6, 3), data=data, devices=2, workers=0, **SETTINGS)
        for data in ((samples, samples[:10]), [samples, samples[:10]])
    ]
    assert [set(result.metrics) for result in results] == [{"loss", "accuracy"}] * 2


def test_byte_images_as_both_samples_and_targets_are_divided_as_both():
    images = torch.randint(256, (48, 1, 8, 8), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    module = nn.Conv2d(1, 1, 3, padding=1)
    how = {"loss": "mse", "batch_size": 48, "epochs": 1, "lr": 0.1, "quiet": True}
    results = [lockstep.train(k, model=module, data=(images, images), **how) for k in (1, 2)]
    assert results[0].weights_sha256 == results[1].weights_sha256
    x = images.float() / 255
    expected = nn.functional.mse_loss(module(x), x).item()
    assert results[0].first_loss == pytest.approx(expected, rel=1e-5)
