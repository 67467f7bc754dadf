"""Samplers of the user's own: keyed by (seed, epoch), so the same for any devices, and after a crash."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler, WeightedRandomSampler

import lockstep
from lockstep.core.errors import LockstepError
from lockstep.data.sampler import SampledOrder

X = np.random.RandomState(0).standard_normal((60, 6)).astype(np.float32)
Y = np.arange(60) % 3
WEIGHTS = (np.arange(60) % 3 == 0) * 10.0 + 0.1


class ByLength:
    """Samples of about the same length come together; an epoch draws their order with numpy."""

    def __init__(self, lengths):
        self.lengths = np.array(lengths)

    def __len__(self):
        return len(self.lengths)

    def __iter__(self):
        return iter(np.argsort(self.lengths + np.random.uniform(0, 3, len(self.lengths))))


SAMPLERS = {
    "weighted": lambda: WeightedRandomSampler(WEIGHTS, 48),
    "random": lambda: RandomSampler(range(60)),
    "by length": lambda: ByLength([number % 7 for number in range(60)]),
    "a function": lambda: lambda epoch: np.roll(np.arange(60), epoch)[:50],
    "a list": lambda: list(range(0, 60, 2)),
}


@pytest.mark.parametrize("case", SAMPLERS)
def test_a_run_has_the_same_bits_for_any_devices_and_is_resumed(tmp_path, case):
    how = {"data": (X, Y), "batch_size": 16, "epochs": 3, "lr": 0.1, "quiet": True}

    def net():
        torch.manual_seed(0)
        return nn.Linear(6, 3)

    results = [lockstep.train(k, model=net(), sampler=SAMPLERS[case](), **how) for k in (1, 2, 3)]
    assert len({result.weights_sha256 for result in results}) == 1
    assert results[0].weights_sha256 != lockstep.train(1, model=net(), **how).weights_sha256
    cut = {**how, "checkpoint_every": 1, "out": tmp_path / "run"}
    lockstep.train(2, model=net(), sampler=SAMPLERS[case](), on_step=lambda r: r.stop() if r.step == 5 else None, **cut)
    resumed = lockstep.train(1, model=net(), sampler=SAMPLERS[case](), resume=True, **cut)
    assert resumed.weights_sha256 == results[0].weights_sha256


def test_epochs_have_orders_of_their_own_and_the_process_keeps_its_random_numbers():
    torch.manual_seed(3)
    order = SampledOrder(RandomSampler(range(60)), 0, 60)
    epochs = [order(epoch).tolist() for epoch in (0, 1, 0)]
    assert epochs[0] == epochs[2] != epochs[1]
    assert SampledOrder(RandomSampler(range(60)), 1, 60)(0).tolist() != epochs[0]
    drawn = torch.rand(3)
    torch.manual_seed(3)
    assert torch.equal(drawn, torch.rand(3))


def test_a_weighted_sampler_draws_by_its_weights():
    order = SampledOrder(WeightedRandomSampler(WEIGHTS, 4000), 0, 60)(0)
    assert np.mean(order % 3 == 0) == pytest.approx(WEIGHTS[::3].sum() / WEIGHTS.sum(), abs=0.02)


def test_set_epoch_is_called():
    class Own(ByLength):
        def set_epoch(self, epoch):
            self.epoch = epoch

        def __iter__(self):
            return iter(range(self.epoch, 30 + self.epoch))

    order = SampledOrder(Own(range(60)), 0, 60)
    assert order(4).tolist() == list(range(4, 34))


WRONG = {
    "own generator": (RandomSampler(range(60), generator=torch.Generator()), "a generator of its own"),
    "batches": (BatchSampler(SequentialSampler(range(60)), 4, False), r"gives \[0, 1, 2, 3\].*a batch sampler\?"),
    "too large": ([3, 60], "gives sample 60, and there are samples 0 to 59"),
    "negative": ([3, -1], "gives sample -1"),
    "empty": ([], "gives no samples"),
    "once": (iter([1, 2]), "is a list_iterator, not one for every epoch"),
    "a number": (3, "is a int, not one for every epoch"),
    "floats": ([0.5], "gives 0.5, which is not a sample number"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_no_sampler_is_refused(case):
    sampler, sentence = WRONG[case]
    with pytest.raises(LockstepError, match=sentence):
        lockstep.train(model=nn.Linear(6, 3), data=(X, Y), sampler=sampler, batch_size=16, quiet=True)


def test_epochs_of_different_lengths_are_refused():
    with pytest.raises(LockstepError, match="gives 32 samples in epoch 3, and 30 in the first"):
        lockstep.train(
            model=nn.Linear(6, 3), data=(X, Y), batch_size=16, epochs=3, quiet=True,
            sampler=lambda epoch: range(30 + epoch // 2 * 2),
        )  # fmt: skip
