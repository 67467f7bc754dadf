"""`lockstep compare`: a sweep remembers its settings, is resumed with them, and finished runs are compared."""

import json
import os
import signal

import pytest

from lockstep.report.console import Console
from lockstep.report.events import EpochDone

SWEEP = ("--batch-size", 8, "--epochs", 1, "--devices", 1, "--lr", "0.1,0.3", "--quiet")


@pytest.fixture
def sweep(lockstep, few, tmp_path):
    """The folder of a finished sweep of two runs."""
    answer = lockstep("compare", "--data", few, *SWEEP, "--out", "grid")
    assert answer.status == 0, answer.err
    return tmp_path / "grid"


def test_finished_runs_with_other_settings_are_not_called_wrong(lockstep, few):
    settings = ("--data", few, "--batch-size", 8, "--quiet", "--backend", "numpy")
    assert lockstep("train", *settings, "--epochs", 1, "--devices", 1, "--out", "one").status == 0
    assert lockstep("train", *settings, "--epochs", 2, "--devices", 2, "--seed", 5, "--out", "two").status == 0
    answer = lockstep("compare", "one", "two")
    assert answer.status == 0, answer.err
    assert "please report it" not in answer.out
    assert "samples a second as" not in answer.out
    assert "differ in seed and epochs" in answer.out
    head, first, *_ = answer.out.splitlines()
    assert head.split()[:6] == ["run", "k", "batch", "lr", "seed", "epochs"]
    assert first.split()[:6] == ["one", "1", "8", "0.2", "0", "1"]


def test_a_sweep_is_resumed_with_its_own_settings(lockstep, sweep):
    (sweep / "k1-batch8-lr0.3" / "result.json").unlink()
    (sweep / "compare.csv").unlink()
    answer = lockstep("compare", "--resume", "--out", "grid", "--json")
    assert answer.status == 0, answer.err
    assert [(row["learning_rate"], row["batch_size"]) for row in answer.json["rows"]] == [(0.1, 8), (0.3, 8)]
    assert {path.name for path in sweep.iterdir() if path.is_dir()} == {"k1-batch8-lr0.1", "k1-batch8-lr0.3"}
    assert (sweep / "compare.csv").is_file()


@pytest.mark.parametrize(
    ("option", "sentence"),
    [
        ("--lr 0.5", "was started with --lr 0.1,0.3, and --lr 0.5 is another one"),
        ("--seed 3", "was started with --seed 0, and --seed 3 is another one"),
        ("--devices 1,2", "was started with --devices 1, and --devices 1,2"),
        ("--scale-batch --devices 2", "and --devices 2 is another one"),
        ("--model mlp", "with --model lenet, and --model mlp"),
        ("--data fashion-mnist-mini", "and --data fashion-mnist-mini is another one"),
    ],
)
def test_options_that_contradict_the_sweep_are_refused(lockstep, sweep, option, sentence):
    before = sorted(os.listdir(sweep))
    answer = lockstep("compare", "--resume", "--out", "grid", *option.split())
    assert answer.status == 2
    assert answer.err.startswith("lockstep: ")
    assert sentence in answer.err
    assert sorted(os.listdir(sweep)) == before


def test_the_same_options_once_more_another_target_and_more_epochs_are_no_contradiction(lockstep, few, sweep):
    again = lockstep("compare", "--resume", "--data", few, *SWEEP, "--target", 0.5, "--out", "grid", "--json")
    assert again.status == 0, again.err
    assert again.json["target"] == 0.5
    longer = lockstep("compare", "--resume", "--out", "grid", "--epochs", 2, "--json", "--quiet")
    assert [row["steps"] for row in longer.json["rows"]] == [6, 6]
    assert json.loads((sweep / "compare.json").read_text())["settings"]["num_epochs"] == 2


