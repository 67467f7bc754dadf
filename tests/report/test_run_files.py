"""A run's files are read for people to look at, whoever has written them: what cannot be is left out."""

import json

import pytest

from lockstep.report.run_files import read_recorded

HOSTILE = [5, True, [1], {"a": 1}, 10**40, 1e308, float("nan"), None, "\x1b[2J\ud800"]
IN_RESULT = ("devices", "test_accuracy", "seconds_per_epoch", "history", "peak_memory", "steps", "metrics")
IN_LINE = ("time", "step", "epoch", "notes", "devices", "seconds", "train_loss", "steps_per_epoch", "num_train_samples")
IN_CONFIG = ("learning_rate", "batch_size", "num_epochs", "optimizer", "versions", "made_with", "model", "num_shards")


@pytest.fixture
def run(lockstep, few, tmp_path):
    """The folder of a finished run, with a trace."""
    lockstep("train", "--data", few, "--batch-size", 8, "--epochs", 1, "--trace", "--out", "run", "--devices", 1)
    return tmp_path / "run"


def assert_shown(lockstep, run, *more):
    """Commands that show a run end with sentences: no traceback, no terminal escape."""
    said = ""
    for command in (["report", run], ["runs", run], ["runs", run, "--json"], *more):
        answer = lockstep(*command)
        assert answer.status in (0, 2), answer.err
        said += answer.out + answer.err
    assert "Traceback" not in said
    assert "\x1b" not in said


@pytest.mark.parametrize("value", HOSTILE, ids=repr)
def test_a_forged_result_is_shown_without_what_cannot_be(lockstep, run, value):
    path = run / "result.json"
    result = json.loads(path.read_text())
    path.write_text(json.dumps(result | dict.fromkeys(IN_RESULT, value)))
    assert_shown(lockstep, run, ["compare", run, "--out", "to"])


@pytest.mark.parametrize("value", HOSTILE, ids=repr)
def test_forged_lines_are_shown_without_what_cannot_be(lockstep, run, value):
    path = run / "metrics.jsonl"
    lines = [json.loads(line) | dict.fromkeys(IN_LINE, value) for line in path.read_text().splitlines()]
    more = [{"event": kind, **dict.fromkeys(IN_LINE, value)} for kind in ("resumed", "healed", value)]
    path.write_text("\n".join(map(json.dumps, [*lines, *more])))
    assert_shown(lockstep, run)


@pytest.mark.parametrize("value", HOSTILE, ids=repr)
def test_forged_settings_and_traces_are_shown_without_what_cannot_be(lockstep, run, value):
    config, trace = run / "config.json", run / "trace.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | dict.fromkeys(IN_CONFIG, value)))
    entries = [entry | {"tid": value, "ts": value, "args": value} for entry in json.loads(trace.read_text())[:9]]
    trace.write_text(json.dumps([*entries, *json.loads(trace.read_text()), value]))
    assert_shown(lockstep, run, ["compare", run, "--out", "to"])


def test_what_is_good_stays(run):
    path = run / "result.json"
    result = json.loads(path.read_text())
    assert read_recorded(run).result == result
    path.write_text(json.dumps(result | {"devices": 5}))
    found = read_recorded(run)
    assert found.result == {name: value for name, value in result.items() if name != "devices"}
    assert found.devices == result["devices"], "what it said at the start"


SHARED = "3 logical CPU devices share 2 cores: more than 2 bring no speed."


def incidents_of(tmp_path, *lines):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return [(each["event"], each["sentence"]) for each in read_recorded(tmp_path).incidents]


def test_a_killed_rank_is_an_incident_of_its_own(tmp_path):
    killed, continuing = (
        "rank 2 (cpu:2) was killed by SIGKILL; a new worker takes its place",
        "continuing after step 187",
    )
    dropped = "rank 1 (cpu:1) was dropped"
    lines = [
        {"event": "started", "notes": [SHARED], "step": 0, "num_restarts": 0},
        {"event": "resumed", "notes": [killed, continuing], "step": 187, "num_restarts": 1},
        {"event": "resumed", "notes": [dropped, continuing], "step": 187, "num_restarts": 2},
    ]
    resumed = ("resumed", f"{continuing}.")
    assert incidents_of(tmp_path, *lines) == [("killed", f"{killed}."), resumed, ("lost", f"{dropped}."), resumed]


def test_what_a_run_said_when_it_started_is_no_incident_when_it_is_resumed(tmp_path):
    other = "The run was started on another processor."
    lines = [
        {"event": "started", "notes": [SHARED], "step": 0, "num_restarts": 0},
        {"event": "stopped", "reason": "interrupted", "step": 7},
        {"event": "resumed", "notes": [SHARED, other, "continuing after step 7"], "step": 7, "num_restarts": 0},
    ]
    found = incidents_of(tmp_path, *lines)
    assert found == [("stopped", "interrupted"), ("note", other), ("resumed", "continuing after step 7.")]
