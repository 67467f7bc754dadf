"""Other users of the machine: they find nothing to take over a run by, and what they send costs it nothing."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from training.background_command import BackgroundCommand

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


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
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
