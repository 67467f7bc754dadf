"""How many samples and seconds until a run was good: at the end of the first epoch that was."""

import math
from dataclasses import replace

import pytest

from lockstep.config import RunConfig
from lockstep.core.errors import ConfigError
from lockstep.report.events import EpochDone, Result
from lockstep.training.compared_rows import Row
from lockstep.training.comparison import Comparison
from lockstep.training.time_to_target import Reached, Target, check_target, reached, target_of


def result(*accuracies, seconds=2.0, losses=None, num_train=1000):
    losses = losses or [1 / (number + 1) for number in range(len(accuracies))]
    history = [
        EpochDone(n, seconds, loss, acc) for n, (acc, loss) in enumerate(zip(accuracies, losses, strict=True), 1)
    ]
    return Result(
        test_accuracy=accuracies[-1], seconds_per_epoch=seconds, samples_per_second=num_train / seconds,
        backend="torch", backend_version="2", devices=["cpu:0"], steps=4, first_loss=1.0, weights_sha256="0" * 64,
        history=history, run=None, params={},
    )  # fmt: skip


def rows(*results, batches=(256, 512)):
    return [Row(vars(RunConfig(batch_size=batch)), found) for batch, found in zip(batches, results, strict=False)]


def test_the_first_epoch_that_is_good_counts():
    assert reached(result(0.5, 0.7, 0.9, 0.6), Target(0.7, True)) == Reached(2, 2000, 4.0)
    assert reached(result(0.5, 0.6), Target(0.7, True)) is None


def test_without_test_samples_the_training_loss_is_the_target():
    found = result(None, None, losses=[0.5, 0.2])
    assert target_of([found], None) == Target(0.2 / 0.95, False)
    assert reached(found, Target(0.3, False)) == Reached(2, 2000, 4.0)


def test_without_a_wish_the_target_is_nearly_the_best():
    assert target_of([result(0.5, 0.8), result(0.4, 0.4)], None) == Target(pytest.approx(0.76), True)
    assert target_of([result(0.5)], 0.7) == Target(0.7, True)
    assert math.isnan(target_of([replace(result(0.5), history=[])], None).value)


@pytest.mark.parametrize("wrong", [0.0, -1.0, math.nan, math.inf])
def test_a_target_that_means_nothing_is_refused(wrong):
    with pytest.raises(ConfigError, match="is no test accuracy"):
        check_target(wrong, is_accuracy=False)


def test_percents_are_refused():
    with pytest.raises(ConfigError, match=r"at most 1\. Write it like 0.8"):
        check_target(80, is_accuracy=True)
    check_target(80, is_accuracy=False)
    check_target(None, is_accuracy=True)


def test_a_comparison_has_samples_and_time_to_the_target_in_its_table_file_and_sentence():
    slow, fast = result(0.5, 0.8, seconds=4.0), result(0.4, 0.5, 0.85, seconds=1.0)
    found = Comparison(rows(slow, fast), wanted=0.8)
    titles, *lines = found.table()
    columns = [titles.index(title) for title in ("samples to 0.8", "sec to 0.8")]
    assert [[line[column] for column in columns] for line in lines] == [["2,000", "8.00"], ["3,000", "3.00"]]
    assert [(row["samples_to_target"], row["seconds_to_target"]) for row in found.plain()] == [(2000, 8.0), (3000, 3.0)]
    assert "ccuracy 0.8 was reached first by batch 512: 3,000 samples, 3.00 s (batch 256 needed 2,000" in str(found)


def test_a_run_that_never_was_good_says_so():
    found = Comparison(rows(result(0.5), result(0.9)), wanted=0.8)
    assert "not reached" in found.table()[1]
    assert found.plain()[0]["samples_to_target"] is None
    assert found.plain()[0]["seconds_to_target"] is None


def test_the_picture_has_the_samples_too():
    axes = Comparison(rows(result(0.5, 0.8), result(0.5))).plot().axes[1]
    assert [text.get_text() for text in axes.texts] == ["batch 256: 4 s, 2,000 samples", "batch 512: not reached"]
