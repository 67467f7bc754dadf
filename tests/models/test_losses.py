"""Losses and metrics: one number for each sample, and PyTorch's own values."""

import pytest
import torch
from torch.nn import functional as F

from lockstep.core.errors import ConfigError, RunError
from lockstep.models.losses import LOSSES, METRICS, first, summed


def test_cross_entropy_of_sequences_is_a_mean_over_positions():
    scores, y = torch.randn(4, 7, 5), torch.randint(7, (4, 5))
    values = LOSSES["cross_entropy"](scores, y)
    assert values.shape == (4,)
    torch.testing.assert_close(values.mean(), F.cross_entropy(scores, y))
    torch.testing.assert_close(
        METRICS["accuracy"](scores, y).float(), (scores.argmax(1) == y).float().mean(1), rtol=0, atol=1e-6
    )


@pytest.mark.parametrize(("name", "function"), [("mse", F.mse_loss), ("l1", F.l1_loss)])
@pytest.mark.parametrize("shape", [(6,), (6, 1), (6, 3, 2)])
def test_mse_and_l1_are_means_over_the_entries_of_a_sample(name, function, shape):
    predicted, y = torch.randn(shape), torch.randn(shape)
    values = LOSSES[name](predicted, y)
    assert values.shape == (6,)
    torch.testing.assert_close(values.mean(), function(predicted, y))


@pytest.mark.parametrize("name", ["mse", "l1", "bce"])
def test_a_column_is_compared_with_a_vector_entry_by_entry(name):
    predicted, y = torch.rand(6, 1), torch.rand(6)
    torch.testing.assert_close(LOSSES[name](predicted, y), LOSSES[name](predicted[:, 0], y))


def test_positions_with_the_label_minus_100_do_not_count():
    scores, y = torch.randn(1, 7, 5), torch.randint(7, (1, 5))
    y[0, 2:] = -100
    torch.testing.assert_close(LOSSES["cross_entropy"](scores, y)[0], F.cross_entropy(scores, y))
    expected = (scores[:, :, :2].argmax(1) == y[:, :2]).double().mean(1)
    torch.testing.assert_close(METRICS["accuracy"](scores, y), expected)


def test_soft_labels():
    scores, y = torch.randn(4, 3), torch.rand(4, 3).softmax(1)
    torch.testing.assert_close(LOSSES["cross_entropy"](scores, y).mean(), F.cross_entropy(scores, y))
    right, counted = METRICS["accuracy"](scores, y)
    assert (int(right), int(counted)) == (int((scores.argmax(1) == y.argmax(1)).sum()), 4)


def test_sums_are_not_computed_in_low_precision():
    values = torch.full((1000,), 1.01, dtype=torch.bfloat16)
    total = summed(lambda output, y: values, "loss", None, None, 1000).total
    assert total.dtype == torch.float32
    assert float(total) == pytest.approx(1000 * float(values[0]), rel=1e-6)


def test_shapes_that_would_be_broadcast_are_refused():
    for predicted, y in ((torch.zeros(4, 3), torch.zeros(4)), (torch.zeros(4), torch.zeros(4, 4))):
        with pytest.raises(RunError, match="They must be the same"):
            LOSSES["mse"](predicted, y)
    y = torch.rand(4, 1)
    torch.testing.assert_close(LOSSES["mse"](torch.zeros(4), y), y[:, 0].square())


def test_classes_come_second():
    with pytest.raises(RunError, match=r"Classes come second, as in PyTorch: \(samples, classes, positions\)"):
        LOSSES["cross_entropy"](torch.zeros(4, 5, 7), torch.zeros(4, 5, dtype=torch.int64))


def test_bce_takes_integer_targets():
    scores, y = torch.randn(6, 4), torch.randint(2, (6, 4))
    torch.testing.assert_close(LOSSES["bce"](scores, y).mean(), F.binary_cross_entropy_with_logits(scores, y.float()))


def test_the_scores_in_a_tuple_are_its_first_entry():
    scores = torch.zeros(2)
    assert first((scores, 1)) is scores
    assert first([(scores,), 2]) is scores
    with pytest.raises(ConfigError, match="The model returns a dict, and a named loss needs a tensor"):
        first({"logits": scores})
