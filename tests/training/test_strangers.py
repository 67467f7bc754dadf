"""Other users of the machine, and other machines: they find nothing to take over a run by.

What they send costs a run in processes a new connection at most, and one of torchrun's, whose store is open to all, a
sentence. `stranger.py` has the attempts.
"""

import contextlib
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from training.background_command import BackgroundCommand

STRANGER = Path(__file__).with_name("stranger.py")
needs_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")

NOBODY = 65534
HOW = ["train", "--data", "fashion-mnist-mini", "--epochs", 4, "--lr", 0.1, "--devices", 3, "--json"]
ATTACK = """
import encodings.idna, os, socket, sys, time
for group in (os.setgroups, os.setgid, os.setuid):
    group([] if group is os.setgroups else {nobody})
sockets = []
for port in map(int, sys.argv[1:]):
    for content in (b"", b"\\0" * 4096, os.urandom(4096), *(number.to_bytes(8, "little") for number in range(8))):
        try:
            one = socket.create_connection(("127.0.0.1", port), timeout=2)
            one.sendall(content)
            sockets.append(one)  # and stays connected
        except OSError as problem:
            print(port, problem)
print("connected", len(sockets), flush=True)
time.sleep(1)
"""


def below(process):
    found = [process]
    for child in Path(f"/proc/{process}/task/{process}/children").read_text().split():
        found += below(int(child))
    return found


def listening_ports(process):
    """Of a process and its children; and the names of Unix sockets that somebody could connect to."""
    inodes = set()
    for each in below(process):
        for link in Path(f"/proc/{each}/fd").iterdir():
            if match := re.fullmatch(r"socket:\[(\d+)\]", os.readlink(link)):
                inodes.add(match[1])
    tcp = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    unix = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    ports = [int(row[1].partition(":")[2], 16) for row in tcp if row[3] == "0A" and row[9] in inodes]
    return ports, [row[7] for row in unix if len(row) > 7 and row[6] in inodes]


@needs_root
def test_another_user_who_connects_to_all_that_listens_changes_nothing(tmp_path):
    run = BackgroundCommand(tmp_path, [*HOW, "--engine", "processes", "--out", "run"])
    try:
        deadline = time.monotonic() + 60
        ports, names = [], []
        while len(ports) < 3 and time.monotonic() < deadline and run.poll() is None:  # Gloo's, one of each worker
            time.sleep(0.05)
            try:
                ports, names = listening_ports(run.pid)
            except (FileNotFoundError, ProcessLookupError):
                continue
        assert len(ports) == 3
        assert names == [], "nothing with a name that others could connect to"
        attack = [sys.executable, "-c", ATTACK.replace("{nobody}", str(NOBODY)), *map(str, ports)]
        done = subprocess.run(attack, capture_output=True, text=True, timeout=60)
        assert "connected" in done.stdout, done.stderr
        out, err = run.communicate(timeout=120)
    finally:
        run.kill_all()
    assert run.returncode == 0, err
    assert "Traceback" not in err
    plain = BackgroundCommand(tmp_path, [*HOW[:-3], "--devices", 1, "--json", "--out", "plain"])
    expected, _ = plain.communicate(timeout=120)
    hashes = [re.search(r'"weights_sha256": "(\w+)"', text)[1] for text in (out, expected)]
    assert hashes[0] == hashes[1]


def test_what_the_run_keeps_for_its_processes_has_no_name_and_no_port(tmp_path):
    from lockstep.runtime.launch.private_store import PrivateStore, WorkerStore
    from lockstep.runtime.store import private_file

    store = PrivateStore()
    end = store.new_connection()
    assert end.getsockname() in ("", b"")
    theirs = end.dup()
    worker = WorkerStore(theirs, 5.0)
    store.serve(end)
    worker.set("key", "value")
    assert worker.get("key") == store.get("key") == b"value"
    assert [worker.add("count", 2), store.add("count", 3), worker.add("count", 0)] == [2, 5, 5]
    assert [worker.check(["key"]), worker.check(["key", "other"])] == [True, False]
    descriptor = private_file()
    assert os.fstat(descriptor).st_nlink == 0
    os.close(descriptor)
    store.close()
    with pytest.raises(RuntimeError, match="the supervisor is gone"):
        worker.check(["key"])
    theirs.close()


