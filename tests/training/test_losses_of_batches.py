"""Losses that are no mean over samples: divided by the weight of the whole batch, or functions of the whole batch.

Each is compared with the plain loop on the whole batch, for any number of devices and shards.
"""

from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import lockstep
from lockstep.core.errors import ConfigError, LockstepError

DEVICES, SHARDS, BATCH = (1, 2, 3), (4, 8), 18  # 18 samples are not divisible by 4 or 8; the last batch has 14
IGNORED = -100


class Tagger(nn.Module):
    """Scores for each position."""

    def __init__(self):
        super().__init__()
        self.embed, self.score = nn.Embedding(11, 8), nn.Linear(8, 5)

    def forward(self, X):
        return self.score(torch.tanh(self.embed(X)))


class TwoTowers(nn.Module):
    """An image and a text encoder, and a temperature, as CLIP has them."""

    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(6, 4), nn.Linear(5, 4)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, images, texts):
        return F.normalize(self.left(images)), F.normalize(self.right(texts)), self.scale.exp()


def token_mean(output, y):
    return F.cross_entropy(output.flatten(0, 1), y.flatten(), reduction="sum"), (y != IGNORED).sum()


CLASS_WEIGHTS = torch.tensor([0.3, 2.0, 1.1, 0.01, 7.0])


def class_weighted(output, y):
    return F.cross_entropy(output, y, weight=CLASS_WEIGHTS, reduction="sum"), CLASS_WEIGHTS[y].sum()


def clip(output, y):
    images, texts, scale = output
    scores, own = scale * images @ texts.T, torch.arange(len(images))
    return (F.cross_entropy(scores, own) + F.cross_entropy(scores.T, own)) / 2


def data_of(name):
    draw = torch.Generator().manual_seed(0)
    if name == "token mean":
        y = torch.randint(5, (50, 7), generator=draw)
        y[torch.rand(50, 7, generator=draw) < 0.6] = IGNORED
        return torch.randint(11, (50, 7), generator=draw), y
    if name == "class weights":
        return torch.randn(50, 6, generator=draw), torch.randint(5, (50,), generator=draw)
    X = torch.randn(50, 6, generator=draw), torch.randn(50, 5, generator=draw)
    return X, torch.zeros(50)


CASES = {
    "token mean": (Tagger, token_mean, lambda output, y: F.cross_entropy(output.flatten(0, 1), y.flatten()), {}),
    "class weights": (
        lambda: nn.Linear(6, 5),
        class_weighted,
        lambda output, y: F.cross_entropy(output, y, weight=CLASS_WEIGHTS),
        {},
    ),
    "clip": (TwoTowers, clip, clip, {"over": "batch"}),
}


def made(make):
    torch.manual_seed(3)
    return make()


@pytest.mark.parametrize("case", CASES)
def test_the_loss_is_that_of_the_plain_loop_on_the_whole_batch(case):
    make, loss, plain, how = CASES[case]
    X, y = data_of(case)
    inputs = tuple(part.numpy() for part in X) if isinstance(X, tuple) else X.numpy()
    module = made(make)
    arguments = {"data": (inputs, y.numpy()), "batch_size": BATCH, "epochs": 2, "lr": 0.1, "quiet": True, **how}
    for shards in SHARDS:
        results = [lockstep.train(model=module, loss=loss, shards=shards, devices=k, **arguments) for k in DEVICES]
        assert len({result.weights_sha256 for result in results}) == 1
        trained, expected, first_loss = plain_loop(made(make), plain, X, y)
        assert results[0].first_loss == pytest.approx(first_loss, abs=1e-5)
        assert results[0].history[0].train_loss == pytest.approx(expected, rel=0.2)  # weighted over its batches
        for name, param in trained.named_parameters():
            found = torch.from_numpy(results[0].params[name])
            torch.testing.assert_close(found, param.detach(), rtol=0, atol=1e-5)


