"""The two lines that a run ends with, and the result as plain values."""

import dataclasses

import pytest

import lockstep
from lockstep.report import run_picture


def test_a_run_ends_with_the_lines_of_the_text(make_result):
    result = make_result(test_accuracy=0.84, seconds_per_epoch=12.3, weights_sha256="0123456789abcdef" * 4)
    assert result.lines() == (
        "test acc: 0.84, 12.3 sec/epoch on [cpu:0, cpu:1]\n"
        "weights sha256: 0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef"
    )


@pytest.mark.parametrize(
    ("accuracy", "seconds", "devices", "line"),
    [
        (1.0, 0.04, ["cuda:0"], "test acc: 1.00, 0.0 sec/epoch on [cuda:0]"),
        (0.8461, 99.96, ["cuda:1", "cuda:1"], "test acc: 0.85, 100.0 sec/epoch on [cuda:1, cuda:1]"),
        (0.1, 7, ["cpu:0"], "test acc: 0.10, 7.0 sec/epoch on [cpu:0]"),
    ],
)
def test_accuracy_has_two_decimals_and_seconds_one(make_result, accuracy, seconds, devices, line):
    result = make_result(test_accuracy=accuracy, seconds_per_epoch=seconds, devices=devices)
    assert result.lines().splitlines()[0] == line


def test_without_accuracy_the_first_line_has_the_metrics_or_the_training_loss(make_result):
    result = make_result(test_accuracy=None, metrics={"loss": 0.123456, "mse": 2.0})
    assert result.lines().startswith("test loss: 0.1235, test mse: 2, 12.3 sec/epoch")
    assert make_result(test_accuracy=None).lines().startswith("train loss: 0.5, 12.3 sec/epoch")


def test_the_summary_has_everything_but_the_parameters(make_result):
    result = make_result()
    summary = result.summary()
    assert set(summary) == {field.name for field in dataclasses.fields(result)} - {
        "params",
        "buffers",
        "module",
        "ema",
        "trace",
    }
    assert summary["history"][1] == {
        "epoch": 2,
        "seconds": 12.68,
        "train_loss": 0.5,
        "test_accuracy": 0.8437,
        "metrics": {},
    }


def test_a_result_is_shown_without_its_parameters(make_result):
    assert "params" not in repr(make_result())


def test_a_stopped_run_is_shown_without_its_parameters(make_stopped):
    shown = repr(make_stopped(1))
    assert "weights" not in shown
    assert "reason='the loss is NaN or infinite'" in shown


def test_a_result_shows_itself_as_a_short_table(make_result, tmp_path):
    result = make_result(run=tmp_path / "run")
    text, page = repr(result), result._repr_html_()
    for words in ("0.8437", "0.5000", "2, 16", "cpu:0, cpu:1", "abababababababab...", str(tmp_path / "run")):
        assert words in text
        assert words in page
    assert len(text.splitlines()) < 12
    assert "array" not in text


def test_the_history_is_a_table_with_a_row_for_each_epoch(make_result):
    history = make_result().history
    assert [row["epoch"] for row in history.rows()] == [1, 2]
    assert repr(history).splitlines()[0].split() == ["epoch", "train_loss", "test_accuracy", "seconds"]
    assert history._repr_html_().count("<tr>") == 3
    assert history == make_result().history
    assert repr(make_result().summary()["history"]).startswith("[{")


def test_a_result_draws_its_curves(make_result):
    assert make_result().plot()._repr_png_().startswith(b"\x89PNG")


def test_a_result_draws_what_curve_png_shows(tmp_path, few, monkeypatch):
    """Title, caption and the losses of single batches: one function draws both."""
    drawn = []
    draw = run_picture.draw_curve
    monkeypatch.setattr(run_picture, "draw_curve", lambda *given: (drawn.append(given), draw(*given)))
    settings = {"batch_size": 8, "num_epochs": 2, "data": str(few), "backend": "numpy", "log_every": 1}
    result = lockstep.train(2, **settings, out=tmp_path / "run", quiet=True)
    ((history, _, caption, steps),) = drawn
    figure = result.plot()
    assert caption.title == figure.get_suptitle() == "lenet on few.npz"
    assert "batch 8 in 8 shards; sgd, lr 0.2; seed 0; 2 of 2 epochs" in " ".join(figure.get_supxlabel().split())
    assert " ".join(figure.get_supxlabel().split()) == " ".join(caption.settings.split())
    assert figure.axes[0].lines[0].get_xydata().tolist() == [list(point) for point in steps]
    assert len(steps) == 6
    assert len(history) == 2
    unrecorded = lockstep.train(2, **settings, quiet=True).plot()
    assert unrecorded.get_suptitle() == "lenet on few.npz"
