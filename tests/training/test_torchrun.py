"""A run whose processes torchrun started: the same bits, one result, and one error message when something is wrong."""

import json
import os
import re
import runpy
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import NamedTuple

import pytest

import lockstep as package
from lockstep.config import RunConfig
from lockstep.core.errors import ConfigError, PeerFailure
from lockstep.core.torchrun_env import TorchrunEnv, prints_result, torchrun_env
from training.background_command import BackgroundCommand

pytest.importorskip("torch", reason="torchrun belongs to PyTorch, which is not installed.")

LIMIT = 120  # seconds; a shared machine may stop for a moment at any time
NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

FILE = """
import os
import signal

import torch
from torch import nn

RANK, START = os.environ.get("RANK"), os.environ.get("TORCHELASTIC_RESTART_COUNT")

class Net(nn.Linear):
    calls = 0

    def forward(self, X):
        Net.calls += self.training
        if Net.calls > 20 and os.environ.get("FAILS", "none") == RANK:
            raise ValueError("this rank cannot")
        if Net.calls > 20 and START == "0" and os.environ.get("KILLS", "none") == RANK:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().forward(X)

def make_model():
    return Net(6, 3)

def make_data():
    generator = torch.Generator().manual_seed(0)
    X, y = torch.rand(90, 6, generator=generator), torch.randint(3, (90,), generator=generator)
    return (X[:64], y[:64]), (X[64:], y[64:])
"""
MINE = ("--model", "own_file:make_model", "--data", "own_file:make_data", "--batch-size", 8, "--epochs", 4)

SCRIPT = """
import json
import os

import lockstep
from own_file import make_data, make_model

if __name__ == "__main__":
    rank = os.environ.get("RANK")
    data = make_data()
    if os.environ.get("OTHER_DATA", "none") == rank:
        data[0][0][:] += 1
    result = lockstep.train(model=make_model, data=data, batch_size=8, epochs=2, shards=6, quiet=True)
    weights = {name: array.tolist() for name, array in result.params.items()}
    module = {name: tensor.tolist() for name, tensor in result.module.state_dict().items()}
    said = [result.weights_sha256, result.metrics, result.steps, [done.train_loss for done in result.history]]
    with open(f"result-{rank}.json", "w") as file:
        json.dump([weights, module, said], file)
"""

SPLITS = """
import json
import os

from torch import nn

import lockstep
from lockstep.training import auto_split
from own_file import make_data

RANK = os.environ.get("RANK")

def network():
    return nn.Sequential(
        nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3)
    )

def train(**how):
    result = lockstep.train(model=network, data=make_data(), batch_size=16, epochs=1, shards=8, quiet=True,
                            optimizer="adamw", **how)
    return [result.weights_sha256, result.buffers_sha256, result.metrics]

def trainer(**how):
    X, y = make_data()[0]
    with lockstep.Trainer(network, optimizer="adamw", shards=8, example=(X[:16], y[:16]), **how) as trainer:
        losses = [trainer.step((X[at : at + 16], y[at : at + 16])).loss for at in (0, 16, 32)]
        return [trainer.weights_sha256, losses, trainer.evaluate((X, y))]

if __name__ == "__main__":
    if RANK is None:
        found = [train(devices=1), trainer(devices=1), trainer(devices=1, slices=4)]
    else:
        found = [train(split="auto"), trainer(split="network"), trainer(split="layers", slices=4)]
        auto_split.USABLE = 1e-9 if RANK == "1" else 0.9  # the machine of rank 1 has no memory
        found += [train(split="auto"), trainer(update="sharded")]
    with open(f"splits-{RANK}.json", "w") as file:
        json.dump(found, file)
"""

SHOW = """
import json
from lockstep.core.torchrun_env import torchrun_env
print(json.dumps(torchrun_env()))
"""


