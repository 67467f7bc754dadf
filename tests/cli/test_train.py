"""`lockstep train`: the contract of the command, and the same bits from the command line."""

import json
import os
import re
import signal
import subprocess
import sys

import numpy as np
import pytest
from safetensors.numpy import load_file

from lockstep.core.layout import sha256_of


@pytest.fixture(scope="module")
def known():
    """The hash of a run on one device, for each data and batch size; every other run must give it again."""
    return {}


# A choice from the grid of devices x exchanges x batch sizes; tests/runtime has all of it for single steps, and
# benchmarks/matrix.py runs all of it on the small dataset.
CASES = [("fashion-mnist-mini", k, "sharded", 256) for k in (2, 8)]
CASES += [("fashion-mnist-mini", "cpu:0,cpu:1", "sharded", 256), ("fashion-mnist-mini", 5, "tree", 256)]
CASES += [("tiny", k, "sharded", 256) for k in range(2, 9)]
CASES += [("tiny", k, exchange, 256) for exchange in ("gather", "tree") for k in (2, 5, 8)]
CASES += [("tiny", 3, "tree", 100), ("tiny", 8, "gather", 100)]
CASES += [("tiny", 3, "gather", 7), ("tiny", 8, "tree", 7)]
CASES += [("few", 2, "tree", 1), ("few", 8, "sharded", 1)]
NUM_SAMPLES = {"fashion-mnist-mini": 2000, "tiny": 260, "few": 24}


