"""`lockstep.compare`: a sweep in Python, what it says, and how it shows itself."""

import numpy as np
import pytest

import lockstep
from lockstep.config import RunConfig
from lockstep.core.errors import ConfigError
from lockstep.report.events import EpochDone, Result
from lockstep.training.compared_rows import Row
from lockstep.training.comparison import Comparison
from lockstep.training.sweep_file import Sweep

SETTINGS = vars(RunConfig(data="fashion-mnist-mini", num_epochs=2, engine="inprocess"))


def row(k, batch=256, lr=0.2, accuracies=(0.5, 0.8), speed=1000.0, sha="ab", **more):
    """A run whose epochs of 2,000 samples all take the same time."""
    history = [EpochDone(number, 2000 / speed, 1.0, accuracy) for number, accuracy in enumerate(accuracies, 1)]
    result = Result(
        test_accuracy=accuracies[-1], seconds_per_epoch=2000 / speed, samples_per_second=speed, backend="torch",
        backend_version="2", devices=[f"cuda:{i}" for i in range(k)], steps=4, first_loss=2.3, weights_sha256=sha * 32,
        history=history, run=None, params={},
    )  # fmt: skip
    name = more.pop("name", "")
    return Row({**SETTINGS, "batch_size": batch, "learning_rate": lr, **more}, result, name)


def test_a_model_and_data_of_ones_own_are_compared(vectors, tmp_path):
    import torch

    torch.manual_seed(0)
    settings = {"model": torch.nn.Linear(6, 3), "data": vectors, "epochs": 2, "quiet": True}
    found = lockstep.compare([1, 2], batch_size=[10, 20], lr=[0.1], **settings, out=tmp_path / "grid")
    assert [(r.num_devices, r.batch_size) for r in found.rows] == [(1, 10), (2, 10), (1, 20), (2, 20)]
    hashes = [result.weights_sha256 for result in found.results]
    assert hashes[0] == hashes[1] != hashes[2] == hashes[3]
    assert (tmp_path / "grid" / "compare.png").is_file()
    assert "1 and 2 devices end with the same weights" in str(found)
    assert found._repr_html_().count("<tr>") == 5
    assert found.plot()._repr_png_().startswith(b"\x89PNG")


def test_a_speed_up_is_stated_at_equal_batch_only_and_with_its_efficiency():
    equal = Comparison([row(1), row(4, speed=3000.0)])
    assert "4 devices train 3.00 times as many samples a second as 1, a scaling efficiency of 75%" in equal.sentence()
    scaled = Comparison([row(1), row(4, batch=1024, speed=3000.0, sha="cd")])
    assert "samples a second" not in scaled.sentence()


def test_a_line_for_each_batch_answers_exercise_2_and_equal_runs_are_one_line():
    rows = [
        row(k, batch, lr, (0.5, 0.5 + lr + batch / 1000)) for batch in (16, 32) for lr in (0.1, 0.2) for k in (1, 2)
    ]
    rows[-1] = row(2, 32, 0.2, (0.5, 0.9), sha="ef")
    left, right = Comparison(rows).plot().axes
    assert [text.get_text() for text in left.get_legend().get_texts()] == [
        "k=1 and k=2, batch 16",
        "k=1, batch 32",
        "k=2, batch 32",
    ]
    assert left.get_xlabel() == "learning rate"
    assert len(right.patches) == 4


def test_the_time_until_a_run_was_good_enough():
    fast, never = row(1, 16, 0.2, (0.9, 0.9)), row(1, 32, 0.2, (0.2, 0.3), sha="cd")
    _, right = Comparison([fast, never]).plot().axes
    texts = [text.get_text() for text in right.texts]
    assert texts == ["batch 16: 2 s, 2,000 samples", "batch 32: not reached"]


def test_weights_that_differ_though_they_must_not_are_reported():
    assert "which must not happen: please report it" in Comparison([row(1), row(2, sha="cd")]).sentence()
    ring = Comparison([row(1, exchange="ring"), row(2, sha="cd", exchange="ring")])
    assert "because ring adds in an order of its own" in ring.sentence()


@pytest.mark.parametrize("given", ["1,2", [1, 2], (1, 2), np.array([1, 2]), range(1, 3)])
def test_values_are_a_list_or_text_with_commas(given):
    sweep = Sweep(RunConfig(), {"devices": given, "batch_size": 256}).runs()
    assert [config.devices for config in sweep] == ["cpu:0", "cpu:0,cpu:1"]


def test_every_optimizer_has_its_own_learning_rate_unless_one_is_given():
    grid = {"devices": 1, "batch_size": 8, "optimizer": "sgd,adam"}
    assert [config.learning_rate for config in Sweep(RunConfig(), grid).runs()] == [0.2, 0.001]
    assert [config.learning_rate for config in Sweep(RunConfig(), {**grid, "lr": 0.5}).runs()] == [0.5, 0.5]


@pytest.mark.parametrize(("name", "given"), [("devices", []), ("lr", "fast"), ("batch_size", [None])])
def test_what_is_no_list_is_refused(name, given):
    with pytest.raises(ConfigError, match=f"--{name.replace('_', '-')}"):
        Sweep(RunConfig(), {"devices": 1, "batch_size": 8, name: given}).runs()
