"""Workers that are killed, hang or raise, and whole runs that are killed: the same bits in the end.

The random crashes belong to the long suite; LOCKSTEP_CRASHES=20 does each of them 20 times.
"""

import json
import os
import random
import re
import signal
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from training.background_command import BackgroundCommand

NUM_CRASHES = int(os.environ.get("LOCKSTEP_CRASHES", "3"))
EPOCHS = 2  # of eight steps
LIMIT = 120.0  # seconds to wait for anything, on a machine that may be busy


def children_of(process):
    """The processes that it has started and that are alive."""
    try:
        found = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    except OSError:
        return []
    return [int(child) for child in found]


def all_below(process):
    return [below for child in children_of(process) for below in (child, *all_below(child))]


def is_alive(process):
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until(condition, what):
    limit = time.monotonic() + LIMIT
    while not (found := condition()):
        assert time.monotonic() < limit, f"waited {LIMIT:g} s for {what}"
        time.sleep(0.01)
    return found


def shared_memory():
    return set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()


class Run:
    """A run in a process of its own, from the command line."""

    def __init__(self, folder, *arguments):
        self.folder = Path(folder)
        command = ["train", "--data", "fashion-mnist-mini", "--epochs", EPOCHS, "--lr", 0.2, "--out", folder, "--json"]
        self.process = BackgroundCommand(self.folder.parent, [*command, *arguments])

    @property
    def workers(self):
        return children_of(self.process.pid)

    def wait_for_workers(self, num):
        return wait_until(lambda: len(self.workers) == num and self.workers, f"{num} workers")

    def wait_for_step(self, step):
        """Until a checkpoint of this step, or a later one, is there."""
        pattern = self.folder / "checkpoints"

        def found():
            names = os.listdir(pattern) if pattern.is_dir() else []
            return any(int(re.findall(r"\d+", name)[0]) >= step for name in names if name.startswith("step-"))

        wait_until(lambda: found() or self.process.poll() is not None, f"a checkpoint of step {step}")

    def kill_all(self):
        """SIGKILL to the whole run at once."""
        below = all_below(self.process.pid)
        self.process.kill_all()
        return below

    def end(self, status=0):
        """The result; the run has to end with this exit status."""
        out, err = self.process.communicate(timeout=LIMIT)
        assert self.process.returncode == status, err
        return json.loads(out) if status == 0 else err, err


@contextmanager
def nothing_left_behind():
    """No process, listening socket or shared memory is left of the runs that are started within."""
    runs, memory = [], shared_memory()
    try:
        yield runs
    finally:
        seen = [below for run in runs for below in all_below(run.process.pid)]
        for run in runs:
            if run.process.poll() is None:
                seen += run.kill_all()
    seen += [below for run in runs for below in getattr(run, "seen", [])]
    wait_until(lambda: not any(map(is_alive, seen)), "all processes to be gone")
    for run in runs:  # everything that it has started is in its session
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = stat.read_text().rpartition(")")[2].split()
            except OSError:
                continue
            assert int(fields[3]) != run.process.pid or fields[0] == "Z", stat
    assert shared_memory() <= memory


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    run = Run(tmp_path_factory.mktemp("undisturbed") / "run", "--devices", 2)
    return run.end()[0]


def check_same_run(result, undisturbed):
    assert result["weights_sha256"] == undisturbed["weights_sha256"]
    assert [(e["epoch"], e["train_loss"], e["test_accuracy"]) for e in result["history"]] == [
        (e["epoch"], e["train_loss"], e["test_accuracy"]) for e in undisturbed["history"]
    ]
    assert result["steps"] == undisturbed["steps"]


def test_a_run_that_is_killed_twice_ends_with_the_same_bits(tmp_path, undisturbed):
    """P3: SIGKILL to all its processes; each time it is resumed on other devices, with another engine."""
    with nothing_left_behind() as runs:
        for step, devices, engine in ((3, 3, "processes"), (10, 2, "inprocess")):
            run = Run(tmp_path / "run", "--resume", "--checkpoint-every", 1, "--devices", devices, "--engine", engine)
            runs.append(run)
            run.wait_for_step(step)
            run.kill_all()
        runs.append(Run(tmp_path / "run", "--resume", "--devices", 1))
        result, err = runs[-1].end()
    assert int(re.search(r"continuing after step (\d+)", err)[1]) >= 10
    check_same_run(result, undisturbed)


