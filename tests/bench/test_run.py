"""Which contenders are measured, and what is saved: from times that are made up."""

import json

import pytest

from lockstep.bench.contenders import CONTENDERS, Contender, default_contenders
from lockstep.bench.plots import bars_of
from lockstep.bench.run import check_writable, contenders_for, plot_title, save_results, split_names
from lockstep.bench.tables import Row, Table
from lockstep.bench.workload import workload_for
from lockstep.core.device import Device
from lockstep.core.errors import ConfigError, RunError


def test_comma_separated_names():
    assert split_names("ddp, text,,ddp") == ["ddp", "text"]
    assert contenders_for("ddp,text", 2, False) == ["lockstep", "text", "ddp"]
    with pytest.raises(ConfigError, match="There is no contender called 'dpp'"):
        contenders_for("dpp", 2, False)


def test_the_default_contenders_depend_on_the_devices():
    assert "lockstep-1-device" in default_contenders(2, False)
    assert "lockstep-1-device" not in default_contenders(1, True)
    assert "lockstep-1-shard" in default_contenders(1, True)
    assert "lockstep-1-shard" not in default_contenders(2, False)


def test_a_missing_package_is_reported_with_the_command_that_installs_it():
    workload, _ = workload_for("lenet", [Device("cpu:0")])
    assert (
        Contender("x:x", "", ("surely_not_there",)).problem(workload) == "not installed: pip install 'lockstep[bench]'"
    )
    assert Contender("x:x", "", ("surely_not_there", "numpy")).problem(workload) == ""
    assert CONTENDERS["ddp"].problem(workload) == ""


@pytest.fixture
def result():
    table = Table("lenet on [cpu:0, cpu:1], batch 256, fp32", "lockstep", [Row("lockstep", seconds=[0.1, 0.2, 0.4])])
    fields = {"commit": "28f0576", "date": "2026-01-01", "machine": ["A CPU"], "versions": {"torch": "2.13.0"}}
    return {**fields, "device": "cpu", "tables": [table.to_dict()]}, [table]


def test_results_are_appended_and_the_picture_replaced(result, tmp_path):
    fields, tables = result
    save_results(fields, tables, tmp_path / "new")
    results, picture = save_results({**fields, "date": "2026-01-02"}, tables, tmp_path / "new")
    assert (results.name, picture.name) == ("bench-cpu.jsonl", "bench-cpu.png")
    first, second = map(json.loads, results.read_text().splitlines())
    assert (first, second["date"]) == (fields, "2026-01-02")
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_title_names_machine_date_commit_and_versions(result):
    assert plot_title(result[0]) == "A CPU; 2026-01-01, commit 28f0576\ntorch 2.13.0"


def test_a_folder_that_cannot_be_written_to_is_an_error(result, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match=r"file cannot be written to: .*\. Choose another --out\."):
        save_results(*result, tmp_path / "file")


@pytest.mark.parametrize("arguments", [["--trials", "0"], ["--models", "", "--no-exchanges"], ["--set", "what"]])
def test_invalid_options_are_refused_before_anything_starts(lockstep, arguments, tmp_path):
    answer = lockstep("bench", "--data", "fashion-mnist-mini", *arguments)
    assert answer.status == 2
    assert answer.err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_bars_are_the_ratios_that_their_labels_say():
    """Of interleaved trials: 1.5, though the ratio of the two medians is 2."""
    rows = [Row("lockstep", seconds=[1.0, 2.0, 4.0]), Row("ddp", seconds=[4.0, 3.0, 6.0])]
    bars, unit = bars_of(Table("lenet", "lockstep", rows), rows)
    assert [bar.median for bar in bars] == [1.0, 1.5]
    assert unit == "time of a step / lockstep's"
    bars, unit = bars_of(Table("lenet", "lockstep", rows[1:]), rows[1:])
    assert ([bar.median for bar in bars], unit) == ([4000.0], "ms/step")


def test_a_folder_that_cannot_be_written_to_is_refused_before_anything_is_measured(lockstep, tmp_path):
    check_writable(tmp_path / "new" / "folder")
    (tmp_path / "file").touch()
    answer = lockstep("bench", "--out", "file")
    assert answer.status == 2
    assert answer.err.startswith("lockstep: Results cannot be written to file")
    assert "measuring" not in answer.err
