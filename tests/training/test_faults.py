"""A fault at every call: `benchmarks/faults.py` with some of the calls; run by itself, it takes all of them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

HARNESS = Path(__file__).parents[2] / "benchmarks" / "faults.py"


@pytest.mark.long
@pytest.mark.parametrize(("engine", "every"), [("inprocess", 8), ("processes", 25)])
def test_a_run_whose_calls_fail_ends_with_its_hash_or_with_a_sentence_and_is_resumed(engine, every):
    command = [sys.executable, HARNESS, "--engine", engine, "--every", str(every)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    found = json.loads(done.stdout)
    assert found["wrong"] == []
    assert found["calls"] > 50
    assert found["killed, then the same hash"] > 0
    assert found["a sentence, then the same hash"] > 0
