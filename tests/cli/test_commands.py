"""The other commands: evaluate, compare, devices, data; and the start of the program."""

import csv
import json
import subprocess
import sys

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import lockstep as package


@pytest.fixture
def run(lockstep, few):
    answer = lockstep(
        "train", "--data", few, "--devices", 2, "--epochs", 2, "--batch-size", 8, "--out", "run", "--json"
    )
    assert answer.status == 0
    return answer.json


def test_help_names_every_command(lockstep):
    answer = lockstep("--help")
    assert answer.status == 0
    for command in ("train", "evaluate", "compare", "report", "runs", "bench", "devices", "data"):
        assert f"│ {command} " in answer.out
        assert lockstep(command, "--help").status == 0


IMPORTS = """
import sys

import lockstep.cli

heavy = {"torch", "paddle", "mxnet", "jax", "numpy", "rich", "matplotlib", "safetensors"}
assert not heavy & set(sys.modules), heavy & set(sys.modules)
heavy -= {"rich"}  # which draws the help
for arguments in (["--help"], ["train", "--help"]):
    try:
        lockstep.cli.main(arguments)
    except SystemExit as end:
        assert not end.code
assert not heavy & set(sys.modules), heavy & set(sys.modules)
"""


def test_the_command_line_and_its_help_import_no_framework_and_no_numpy():
    subprocess.run([sys.executable, "-c", IMPORTS], check=True, stdout=subprocess.DEVNULL)


def test_version(lockstep):
    assert lockstep("--version").out == f"lockstep {package.__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("trian", "lockstep: No such command 'trian'. Did you mean 'train'? See lockstep --help.\n"),
        ("devices --jason", "No such option: --jason"),
        ("evaluate", " See lockstep evaluate --help.\n"),
    ],
)
def test_a_usage_error_is_one_line(lockstep, arguments, sentence):
    answer = lockstep(*arguments.split())
    assert answer.status == 2
    assert sentence in answer.err
    assert answer.err.count("\n") == 1
    assert ".." not in answer.err
    assert "?." not in answer.err


def test_without_a_command_the_help_is_shown(lockstep):
    answer = lockstep()
    assert "Usage: lockstep" in answer.out + answer.err


@pytest.mark.parametrize("k", [1, 2, 3, 11])
def test_evaluate_gives_the_accuracy_of_the_run_on_any_number_of_devices(lockstep, run, k):
    answer = lockstep("evaluate", "run", "--devices", k, "--json")
    assert answer.status == 0
    assert answer.json["test_accuracy"] == run["test_accuracy"]
    assert answer.json["weights_sha256"] == run["weights_sha256"]
    assert answer.json["num_samples"] == 10
    assert len(answer.json["devices"]) == k


def test_evaluate_prints_two_lines(lockstep, run):
    first, second = lockstep("evaluate", "run", "--devices", 2).out.splitlines()
    assert first.startswith("test acc: ")
    assert first.endswith("of 10) on [cpu:0, cpu:1]")
    assert second == f"weights sha256: {run['weights_sha256']}"


def test_evaluate_refuses_what_is_not_a_run(lockstep, tmp_path):
    (tmp_path / "empty").mkdir()
    for folder in ("empty", "nowhere"):
        answer = lockstep("evaluate", folder)
        assert answer.status == 2
        assert answer.err == (
            f"lockstep: {folder} is not a run: it has no config.json. Give the folder of one, like runs/NAME.\n"
        )


