"""Real contenders on a small workload: the same losses, failures that do not stop the others, no process left."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lockstep.bench import measure
from lockstep.bench.contenders import CONTENDERS
from lockstep.bench.measure import Measurement, measure_exchanges, measure_model
from lockstep.bench.processes import ContenderFailed, ContenderProcesses
from lockstep.bench.tables import Row
from lockstep.bench.workload import Workload
from lockstep.core.device import Device

# Few samples and a large learning rate: each loss shows whether the updates before it were right.
WORKLOAD = Workload(
    model="lenet",
    devices=("cpu:0", "cpu:1"),
    batch_size=16,
    num_steps=1,
    num_warmup=0,
    learning_rate=1.0,
    data="fashion-mnist-mini",
)
OTHERS = ["text", "text-in-memory", "ddp", "ddp-best", "fabric", "accelerate"]
INSTALLED = [name for name in OTHERS if not CONTENDERS[name].problem(WORKLOAD)]


def descendants(process):
    """The running processes that were started by this one, or by those."""
    found = []
    for task in Path(f"/proc/{process}/task").glob("*/children"):
        for child in task.read_text().split():
            found += [child, *descendants(child)]
    return [p for p in found if is_alive(p)]


def is_alive(process):
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until(condition, seconds=30):
    end = time.monotonic() + seconds
    while not (found := condition()) and time.monotonic() < end:
        time.sleep(0.05)
    return found


@pytest.fixture(scope="module")
def started_before():
    """Processes that other tests have left, like multiprocessing's resource tracker."""
    return set(descendants(os.getpid()))


@pytest.fixture(scope="module")
def table(started_before):
    """Three trials of one step each."""
    return measure_model(WORKLOAD, [], ["lockstep", "lockstep-1-device", *INSTALLED], 3, lambda line: None)


@pytest.fixture(scope="module")
def losses(table):
    return {row.name: row.losses for row in table.rows if not row.problem}


@pytest.mark.long
def test_every_contender_is_measured(table):
    assert {row.name: row.problem for row in table.rows if row.problem} == {}
    assert all(len(row.seconds) == 3 and min(row.seconds) > 0 for row in table.rows)


@pytest.mark.long
@pytest.mark.parametrize("name", OTHERS)
def test_the_others_compute_the_same_losses(losses, name):
    if name not in INSTALLED:
        pytest.skip(f"{name} is {CONTENDERS[name].problem(WORKLOAD)}")
    assert losses[name] == pytest.approx(losses["lockstep"], abs=1e-4)


@pytest.mark.long
def test_each_update_changes_the_loss(losses):
    first, second, third = losses["lockstep"]
    assert abs(first - second) > 1e-3
    assert abs(second - third) > 1e-3


@pytest.mark.long
def test_one_device_and_two_have_the_same_weights(table):
    ours, one = table.rows[:2]
    assert ours.weights_sha256 == one.weights_sha256
    assert any("bit for bit" in note for note in table.notes)


@pytest.mark.long
def test_no_process_is_left(table, started_before):
    assert wait_until(lambda: set(descendants(os.getpid())) <= started_before)


def test_a_contender_that_fails_or_is_not_installed_does_not_stop_the_others(monkeypatch, started_before):
    missing = CONTENDERS["fabric"]._replace(packages=("surely_not_there",))
    monkeypatch.setitem(measure.CONTENDERS, "fabric", missing)
    broken = Workload(**{**vars(WORKLOAD), "settings": {"exchange": "rign"}})  # of our own run only
    log = []
    table = measure_model(broken, [], ["lockstep", "text-in-memory", "fabric"], 1, log.append)
    ours, text, fabric = table.rows
    assert ours.problem.startswith(
        "failed: exchange must be gather, native, ring, sharded or tree, got 'rign' (--exchange)."
    )
    assert any("lockstep failed" in line for line in log)
    assert (text.problem, len(text.seconds)) == ("", 1)
    assert fabric.problem == "not installed: pip install 'lockstep[bench]'"
    assert set(descendants(os.getpid())) <= started_before


