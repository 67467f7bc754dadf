"""Two machines, as two network namespaces that a cable joins: the same bits, and plain words when it is cut."""

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

import lockstep as package

pytest.importorskip("torch", reason="torchrun belongs to PyTorch, which is not installed.")

LIMIT = 120  # seconds; a shared machine may stop for a moment at any time
TIMEOUT = 5  # of the run whose cable is cut
SLOW_CABLE = ("tbf", "rate", "2mbit", "burst", "2kb", "latency", "5s")
ADDRESSES = {"a": "10.213.77.1", "b": "10.213.77.2"}

FILE = """
import os
import time

import torch
from torch import nn

class Net(nn.Linear):
    def forward(self, X):
        time.sleep(float(os.environ.get("SLOW", "0")))
        return super().forward(X)

def make_model():
    return Net(6, 3)

def make_data():
    generator = torch.Generator().manual_seed(0)
    X, y = torch.rand(90, 6, generator=generator), torch.randint(3, (90,), generator=generator)
    return (X[:64], y[:64]), (X[64:], y[64:])
"""
MINE = ("--model", "own_file:make_model", "--data", "own_file:make_data", "--batch-size", 8, "--epochs", 6)


class Started:
    """Processes that a test started, found again by what is in their environment, also when their parent is gone."""

    def __init__(self, folder):
        self._mark = f"LOCKSTEP_TEST={uuid.uuid4()}"
        (folder / "own_file.py").write_text(FILE)
        paths = [str(Path(package.__file__).parents[1]), str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
        self._environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
        self._environment.update([self._mark.split("=")])
        self._begun = []

    def start(self, command, folder, **more):
        """Starts it in `folder`, where `out` and `err` get what it prints."""
        folder.mkdir(exist_ok=True)
        with (folder / "out").open("w") as out, (folder / "err").open("w") as err:
            command, environment = [str(part) for part in command], {**self._environment, **more}
            process = subprocess.Popen(command, cwd=folder, env=environment, stdout=out, stderr=err)
        self._begun.append(process)
        return process

    def processes(self, holding=""):
        """Those that run, by id; `holding`: only with this variable."""
        found = []
        for place in Path("/proc").glob("[0-9]*"):
            try:
                environment = (place / "environ").read_bytes().split(b"\0")
            except OSError:  # it has ended
                continue
            names = [entry.partition(b"=")[0].decode() for entry in environment]
            if self._mark.encode() in environment and (not holding or holding in names):
                found.append(int(place.name))
        return found

    def workers(self):
        """The processes of the ranks, without torchrun's own."""
        return self.processes(holding="LOCAL_RANK")

    def end(self):
        """Ends whatever is left."""
        for process in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        for process in self._begun:
            process.wait()


@pytest.fixture
def started(tmp_path):
    """Starts processes, and leaves none behind."""
    started = Started(tmp_path)
    yield started
    started.end()


def ip(*arguments):
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


@pytest.fixture
def cable(started):
    """Two machines with a cable between them. Gives their names, and a function that cuts or mends it."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("Two machines on one need root, and the program ip (iproute2).")
    names = {which: f"lockstep-{os.getpid()}-{which}" for which in ADDRESSES}
    try:
        try:
            for name in names.values():
                ip("netns", "add", name)
            ip("-n", names["a"], "link", "add", "cable", "type", "veth", "peer", "name", "cable", "netns", names["b"])
        except subprocess.CalledProcessError as problem:
            pytest.skip(f"Network namespaces cannot be made here: {problem.stderr.strip()}.")
        for which, name in names.items():
            ip("-n", name, "addr", "add", f"{ADDRESSES[which]}/24", "dev", "cable")
            for device in ("lo", "cable"):
                ip("-n", name, "link", "set", device, "up")
        yield names, lambda state: ip("-n", names["a"], "link", "set", "cable", state)
    finally:
        started.end()
        for name in names.values():
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def train_on_both(started, names, tmp_path, *arguments, port, keeper, **more):
    """`lockstep train` on both machines; that of `keeper` has torchrun's own store."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", 2, "--nproc-per-node", 2]
    torchrun += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{ADDRESSES[keeper]}:{port}"]
    own = {which: ["--local-addr", ADDRESSES[which], "--rdzv-conf", f"is_host={which == keeper}"] for which in names}
    train = ["-m", "lockstep", "train", *MINE, *arguments]
    return {
        which: started.start(
            ["ip", "netns", "exec", name, *torchrun, *own[which], *train], tmp_path / f"machine-{which}", **more
        )
        for which, name in names.items()
    }


def wait_until(is_so, what, seconds=LIMIT):
    """Waits for something to happen; gives how long that took."""
    began = time.monotonic()
    while not is_so():
        assert time.monotonic() < began + seconds, f"after {seconds} s: {what}"
        time.sleep(0.02)
    return time.monotonic() - began


def wait_for_a_checkpoint(folder, process):
    """Waits until the run in `folder` has one; `process` has to live until then."""
    path = folder / "run" / "checkpoints" / "step-000002.safetensors"
    wait_until(lambda: path.exists() or process.poll() is not None, "there is no checkpoint")
    assert path.exists(), (folder / "err").read_text()


def wait_for_both(processes, tmp_path):
    """Waits for the two torchruns, which have to succeed; gives what both printed together."""
    for which, process in processes.items():
        assert process.wait(timeout=LIMIT) == 0, (tmp_path / f"machine-{which}" / "err").read_text()
    return "".join((tmp_path / f"machine-{which}" / "out").read_text() for which in processes)


def sentences(tmp_path, which):
    """What lockstep itself said last on a machine."""
    lines = (tmp_path / f"machine-{which}" / "err").read_text().splitlines()
    return [line for line in lines if line.startswith("lockstep: ")]


def listening(processes):
    """The addresses at which any of these processes can be reached."""
    found = []
    for process in processes:
        sockets = set()
        for entry in Path(f"/proc/{process}/fd").iterdir():
            with contextlib.suppress(OSError):  # it was closed
                sockets.add(os.readlink(entry))
        for table in ("tcp", "tcp6"):
            for line in Path(f"/proc/{process}/net/{table}").read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == "0A" and f"socket:[{fields[9]}]" in sockets:
                    address = bytes.fromhex(fields[1].partition(":")[0])
                    words = [address[at : at + 4][::-1] for at in range(0, len(address), 4)]  # each in the host's order
                    family = socket.AF_INET if len(words) == 1 else socket.AF_INET6
                    found.append(socket.inet_ntop(family, b"".join(words)))
    return found


@pytest.fixture
def expected(lockstep, tmp_path, monkeypatch):
    """The hash of the same run in this process."""
    (tmp_path / "own_file.py").write_text(FILE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "own_file", raising=False)
    answer = lockstep("train", *MINE, "--devices", 4, "--out", "reference", "--json")
    assert answer.status == 0, answer.err
    monkeypatch.delitem(sys.modules, "own_file")
    return answer.json["weights_sha256"]


@pytest.mark.long
def test_two_machines_come_to_the_hash_of_one_process(started, cable, expected, tmp_path):
    """Torchrun's own store is on the second machine, and rank 0 on the first."""
    names, _ = cable
    processes = train_on_both(started, names, tmp_path, "--out", "run", "--json", port=29411, keeper="b")
    out = wait_for_both(processes, tmp_path)
    result = json.loads(out)
    assert out.count("\n") == 1
    assert result["weights_sha256"] == expected
    assert result["devices"] == ["cpu:0", "cpu:1", "cpu:0", "cpu:1"]
    shown = [(tmp_path / f"machine-{which}" / "err").read_text().count("epoch 6/6") for which in names]
    assert sorted(shown) == [0, 1]
    with_run, without = sorted((tmp_path / f"machine-{which}" for which in names), key=shown_last)
    assert (with_run / "run" / "result.json").is_file()
    assert list((with_run / "run" / "checkpoints").iterdir())
    assert sorted(os.listdir(without)) == ["err", "out"]


@pytest.mark.long
def test_a_slow_cable_is_where_the_time_goes(started, cable, tmp_path, lockstep):
    """What both machines wait for is named as the exchange, by the rank that waits for no other."""
    names, _ = cable
    for name in names.values():
        slow = ["ip", "netns", "exec", name, "tc", "qdisc", "add", "dev", "cable", "root", *SLOW_CABLE]
        if shutil.which("tc") is None or subprocess.run(slow, check=False, capture_output=True).returncode:
            pytest.skip("The kernel cannot slow a cable down: tc, or its tbf, is missing.")
    how = ("--out", "run", "--json", "--trace")
    result = json.loads(wait_for_both(train_on_both(started, names, tmp_path, *how, port=29413, keeper="a"), tmp_path))
    parts = result["explanation"]["parts"]
    assert max(parts, key=parts.get) == "exposed exchange", parts
    assert result["explanation"]["advice"].startswith("Exposed exchange: ")
    total = result["explanation"]["perfect_ms"] + sum(parts.values()) + result["explanation"]["rest_ms"]
    assert total == pytest.approx(result["explanation"]["step_ms"], rel=0.02)
    assert abs(result["explanation"]["rest_ms"]) <= 0.05 * result["explanation"]["step_ms"]
    (folder,) = [machine for which in names if (machine := tmp_path / f"machine-{which}" / "run").is_dir()]
    told = lockstep("explain", folder, "--json")
    assert told.json["parts"] == parts
    events = json.loads((folder / "trace.json").read_text())
    assert len({event["pid"] for event in events}) == 4


def shown_last(machine):
    return "epoch 6/6" not in (machine / "err").read_text()


@pytest.mark.long
def test_when_the_cable_is_cut_both_machines_say_so_and_the_run_goes_on_later(started, cable, expected, tmp_path):
    names, set_cable = cable
    arguments = ("--out", "run", "--json", "--checkpoint-every", 2, "--timeout", TIMEOUT)
    processes = train_on_both(started, names, tmp_path, *arguments, port=29412, keeper="a", SLOW="0.2")
    wait_for_a_checkpoint(tmp_path / "machine-a", processes["a"])
    workers = started.workers()
    assert len(workers) == 4
    assert set(listening(workers)) == set(ADDRESSES.values())
    set_cable("down")
    took = wait_until(lambda: not started.workers(), "some rank still waits for the others", TIMEOUT + 25)
    assert took > TIMEOUT / 2
    (said,) = sentences(tmp_path, "a")
    assert re.match(r"lockstep: rank [01] \(cpu:[01]\), in an exchange, peers (did not arrive|were lost): ", said)
    for rank in (2, 3):
        seen = rf"rank {rank} \(cpu:{rank - 2}\) is in [a-z ]+ of step \d+, at [^;]+:\d+; it sends no heartbeat"
        assert re.search(seen, said)
    assert said.endswith("Resume with --resume.")
    others = sentences(tmp_path, "b")  # they cannot ask each other whether it is said: the store is far
    assert 1 <= len(others) <= 2
    assert len({line.partition(",")[0] for line in others}) == len(others)
    for line in others:
        assert re.match(r"lockstep: rank [23] \(cpu:[01]\), in an exchange, peers (did not arrive|were lost): ", line)
        assert "the store of all processes cannot be reached" in line
    for which in names:
        ours = f"{os.sep}lockstep{os.sep}training{os.sep}torchrun.py"
        assert ours not in (tmp_path / f"machine-{which}" / "err").read_text()
        assert (tmp_path / f"machine-{which}" / "out").read_text() == ""
    started.end()  # torchrun's own process on the second machine waits for the first as long as TCP does
    set_cable("up")
    processes = train_on_both(started, names, tmp_path, *arguments, "--resume", port=29413, keeper="a")
    result = json.loads(wait_for_both(processes, tmp_path))
    assert result["weights_sha256"] == expected
    assert re.search(r"continuing after step [1-9]", (tmp_path / "machine-a" / "err").read_text())
    assert sorted(os.listdir(tmp_path / "machine-b")) == ["err", "out"]


def test_processes_of_one_machine_can_be_reached_from_nowhere_else(started, tmp_path):
    """Neither the store nor Gloo listens on another address than loopback; and all end with the run."""
    folder = tmp_path / "machine"
    command = [sys.executable, "-m", "lockstep", "train", *MINE, "--engine", "processes", "--devices", 2]
    process = started.start([*command, "--out", "run", "--checkpoint-every", 2], folder, SLOW="0.2")
    wait_for_a_checkpoint(folder, process)
    processes = started.processes()
    assert len(processes) == 3
    found = listening(processes)
    assert set(found) == {"127.0.0.1"}
    assert len(found) == 2, "Gloo on both ranks"
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=LIMIT) == 130
    assert started.processes() == []
    assert "lockstep: interrupted after step " in (folder / "err").read_text()