def started_with(mark):
    """The processes, by id, that have `mark` in their environment: whatever was started, also if its parent is gone."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (process / "environ").read_bytes():
                found.append(int(process.name))
        except OSError:  # it has ended
            pass
    return found


class Launched(NamedTuple):
    """What all ranks together printed, and their exit statuses; torchrun itself names that of the first failure."""

    statuses: list[int]
    stdout: str
    stderr: str


def launch_with_torchrun(folder, num_ranks, arguments, max_restarts, environment):
    mark = f"LOCKSTEP_TEST={uuid.uuid4()}"
    paths = [str(Path(package.__file__).parents[1]), str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", **environment}
    environment[mark.partition("=")[0]] = mark.partition("=")[2]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", num_ranks]
    command += ["--max-restarts", max_restarts] + ([] if arguments[0].endswith(".py") else ["-m", "lockstep"])
    command = [str(part) for part in [*command, *arguments]]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT, check=False)
        assert started_with(mark) == []
    finally:
        for process in started_with(mark):
            os.kill(process, signal.SIGKILL)
    assert "forcefully exiting" not in done.stderr, "no rank waits for one that is gone"
    statuses = [int(status) for status in re.findall(r"exitcode  : (-?\d+) ", done.stderr)]
    assert (done.returncode == 0) == (not statuses)
    return Launched(statuses or [0], done.stdout, done.stderr)


def launch_by_forking(folder, num_ranks, arguments, max_restarts, environment):
    """The same in two seconds: the environment is torchrun's, and so is what happens when a rank fails."""
    from lockstep.runtime.store import serve_store

    store, port, _ = serve_store()
    size = {"WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    for restart in range(max_restarts + 1):
        run = {"TORCHELASTIC_USE_AGENT_STORE": True, "TORCHELASTIC_RUN_ID": 1, "TORCHELASTIC_RESTART_COUNT": restart}
        ranks = []
        for rank in range(num_ranks):
            variables = {**size, **run, "RANK": rank, "LOCAL_RANK": rank, **environment}
            variables = {name: str(value) for name, value in variables.items()}
            ranks.append(BackgroundCommand(folder, arguments, **variables))
        try:
            while None in (statuses := [rank.poll() for rank in ranks]) and not any(statuses):
                time.sleep(0.05)
            for rank in ranks:
                if rank.poll() is None:
                    rank.send_signal(signal.SIGTERM)
            printed = [rank.communicate(30) for rank in ranks]  # torchrun waits so long, too
        finally:
            for rank in ranks:
                rank.kill_all()
        if not any(statuses):
            break
    del store
    statuses = [rank.returncode for rank in ranks]
    return Launched(statuses, *("".join(parts) for parts in zip(*printed, strict=True)))


LAUNCHERS = {"forked": launch_by_forking, "torchrun": launch_with_torchrun}


@pytest.fixture(params=["forked", pytest.param("torchrun", marks=pytest.mark.long)])
def torchrun(request, tmp_path, monkeypatch):
    """Runs `lockstep ARGUMENTS`, or a script, on k ranks in an empty folder with a file of the user's own."""
    (tmp_path / "own_file.py").write_text(FILE)
    (tmp_path / "script.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)

    def run(num_ranks, *arguments, max_restarts=0, **environment):
        return LAUNCHERS[request.param](tmp_path, num_ranks, arguments, max_restarts, environment)

    return run


def sentences(err):
    """The error messages of lockstep itself."""
    return [line for line in err.splitlines() if line.startswith("lockstep: ")]


@pytest.fixture
def own(lockstep, tmp_path, monkeypatch):
    """The hash of the own model, trained in this process."""
    (tmp_path / "own_file.py").write_text(FILE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "own_file", raising=False)
    answer = lockstep("train", *MINE, "--devices", 2, "--out", "reference", "--json")
    assert answer.status == 0, answer.err
    monkeypatch.delitem(sys.modules, "own_file")
    return answer.json["weights_sha256"]


# ---------------------------------------------------------------------------------------------------- the same bits


@pytest.mark.parametrize(
    ("torchrun", "num_ranks"),
    [("forked", num_ranks) for num_ranks in (1, 2, 3)]
    + [pytest.param("torchrun", num_ranks, marks=pytest.mark.long) for num_ranks in (1, 2, 3)],
    indirect=["torchrun"],
)
def test_the_hash_is_that_of_one_process_and_one_rank_prints_it(torchrun, lockstep, few, tmp_path, num_ranks):
    arguments = ("train", "--data", few, "--batch-size", 8, "--epochs", 2, "--json")
    expected = lockstep(*arguments, "--devices", 1, "--out", "reference")
    done = torchrun(num_ranks, *arguments)
    assert set(done.statuses) == {0}, done.stderr
    result = json.loads(done.stdout)
    assert done.stdout.count("\n") == 1
    assert result["weights_sha256"] == expected.json["weights_sha256"]
    assert result["devices"] == [f"cpu:{rank}" for rank in range(num_ranks)]
    assert result["steps"] == 6
    assert sorted(result["peak_memory"]) == (result["devices"] if num_ranks > 1 else ["cpu"])
    assert done.stderr.count("epoch 2/2") == 1
    assert sentences(done.stderr) == []
    (run,) = (tmp_path / "runs").iterdir()
    assert json.loads((run / "result.json").read_text()) == result
    kinds = [json.loads(line)["event"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [kind for kind in kinds if kind != "step"] == ["started", "epoch", "epoch", "done"]
    assert kinds.count("step") == 6, "one rank writes them"


def test_a_script_of_the_users_own_gets_the_same_result_on_every_rank(torchrun, tmp_path, monkeypatch):
    """Six shards on two ranks: also what belongs to no rank alone, like metrics and losses, is the same."""
    done = torchrun(2, "script.py")
    assert set(done.statuses) == {0}, done.stderr
    assert done.stdout == done.stderr == ""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "own_file", raising=False)
    runpy.run_path(str(tmp_path / "script.py"), run_name="__main__")
    monkeypatch.delitem(sys.modules, "own_file")
    results = [json.loads((tmp_path / f"result-{rank}.json").read_text()) for rank in ("None", "0", "1")]
    assert results[0] == results[1]
    assert results[0] == results[2]


@pytest.mark.parametrize("num_ranks", [pytest.param(2, marks=pytest.mark.long), 3])
def test_several_runs_and_trainers_of_one_program_with_every_split(torchrun, tmp_path, monkeypatch, num_ranks):
    (tmp_path / "splits.py").write_text(SPLITS)
    done = torchrun(num_ranks, "splits.py")
    assert set(done.statuses) == {0}, done.stderr
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "own_file", raising=False)
    runpy.run_path(str(tmp_path / "splits.py"), run_name="__main__")
    monkeypatch.delitem(sys.modules, "own_file")
    alone, *ranks = (json.loads((tmp_path / f"splits-{rank}.json").read_text()) for rank in ["None", *range(num_ranks)])
    assert all(rank == [*alone, *alone[:2]] for rank in ranks)


# ------------------------------------------------------------------------------------------------ what can go wrong


def test_an_error_in_the_users_model_on_one_rank_is_shown_once(torchrun, tmp_path):
    done = torchrun(2, "train", *MINE, "--out", "run", FAILS="1")
    assert 1 in done.statuses
    assert done.stdout == ""
    (said,) = sentences(done.stderr)
    assert said.startswith("lockstep: rank 1 (cpu:1), during forward and backward: ValueError: this rank cannot (at ")
    line = FILE.splitlines().index('            raise ValueError("this rank cannot")') + 1
    assert f"own_file.py:{line})" in said
    lines = done.stderr.splitlines()
    assert lines.count("ValueError: this rank cannot") == 1
    assert done.stderr.count(f'File "{tmp_path}/own_file.py", line {line}, in forward') == 1
    assert f"{os.sep}lockstep{os.sep}runtime" not in done.stderr, "only the user's own part of the traceback"


def test_a_run_that_torchrun_restarts_continues_after_its_last_checkpoint(torchrun, own, tmp_path):
    """Rank 0, which writes the checkpoints, is killed; torchrun then restarts all of them."""
    arguments = ("train", *MINE, "--out", "run", "--checkpoint-every", 2, "--verify-every", 0, "--json")
    done = torchrun(2, *arguments, max_restarts=2, KILLS="0")
    assert set(done.statuses) == {0}, done.stderr
    assert json.loads(done.stdout)["weights_sha256"] == own
    events = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    started = [event for event in events if event["event"] in ("started", "resumed")]
    assert [event["event"] for event in started] == ["started", "resumed"]
    assert started[1]["step"] == 4, "the sixth step was under way when it was killed"
    assert done.stderr.count("continuing after step 4") == 1
    assert [event["epoch"] for event in events if event["event"] == "epoch"][-1] == 4
    assert events[-1]["event"] == "done"
    assert 'lockstep/training/torchrun.py", line' not in done.stderr


WRONG = {
    "--devices 3": "torchrun has started 2 processes, 2 of them on this machine, and --devices is 3. Leave it out",
    "--lr 0": "learning rate must be more than 0, got 0.0 (--lr).",
    "--lrate 1": "No such option: --lrate",
    "--out full": "full is not empty",  # only the rank that writes there finds out
}


@pytest.mark.parametrize("arguments", WRONG)
def test_wrong_settings_are_reported_by_one_rank_and_end_all_of_them(torchrun, few, tmp_path, arguments):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    done = torchrun(2, "train", "--data", few, "--batch-size", 8, *arguments.split())
    assert 2 in done.statuses
    assert done.stdout == ""
    (said,) = sentences(done.stderr)
    assert WRONG[arguments] in said
    assert not (tmp_path / "runs").exists()


def test_ranks_that_have_other_data_than_the_others_are_refused(torchrun, tmp_path):
    """On several machines, files of one name may differ, and the hash would be that of no run."""
    done = torchrun(2, "script.py", OTHER_DATA="1")
    assert set(done.statuses) != {0}, "it trained each shard on the data of its rank"
    assert "ConfigError: " in done.stderr
    assert "data" in done.stderr
    assert not list(tmp_path.glob("result-*.json"))


# --------------------------------------------------------------------------------------- the environment of torchrun


@pytest.fixture
def environment(monkeypatch):
    """Sets the variables of torchrun to `values`; without arguments, none is set."""

    def set_to(**values):
        for name in {*os.environ}:
            if name in NAMES or name.startswith("TORCHELASTIC_"):
                monkeypatch.delenv(name)
        for name, value in values.items():
            monkeypatch.setenv(name, value)

    set_to()
    return set_to


THIRD_OF_FOUR = {
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "TORCHELASTIC_RUN_ID": "abc",
    "TORCHELASTIC_RESTART_COUNT": "0",
    "RANK": "2",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29400",
}


def test_a_process_that_torchrun_did_not_start_has_no_environment(environment):
    assert torchrun_env() is None
    assert prints_result()


@pytest.mark.parametrize("missing", ["TORCHELASTIC_USE_AGENT_STORE", "RANK"])
def test_other_launchers_variables_do_not_make_a_torchrun(environment, missing):
    environment(**{name: value for name, value in THIRD_OF_FOUR.items() if name != missing})
    assert torchrun_env() is None
    assert prints_result()


def test_rank_size_and_address_are_read_from_the_environment(environment):
    environment(**THIRD_OF_FOUR)
    env = torchrun_env()
    assert env is not None
    assert (env.rank, env.size, env.local_rank, env.local_size) == (2, 4, 0, 2)
    assert (env.host, env.port) == ("10.0.0.1", 29400)
    assert not env.is_restarted


@pytest.mark.parametrize("torchrun", LAUNCHERS, indirect=True)
def test_every_rank_finds_its_environment(torchrun, tmp_path):
    """The forked ranks, which most tests here use, have the environment that torchrun itself sets."""
    (tmp_path / "show.py").write_text(SHOW)
    found = sorted(map(json.loads, torchrun(2, "show.py").stdout.splitlines()))
    for rank, (number, size, local_rank, local_size, host, port, attempt, is_restarted) in enumerate(found):
        assert (number, size, local_rank, local_size) == (rank, 2, rank, 2)
        assert host
        assert port > 0
        assert attempt.endswith("/0/2")
        assert not is_restarted
    assert len(found) == 2
    assert found[0][4:] == found[1][4:]


def test_only_rank_0_prints_the_result(environment):
    environment(**THIRD_OF_FOUR)
    assert not prints_result()
    environment(**{**THIRD_OF_FOUR, "RANK": "0"})
    assert prints_result()


def test_each_start_of_all_processes_has_its_own_name(environment):
    """The store outlives them: what an earlier start left there must not be read by the next."""
    attempts = set()
    for changes in ({}, {"TORCHELASTIC_RESTART_COUNT": "1"}, {"TORCHELASTIC_RUN_ID": "abd"}, {"WORLD_SIZE": "3"}):
        environment(**{**THIRD_OF_FOUR, **changes})
        env = torchrun_env()
        assert env is not None
        assert env.is_restarted == ("TORCHELASTIC_RESTART_COUNT" in changes)
        attempts.add(env.attempt)
    assert len(attempts) == 4


# ------------------------------------------------------------------------------------------- the devices of all ranks


@pytest.fixture
def store():
    """A store with nothing in it."""
    from lockstep.runtime.store import join_store, serve_store

    kept, port, _ = serve_store()
    yield join_store("127.0.0.1", port, 0.3)
    del kept


def env_of_rank(rank, size, local_rank, local_size):
    return TorchrunEnv(rank, size, local_rank, local_size, "127.0.0.1", 1, "abc", False)


@pytest.mark.parametrize("devices", [None, 4, "4", "cpu:0,cpu:1"])
def test_every_rank_takes_the_device_of_its_local_rank(store, devices):
    from lockstep.training.torchrun import devices_of_all

    for rank in (0, 1, 2):
        store.set(f"device/{rank}", f"cpu:{rank % 2}")
    config = RunConfig(devices=devices, timeout=1)
    assert devices_of_all(config, env_of_rank(3, 4, 1, 2), store) == ["cpu:0", "cpu:1", "cpu:0", "cpu:1"]
    assert store.get("device/3") == b"cpu:1"


def test_devices_of_two_kinds_are_refused(store):
    from lockstep.training.torchrun import devices_of_all

    store.set("device/1", "cuda:0")
    with pytest.raises(ConfigError, match="devices of two kinds, cpu:0, cuda:0: their kernels round differently"):
        devices_of_all(RunConfig(devices="cpu:0", timeout=1), env_of_rank(0, 2, 0, 1), store)


def test_a_rank_that_never_starts_is_a_peer_failure(store):
    from lockstep.training.torchrun import devices_of_all

    with pytest.raises(PeerFailure):
        devices_of_all(RunConfig(devices=2, timeout=0.3), env_of_rank(0, 2, 0, 2), store)


def test_all_ranks_know_the_least_memory_that_one_of_them_has(store):
    from lockstep.core.interrupts import Interrupts
    from lockstep.training.torchrun import least_of_all

    store.set("memory/1", "700")
    with Interrupts(notify=False) as interrupts:
        assert least_of_all(store, env_of_rank(0, 2, 0, 2), 1.0, interrupts, 900.5) == 700.0
        assert least_of_all(store, env_of_rank(0, 2, 0, 2), 1.0, interrupts, 600.5) == 600.0
        store.set("memory/1", "much")
        with pytest.raises(PeerFailure, match="memory in torchrun's store is no number"):
            least_of_all(store, env_of_rank(0, 2, 0, 2), 1.0, interrupts, 900.0)
        with pytest.raises(PeerFailure, match="Not all ranks are ready"):
            least_of_all(store, env_of_rank(0, 3, 0, 3), 0.1, interrupts, 900.0)


def test_a_mark_that_anybody_could_write_keeps_no_rank_silent(store):
    from lockstep.runtime.authenticated_store import AuthenticatedStore
    from lockstep.training.torchrun import is_reported

    store.set("failed", "7")
    store.set("printed", "yes")
    marked = AuthenticatedStore(store, b"known to the ranks only", 0.3)
    assert not is_reported(marked), "nobody has printed it"
    assert is_reported(marked)