def test_a_contender_that_is_killed_is_an_error_with_the_signal_and_leaves_no_process(tmp_path, monkeypatch):
    contender = tmp_path / "contender"  # with a child that keeps standard output open, as a DataLoader's workers do
    contender.write_text("#!/bin/sh\nsleep 1000 &\necho '{}'\nread command\nread command\nkill -9 $$\n")
    contender.chmod(0o755)
    monkeypatch.setattr("lockstep.bench.processes.sys.executable", str(contender))
    monkeypatch.setattr("lockstep.bench.processes.ANSWER_SECONDS", 15.0)
    with ContenderProcesses("text", WORKLOAD, [Device("cpu:0")], None) as processes:
        assert processes.ask("prepare") == [{}]
        (process,) = (started.pid for started in processes._processes)
        (child,) = wait_until(lambda: descendants(process))
        with pytest.raises(ContenderFailed, match=r"ended by signal 9 \(Killed\)$"):
            processes.ask("run")
        processes.close()
        assert wait_until(lambda: not is_alive(process) and not is_alive(child))


class FailsAtSecondTrial:
    """Processes that fail at their second trial."""

    def __init__(self):
        self.num_trials, self.is_closed = 0, False

    def ask(self, command, **arguments):
        self.num_trials += command == "run"
        if self.num_trials == 2:
            raise ContenderFailed("out of memory")
        return [{"chosen": "", "seconds": 1.0}]

    def close(self):
        self.is_closed = True


def test_rows_that_share_processes_fail_together():
    shared, other = FailsAtSecondTrial(), FailsAtSecondTrial()
    other.num_trials = 10
    rows = {name: Row(name) for name in ("ring", "other", "tree")}
    measurement = Measurement("exchanges", rows, {"ring": shared, "other": other, "tree": shared}, lambda line: None)
    measurement.run_trials(num_trials=3, num_warmup=1, num_steps=2)
    assert rows["ring"].problem == rows["tree"].problem == "failed: out of memory"
    assert (rows["other"].problem, rows["other"].seconds) == ("", [0.5, 0.5, 0.5])
    assert shared.is_closed
    assert not other.is_closed


def test_every_exchange_is_measured_and_gives_the_sum():
    (table,) = measure_exchanges([Device("cpu:0")], 2, lambda line: None, sizes={4000: 2})
    assert [row.name for row in table.rows] == ["all_reduce", "sharded", "gather", "tree", "ring"]
    assert {row.problem for row in table.rows} == {""}, "a contender checks the sum itself"
    assert all(len(row.seconds) == 2 for row in table.rows)


@pytest.mark.long
def test_the_command_prints_the_result_and_appends_it(lockstep, tmp_path):
    answer = lockstep(
        *("bench", "--models", "lenet", "--data", "fashion-mnist-mini", "--devices", "2", "--steps", "1"),
        *("--trials", "2", "--only", "text-in-memory", "--no-exchanges", "--out", tmp_path / "out", "--json"),
    )
    assert answer.status == 0, answer.err
    result = answer.json
    assert result == json.loads((tmp_path / "out" / "bench-cpu.jsonl").read_text())
    assert (tmp_path / "out" / "bench-cpu.png").read_bytes().startswith(b"\x89PNG")
    assert {"commit", "date", "command", "machine", "versions", "device", "tables"} == set(result)
    (table,) = result["tables"]
    assert [row["name"] for row in table["rows"]] == ["lockstep", "text-in-memory"]
    assert all(len(row["seconds"]) == 2 for row in table["rows"])
    assert table["settings"]["devices"] == ["cpu:0", "cpu:1"]
    assert "lenet: trial 2 of 2" in answer.err


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_no_process_is_left_when_the_command_is_interrupted_or_killed(number, tmp_path):
    command = [sys.executable, "-m", "lockstep", "bench", "--models", "lenet", "--data", "fashion-mnist-mini"]
    command += ["--devices", "2", "--only", "ddp", "--trials", "1000", "--no-exchanges"]
    with subprocess.Popen(
        command,
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a background job of a shell ignores it
    ) as process:
        try:
            assert process.stderr is not None
            assert any("warming up ddp" in line for line in process.stderr)
            started = descendants(process.pid)
            assert len(started) >= 3
            os.kill(int(started[0]), signal.SIGSTOP)  # one that hangs, and would not exit by itself
            process.send_signal(number)
            assert process.wait(timeout=30) == (130 if number == signal.SIGINT else -number)
            process.stderr.close()
        finally:
            process.kill()
    assert wait_until(lambda: not any(map(is_alive, started)))
    assert not (tmp_path / "benchmarks").exists()
