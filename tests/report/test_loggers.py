"""Loggers: TensorBoard's own reader finds the curves; loggers of Lightning work unchanged; one process logs."""

import csv
import os
import time
import warnings

import pytest

import lockstep
from lockstep.core.errors import ConfigError, RunError
from lockstep.report.loggers import TensorBoard

SETTINGS = {"data": "fashion-mnist-mini", "batch_size": 250, "quiet": True}


class Recorded:
    """A logger with Lightning's methods that writes down its calls."""

    def __init__(self):
        self.params, self.metrics, self.statuses, self.processes = [], [], [], set()

    def log_hyperparams(self, params):
        self.params.append(params)

    def log_metrics(self, metrics, step=None):
        self.metrics.append((step, metrics))
        self.processes.add(os.getpid())

    def finalize(self, status):
        self.statuses.append(status)

    def curve(self, name):
        return {step: metrics[name] for step, metrics in self.metrics if name in metrics}


def curves_in(folder):
    """What TensorBoard itself reads from a folder: points by name."""
    with warnings.catch_warnings(action="ignore"):
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        found = EventAccumulator(str(folder))
        found.Reload()
    return {name: {p.step: p.value for p in found.Scalars(name)} for name in found.Tags()["scalars"]}


def test_tensorboards_own_reader_finds_the_curves_of_a_run(lockstep, tmp_path):
    answer = lockstep(
        "train", "--data", "fashion-mnist-mini", "--batch-size", 250, "--epochs", 2, "--logger", "tensorboard",
        "--log-every", 4, "--warmup", 8, "--out", "run", "--json",
    )  # fmt: skip
    assert answer.status == 0, answer.err
    found = curves_in(tmp_path / "run" / "tensorboard")
    history = answer.json["history"]
    assert list(found["train_loss"]) == [4, 8, 12, 16]
    assert found["learning_rate"] == pytest.approx({4: 0.1, 8: 0.2, 12: 0.2, 16: 0.2})
    assert found["test_accuracy"] == pytest.approx({8: history[0]["test_accuracy"], 16: history[1]["test_accuracy"]})
    assert found["epoch_train_loss"] == pytest.approx({8: history[0]["train_loss"], 16: history[1]["train_loss"]})
    assert all(speed > 0 for speed in found["samples_per_second"].values())


def test_a_run_that_is_resumed_continues_its_curves(tmp_path):
    def interrupt(run):
        if run.step == 12:
            raise KeyboardInterrupt

    settings = {**SETTINGS, "epochs": 2, "out": tmp_path / "run", "logger": "tensorboard", "log_every": 1}
    with pytest.raises(lockstep.LockstepError):
        lockstep.train(2, **settings, on_step=interrupt)
    lockstep.train(1, **settings, resume=True)
    found = curves_in(tmp_path / "run" / "tensorboard")
    assert list(found["train_loss"]) == list(range(1, 17))


def test_two_files_of_one_second_are_two(tmp_path, monkeypatch):
    now = time.time()
    monkeypatch.setattr("time.time", lambda: now)
    for step in (1, 2):
        board = TensorBoard(tmp_path)
        board.first_step = step
        board.log_metrics({"loss": float(step)}, step)
        board.finalize("success")
    assert curves_in(tmp_path) == {"loss": {1: 1.0, 2: 2.0}}


def test_any_object_with_the_methods_of_lightnings_loggers_is_called():
    logger = Recorded()
    result = lockstep.train(2, **SETTINGS, epochs=2, logger=logger, log_every=4)
    (params,) = logger.params
    assert (params["batch_size"], params["learning_rate"], params["devices"]) == (250, 0.2, "cpu:0,cpu:1")
    assert list(logger.curve("train_loss")) == [4, 8, 12, 16]
    assert logger.curve("test_accuracy") == {8: result.history[0].test_accuracy, 16: result.test_accuracy}
    assert logger.statuses == ["success"]


@pytest.mark.filterwarnings("ignore")
def test_a_csv_logger_of_lightning_works_unchanged(tmp_path):
    loggers = pytest.importorskip("pytorch_lightning.loggers", reason="pytorch-lightning is not installed")
    result = lockstep.train(2, **SETTINGS, epochs=2, logger=loggers.CSVLogger(tmp_path, name="mine"), log_every=4)
    (path,) = tmp_path.rglob("metrics.csv")
    with path.open() as file:
        rows = list(csv.DictReader(file))
    accuracies = [float(row["test_accuracy"]) for row in rows if row["test_accuracy"]]
    assert accuracies == [done.test_accuracy for done in result.history]
    assert [row["step"] for row in rows if row["train_loss"]] == ["4", "8", "12", "16"]
    assert "batch_size: 250" in (path.parent / "hparams.yaml").read_text()


def test_one_process_logs(tmp_path):
    class ToFile(Recorded):
        def log_metrics(self, metrics, step=None):
            with (tmp_path / "calls").open("a") as out:
                out.write(f"{os.getpid()} {step}\n")

    lockstep.train(2, **SETTINGS, epochs=1, logger=[ToFile()], log_every=8, engine="processes")
    calls = [line.split() for line in (tmp_path / "calls").read_text().splitlines()]
    assert [step for _, step in calls] == ["8", "8"]
    assert len({process for process, _ in calls}) == 1


def test_a_logger_that_fails_ends_the_run_and_is_named():
    class Broken(Recorded):
        def log_metrics(self, metrics, step=None):
            raise OSError("no space")

    logger = Broken()
    with pytest.raises(RunError, match=r"the logger Broken failed in log_metrics after step 1: OSError: no space"):
        lockstep.train(1, **SETTINGS, epochs=1, logger=logger)


def test_a_run_that_fails_is_finalized_as_failed():
    def fails(run):
        raise ValueError("no")

    logger = Recorded()
    with pytest.raises(RunError, match="on_epoch failed"):
        lockstep.train(1, **SETTINGS, epochs=1, logger=logger, on_epoch=fails)
    assert logger.statuses == ["failed"]


@pytest.mark.parametrize(
    ("logger", "sentence"),
    [
        (print, "The logger is a builtin_function_or_method without log_hyperparams. Give tensorboard, or an object"),
        ("tensorbord", "There is no logger called 'tensorbord'. Did you mean 'tensorboard'?"),
        ("tensorboard", "The logger tensorboard writes to the run's folder: name one"),
        ("nowhere:make", "The logger nowhere:make cannot be loaded: there is no module nowhere"),
    ],
)
def test_what_cannot_log_is_refused_before_the_run(logger, sentence):
    with pytest.raises(ConfigError) as refused:
        lockstep.train(1, **SETTINGS, logger=logger)
    assert sentence in str(refused.value)


def test_a_logger_is_named_on_the_command_line(lockstep, few, tmp_path):
    (tmp_path / "own_logger.py").write_text(
        "class Lines:\n"
        "    def log_hyperparams(self, params): pass\n"
        "    def log_metrics(self, metrics, step=None): print('LOGGED', step)\n"
        "    def finalize(self, status): print('ENDED', status)\n"
    )
    settings = ("--data", few, "--batch-size", 8, "--epochs", 1, "--quiet", "--log-every", 3)
    answer = lockstep("train", *settings, "--logger", "own_logger:Lines", "--out", "run")
    assert answer.out.splitlines()[:3] == ["LOGGED 3", "LOGGED 3", "ENDED success"]
    again = lockstep("train", "--resume", "--out", "run", "--epochs", 2, "--quiet")
    assert again.status == 0, again.err
    assert "LOGGED" not in again.out
