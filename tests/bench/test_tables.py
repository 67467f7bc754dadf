"""Medians, ratios, the table on the terminal, in the results and as a picture: from times that are made up."""

import json

import pytest

from lockstep.bench.plots import draw_tables
from lockstep.bench.tables import Row, Spread, Table, spread
from lockstep.report.runlog import to_json


@pytest.fixture
def table():
    return Table(
        "lenet on [cpu:0, cpu:1], batch 256, fp32",
        "lockstep",
        [
            Row("lockstep", seconds=[0.1, 0.2, 0.4]),
            Row("ddp-best", seconds=[0.2, 0.2, 0.2], chosen="1 thread a process"),
            Row("ddp", seconds=[0.2], problem="failed: it broke"),
            Row("fabric", problem="not installed: pip install 'lockstep[bench]'"),
        ],
        notes=["a note"],
    )


def test_the_spread_is_the_median_and_the_range():
    assert spread([5.0, 1.0, 2.0, 9.0, 3.0]) == Spread(3.0, 1.0, 9.0)


def test_a_ratio_compares_trials_of_the_same_number(table):
    ours, other, broken, missing = table.rows
    assert other.ratios(ours) == [2.0, 1.0, 0.5]
    assert broken.ratios(ours) == missing.ratios(ours) == other.ratios(None) == []


def test_the_table_shows_medians_ratios_and_problems(table):
    title, headings, *rows, note = table.text().splitlines()
    assert title == table.title
    assert "times lockstep" in headings
    assert rows[0].split() == ["lockstep", "200", "(100", "to", "400)", "1.00x"]
    assert rows[1].split()[:5] == ["ddp-best", "200", "(200", "to", "200)"]
    assert "1.00x       (0.50 to 2.00)    1 thread a process" in rows[1]
    assert rows[2].split() == ["ddp", "failed:", "it", "broke"]
    assert rows[3].endswith("not installed: pip install 'lockstep[bench]'")
    assert note.strip() == "a note"


def test_the_memory_of_gpus_is_a_column_where_there_is_any(table):
    assert "GPU memory" not in table.text()
    table.rows[0].peak_bytes = 3 << 30
    _, headings, ours, *_, note = table.text().splitlines()
    assert headings.split()[-2:] == ["GPU", "memory"]
    assert ours.split()[-2:] == ["3.0", "GiB"]
    assert note.strip() == "GPU memory is beside samples that are kept there"


def test_results_have_every_single_trial(table):
    fields = json.loads(to_json(table.to_dict()))
    ours, other, broken, missing = fields["rows"]
    assert ours["seconds"] == [0.1, 0.2, 0.4]
    assert ours["ms_per_step"] == {"median": 200.0, "lowest": 100.0, "highest": 400.0}
    assert other["times_lockstep"] == {"median": 1.0, "lowest": 0.5, "highest": 2.0}
    assert broken["times_lockstep"] is None
    assert (missing["seconds"], missing["ms_per_step"]) == ([], None)


def test_without_the_reference_there_are_no_ratios(table):
    table.rows[0].problem = "failed: it broke"
    assert table.reference_row() is None
    assert "x" not in table.text().splitlines()[3].replace("ddp-best", "")


def test_tables_without_times_give_an_empty_picture(tmp_path):
    draw_tables([Table("none", "lockstep", [Row("lockstep", problem="failed")])], "title", tmp_path / "empty.png")
    assert (tmp_path / "empty.png").stat().st_size > 1000