def test_a_worker_whose_message_is_refused_does_not_wait_for_ever():
    from lockstep.runtime.launch.private_store import MAX_BYTES, PrivateStore, WorkerStore

    store = PrivateStore()
    theirs = store.new_connection()
    mine = theirs.dup()
    store.serve(theirs)
    with pytest.raises(RuntimeError, match="the supervisor is gone"):
        WorkerStore(mine, 5.0).set("error/0", "x" * (MAX_BYTES + 1))
    mine.close()
    store.close()


@contextlib.contextmanager
def stranger(*arguments, prefix=(), log):
    """Somebody who tries `arguments` from now on, until the end of the block; what is printed goes to `log`."""
    command = [*prefix, sys.executable, STRANGER, *arguments]
    with log.open("w") as out:
        process = subprocess.Popen(list(map(str, command)), stdout=out, stderr=subprocess.STDOUT)
        try:
            deadline = time.monotonic() + 60
            while not log.read_text() and process.poll() is None and time.monotonic() < deadline:
                time.sleep(0.02)
            yield process
        finally:
            process.kill()
            process.wait()


def hash_in(text):
    return re.search(r'"weights_sha256": "(\w+)"', text)[1]


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """The run's own hash."""
    folder = tmp_path_factory.mktemp("expected")
    out, err = BackgroundCommand(folder, [*HOW, "--out", "plain"]).communicate(timeout=120)
    assert out, err
    return hash_in(out)


@needs_root
def test_another_user_can_open_nothing_that_the_processes_of_a_run_share(tmp_path, expected):
    run = BackgroundCommand(tmp_path, [*HOW, "--engine", "processes", "--out", "run"])
    try:
        wait_for(lambda: (tmp_path / "run" / "metrics.jsonl").exists() or run.poll() is not None)
        processes = ",".join(map(str, below(run.pid)))
        with stranger("enter", processes, log=tmp_path / "stranger") as other:
            other.wait(timeout=60)
        out, err = run.communicate(timeout=120)
    finally:
        run.kill_all()
    assert "killed, read, written: [0, 0, 0]" in (tmp_path / "stranger").read_text()
    assert run.returncode == 0, err
    assert hash_in(out) == expected


def wait_for(condition, seconds=60):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


# --- other machines: network namespaces


def ip(*arguments):
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


VICTIM, OTHER = "10.213.78.1", "10.213.78.2"


@pytest.fixture
def machines():
    """The names of two machines with a cable between them."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("Two machines on one need root, and the program ip (iproute2).")
    names = [f"lockstep-{os.getpid()}-{which}" for which in ("victim", "other")]
    try:
        try:
            for name in names:
                ip("netns", "add", name)
            ip("-n", names[0], "link", "add", "cable", "type", "veth", "peer", "name", "cable", "netns", names[1])
        except subprocess.CalledProcessError as problem:
            pytest.skip(f"Network namespaces cannot be made here: {problem.stderr.strip()}.")
        for name, address in zip(names, (VICTIM, OTHER), strict=True):
            ip("-n", name, "addr", "add", f"{address}/24", "dev", "cable")
            for device in ("lo", "cable"):
                ip("-n", name, "link", "set", device, "up")
        yield [["ip", "netns", "exec", name] for name in names]
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def started(folder, *command):
    """A command in a process of its own, that has a secret; standard error goes to the file `err`."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "LOCKSTEP_SECRET_FILE": str(folder / "secret")}
    (folder / "secret").write_text("known to the ranks only")
    (folder / "secret").chmod(0o600)
    with (folder / "err").open("w") as err:
        return subprocess.Popen(
            list(map(str, command)), cwd=folder, env=environment, text=True, stdout=subprocess.PIPE, stderr=err
        )


IN_PROCESSES = [sys.executable, "-m", "lockstep", *HOW, "--engine", "processes", "--out", "run"]