@pytest.mark.parametrize(("data", "devices", "exchange", "batch_size"), CASES)
def test_the_hash_does_not_depend_on_devices_or_exchange(lockstep, request, known, data, devices, exchange, batch_size):
    path = data if data == "fashion-mnist-mini" else request.getfixturevalue(data)
    how = ("train", "--data", path, "--batch-size", batch_size, "--epochs", 2, "--json")
    if (data, batch_size) not in known:
        known[data, batch_size] = lockstep(*how, "--devices", 1).json["weights_sha256"]
    answer = lockstep(*how, "--devices", devices, "--exchange", exchange)
    assert answer.status == 0, answer.err
    assert answer.json["weights_sha256"] == known[data, batch_size]
    assert answer.json["steps"] == 2 * -(-NUM_SAMPLES[data] // batch_size)


def test_the_hash_is_that_of_the_weights_on_disk(lockstep, tiny, tmp_path):
    answer = lockstep("train", "--data", tiny, "--devices", 2, "--epochs", 1, "--out", "run", "--json")
    run = tmp_path / "run"
    assert sorted(os.listdir(run)) == [
        "checkpoints",
        "config.json",
        "curve.png",
        "metrics.jsonl",
        "result.json",
        "weights.safetensors",
    ]
    weights = load_file(run / "weights.safetensors")
    order = ["W1", "b1", "W2", "b2", "W3", "b3", "W4", "b4"]
    assert sha256_of([weights[name] for name in order]) == answer.json["weights_sha256"]
    assert json.loads((run / "result.json").read_text()) == answer.json
    assert answer.json["run"] == "run"
    events = [json.loads(line)["event"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert events == ["started", "step", "step", "epoch", "done"]


def test_it_ends_with_the_two_lines_of_the_text(lockstep, tiny):
    answer = lockstep("train", "--data", tiny, "--devices", 2, "--epochs", 1)
    first, second = answer.out.splitlines()
    assert re.fullmatch(r"test acc: \d\.\d\d, \d+\.\d sec/epoch on \[cpu:0, cpu:1\]", first)
    assert re.fullmatch(r"weights sha256: [0-9a-f]{64}", second)
    assert "epoch 1/1" in answer.err


def test_json_is_one_object_with_the_promised_names(lockstep, tiny):
    answer = lockstep("train", "--data", tiny, "--devices", 2, "--epochs", 1, "--json")
    promised = {"test_accuracy", "seconds_per_epoch", "devices", "steps", "weights_sha256", "run"}
    assert promised <= set(answer.json)
    assert answer.json["devices"] == ["cpu:0", "cpu:1"]
    assert answer.out.count("\n") == 1


def test_without_out_every_run_gets_a_new_folder(lockstep, tiny, tmp_path):
    for _ in range(2):
        assert lockstep("train", "--data", tiny, "--devices", 1, "--epochs", 1).status == 0
    names = os.listdir(tmp_path / "runs")
    assert len(names) == 2
    assert all(name.startswith("lenet-tiny-") for name in names)


def test_a_quiet_run_says_where_it_was_recorded_unless_that_was_given(lockstep, few, tmp_path):
    settings = (
        "train",
        "--data",
        few,
        "--batch-size",
        8,
        "--devices",
        1,
        "--epochs",
        1,
        "--backend",
        "numpy",
        "--quiet",
    )
    answer = lockstep(*settings)
    (run,) = (tmp_path / "runs").iterdir()
    assert answer.err == f"recorded in runs/{run.name}\n"
    assert [line.partition(":")[0] for line in answer.out.splitlines()] == ["test acc", "weights sha256"]
    assert lockstep(*settings, "--out", "mine").err == ""
    assert lockstep(*settings, "--json").err == ""


WRONG = {
    "--devices 0": "0 devices",
    "--devices 9": "9 devices cannot share 8 shards",
    "--devices cuda:7": "There is no cuda:7",
    "--devices cpu:0,cpu:0": "cpu:0 is listed 2 times",
    "--devices cpu:0,cuda:0": "mixes CPU and GPU",
    "--devices tpu": "'tpu' is not the name of a device",
    "--batch-size 0": "batch size must be at least 1, got 0 (--batch-size).",
    "--batch-size 2001": "A batch of 2001 samples is larger than fashion-mnist-mini, which has 2000",
    "--batch-size many": "Invalid value for '--batch-size'",
    "--lrate 0.1": "No such option: --lrate",
    "--out /proc/nowhere": "/proc/nowhere cannot be made",
    "--data-dir nowhere --data fashion-mnist": "There is no folder",
    "--lr 0": "learning rate must be more than 0, got 0.0 (--lr).",
    "--lr nan": "learning rate must be more than 0, got nan (--lr).",
    "--epochs 0": "epochs must be at least 1, got 0 (--epochs).",
    "--shards 0": "shards must be at least 1 and at most 4096, got 0 (--shards).",
    "--seed -1": "seed must be at least 0 and at most 4294967295, got -1 (--seed).",
    "--model lenett": "no model called 'lenett'. Did you mean 'lenet'?",
    "--data fashion": "no dataset (or .npz file) called 'fashion'",
    "--data missing.npz": "missing.npz.",
    "--exchange rings": "Did you mean 'ring'?",
    "--engine threads": "engine must be auto, inprocess or processes, got 'threads' (--engine).",
    "--backend pytorch": "Did you mean 'torch'?",
}


@pytest.mark.parametrize("arguments", WRONG)
def test_wrong_settings_are_refused_in_one_line_before_anything_is_written(lockstep, tmp_path, arguments):
    answer = lockstep("train", "--data", "fashion-mnist-mini", *arguments.split())
    assert answer.status == 2
    assert answer.out == ""
    assert WRONG[arguments] in answer.err
    assert answer.err.startswith("lockstep: ")
    assert answer.err.count("\n") == 1
    assert os.listdir(tmp_path) == []


def test_a_value_that_is_no_number_is_shown(lockstep):
    for arguments in (["--lr", "abc"], ["--lr=abc"]):
        answer = lockstep("train", *arguments)
        assert answer.status == 2
        assert "'--lr'" in answer.err
        assert answer.err.endswith(". Got 'abc'. See lockstep train --help.\n")
        assert answer.err.count("\n") == 1


def test_a_run_is_never_written_over(lockstep, tiny):
    arguments = ("train", "--data", tiny, "--devices", 1, "--epochs", 1, "--out", "run")
    assert lockstep(*arguments).status == 0
    again = lockstep(*arguments)
    assert again.status == 2
    assert "run is not empty" in again.err


def test_data_of_another_shape_is_refused(lockstep, tmp_path):
    X, y = np.zeros((300, 32, 32), np.uint8), np.zeros(300, int)
    np.savez(tmp_path / "large.npz", X_train=X, y_train=y, X_test=X, y_test=y)
    answer = lockstep("train", "--data", "large.npz")
    assert answer.status == 2
    assert "lenet takes samples of shape 1x28x28, and those of" in answer.err
    X, y = np.zeros((300, 28, 28), np.uint8), np.arange(300) % 12
    np.savez(tmp_path / "labels.npz", X_train=X, y_train=y, X_test=X, y_test=y)
    answer = lockstep("train", "--data", "labels.npz")
    assert answer.status == 2
    assert "labels.npz has labels up to 11" in answer.err


def test_a_loss_that_is_no_longer_a_number_stops_the_run_and_its_metrics_are_kept(lockstep, tiny, tmp_path):
    answer = lockstep("train", "--data", tiny, "--devices", 2, "--lr", 1e30, "--batch-size", 100, "--out", "run")
    assert answer.status == 1
    assert answer.out == ""
    assert re.search(r"lockstep: epoch 1, step \d: the loss is NaN or infinite\. .*too large", answer.err)
    assert "The metrics are in run." in answer.err
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["event"] == "stopped"
    assert lines[-1]["epoch"] == 1
    assert not (tmp_path / "run" / "result.json").exists()


def test_finished_epochs_are_kept_when_the_loss_is_no_longer_a_number(lockstep, tiny, tmp_path, monkeypatch):
    from lockstep.backends import load_backend

    torch, calls = load_backend("torch"), iter(range(10**6))
    real = torch.value_and_grad

    def spoilt(*arguments):
        loss, gradient = real(*arguments)
        return (loss * float("nan") if next(calls) >= 5 * 8 else loss), gradient  # after five steps of 8 shards

    monkeypatch.setattr(torch, "value_and_grad", spoilt)
    answer = lockstep(
        "train", "--data", tiny, "--devices", 1, "--batch-size", 100, "--epochs", 3, "--out", "run", "--verify-every", 0
    )
    assert answer.status == 1
    assert "epoch 2, step 6: the loss is NaN or infinite" in answer.err
    assert "the weights after epoch 1 are in run. To start over" in answer.err
    assert sorted(os.listdir(tmp_path / "run")) == [
        "checkpoints",
        "config.json",
        "curve.png",
        "metrics.jsonl",
        "weights.safetensors",
    ]
    assert lockstep("evaluate", "run").status == 0


def test_weights_that_are_no_longer_numbers_stop_the_run_too(lockstep, few, monkeypatch):
    """The last update of an epoch can overflow after a finite loss."""
    from lockstep.backends import load_backend

    torch = load_backend("torch")
    real = torch.value_and_grad

    def spoilt(*arguments):
        loss, gradient = real(*arguments)
        return loss, gradient * float("inf")

    monkeypatch.setattr(torch, "value_and_grad", spoilt)
    answer = lockstep("train", "--data", few, "--devices", 1, "--batch-size", 24, "--epochs", 2, "--out", "run")
    assert answer.status == 1
    assert "epoch 1, step 1: a weight is NaN or infinite" in answer.err


def test_ctrl_c_while_an_event_is_recorded_stops_the_run_with_its_own_message(lockstep, few, tmp_path, monkeypatch):
    from lockstep.report.runlog import RunLog

    real = RunLog._line

    def interrupted_once(log, kind, fields):
        real(log, kind, fields)
        if kind == "epoch":
            raise KeyboardInterrupt

    monkeypatch.setattr(RunLog, "_line", interrupted_once)
    answer = lockstep("train", "--data", few, "--devices", 1, "--batch-size", 24, "--epochs", 9, "--out", "run")
    assert answer.status == 130
    assert "interrupted after step 1. The metrics and the weights after epoch 1 are in run." in answer.err
    assert (tmp_path / "run" / "weights.safetensors").is_file()


def test_a_failure_on_a_rank_is_status_1_and_named(lockstep, tiny, monkeypatch):
    from lockstep.backends import load_backend

    def fails(*_):
        raise RuntimeError("the kernel is broken")

    monkeypatch.setattr(load_backend("torch"), "value_and_grad", fails)
    answer = lockstep("train", "--data", tiny, "--devices", 2, "--epochs", 1)
    assert answer.status == 1
    assert "rank 0 (cpu:0), during forward and backward: RuntimeError: the kernel is broken" in answer.err


def test_ctrl_c_ends_the_run_with_status_130(tmp_path, few):
    arguments = f"train --data {few} --batch-size 8 --devices 2 --epochs 100000 --backend numpy"
    with subprocess.Popen(
        [sys.executable, "-m", "lockstep", *arguments.split()],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # ignored in a background process
    ) as process:
        try:
            assert process.stderr is not None
            assert any(line.startswith("epoch") for line in process.stderr)
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 130, err
    assert out == ""
    assert "lockstep: interrupted after step " in err
    (run,) = (tmp_path / "runs").iterdir()
    assert f"A checkpoint is in runs/{run.name}/checkpoints/step-" in err
    assert f"Resume with: lockstep train --resume --out runs/{run.name}" in err
    assert "Traceback" not in err
    assert {"checkpoints", "config.json", "curve.png", "metrics.jsonl", "weights.safetensors"} == set(os.listdir(run))
    assert json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])["reason"] == "interrupted"


def test_a_run_continues_when_the_reader_of_its_progress_is_gone(tmp_path, few):
    arguments = f"train --data {few} --batch-size 8 --epochs 3 --devices 1 --backend numpy --out run"
    command = f"{sys.executable} -m lockstep {arguments} 2>&1 >result | head -n 1"
    subprocess.run(["bash", "-c", command], cwd=tmp_path, check=True, stdout=subprocess.DEVNULL)
    assert (tmp_path / "run" / "result.json").is_file()
    assert "weights sha256" in (tmp_path / "result").read_text()


def test_a_result_that_cannot_be_printed_is_an_error_of_one_line(tmp_path, few):
    arguments = f"train --data {few} --batch-size 8 --epochs 1 --devices 1 --backend numpy --out run"
    command = f"unset PYTHONUNBUFFERED; {sys.executable} -m lockstep {arguments} >/dev/full"
    done = subprocess.run(["bash", "-c", command], cwd=tmp_path, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 1
    assert "lockstep: standard output cannot be written: No space left on device." in done.stderr
    assert "Traceback" not in done.stderr


def test_a_batch_that_does_not_fill_the_shards_is_noted(lockstep, few):
    answer = lockstep("train", "--data", few, "--batch-size", 7, "--devices", 1, "--epochs", 1)
    assert "A batch of 7 fills only 7 of the shards." in answer.err
