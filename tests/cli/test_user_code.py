"""A model and data of the user's own, from the command line."""

import json

import numpy as np
import pytest

FILE = """
import torch
from torch import nn
from torch.nn import functional as F

def make_model():
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 3))

def make_data():
    generator = torch.Generator().manual_seed(0)
    X, y = torch.rand(90, 6, generator=generator), torch.randint(3, (90,), generator=generator)
    return (X[:64], y[:64]), (X[64:], y[64:])

def smooth(output, y):
    return F.cross_entropy(output, y, reduction="none", label_smoothing=0.1)

def adam(params):
    return torch.optim.Adam(params, lr=1e-2)

def fails():
    open("not/there")

number = 5
"""


@pytest.fixture
def own(lockstep, tmp_path, monkeypatch):
    """Runs a command in a folder with a file of the user's own."""
    (tmp_path / "own_file.py").write_text(FILE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(__import__("sys").modules, "own_file", raising=False)
    return lockstep


MINE = ("--model", "own_file:make_model", "--data", "own_file:make_data", "--batch-size", 32)
HOW = ("--optimizer", "adamw", "--lr", "1e-3", "--weight-decay", "0.01", "--warmup", 3, "--schedule", "cosine")


def test_a_users_model_and_data_train_the_same_on_any_devices_and_are_evaluated_again(own, tmp_path):
    answers = [
        own("train", *MINE, *HOW, "--epochs", 2, "--devices", k, "--out", f"run{k}", "--json") for k in (1, 2, 4)
    ]
    assert [answer.status for answer in answers] == [0, 0, 0], answers[0].err
    assert len({answer.json["weights_sha256"] for answer in answers}) == 1
    assert len({answer.json["buffers_sha256"] for answer in answers}) == 1
    assert "Sequential (99 parameters) on own_file:make_data (64 training and 26 test samples)" in answers[0].err
    assert "adamw, lr 0.001, weight decay 0.01, warm-up 3, cosine, exchange sharded" in answers[0].err
    assert "peak memory: cpu " in answers[0].err
    again = [own("evaluate", "run1", *MINE[:4], "--devices", k, "--json") for k in (1, 3, 11)]
    assert len({json.dumps(answer.json["metrics"]) for answer in again}) == 1
    assert again[0].json["metrics"] == answers[0].json["metrics"]
    assert again[0].json["weights_sha256"] == answers[0].json["weights_sha256"]


def test_a_runs_record_does_not_decide_what_code_is_run(own, tmp_path):
    own("train", *MINE, "--epochs", 1, "--out", "run")
    refused = own("evaluate", "run")
    assert refused.status == 2
    assert refused.err == (
        "lockstep: The model of the run in run is code of your own, own_file:make_model. Lockstep never "
        "imports code that only config.json names: add --model own_file:make_model.\n"
    )
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    (tmp_path / "evil.py").write_text("open('broken-in', 'w')")
    for name in ("model", "data", "loss"):
        (tmp_path / "run" / "config.json").write_text(json.dumps({**config, "model": "lenet", name: "evil:f"}))
        assert own("evaluate", "run").status == 2
    assert not (tmp_path / "broken-in").exists()


def test_a_users_loss_and_optimizer(own):
    answer = own("train", *MINE, "--loss", "own_file:smooth", "--optimizer", "own_file:adam", "--epochs", 1, "--json")
    assert answer.status == 0, answer.err
    assert answer.json["test_accuracy"] is None
    assert set(answer.json["metrics"]) == {"loss"}
    assert "lr " not in answer.err


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            ("--model", "own_file:missing"),
            "own_file has no missing for the model. It has: make_model, make_data, smooth, adam, fails.",
        ),
        (("--model", "own_file:number"), "The model is a int. Give a torch.nn.Module, or a function that makes one."),
        (("--data", "own_file:number"), "The data own_file:number is a int. Name a function that returns the data."),
        (("--model", "own_file:make_modle"), "own_file has no make_modle for the model. Did you mean 'make_model'?"),
        (
            ("--optimizer", "own_file:adam", "--lr", "0.1"),
            "The optimizer is made by own_file:adam: set the learning rate",
        ),
        (
            ("--data", "own_file:fails"),
            "The function for the data failed: FileNotFoundError: [Errno 2] No such file or",
        ),
        (("--optimizer", "adamm"), "There is no optimizer called 'adamm'. Did you mean 'adam'?"),
        (
            ("--schedule", "cosin"),
            "schedule must be constant, cosine or linear, got 'cosin' (--schedule). Did you mean 'cosine'?",
        ),
        (("--momentum", "1.5"), "momentum must be at least 0 and less than 1, got 1.5 (--momentum)."),
        (("--optimizer", "adam", "--momentum", "0.5"), "Momentum belongs to sgd, and the optimizer is adam."),
        (("--weight-decay", "-1"), "weight decay must be at least 0, got -1.0 (--weight-decay)."),
        (("--clip-norm", "0"), "clip norm must be more than 0, got 0.0 (--clip-norm)."),
        (("--warmup", "-1"), "warmup must be at least 0, got -1 (--warmup)."),
        (("--workers", "-1"), "workers must be at least 0 and at most 256, got -1 (--workers)."),
        (("--precision", "fp8"), "precision must be bf16, fp32 or tf32, got 'fp8' (--precision)."),
        (("--batch-norm", "global"), "batch norm must be shard or sync, got 'global' (--batch-norm)."),
        (("--backend", "numpy"), "own_file:make_model needs --backend torch. In numpy, use --model lenet."),
    ],
)
def test_wrong_settings_are_status_2_in_one_line_and_nothing_is_written(own, tmp_path, arguments, sentence):
    answer = own("train", *MINE, "--epochs", 1, *arguments)
    assert answer.status == 2
    assert answer.err.startswith(f"lockstep: {sentence}")
    assert len(answer.err.splitlines()) == 1
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("model", ["lenet-bn", "mlp"])
def test_built_in_models_train_and_are_evaluated(lockstep, tiny, model):
    answer = lockstep("train", "--model", model, "--data", tiny, "--lr", 0.05, "--epochs", 1, "--out", "run", "--json")
    assert answer.status == 0, answer.err
    again = [lockstep("evaluate", "run", "--devices", k, "--json").json for k in (1, 3)]
    assert again[0]["metrics"] == again[1]["metrics"] == answer.json["metrics"]