@pytest.mark.long
@pytest.mark.parametrize("number", range(NUM_CRASHES))
def test_a_run_that_is_killed_again_and_again_ends_with_the_same_bits(tmp_path, undisturbed, number):
    """SIGKILL to all its processes, one to five times, at any moment."""
    chance = random.Random(number)
    engines = ["inprocess", "processes"]
    with nothing_left_behind() as runs:
        for _ in range(chance.randint(1, 5)):
            where = ("--devices", chance.randint(1, 4), "--engine", chance.choice(engines))
            run = Run(tmp_path / "run", "--resume", "--checkpoint-every", chance.randint(1, 4), *where)
            runs.append(run)
            time.sleep(chance.uniform(0.5, 8.0))
            run.kill_all()
        where = ("--devices", chance.randint(1, 4), "--engine", chance.choice(engines))
        run = Run(tmp_path / "run", "--resume", *where)
        runs.append(run)
        result, _ = run.end()
    check_same_run(result, undisturbed)


@pytest.mark.long
@pytest.mark.parametrize("number", range(NUM_CRASHES))
def test_the_other_workers_continue_when_one_is_killed(tmp_path, undisturbed, number):
    """With a new worker or without, the run continues within seconds."""
    chance = random.Random(100 + number)
    max_restarts = chance.choice([0, 3])
    with nothing_left_behind() as runs:
        run = Run(tmp_path / "run", "--devices", 4, "--engine", "processes", "--max-restarts", max_restarts)
        runs.append(run)
        workers = run.wait_for_workers(4)
        time.sleep(chance.uniform(0.0, 1.5))
        victim = chance.choice(workers)
        lines = tmp_path / "run" / "metrics.jsonl"
        with suppress(ProcessLookupError):  # its work is done, and so is the run
            os.kill(victim, signal.SIGKILL)
        killed = time.monotonic()
        continued_after = None
        while run.process.poll() is None:
            if continued_after is None and lines.exists() and '"num_restarts": 1' in lines.read_text():
                continued_after = time.monotonic() - killed
            time.sleep(0.02)
        result, err = run.end()
    assert result["weights_sha256"] == undisturbed["weights_sha256"]
    rank = workers.index(victim)
    if continued_after is None:  # it was killed when its work was done
        assert result["devices"] == [f"cpu:{other}" for other in range(4)]
        return
    assert continued_after < 30, "the deadline is 60"
    new = "; a new worker takes its place" if max_restarts else ""
    assert f"rank {rank} (cpu:{rank}) was killed by SIGKILL{new}\n" in err
    assert re.search(r"continuing after step \d+ on \[", err)
    assert len(result["devices"]) == (4 if max_restarts else 3)


def test_no_step_is_repeated_when_a_worker_is_killed(tmp_path, undisturbed):
    """The state comes from another worker: there is no checkpoint."""
    with nothing_left_behind() as runs:
        run = Run(tmp_path / "run", "--devices", 3, "--engine", "processes", "--checkpoint-every", 0)
        runs.append(run)
        workers = run.wait_for_workers(3)
        lines = tmp_path / "run" / "metrics.jsonl"
        wait_until(lambda: lines.exists() and '"event": "epoch"' in lines.read_text(), "the first epoch")
        os.kill(workers[0], signal.SIGKILL)
        result, err = run.end()
    assert result["weights_sha256"] == undisturbed["weights_sha256"]
    assert int(re.search(r"continuing after step (\d+) on", err)[1]) >= 8
    assert err.count("epoch 1/2") == 1
    assert "rank 0 (cpu:0) was killed by SIGKILL; a new worker takes its place\n" in err
    assert len(result["devices"]) == 3