DAMAGE = {
    "another tensor": (lambda w: {**w, "W9": w["b1"]}, "has W1, W2, W3, W4, W9"),
    "a tensor less": (lambda w: {n: a for n, a in w.items() if n != "b4"}, "needs W1, b1"),
    "another shape": (lambda w: {**w, "b1": np.zeros(21, np.float32)}, "b1 is float32 of shape (21,)"),
    "another type": (lambda w: {**w, "b1": w["b1"].astype(np.float64)}, "b1 is float64"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_evaluate_refuses_weights_that_are_not_the_models(lockstep, run, tmp_path, damage):
    change, sentence = DAMAGE[damage]
    path = tmp_path / "run" / "weights.safetensors"
    save_file(change(load_file(path)), path)
    answer = lockstep("evaluate", "run")
    assert answer.status == 2
    assert sentence in answer.err


@pytest.mark.parametrize("settings", [{"model": 3}, {"model": "alexnet"}, {"backend": None}, {"data": ["x"]}], ids=str)
def test_evaluate_refuses_forged_settings(lockstep, run, tmp_path, settings):
    path = tmp_path / "run" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))
    answer = lockstep("evaluate", "run")
    assert answer.status == 2
    assert answer.err.startswith("lockstep: ")
    assert answer.err.count("\n") == 1