def test_the_transformer_takes_tokens_from_a_file(lockstep, tmp_path):
    tokens = np.arange(9 * 20).reshape(20, 9) % 11
    X, y = tokens[:, :-1], tokens[:, 1:]
    np.savez(tmp_path / "tokens.npz", X_train=X, y_train=y, X_test=X, y_test=y)
    settings = ("--model", "transformer", "--data", "tokens.npz", "--batch-size", 10, "--epochs", 1, "--json")
    answers = [lockstep("train", *settings, "--optimizer", "adamw", "--devices", k) for k in (1, 3)]
    assert [answer.status for answer in answers] == [0, 0], answers[0].err
    assert answers[0].json["weights_sha256"] == answers[1].json["weights_sha256"]
    refused = lockstep("train", *settings, "--model", "lenet")
    assert "lenet takes samples of shape 1x28x28" in refused.err


@pytest.mark.parametrize("optimizer", ["adam", "adamw"])
def test_lenet_in_every_framework_has_the_same_optimizers(lockstep, few, optimizer):
    settings = (
        "--data",
        few,
        "--batch-size",
        8,
        "--epochs",
        1,
        "--optimizer",
        optimizer,
        "--clip-norm",
        1,
        "--warmup",
        2,
    )
    for backend in ("torch", "numpy"):
        answers = [lockstep("train", *settings, "--backend", backend, "--devices", k, "--json") for k in (1, 3)]
        assert [answer.status for answer in answers] == [0, 0], answers[0].err
        assert answers[0].json["weights_sha256"] == answers[1].json["weights_sha256"]


def test_settings_that_lenet_does_not_have_are_refused(lockstep, few):
    for option, value in (("--batch-norm", "sync"), ("--precision", "bf16"), ("--loss", "mse")):
        answer = lockstep("train", "--data", few, "--batch-size", 8, option, value)
        assert answer.status == 2
        assert f"lenet is written for every framework and has no {option} {value}." in answer.err
