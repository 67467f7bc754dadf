"""`loss="model"`: the loss that a model computes itself, as one of the whole batch for any devices and shards."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import lockstep
from lockstep.core.errors import LockstepError

IGNORED = -100
NUM_SAMPLES, LENGTH = 18, 7  # not divisible by the shards


class OwnLoss(nn.Module):
    """Scores for tokens, and a loss of its own from `loss_of`."""

    def __init__(self, loss_of, num_scores=5):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.score, self.loss_of = nn.Embedding(11, 8), nn.Linear(8, num_scores), loss_of

    def forward(self, input_ids, labels):
        scores = self.score(torch.tanh(self.embed(input_ids)))
        return SimpleNamespace(loss=self.loss_of(scores, labels), logits=scores)


def next_token(scores, labels):
    return F.cross_entropy(scores[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def masked_token(scores, labels):
    return F.cross_entropy(scores.flatten(0, 1), labels.flatten())


def of_sequence(scores, labels):
    return F.cross_entropy(scores.mean(1), labels)


def number(scores, labels):
    return F.mse_loss(scores.mean((1, 2)), labels)


def without_ignored(scores, labels):
    assert int(labels.min()) >= 0, "a label is negative"
    return F.cross_entropy(scores.mean(1), labels)


def batch_of(kind):
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(11, (NUM_SAMPLES, LENGTH), generator=draw)
    labels = torch.randint(5, (NUM_SAMPLES, LENGTH), generator=draw)
    labels[torch.rand(NUM_SAMPLES, LENGTH, generator=draw) < 0.5] = IGNORED
    by_sample = torch.randint(5, (NUM_SAMPLES,), generator=draw)
    kinds = {"tokens": labels, "labels": by_sample, "numbers": torch.randn(NUM_SAMPLES, generator=draw)}
    return {"input_ids": ids, "labels": kinds[kind]}


LOSSES = {
    "next token": (next_token, "tokens"),
    "masked token": (masked_token, "tokens"),
    "sequence": (of_sequence, "labels"),
    "regression": (number, "numbers"),
    "labels that cannot be ignored": (without_ignored, "labels"),
}


@pytest.mark.parametrize("case", LOSSES)
def test_it_is_that_of_the_whole_batch(case):
    loss_of, kind = LOSSES[case]
    batch, plain, hashes = batch_of(kind), OwnLoss(loss_of), {}
    expected = plain(**batch).loss
    expected.backward()
    for k in (1, 2, 3):
        for shards in (4, 8):
            with lockstep.Trainer(OwnLoss(loss_of), loss="model", lr=1.0, devices=k, shards=shards) as trainer:
                before = trainer.weights()
                assert trainer.step(batch).loss == pytest.approx(expected.item(), abs=1e-6)
                hashes.setdefault(shards, set()).add(trainer.weights_sha256)
                after = trainer.weights()
            for name, param in plain.named_parameters():
                found = torch.from_numpy(before[name] - after[name])
                torch.testing.assert_close(found, param.grad, rtol=0, atol=1e-6)
    assert [len(found) for found in hashes.values()] == [1, 1]


def with_balance(scores, labels):
    """As mixtures of experts have it: what is added is a product of means over the whole batch."""
    share = scores.softmax(-1).mean((0, 1))
    return masked_token(scores, labels) + 5 * (share * share).sum()


def test_one_that_looks_across_the_batch_is_refused():
    with (
        lockstep.Trainer(OwnLoss(with_balance), loss="model", devices=2, lr=0.1) as trainer,
        pytest.raises(LockstepError, match=r"not a mean over its labels or samples.*over='batch'"),
    ):
        trainer.step(batch_of("tokens"))


def test_a_batch_without_names_is_refused():
    batch = batch_of("labels")
    with (
        lockstep.Trainer(OwnLoss(of_sequence), loss="model", devices=1, lr=0.1) as trainer,
        pytest.raises(LockstepError, match="needs batches that are dicts"),
    ):
        trainer.step((batch["input_ids"], batch["labels"]))