def test_compare_trains_the_sweep_and_sums_it_up(lockstep, tiny, tmp_path):
    answer = lockstep(
        "compare",
        "--data",
        tiny,
        "--devices",
        "1,2",
        "--batch-size",
        20,
        "--lr",
        "0.1,0.2",
        "--epochs",
        2,
        "--out",
        "grid",
    )
    assert answer.status == 0, answer.err
    assert "1 and 2 devices end with the same weights, bit for bit" in answer.out
    assert "times as many samples a second as 1, a scaling efficiency of" in answer.out
    assert [line for line in answer.err.splitlines() if line.startswith("run ")] == [
        "run 1 of 4: k1-batch20-lr0.1",
        "run 2 of 4: k2-batch20-lr0.1",
        "run 3 of 4: k1-batch20-lr0.2",
        "run 4 of 4: k2-batch20-lr0.2",
    ]
    with (tmp_path / "grid" / "compare.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["num_devices"], row["batch_size"], row["learning_rate"]) for row in rows] == [
        ("1", "20", "0.1"),
        ("2", "20", "0.1"),
        ("1", "20", "0.2"),
        ("2", "20", "0.2"),
    ]
    assert rows[0]["weights_sha256"] == rows[1]["weights_sha256"] != rows[2]["weights_sha256"]
    assert (tmp_path / "grid" / "compare.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "grid" / "k2-batch20-lr0.2" / "weights.safetensors").is_file()


def test_compare_scales_the_batch_with_the_devices(lockstep, few):
    arguments = ("compare", "--data", few, "--devices", "1,2", "--batch-size", "10", "--scale-batch", "--epochs", 1)
    answer = lockstep(*arguments, "--lr", "0.1,0.2", "--json")
    assert [row["batch_size"] for row in answer.json["rows"]] == [10, 20, 10, 20]
    assert "the best learning rate is" in answer.json["sentence"].lower()
    assert "for batch 10, " in answer.json["sentence"]
    assert "samples a second" not in answer.json["sentence"], "a speed-up is one at equal batch"


@pytest.mark.parametrize("engine", ["inprocess", "processes"])
def test_a_run_of_a_sweep_that_diverges_is_named_and_the_others_are_trained(lockstep, few, engine):
    arguments = ("compare", "--data", few, "--devices", "1,2", "--batch-size", 8, "--epochs", 2, "--engine", engine)
    for more in ((), ("--resume",)):
        answer = lockstep(*arguments, "--lr", "1e30,0.1", "--out", "grid", "--json", *more)
        assert answer.status == 0, answer.err
        assert [row["learning_rate"] for row in answer.json["rows"]] == [0.1, 0.1]
        assert list(answer.json["diverged"]) == ["k1-batch8-lr1e+30", "k2-batch8-lr1e+30"]
        assert "Diverged: k1-batch8-lr1e+30 (epoch 1, step 2: the loss is NaN or infinite); " in answer.json["sentence"]
    alone = lockstep(*arguments, "--lr", "1e30")
    assert alone.status == 1
    assert "All runs have diverged: k1-batch8-lr1e+30 (epoch 1, step 2: " in alone.err


def test_compare_resumes_and_trains_nothing_twice(lockstep, few, tmp_path):
    arguments = ("compare", "--data", few, "--batch-size", 8, "--epochs", 2, "--lr", "0.1", "--out", "grid", "--json")
    first = lockstep(*arguments)
    assert first.status == 0, first.err
    assert lockstep(*arguments).status == 2, "a folder that is not empty needs --resume"
    (tmp_path / "grid" / "k2-batch8-lr0.1" / "result.json").unlink()
    (tmp_path / "grid" / "compare.csv").unlink()
    again = lockstep(*arguments, "--resume")
    assert again.status == 0, again.err
    assert "the run is done" in again.err
    assert again.err.count("on 1 logical CPU device [") == 0, "the first was finished"
    hashes = [[row["weights_sha256"] for row in answer.json["rows"]] for answer in (first, again)]
    assert hashes[0] == hashes[1]
    assert (tmp_path / "grid" / "compare.csv").is_file()
    assert lockstep("compare", "--resume").status == 2
    longer = lockstep(*arguments, "--resume", "--epochs", 3)
    assert longer.status == 0, longer.err
    assert [row["steps"] for row in longer.json["rows"]] == [9, 9], "three epochs of three steps"
    other = lockstep(*arguments, "--resume", "--epochs", 3, "--seed", 5)
    assert other.status == 2
    assert "was started with --seed 0, and --seed 5 is another one. Leave --seed out" in other.err


def test_compare_sweeps_shards_exchange_engine_and_optimizer(lockstep, few):
    settings = ("--data", few, "--batch-size", 8, "--epochs", 1, "--devices", 2, "--quiet", "--json")
    answer = lockstep("compare", *settings, "--shards", "4,8", "--exchange", "sharded,tree", "--optimizer", "sgd,adam")
    assert answer.status == 0, answer.err
    rows = answer.json["rows"]
    assert len(rows) == 8
    by_setting = {(row["shards"], row["optimizer"]): set() for row in rows}
    for row in rows:
        by_setting[row["shards"], row["optimizer"]].add(row["weights_sha256"])
    assert [len(found) for found in by_setting.values()] == [1, 1, 1, 1]
    assert len({row["weights_sha256"] for row in rows}) == 4
    assert {row["learning_rate"] for row in rows} == {0.2, 0.001}


def test_compare_of_finished_runs(lockstep, few, tmp_path):
    for name, k in (("one", 1), ("two", 2)):
        settings = ("--data", few, "--batch-size", 8, "--epochs", 1, "--devices", k, "--out", name, "--quiet")
        assert lockstep("train", *settings).status == 0
    answer = lockstep("compare", "one", "two")
    assert answer.status == 0, answer.err
    assert "1 and 2 devices end with the same weights, bit for bit" in answer.out
    (tmp_path / "two" / "result.json").write_text("{}")
    answer = lockstep("compare", "one", "two")
    assert answer.status == 2
    assert "two is a run that has not finished" in answer.err


def test_compare_warns_when_devices_outnumber_cores(lockstep, few, monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    settings = ("--data", few, "--batch-size", 8, "--epochs", 1, "--devices", "1,3", "--json")
    assert "3 logical CPU devices share 2 cores" in lockstep("compare", *settings).json["sentence"]


def test_compare_shows_that_ring_does_not_keep_the_bits(lockstep, tiny):
    answer = lockstep(
        "compare", "--data", tiny, "--devices", "2,3", "--epochs", 2, "--exchange", "ring", "--json", "--batch-size", 5
    )
    assert (
        "the number of devices changed the weights, because ring adds in an order of its own" in answer.json["sentence"]
    )


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("--devices one", "--devices one: not a list of numbers"),
        ("--devices 0,1", "0 is not a number of devices"),
        ("--devices 1,9", "9 devices cannot share 8 shards"),
        ("--lr fast", "--lr fast: not a list of numbers"),
        ("--lr 0.1,-1", "learning rate must be more than 0, got -1.0 (--lr)."),
        ("--batch-size 10,x", "--batch-size 10,x: not a list of numbers"),
    ],
)
def test_compare_refuses_wrong_settings_before_it_starts(lockstep, tiny, tmp_path, arguments, sentence):
    answer = lockstep("compare", "--data", tiny, *arguments.split())
    assert answer.status == 2
    assert sentence in answer.err
    assert not (tmp_path / "runs").exists()