@pytest.mark.parametrize("steps", [(4,), pytest.param((2, 7, 12), marks=pytest.mark.long)], ids=str)
def test_an_aborted_step_does_not_change_buffers(tmp_path, steps):
    """Running statistics are those of complete steps, though the others had begun the next when one was killed."""
    model = ("--model", "lenet-bn", "--optimizer", "adam", "--lr", 0.001, "--epochs", 1 if len(steps) == 1 else EPOCHS)
    with nothing_left_behind() as runs:
        runs.append(Run(tmp_path / "alone", *model, "--devices", 1))
        alone, _ = runs[0].end()
        run = Run(tmp_path / "run", *model, "--devices", 3, "--engine", "processes", "--checkpoint-every", 1)
        runs.append(run)
        run.wait_for_workers(3)
        for step in steps:
            run.wait_for_step(step)
            os.kill(run.workers[step % 3], signal.SIGKILL)
        result, err = run.end()
    assert err.count("was killed by SIGKILL; a new worker takes its place") == len(steps)
    assert result["weights_sha256"] == alone["weights_sha256"]
    assert result["buffers_sha256"] == alone["buffers_sha256"]


def test_all_workers_but_one_may_be_killed(tmp_path, undisturbed):
    with nothing_left_behind() as runs:
        run = Run(tmp_path / "run", "--devices", 3, "--engine", "processes", "--max-restarts", 0)
        runs.append(run)
        workers = run.wait_for_workers(3)
        for victim in workers[:2]:
            os.kill(victim, signal.SIGKILL)
            wait_until(lambda victim=victim: victim not in run.workers, "the end of a worker")
            time.sleep(0.3)
        result, err = run.end()
    assert result["weights_sha256"] == undisturbed["weights_sha256"]
    assert result["devices"] == ["cpu:2"]
    assert "rank 0 (cpu:0) was killed by SIGKILL\n" in err


def test_when_the_last_worker_is_killed_the_run_ends_with_a_sentence(tmp_path):
    with nothing_left_behind() as runs:
        run = Run(tmp_path / "run", "--devices", 1, "--engine", "processes", "--max-restarts", 0)
        runs.append(run)
        (worker,) = run.wait_for_workers(1)
        os.kill(worker, signal.SIGKILL)
        err, _ = run.end(status=1)
    assert err.splitlines()[-1] == ("lockstep: rank 0 (cpu:0) was killed by SIGKILL. No worker is left.")


def test_workers_end_when_the_supervisor_is_killed(tmp_path):
    with nothing_left_behind() as runs:
        run = Run(tmp_path / "run", "--devices", 2, "--engine", "processes")
        runs.append(run)
        run.seen = run.wait_for_workers(2)
        os.kill(run.process.pid, signal.SIGKILL)
        run.process.wait(timeout=LIMIT)
        wait_until(lambda: not any(map(is_alive, run.seen)), "the workers to end")
        assert not any(map(is_alive, run.seen))


MODEL = """
import os, time
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.out = nn.Linear(784, 10)

    def forward(self, X):
        time.sleep(0.05)
        if os.path.exists(f"sleep-{os.getpid()}"):
            open("asleep", "w").close()
            time.sleep(600)
        if os.path.exists("raise"):
            raise ValueError("my own mistake")
        return self.out(X.flatten(1))
"""


@pytest.fixture
def own_model(tmp_path):
    (tmp_path / "mine.py").write_text(MODEL)
    return "mine:Net"


TIMEOUT, MORE = 5, 5  # seconds: of an exchange, on a machine that is busy; until a rank that hangs is named, then
NAMED = rf"(the others waited|no sign of life for) {TIMEOUT} s \(--timeout\): .*"  # by another rank, or the supervisor


