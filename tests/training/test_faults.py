"""Faults of all kinds: samples of `benchmarks/faults.py`, `soak.py` and `forged.py`, which take longer themselves."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
needs_compiler = pytest.mark.skipif(
    not (shutil.which("cc") or shutil.which("gcc")),
    reason="Calls of the C library are replaced: a C compiler is needed.",
)


def figures_of(script, *options, timeout=900):
    command = [sys.executable, BENCHMARKS / script, *map(str, options)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout)
    assert "{" in done.stdout, done.stderr
    return done, json.loads(done.stdout[done.stdout.index("{") :])


@pytest.mark.long
@needs_compiler
@pytest.mark.parametrize(("engine", "every"), [("inprocess", 9), ("processes", 25)])
def test_a_run_whose_calls_fail_ends_with_its_hash_or_with_a_sentence_and_is_resumed(engine, every):
    done, found = figures_of("faults.py", "--engine", engine, "--every", every)
    assert found["wrong"] == []
    assert done.returncode == 0, done.stderr
    assert found["calls"] > 300
    assert {"open", "read", "write", "fsync", "rename", "unlink", "mkdir", "close"} <= set(found["resumed"])
    assert found["killed, then the same hash"] + found["same hash at once"] >= found["faults"] // 3
    assert found["a sentence, then the same hash"] > 0


@needs_compiler
def test_every_kind_of_call_is_counted_and_can_fail():
    """One call of a run in this engine, which writes a checkpoint: killed, and with two errors."""
    done, found = figures_of("faults.py", "--call", 31)
    assert done.returncode == 0, found["wrong"]
    assert found["faults"] == 6
    assert found["killed, then the same hash"] == 2


@pytest.mark.long
@needs_compiler
def test_a_soak_ends_with_equal_hashes_and_leaves_nothing_behind(tmp_path):
    done, found = figures_of("soak.py", "--faults", 30, "--seed", 1, "--out", tmp_path / "soak.jsonl")
    assert found["failed"] == []
    assert done.returncode == 0, done.stderr
    assert found["runs"] == found["equal hashes"]
    assert (found["orphans"], found["tracebacks"]) == (0, 0)
    assert json.loads((tmp_path / "soak.jsonl").read_text())["faults"] >= 30


@pytest.mark.parametrize("count", [180, pytest.param(3000, marks=pytest.mark.long)])
def test_damaged_and_forged_files_and_messages_end_in_a_sentence(tmp_path, count):
    done, found = figures_of("forged.py", "--count", count, "--out", tmp_path / "forged.jsonl")
    assert found["failures"] == []
    assert done.returncode == 0, done.stderr
    assert found["cases"] == count
    assert found["megabytes above the run's own"] < 1000
    kinds = {name.rpartition(" ")[0] for name in found["answers"]}
    assert len(kinds) == 11
    assert all(found["answers"].get(f"{kind} refused") for kind in kinds - {"store_message"})
