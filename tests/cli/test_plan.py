"""`lockstep plan`: what it prints, for people and for programs, and what it refuses."""

import json

import pytest

QUICK = ("--seconds", 0.1)


def test_a_plan_prints_json_and_writes_nothing(lockstep, few, tmp_path):
    before = sorted(tmp_path.iterdir())
    answer = lockstep("plan", "--data", few, "--batch-size", 8, "--shards", "2,4", "--max-devices", 2, "--json",
                      *QUICK)  # fmt: skip
    assert answer.status == 0, answer.err
    assert sorted(tmp_path.iterdir()) == before
    rows = answer.json["configurations"]
    assert {(row["devices"], row["split"]) for row in rows} >= {(1, "data"), (2, "data"), (2, "network"), (2, "layers")}
    assert all(row["predicted_ms"] > 0 and row["memory_bytes"] > 0 for row in rows)
    assert answer.json["recommended"]["shards"] == 2
    assert "measuring one device" in answer.err


def test_a_plan_needs_no_folder_that_it_can_write_to(lockstep, few, tmp_path, monkeypatch):
    folder = tmp_path / "read-only"
    folder.mkdir()
    folder.chmod(0o500)
    monkeypatch.chdir(folder)
    answer = lockstep("plan", "--data", few, "--batch-size", 8, "--shards", 2, "--max-devices", 2, "--check", *QUICK)
    assert answer.status == 0, answer.err
    assert list(folder.iterdir()) == []


def test_under_torchrun_a_plan_is_refused(lockstep, monkeypatch):
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, "0")
    for name, value in {"WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "1",
                        "TORCHELASTIC_USE_AGENT_STORE": "True"}.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    answer = lockstep("plan", "--data", "fashion-mnist-mini")
    assert answer.status == 2
    assert answer.err == "lockstep: lockstep plan measures the devices of one machine. Leave torchrun out.\n"


def test_a_checked_plan_has_measured_times_and_is_kept_where_that_is_asked_for(lockstep, few, tmp_path):
    answer = lockstep(
        "plan", "--data", few, "--batch-size", 8, "--shards", 2, "--devices", 2, "--split", "network", "--check",
        "--out", "plan.jsonl", "-q", *QUICK,
    )  # fmt: skip
    assert answer.status == 0, answer.err
    assert "measured" in answer.out
    assert "error of the prediction: median" in answer.out
    assert answer.err == ""
    kept = json.loads((tmp_path / "plan.jsonl").read_text())
    assert {row["split"] for row in kept["configurations"]} == {"data", "network"}
    assert all({"measured_ms", "error"} <= set(row) for row in kept["configurations"])
    assert kept["check"]["num_pairs"] >= 0


def test_the_recommended_line_runs(lockstep, few):
    answer = lockstep("plan", "--data", few, "--batch-size", 8, "--shards", 2, "--max-devices", 2, "--json",
                      *QUICK)  # fmt: skip
    for row in answer.json["configurations"]:
        command = row["command"].split()[1:]
        assert lockstep(*command, "--epochs", 1, "--dry-run").status == 0, row["command"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("--link fast", "--link fast cannot be read"),
        ("--link 0GB/s", "the bandwidth must be more than 0"),
        ("--max-devices 0", "from 1 to"),
        ("--max-devices -3", "from 1 to"),
        ("--device-speed 0", "must be more than 0"),
        ("--device-speed nan", "must be more than 0"),
        ("--max-devices 2 --device-speed 1,2,3", "has 3 numbers"),
        ("--shards 0", "--shards"),
        ("--shards many", "--shards many"),
        ("--split sideways", "--split sideways cannot be read"),
        ("--model alexnet", "alexnet"),
        ("--out nowhere/plan.jsonl", "there is no folder nowhere"),
        ("--batch-size 4096", "larger than"),
        ("--seconds -1", "at least 0"),
        ("--seconds nan", "at least 0"),
        ("--device-memory lots", "--device-memory lots cannot be read"),
        ("--device-memory 1B --shards 2 --seconds 0.1", "Nothing fits"),
        (
            "--split network --stages nowhere --shards 2 --max-devices 2 --seconds 0.1",
            "--stages nowhere cannot be planned",
        ),
        ("--out /proc/plan.jsonl", "cannot be written"),
        ("--engine processes --backend numpy", "no engine for numpy called 'processes'"),
    ],
)
def test_bad_input_is_one_sentence(lockstep, few, arguments, sentence):
    answer = lockstep("plan", "--data", few, *(("--batch-size", 8) if "--batch" not in arguments else ()),
                      *arguments.split())  # fmt: skip
    assert answer.status == 2
    assert sentence in answer.err
    assert answer.out == ""
    assert answer.err.splitlines()[-1].startswith("lockstep: ")