@pytest.mark.parametrize("answer", ["stop", pytest.param("drop", marks=pytest.mark.long)])
def test_a_rank_that_hangs_is_named_with_its_source_line(tmp_path, own_model, answer):
    """A process that was stopped (SIGSTOP) hangs, and cannot do anything about it."""
    how = ("--model", own_model, "--engine", "processes", "--on-hang", answer, "--epochs", 1)
    with nothing_left_behind() as runs:
        run = Run(tmp_path / "run", *how, "--devices", 3, "--timeout", TIMEOUT, "--checkpoint-every", 1)
        runs.append(run)
        workers = run.wait_for_workers(3)
        run.wait_for_step(2)
        (tmp_path / f"sleep-{workers[1]}").write_text("")  # so that it is in the user's code when it is stopped
        wait_until((tmp_path / "asleep").exists, "the rank to be in forward")
        time.sleep(2.0)  # for a heartbeat from there
        os.kill(workers[1], signal.SIGSTOP)
        result, err = run.end(status=1 if answer == "stop" else 0)
        if answer == "drop":
            assert result["devices"] == ["cpu:0", "cpu:2"]
            assert "rank 1 (cpu:1) was dropped\n" in err
    (sentence,) = [line for line in err.splitlines() if re.search(NAMED + r"rank 1 \(cpu:1\) is in ", line)]
    assert sentence.startswith("lockstep: ") == (answer == "stop")
    assert sum(line.startswith("lockstep: ") for line in err.splitlines()) == (answer == "stop")
    here = re.escape(str(tmp_path / "mine.py"))
    what = "it (sends no heartbeat|is stopped)"
    assert re.search(rf"in forward and backward of step \d+, at {here}:14; {what}", sentence)
    assert "Traceback" not in err


def test_a_workers_exception_shows_the_users_own_traceback_once(tmp_path, own_model):
    with nothing_left_behind() as runs:
        how = ("--model", own_model, "--engine", "processes", "--devices", 4)
        run = Run(tmp_path / "run", *how, "--checkpoint-every", 1)
        runs.append(run)
        run.wait_for_step(1)
        (tmp_path / "raise").write_text("")
        err, _ = run.end(status=1)
    assert err.count("Traceback (most recent call last):") == 1
    assert err.count('raise ValueError("my own mistake")') == 1
    assert "site-packages" not in err
    assert re.search(
        r"^lockstep: rank \d \(cpu:\d\), during forward and backward: ValueError: my own mistake \(at .*mine\.py:16\)$",
        err.splitlines()[-1],
    )
    assert err.count("lockstep: ") == 1
    assert '"event": "stopped"' in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1]


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.long)])
def test_an_interrupted_run_of_processes_saves_a_checkpoint_and_can_be_resumed(tmp_path, undisturbed, number):
    with nothing_left_behind() as runs:
        run = Run(tmp_path / "run", "--devices", 3, "--engine", "processes", "--checkpoint-every", 2)
        runs.append(run)
        run.wait_for_workers(3)
        run.wait_for_step(2)
        if number == signal.SIGINT:
            os.killpg(run.process.pid, number)  # as a terminal does
        else:
            os.kill(run.process.pid, number)
        err, _ = run.end(status=130)
        assert re.search(r"^lockstep: interrupted after step \d+\. A checkpoint is in .*\.safetensors\.", err, re.M)
        assert err.count("lockstep: ") == 1
        assert "Traceback" not in err
        again = Run(tmp_path / "run", "--resume", "--devices", 1)
        runs.append(again)
        result, err = again.end()
    assert result["weights_sha256"] == undisturbed["weights_sha256"]


def test_nothing_listens_on_another_address_than_loopback(tmp_path):
    with nothing_left_behind() as runs:
        run = Run(tmp_path / "run", "--devices", 2, "--engine", "processes", "--checkpoint-every", 1)
        runs.append(run)
        workers = run.wait_for_workers(2)
        run.wait_for_step(1)
        sockets = set()
        for process in (run.process.pid, *workers):
            for link in Path(f"/proc/{process}/fd").iterdir():
                if match := re.fullmatch(r"socket:\[(\d+)\]", os.readlink(link)):
                    sockets.add(match[1])
        listening = [
            line.split()[1].partition(":")[0]
            for table in ("tcp", "tcp6")
            for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]
            if line.split()[3] == "0A" and line.split()[9] in sockets
        ]
        assert len(listening) == 2, "one of each worker's"
        assert set(listening) == {"0100007F"}, "127.0.0.1"
        run.end()