def test_nothing_of_a_run_in_processes_can_be_reached_from_another_machine(tmp_path, machines, expected):
    victim, other = machines
    run = started(tmp_path, *victim, *IN_PROCESSES)
    try:
        wait_for(lambda: (tmp_path / "run" / "metrics.jsonl").exists() or run.poll() is not None, 120)
        rows = Path(f"/proc/{run.pid}/net/tcp").read_text().splitlines()[1:]
        ports = [int(row.split()[1].partition(":")[2], 16) for row in rows if row.split()[3] == "0A"]
        assert len(ports) == 3
        done = subprocess.run([*other, sys.executable, STRANGER, "knock", VICTIM, *map(str, ports)],
                              capture_output=True, text=True, timeout=60)  # fmt: skip
        assert done.stdout == "reached: []\n", done.stderr
        out, _ = run.communicate(timeout=120)
    finally:
        run.kill()
        run.wait()
    assert hash_in(out) == expected


@pytest.mark.parametrize("max_ports", [9, pytest.param(10**6, marks=pytest.mark.long)])
def test_who_connects_before_the_ranks_do_costs_a_new_connection(tmp_path, machines, expected, max_ports):
    """As another user of the same machine, and faster than the ranks: the first three times, or every time."""
    victim, _ = machines
    with stranger("race", max_ports, prefix=victim, log=tmp_path / "stranger"):
        run = started(tmp_path, *victim, *IN_PROCESSES, "--timeout", 20)
        out, _ = run.communicate(timeout=180)
    err = (tmp_path / "err").read_text()
    assert (tmp_path / "stranger").read_text().count("connected to") >= 3
    assert "Traceback" not in err
    if max_ports == 9 or run.returncode == 0:
        assert run.returncode == 0, err
        assert hash_in(out) == expected
    else:
        assert run.returncode == 1, err
        assert re.search("^lockstep: 10 times, not all ranks were connected to each other", err, re.M), err


TORCHRUN = ("-m", "torch.distributed.run", "--nnodes", "1", "--nproc-per-node", "2", "--rdzv-backend", "static")
ATTEMPTS = [
    ("forge", "device"),
    ("forge", "heartbeat", "ready"),
    ("forge", "address"),
    ("forge", "nothing"),
    ("forge", "failed"),
    ("join",),
]


@pytest.mark.parametrize("attempt", [ATTEMPTS[-1], *(pytest.param(a, marks=pytest.mark.long) for a in ATTEMPTS[:-1])])
def test_who_reaches_the_store_of_torchrun_can_end_a_run_and_not_change_its_bits(tmp_path, machines, expected, attempt):
    """From another machine, with our own classes: the run's own hash, or a sentence and its own hash when resumed."""
    victim, other = machines
    how, *what = attempt
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    launcher = [*TORCHRUN, "--rdzv-id", "known", "--master-addr", VICTIM, "--master-port", port]
    arguments = [argument for argument in HOW if argument not in ("--devices", 3)]  # as many as torchrun starts
    command = [*victim, sys.executable, *launcher, "-m", "lockstep", *arguments, "--timeout", 30, "--out", "run"]
    target = [VICTIM, port, "known/0/2", *([OTHER] if how == "join" else what)]
    with stranger(how, *target, prefix=other, log=tmp_path / "stranger"):
        run = started(tmp_path, *command)
        out, _ = run.communicate(timeout=120)
    err = (tmp_path / "err").read_text()
    assert "inside" not in (tmp_path / "stranger").read_text()
    assert "Traceback" not in said_by_lockstep(err)
    if run.returncode == 0:
        assert hash_in(out) == expected
        return
    assert re.search("^lockstep: ", err, re.M), err
    assert "\x1b[2J" not in err
    assert not (tmp_path / "run" / "result.json").exists()
    out, _ = started(tmp_path, *command, "--resume").communicate(timeout=120)
    assert hash_in(out) == expected, (tmp_path / "err").read_text()


def said_by_lockstep(err):
    """Without torchrun's own traceback, which it ends with when a process has failed: the last one, and no other."""
    before, _, last = err.rpartition("Traceback")
    return before if "/torch/distributed/run.py" in last else err