def plain_loop(module, loss, X, y):
    from lockstep.data.order import sample_order

    optimizer, losses = torch.optim.SGD(module.parameters(), lr=0.1), []
    for epoch in range(2):
        for part in torch.from_numpy(sample_order(0, epoch, len(y))).split(BATCH):
            output = module(*(x[part] for x in X)) if isinstance(X, tuple) else module(X[part])
            value = loss(output, y[part])
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
            losses.append(value.item())
    return module, sum(losses[: len(losses) // 2]) / (len(losses) // 2), losses[0]


@pytest.mark.parametrize("case", CASES)
def test_processes_give_the_bits_of_one_thread(case):
    make, loss, _, how = CASES[case]
    X, y = data_of(case)
    inputs = tuple(part.numpy() for part in X) if isinstance(X, tuple) else X.numpy()
    arguments = {"data": (inputs, y.numpy()), "batch_size": BATCH, "epochs": 1, "lr": 0.1, "quiet": True, **how}
    hashes = {
        lockstep.train(model=made(make), loss=loss, devices=2, engine=engine, **arguments).weights_sha256
        for engine in ("inprocess", "processes")
    }
    assert len(hashes) == 1


def test_the_loss_of_test_samples_is_divided_by_their_weights():
    X, y = data_of("token mean")
    part = X.numpy(), y.numpy()
    how = {"devices": 2, "batch_size": BATCH, "epochs": 1, "lr": 0.1, "quiet": True}
    result = lockstep.train(model=made(Tagger), loss=token_mean, data=(part, part), **how)
    with torch.no_grad():
        expected = F.cross_entropy(result.module(X).flatten(0, 1), y.flatten())
    assert result.metrics["loss"] == pytest.approx(float(expected), abs=1e-6)


def test_a_run_with_weights_is_resumed_with_the_same_bits(tmp_path):
    X, y = data_of("token mean")
    calls = []

    def loss(output, y):
        calls.append("called")
        if len(calls) == fails_at:
            raise ValueError("lost")
        return token_mean(output, y)

    fails_at = 0

    arguments = {"loss": loss, "data": (X.numpy(), y.numpy()), "batch_size": BATCH, "lr": 0.1, "quiet": True}
    whole = lockstep.train(model=made(Tagger), epochs=3, devices=2, **arguments)
    arguments |= {"checkpoint_every": 1, "out": tmp_path / "run", "epochs": 3}
    calls.clear()
    fails_at = 30  # in the second epoch
    with pytest.raises(LockstepError, match="lost"):
        lockstep.train(model=made(Tagger), devices=1, **arguments)
    result = lockstep.train(model=made(Tagger), devices=3, resume=True, **arguments)
    assert result.weights_sha256 == whole.weights_sha256
    assert [each.train_loss for each in result.history] == [each.train_loss for each in whole.history]


def in_batch_negatives(output, y):
    images, texts, scale = output
    return F.cross_entropy(scale * images @ texts.T, torch.arange(len(images)), reduction="none")


def test_a_loss_that_looks_across_samples_without_saying_so_is_refused():
    X, y = data_of("clip")
    data = tuple(part.numpy() for part in X), y.numpy()
    with pytest.raises(
        LockstepError, match=r"depends on the other samples that it is computed with .* Use over='batch'"
    ):
        lockstep.train(model=made(TwoTowers), loss=in_batch_negatives, data=data, batch_size=BATCH, quiet=True)


MODULES = {
    "cross-entropy": nn.CrossEntropyLoss(),
    "weights": nn.CrossEntropyLoss(weight=CLASS_WEIGHTS, ignore_index=3, label_smoothing=0.1),
    "mse": nn.MSELoss(),
    "soft labels": nn.CrossEntropyLoss(),
    "batch mean": nn.KLDivLoss(reduction="batchmean"),
}


@pytest.mark.parametrize("case", MODULES)
def test_a_loss_module_that_returns_a_mean_is_exact(case):
    loss, (X, y) = MODULES[case], data_of("class weights")
    if case in ("mse", "soft labels", "batch mean"):
        y = torch.softmax(torch.randn(50, 5, generator=torch.Generator().manual_seed(1)), dim=1)
    results = [
        lockstep.train(
            model=made(lambda: nn.Linear(6, 5)), loss=loss, data=(X.numpy(), y.numpy()), batch_size=BATCH, epochs=2,
            lr=0.1, devices=k, quiet=True,
        )
        for k in DEVICES
    ]  # fmt: skip
    assert len({result.weights_sha256 for result in results}) == 1
    trained, _, first_loss = plain_loop(made(lambda: nn.Linear(6, 5)), loss, X, y)
    assert results[0].first_loss == pytest.approx(first_loss, abs=1e-5)
    torch.testing.assert_close(
        torch.from_numpy(results[0].params["weight"]), trained.weight.detach(), rtol=0, atol=1e-5
    )


WRONG = {
    "mean": (lambda output, y: F.cross_entropy(output, y), "return a pair (sum, weight); if it looks across the batch"),
    "not a number": (lambda output, y: (output, 1.0), "whose first entry is not one number"),
    "two weights": (lambda output, y: (output.sum(), torch.ones(2)), "whose weight is not one number"),
    "nothing": (lambda output, y: (output.sum(), 0), "add up to 0 in this batch"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_loss_that_cannot_be_exact_is_refused(case):
    loss, sentence = WRONG[case]
    X, y = data_of("class weights")
    with pytest.raises(LockstepError) as caught:
        lockstep.train(model=made(lambda: nn.Linear(6, 5)), loss=loss, data=(X, y), batch_size=BATCH, quiet=True)
    assert sentence in str(caught.value)


def test_a_loss_module_whose_target_has_another_shape_is_refused():
    X, y = data_of("class weights")
    with pytest.raises(LockstepError, match=r"returns a shape of \(\d, 5\) for targets of shape \(\d, 1\)"):
        lockstep.train(
            model=made(lambda: nn.Linear(6, 5)), loss=nn.MSELoss(), data=(X, y.float()[:, None]), batch_size=BATCH,
            quiet=True,
        )  # fmt: skip


def test_a_subclass_of_a_loss_module_is_left_as_it_is():
    class Own(nn.CrossEntropyLoss):
        def forward(self, output, y):
            return 2 * F.cross_entropy(output, y, reduction="none")

    X, y = data_of("class weights")
    how = {"data": (X.numpy(), y.numpy()), "batch_size": BATCH, "epochs": 1, "quiet": True}
    twice = lockstep.train(model=made(lambda: nn.Linear(6, 5)), loss=Own(), lr=0.1, **how)
    once = lockstep.train(model=made(lambda: nn.Linear(6, 5)), loss=nn.CrossEntropyLoss(), lr=0.1, **how)
    assert twice.first_loss == pytest.approx(2 * once.first_loss)


def test_activation_checkpointing_with_dropout_under_a_loss_over_the_batch():
    class Checkpointed(TwoTowers):
        def __init__(self, on):
            super().__init__()
            self.on = on

        def forward(self, images, texts):
            def hidden(images):
                return F.dropout(self.left(images), 0.5)

            left = checkpoint(hidden, images, use_reentrant=False) if self.on else hidden(images)
            return F.normalize(left), F.normalize(self.right(texts)), self.scale.exp()

    X, y = data_of("clip")
    how = {"data": (tuple(part.numpy() for part in X), y.numpy()), "batch_size": BATCH, "epochs": 1, "lr": 0.1}
    hashes = {
        lockstep.train(
            model=made(partial(Checkpointed, on)), loss=clip, over="batch", devices=k, quiet=True, **how
        ).weights_sha256
        for k in DEVICES
        for on in (True, False)
    }
    assert len(hashes) == 1


def test_what_does_not_go_together_with_a_loss_over_the_batch_is_said():
    X, y = data_of("class weights")
    with pytest.raises(ConfigError, match="--over batch"):
        lockstep.train(model=nn.Linear(6, 5), data=(X, y), batch_size=BATCH, over="batch", batch_norm="sync")


@pytest.mark.parametrize("draw", [torch.rand_like, torch.randn_like, F.dropout], ids=lambda each: each.__name__)
def test_random_numbers_that_a_loss_draws_are_keyed_by_the_shard(tmp_path, draw):
    def loss(output, y):
        return F.cross_entropy(output + draw(output), y, reduction="none")

    X, y = data_of("class weights")
    how = {"data": (X.numpy(), y.numpy()), "batch_size": BATCH, "epochs": 2, "lr": 0.1, "quiet": True, "loss": loss}
    hashes = {
        lockstep.train(model=made(lambda: nn.Linear(6, 5)), devices=k, engine=engine, **how).weights_sha256
        for k, engine in ((1, "inprocess"), (2, "inprocess"), (3, "inprocess"), (2, "processes"))
    }
    cut = {**how, "out": tmp_path / "run", "checkpoint_every": 1}
    lockstep.train(model=made(lambda: nn.Linear(6, 5)), on_step=lambda r: r.stop() if r.step == 4 else None, **cut)
    resumed = lockstep.train(model=made(lambda: nn.Linear(6, 5)), devices=2, resume=True, **cut)
    assert hashes == {resumed.weights_sha256}


@pytest.mark.parametrize("k", [1, 2])
def test_a_loss_that_draws_from_numpy_is_refused(k):
    X, y = data_of("class weights")
    with pytest.raises(LockstepError, match=r"drawn from numpy.random while model or loss were computed"):
        lockstep.train(
            model=made(lambda: nn.Linear(6, 5)), data=(X, y), batch_size=BATCH, devices=k, quiet=True,
            loss=lambda output, y: F.cross_entropy(output, y, reduction="none") * np.random.rand(),
        )  # fmt: skip


def test_one_label_for_each_sample_that_is_ignored_needs_the_loss_that_counts_the_others():
    X, y = data_of("class weights")
    y[::3] = IGNORED
    how = {"data": (X.numpy(), y.numpy()), "batch_size": BATCH, "epochs": 1, "lr": 0.1, "quiet": True}
    with pytest.raises(LockstepError, match=r"labels of -100.*loss=nn.CrossEntropyLoss\(\)"):
        lockstep.train(model=made(lambda: nn.Linear(6, 5)), **how)
    result = lockstep.train(model=made(lambda: nn.Linear(6, 5)), loss=nn.CrossEntropyLoss(), **how)
    _, _, first_loss = plain_loop(made(lambda: nn.Linear(6, 5)), nn.CrossEntropyLoss(), X, y)
    assert result.first_loss == pytest.approx(first_loss, abs=1e-5)
    with lockstep.Trainer(made(lambda: nn.Linear(6, 5)), loss=nn.CrossEntropyLoss(), metrics="accuracy") as trainer:
        counted = y != IGNORED
        expected = (trainer.module(X).argmax(1) == y)[counted].float().mean()
        assert trainer.evaluate((X, y))["accuracy"] == pytest.approx(float(expected))


OTHERS = {
    "margin": nn.MultiMarginLoss(), "soft margin": nn.SoftMarginLoss(), "poisson": nn.PoissonNLLLoss(),
    "multi-label": nn.MultiLabelSoftMarginLoss(),
}  # fmt: skip


@pytest.mark.parametrize("case", OTHERS)
def test_other_loss_modules_that_return_a_mean_are_exact(case):
    loss, (X, y) = OTHERS[case], data_of("class weights")
    if case != "margin":
        y = torch.randint(2, (50, 5), generator=torch.Generator().manual_seed(1)).float()
    y = 2 * y - 1 if case == "soft margin" else y
    with lockstep.Trainer(made(lambda: nn.Linear(6, 5)), loss=loss, devices=2, lr=0.1) as trainer:
        expected = loss(trainer.module(X), y).item()
        assert trainer.step((X, y)).loss == pytest.approx(expected, abs=1e-5)


def test_a_loss_module_that_returns_a_sum_is_refused():
    with pytest.raises(ConfigError, match=r"adds up over the samples.*reduction='mean'"):
        lockstep.Trainer(nn.Linear(6, 5), loss=nn.CrossEntropyLoss(reduction="sum"))