def seconds_until_named(folder, own_model, when):
    """One worker is stopped, and is named with what it did: how long that took."""
    how = ("--model", own_model, "--engine", "processes", "--devices", 3, "--checkpoint-every", 1)
    with nothing_left_behind() as runs:
        run = Run(folder, *how, "--timeout", TIMEOUT, "--epochs", 1)
        runs.append(run)
        workers = run.wait_for_workers(3)
        if when == "another is killed":
            run.wait_for_step(2)
        os.kill(workers[1], signal.SIGSTOP)
        stopped = time.monotonic()
        if when == "another is killed":
            os.kill(workers[2], signal.SIGKILL)
        err, _ = run.end(status=1)
        seconds = time.monotonic() - stopped
    said = err.splitlines()[-1]
    assert re.search(NAMED + r"rank 1 \(cpu:1\) ", said)
    if when == "another is killed":
        assert re.search(r"rank 1 \(cpu:1\) is in .* of step \d+.*; it (sends no heartbeat|is stopped)", said)
    assert "Traceback" not in err
    return seconds


@pytest.mark.parametrize("when", ["another is killed", "at the start"])
def test_a_worker_that_is_stopped_meanwhile_is_named_in_time_with_what_it_did(tmp_path, own_model, when):
    """Within deadline + 5 s; where the machine itself stops for a moment, a second or a third time counts."""
    times = (seconds_until_named(tmp_path / f"run-{number}", own_model, when) for number in range(3))
    assert any(seconds < TIMEOUT + MORE for seconds in times)


@pytest.mark.parametrize(("num_devices", "answer"), [(1, "stop"), (1, "drop"), (2, "stop")])
def test_workers_that_nobody_waits_for_are_named_when_they_are_stopped(tmp_path, own_model, num_devices, answer):
    """All that there are: then no other rank notices."""
    how = ("--model", own_model, "--engine", "processes", "--checkpoint-every", 1)
    with nothing_left_behind() as runs:
        run = Run(tmp_path / "run", *how, "--devices", num_devices, "--timeout", TIMEOUT, "--on-hang", answer)
        runs.append(run)
        workers = run.wait_for_workers(num_devices)
        run.wait_for_step(2)
        for worker in workers:
            os.kill(worker, signal.SIGSTOP)
        err, _ = run.end(status=1)
        said = err.splitlines()[-1]
        for rank in range(num_devices):
            where = rf"rank {rank} \(cpu:{rank}\) is in .* of step \d+.*; it is stopped \(SIGSTOP\)"
            assert re.search(rf"no sign of life for {TIMEOUT} s \(--timeout\): .*{where}", said)
        assert "Resume with: " in said
        assert ("No worker is left" in said) == (answer == "drop")
        plain, again = Run(tmp_path / "plain", *how), Run(tmp_path / "run", "--resume", *how)
        runs += [plain, again]
        assert again.end()[0]["weights_sha256"] == plain.end()[0]["weights_sha256"]


ENDS = """
import os
from mine import Net as Plain

class Net(Plain):
    def forward(self, X):
        os._exit(0)
"""


def test_workers_that_user_code_ends_are_not_done(tmp_path, own_model):
    (tmp_path / "ends.py").write_text(ENDS)
    with nothing_left_behind() as runs:
        how = ("--model", "ends:Net", "--engine", "processes", "--devices", 2, "--max-restarts", 1)
        run = Run(tmp_path / "run", *how)
        runs.append(run)
        err, _ = run.end(status=1)
    assert re.search(r"rank \d \(cpu:\d\) ended with exit status 0", err)
    assert "No worker is left" in err
    assert not (tmp_path / "run" / "result.json").exists()


@pytest.mark.long
@pytest.mark.parametrize("split", ["network=2", "data=2,network=2"])
@pytest.mark.parametrize("every", [1, 100])
def test_a_stage_that_is_lost_comes_back_and_the_bits_stay(tmp_path, undisturbed, split, every):
    """From the newest checkpoint, or from the replica of another data rank; without either, the run starts again."""
    with nothing_left_behind() as runs:
        run = Run(tmp_path / "run", "--split", split, "--engine", "processes", "--checkpoint-every", every)
        runs.append(run)
        workers = run.wait_for_workers(4 if "," in split else 2)
        if every == 1:
            run.wait_for_step(3)
        else:
            lines = tmp_path / "run" / "metrics.jsonl"
            wait_until(lambda: lines.exists() or run.process.poll() is not None, "the first lines")
        with suppress(ProcessLookupError):  # its work is done, and so is the run
            os.kill(workers[-1], signal.SIGKILL)
        result, err = run.end()
    check_same_run(result, undisturbed)
    assert "continuing after step" in err