def test_devices_lists_the_cpu_with_its_cores(lockstep):
    answer = lockstep("devices")
    assert answer.status == 0
    assert "cpu:0, cpu:1, ..." in answer.out
    assert "core" in answer.out
    rows = lockstep("devices", "--json").json["devices"]
    assert rows[-1]["device"] == "cpu:0"
    assert rows[-1]["num_cores"] >= 1


def test_data_shows_where_each_data_set_is(lockstep, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("lockstep.data.sources.SYSTEM_FOLDER", tmp_path / "nowhere")
    answer = lockstep("data")
    assert answer.status == 0
    assert "fashion-mnist: not on this machine; `lockstep data fashion-mnist --fetch` gets it" in answer.out
    assert "fashion-mnist-mini.npz" in answer.out


def test_data_verifies(lockstep, tiny):
    answer = lockstep("data", "fashion-mnist-mini", "--verify")
    assert "good: 2,000 training and 500 test samples of 1x28x28, 10 classes" in answer.out
    assert answer.status == 0
    assert "good: 260 training and 30 test samples" in lockstep("data", tiny).out


def test_data_refuses_unknown_and_missing_data_sets(lockstep, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("lockstep.data.sources.SYSTEM_FOLDER", tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    refused = {
        "data mnist": "no dataset",
        "data fashion-mnist --verify": "fashion-mnist is not on this machine",
        "data fashion-mnist --data-dir empty": "does not have Fashion-MNIST",
        "data --verify --data-dir nowhere": "There is no folder",
        "data missing.npz": "There is no file",
    }
    for arguments, sentence in refused.items():
        answer = lockstep(*arguments.split())
        assert answer.status == 2, arguments
        assert answer.out == "", arguments
        assert sentence in answer.err


def test_a_run_remembers_its_data_from_any_folder_and_knows_it_again(lockstep, few, tmp_path, monkeypatch):
    data = tmp_path / "data.npz"
    data.write_bytes(few.read_bytes())
    settings = ("--devices", 1, "--epochs", 1, "--batch-size", 10, "--out", "run")
    assert lockstep("train", "--data", "data.npz", *settings).status == 0
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert lockstep("evaluate", "../run").status == 0
    arrays = dict(np.load(data))
    np.savez(data, **{**arrays, "y_test": (arrays["y_test"] + 1) % 10})
    answer = lockstep("evaluate", "../run")
    assert answer.status == 2
    assert "is not the data that the run in ../run was trained on" in answer.err


def test_compare_checks_every_batch_before_the_first_run(lockstep, tiny, tmp_path):
    answer = lockstep("compare", "--data", tiny, "--devices", "1,2", "--batch-size", 200, "--scale-batch", "--out", "x")
    assert answer.status == 2
    assert "A batch of 400 samples is larger than" in answer.err
    assert not (tmp_path / "x").exists()


def test_compare_keeps_learning_rates_apart_that_are_almost_the_same(lockstep, few, tmp_path):
    arguments = ("compare", "--data", few, "--devices", 1, "--batch-size", 12, "--epochs", 1, "--out", "x")
    assert lockstep(*arguments, "--lr", "0.1234567,0.12345671").status == 0
    assert len([path for path in (tmp_path / "x").iterdir() if path.is_dir()]) == 2