def test_where_there_is_no_sweep_nothing_is_started(lockstep, tmp_path):
    (tmp_path / "empty").mkdir()
    for folder in ("empty", "nowhere"):
        answer = lockstep("compare", "--resume", "--out", folder, "--epochs", 1)
        assert answer.status == 2
        assert f"There is no sweep in {folder} to resume" in answer.err
    assert os.listdir(tmp_path) == ["empty"]


HOSTILE = [
    "{",
    "[]",
    "{}",
    '{"grid": {"devices": 3}, "scale_batch": false, "target": null, "settings": {}}',
    '{"grid": {"devices": [1], "batch_size": [8], "rm": [1]}, "scale_batch": false, "target": null, "settings": {}}',
    '{"grid": {"devices": [-1], "batch_size": [8]}, "scale_batch": false, "target": null, "settings": {}}',
    '{"grid": {"devices": [1], "batch_size": [8]}, "scale_batch": false, "target": null, "settings": {"seed": "x"}}',
    '{"grid": {"devices": [1], "batch_size": [8]}, "scale_batch": false, "target": null, '
    '"settings": {"model": "os:getcwd"}}',
    '{"grid": {"devices": [1], "batch_size": [8], "optimizer": ["os:getcwd"]}, "scale_batch": false, "target": null, '
    '"settings": {}}',
]


@pytest.mark.parametrize("content", HOSTILE)
def test_a_forged_sweep_is_refused_with_a_sentence(lockstep, tmp_path, content):
    (tmp_path / "grid").mkdir()
    (tmp_path / "grid" / "compare.json").write_text(content)
    answer = lockstep("compare", "--resume", "--out", "grid")
    assert answer.status == 2, answer.err
    assert answer.err.startswith("lockstep: ")
    assert answer.err.count("\n") == 1
    assert os.listdir(tmp_path / "grid") == ["compare.json"]


def test_a_sweep_with_too_many_runs_is_refused(lockstep, tmp_path):
    (tmp_path / "grid").mkdir()
    grid = {"devices": [1], "batch_size": list(range(1, 200)), "lr": list(range(1, 200))}
    plain = {"grid": grid, "scale_batch": False, "target": None, "settings": {}}
    (tmp_path / "grid" / "compare.json").write_text(json.dumps(plain))
    answer = lockstep("compare", "--resume", "--out", "grid")
    assert answer.status == 2
    assert "39,601 runs" in answer.err


def test_ctrl_c_says_how_to_resume_the_sweep(lockstep, few, monkeypatch):
    show = Console.show

    def interrupted(self, event):
        show(self, event)
        if isinstance(event, EpochDone) and event.epoch == 2:
            signal.raise_signal(signal.SIGTERM)  # like SIGINT, which is ignored in what runs in the background

    monkeypatch.setattr(Console, "show", interrupted)
    settings = ("--data", few, "--batch-size", 8, "--epochs", 4, "--devices", 1, "--lr", "0.1", "--backend", "numpy")
    answer = lockstep("compare", *settings, "--out", "grid")
    assert answer.status == 130
    assert answer.err.rstrip().endswith("Resume with: lockstep compare --resume --out grid")
    assert "lockstep train --resume" not in answer.err
    monkeypatch.setattr(Console, "show", show)
    again = lockstep("compare", "--resume", "--out", "grid", "--json")
    assert again.status == 0, again.err
    assert again.json["rows"][0]["steps"] == 12


def test_in_python_another_sweep_is_not_mixed_into_a_folder(few, tmp_path):
    import lockstep

    settings = {"batch_size": 8, "lr": 0.1, "data": str(few), "epochs": 1, "quiet": True, "out": tmp_path / "grid"}
    lockstep.compare([1], **settings, backend="numpy")
    assert len(lockstep.compare([1], **settings, backend="numpy", resume=True).rows) == 1
    with pytest.raises(lockstep.LockstepError, match="was started with other settings"):
        lockstep.compare([1, 2], **settings, backend="numpy", resume=True)
