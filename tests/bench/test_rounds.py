"""Real contenders on a little work: all compute the same, a failure stays its own, and nothing is left behind."""

import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from lockstep.bench import rounds
from lockstep.bench.contenders import CONTENDERS
from lockstep.bench.processes import ContenderFailed, Running
from lockstep.bench.rounds import measure_exchanges, measure_model
from lockstep.bench.work import Work
from lockstep.core.device import Device

# A few samples and a large rate: the second loss depends on the first update of every weight of the last layer.
WORK = Work(
    model="lenet",
    devices=("cpu:0", "cpu:1"),
    batch_size=16,
    num_steps=1,
    num_warmup=0,
    learning_rate=1.0,
    data="fashion-mnist-mini",
)
OTHERS = ["text", "text-in-memory", "ddp", "ddp-best", "fabric", "accelerate"]
HERE = [name for name in OTHERS if not CONTENDERS[name].problem()]


def below(process):
    """All processes that were started by this one, or by those, and have not ended."""
    found = []
    for task in Path(f"/proc/{process}/task").glob("*/children"):
        for child in task.read_text().split():
            found += [child, *below(child)]
    return [p for p in found if is_alive(p)]


def is_alive(process):
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until(condition, seconds=30):
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.05)
    return condition()


@pytest.fixture(scope="module")
def table():
    """Three trials of one step each."""
    return measure_model(WORK, [], ["lockstep", "lockstep-1-device", *HERE], 3, lambda line: None)


@pytest.fixture(scope="module")
def losses(table):
    return {row.name: row.losses for row in table.rows if not row.problem}


def test_everybody_was_measured(table):
    assert {row.name: row.problem for row in table.rows if row.problem} == {}
    assert all(len(row.seconds) == 3 and min(row.seconds) > 0 for row in table.rows)


@pytest.mark.parametrize("name", OTHERS)
def test_others_compute_what_we_compute(losses, name):
    if name not in HERE:
        pytest.skip(f"{name} is {CONTENDERS[name].problem()}")
    assert losses[name] == pytest.approx(losses["lockstep"], abs=1e-4)


def test_the_losses_tell_updates_apart(losses):
    first, second, third = losses["lockstep"]
    assert abs(first - second) > 1e-3
    assert abs(second - third) > 1e-3


def test_one_device_and_two_have_the_same_weights(table):
    ours, one = table.rows[:2]
    assert ours.weights_sha256 == one.weights_sha256
    assert any("bit for bit" in note for note in table.notes)


def test_nothing_is_left_behind(table):
    assert wait_until(lambda: not below(os.getpid()))


def test_one_that_fails_or_is_missing_is_named_and_the_others_go_on(monkeypatch):
    missing = CONTENDERS["fabric"]._replace(packages=("surely_not_there",))
    monkeypatch.setitem(rounds.CONTENDERS, "fabric", missing)
    broken = Work(**{**vars(WORK), "settings": {"exchange": "rign"}})  # which only our own run has
    said = []
    table = measure_model(broken, [], ["lockstep", "text-in-memory", "fabric"], 1, said.append)
    ours, text, fabric = table.rows
    assert ours.problem.startswith("failed: There is no exchange called 'rign'. Did you mean 'ring'?")
    assert any("lockstep failed" in line for line in said)
    assert (text.problem, len(text.seconds)) == ("", 1)
    assert fabric.problem == "not installed: pip install 'lockstep[bench]'"
    assert not below(os.getpid())


def test_one_that_dies_is_an_error_that_says_how_and_leaves_nothing():
    running = Running("text", WORK, [Device("cpu:0")], 0, "lo")
    try:
        assert running.answers() == [{"ready": True}]
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(running.ask, "run", num_steps=10_000)
            assert wait_until(lambda: len(below(os.getpid())) > 1)  # the loader has processes too
            (process, *loaders) = below(os.getpid())
            os.kill(int(process), signal.SIGKILL)
            with pytest.raises(ContenderFailed, match=r"ended by signal 9 \(Killed\)"):
                answer.result()
    finally:
        running.kill()
    # at once: left alone, they would notice after some seconds
    assert wait_until(lambda: not any(map(is_alive, [process, *loaders])), seconds=2)


def test_every_exchange_is_measured_and_gives_the_sum():
    (table,) = measure_exchanges([Device("cpu:0")], 2, lambda line: None, sizes={4000: 2})
    assert [row.name for row in table.rows] == ["all_reduce", "sharded", "gather", "tree", "ring"]
    assert {row.problem for row in table.rows} == {""}, "a contender looks itself if the sum is right"
    assert all(len(row.seconds) == 2 for row in table.rows)


def test_the_command_prints_the_record_and_writes_it(lockstep, tmp_path):
    answer = lockstep(
        *("bench", "--models", "lenet", "--data", "fashion-mnist-mini", "--devices", "2", "--steps", "1"),
        *("--trials", "2", "--only", "text-in-memory", "--no-exchanges", "--out", tmp_path / "out", "--json"),
    )
    assert answer.status == 0, answer.err
    record = answer.json
    assert record == json.loads((tmp_path / "out" / "bench-cpu.json").read_text())
    assert (tmp_path / "out" / "bench-cpu.png").read_bytes().startswith(b"\x89PNG")
    assert {"command", "date", "machine", "device", "versions", "tables"} == set(record)
    (table,) = record["tables"]
    assert [row["name"] for row in table["rows"]] == ["lockstep", "text-in-memory"]
    assert all(len(row["seconds"]) == 2 for row in table["rows"])
    assert table["settings"]["devices"] == ["cpu:0", "cpu:1"]
    assert "lenet: trial 2 of 2" in answer.err


@pytest.mark.parametrize("arguments", [["--trials", "0"], ["--models", "", "--no-exchanges"], ["--set", "what"]])
def test_the_impossible_is_refused_at_once(lockstep, arguments, tmp_path):
    answer = lockstep("bench", "--data", "fashion-mnist-mini", *arguments)
    assert answer.status == 2
    assert answer.err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_when_it_is_ended_everything_ends(number, tmp_path):
    command = [sys.executable, "-m", "lockstep", "bench", "--models", "lenet", "--data", "fashion-mnist-mini"]
    command += ["--devices", "2", "--only", "ddp", "--trials", "1000", "--no-exchanges"]
    with subprocess.Popen(
        command,
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell has its background ignore it
    ) as process:
        try:
            assert process.stderr is not None
            assert any("warming up ddp" in line for line in process.stderr)
            started = below(process.pid)
            assert len(started) >= 3
            os.kill(int(started[0]), signal.SIGSTOP)  # one that hangs, and does not notice by itself
            process.send_signal(number)
            assert process.wait(timeout=30) == (130 if number == signal.SIGINT else -number)
            process.stderr.close()
        finally:
            process.kill()
    assert wait_until(lambda: not any(map(is_alive, started)))
    assert not (tmp_path / "benchmarks").exists()
