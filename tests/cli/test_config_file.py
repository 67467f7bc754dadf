"""Settings in a file: `--config run.toml`, or the config.json of a run; `--dry-run` and `--quiet`."""

import json

import pytest

TOML = """
batch-size = 12
lr = 0.1
num_epochs = 1
devices = ["cpu:0", "cpu:1"]
"""


@pytest.fixture
def toml(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(TOML)
    return path


def settings(folder):
    return json.loads((folder / "config.json").read_text())


def test_settings_are_read_from_a_toml_file_and_the_command_line_counts_more(lockstep, few, toml, tmp_path):
    answer = lockstep("train", "--config", toml, "--data", few, "--lr", 0.3, "--out", "run", "--json")
    assert answer.status == 0, answer.err
    found = settings(tmp_path / "run")
    assert (found["batch_size"], found["learning_rate"], found["num_epochs"]) == (12, 0.3, 1)
    assert answer.json["devices"] == ["cpu:0", "cpu:1"]


def test_a_run_is_repeated_from_its_own_config(lockstep, few, tmp_path):
    first = lockstep("train", "--data", few, "--batch-size", 8, "--epochs", 1, "--seed", 3, "--out", "one", "--json")
    for config in ("one/config.json", "one"):
        again = lockstep("train", "--config", config, "--json", "--devices", 1)
        assert again.status == 0, again.err
        assert again.json["weights_sha256"] == first.json["weights_sha256"]
        assert again.json["run"].startswith("runs/")


def test_a_misspelt_setting_in_a_config_json_is_refused(lockstep, few, tmp_path):
    lockstep("train", "--data", few, "--batch-size", 8, "--epochs", 1, "--out", "one")
    recorded = settings(tmp_path / "one")
    (tmp_path / "own.json").write_text(json.dumps(recorded | {"learning_rat": 0.3}))
    answer = lockstep("train", "--config", "own.json")
    assert answer.status == 2
    assert "there is no setting 'learning_rat'. Did you mean 'learning_rate'?" in answer.err


def test_a_toml_file_may_name_code_and_a_recorded_run_may_not(lockstep, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "mine_toml.py").write_text(
        "import torch\ndef net():\n    return torch.nn.Linear(6, 3)\n"
        "def data():\n    return torch.ones(24, 6), torch.zeros(24, dtype=torch.long)\n"
    )
    (tmp_path / "run.toml").write_text('model = "mine_toml:net"\ndata = "mine_toml:data"\nbatch-size = 8\nepochs = 1\n')
    assert lockstep("train", "--config", "run.toml", "--out", "own").status == 0
    answer = lockstep("train", "--config", "own/config.json")
    assert answer.status == 2
    assert "Lockstep never imports code that only config.json names: add --model mine_toml:net" in answer.err


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("bathc-size = 3", "there is no setting 'bathc-size'. Did you mean 'batch-size'?"),
        ("learning_rat = 0.1", "there is no setting 'learning_rat'. Did you mean 'learning_rate'?"),
        ("num-epoch = 1", "there is no setting 'num-epoch'. Did you mean 'num-epochs'?"),
        ("batch-size = ", "run.toml cannot be read: "),
        ("batch-size = 3\nbatch_size = 4", "run.toml has batch_size twice. Leave one out."),
        ('batch-size = "many"', "batch size must be an integer, got 'many' (--batch-size)."),
        ("batch-size = 0", "batch size must be at least 1, got 0 (--batch-size)."),
        ("[train]\nlr = 1", "there is no setting 'train'"),
        ("lr = " + "[" * 50_000, "run.toml cannot be read: maximum recursion depth exceeded"),
        ('model = "\x1b[2J"', "run.toml cannot be read: "),
        ('"\\u001b[2J" = 3', "there is no setting '\\x1b[2J'"),
    ],
)
def test_wrong_settings_in_a_file_are_refused(lockstep, toml, content, sentence, tmp_path):
    toml.write_text(content)
    answer = lockstep("train", "--config", toml, "--data", "fashion-mnist-mini")
    assert answer.status == 2
    assert sentence in answer.err
    assert answer.err.count("\n") == 1
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("name", "sentence"), [("gone.toml", "There is no file gone.toml"), ("data.npz", "neither .toml nor .json")]
)
def test_what_is_no_file_of_settings_is_refused(lockstep, tmp_path, name, sentence):
    (tmp_path / "data.npz").write_bytes(b"")
    answer = lockstep("train", "--config", name)
    assert answer.status == 2
    assert sentence in answer.err


def test_a_dry_run_says_what_would_be_trained_and_leaves_nothing(lockstep, tmp_path):
    answer = lockstep("train", "--data", "fashion-mnist-mini", "--devices", 2, "--batch-size", 100, "--dry-run")
    assert answer.status == 0, answer.err
    lines = answer.out.splitlines()
    assert lines[0] == "lenet (129,068 parameters) on fashion-mnist-mini (2,000 training and 500 test samples)"
    assert "on 2 logical CPU devices [cpu:0, cpu:1]" in lines[1]
    assert "200 steps: 20 an epoch, 10 epochs; shards of 13 samples" in lines
    assert lines[-1] == "Nothing was trained or written."
    assert list(tmp_path.iterdir()) == []
    assert lockstep("train", "--data", "fashion-mnist-mini", "--dry-run", "--json").json["steps"] == 80


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("--batch-size 5000", "A batch of 5000 samples is larger than fashion-mnist-mini"),
        ("--devices 9", "9 devices cannot share 8 shards"),
        ("--out full", "full is not empty"),
    ],
)
def test_a_dry_run_refuses_what_a_run_would(lockstep, tmp_path, arguments, sentence):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    answer = lockstep("train", "--data", "fashion-mnist-mini", "--dry-run", *arguments.split())
    assert answer.status == 2
    assert sentence in answer.err


def test_a_quiet_run_prints_its_result_and_nothing_else(lockstep, few):
    answer = lockstep("train", "--data", few, "--batch-size", 8, "--epochs", 1, "--quiet", "--out", "quiet")
    assert answer.err == ""
    assert [line.partition(":")[0] for line in answer.out.splitlines()] == ["test acc", "weights sha256"]


def test_more_devices_than_cores_are_warned_about(lockstep, few, monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    arguments = ("train", "--data", few, "--batch-size", 16, "--epochs", 1, "--shards", 16, "--devices")
    sentence = "16 logical CPU devices share 2 cores: more than 2 bring no speed."
    assert sentence in lockstep(*arguments, 16, "--out", "many").err
    assert "share" not in lockstep(*arguments, 2, "--out", "two").err
