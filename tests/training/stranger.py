"""What somebody tries who does not belong to a run: `python stranger.py HOW ARGUMENTS`. It prints what it reached.

It knows all of Lockstep's code and uses its classes, sees /proc and the network, and lacks the run's secret.
"""

import contextlib
import encodings.idna  # noqa: F401  nobody cannot read root's files: everything is imported before
import os
import socket
import sys
import time
from pathlib import Path

import torch.distributed as dist

from lockstep.core.device import Device
from lockstep.core.errors import LockstepError, PeerFailure
from lockstep.core.serialization import pack
from lockstep.runtime.authenticated_store import AuthenticatedStore
from lockstep.runtime.process_group import ProcessGroup
from lockstep.runtime.store import join_store, prefix_store

NOBODY = 65534
ADDRESSES = ("rank_0", "rank_1", "0/0", "0/1", "1/0", "0", "1")  # what Gloo calls them
SECONDS = 60.0  # until it gives up, if it is not ended before


def become_nobody():
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)


def listeners():
    """The ports that anybody listens on, on loopback."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return {int(row[1].partition(":")[2], 16) for row in rows if row[3] == "0A" and row[1].startswith("0100007F")}


def race(max_ports):
    """Connects to whatever listens from now on, before the ranks do, and sends what they would: numbers of pairs."""
    become_nobody()
    known, kept = listeners(), []
    print("ready", flush=True)
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        for port in listeners() - known if len(kept) < 16 * int(max_ports) else ():
            for number in range(16):
                with contextlib.suppress(OSError):
                    one = socket.create_connection(("127.0.0.1", port), timeout=1)
                    one.sendall(number.to_bytes(8, "little"))
                    kept.append(one)
            known.add(port)
            print("connected to", port, flush=True)


def enter(process, *_):
    """Opens what the processes of a run have open, writes to their addresses, and ends them."""
    become_nobody()
    found = [0, 0, 0]
    for each in map(int, process.split(",")):
        with contextlib.suppress(OSError):
            os.kill(each, 9)
            found[0] += 1
        for descriptor in range(64):
            file = Path(f"/proc/{each}/fd/{descriptor}")
            try:
                file.read_bytes()
                found[1] += 1
            except FileNotFoundError:  # the process is gone, and a store would wait for the file
                continue
            except OSError:
                pass
            with contextlib.suppress(Exception):
                dist.FileStore(str(file), -1).set("group/0/gloo/0", "forged")
                found[2] += 1
    print("killed, read, written:", found, flush=True)


def knock(host, *ports):
    """Connects to these ports of a machine."""
    found = []
    for port in map(int, ports):
        with contextlib.suppress(OSError), socket.create_connection((host, port), timeout=2):
            found.append(port)
    print("reached:", found, flush=True)


def store_of_torchrun(host, port, attempt):
    deadline = time.monotonic() + SECONDS
    while True:
        try:
            return prefix_store(f"lockstep/{attempt}", join_store(host, int(port), 5.0))
        except PeerFailure:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def forge(host, port, attempt, *what):
    """Writes into torchrun's store whatever a run reads there, until it is gone."""
    store = store_of_torchrun(host, port, attempt)
    print("ready", flush=True)
    values = {
        "device": {f"device/{rank}": "\x1b[2Jcuda:99999999999999999999" for rank in range(2)},
        "heartbeat": {f"heartbeat/{rank}": '{"count": "\x1b[31m", "step": ' + "[" * 9000 for rank in range(2)},
        "address": {f"gloo/{key}": "forged" for key in ADDRESSES},
        "nothing": dict.fromkeys((f"gloo/{key}" for key in ADDRESSES), ""),  # Gloo itself crashes on this one
        "ready": {"ready/0": "", "ready/1": ""},
        "failed": {"failed": "7", "failed/0": "", "failed/1": "", "printed": ""},
    }
    with contextlib.suppress(RuntimeError):  # the run has ended
        while True:
            for name in what:
                for key, value in values[name].items():
                    store.set(key, value)
            time.sleep(0.01)


def join(host, port, attempt, address, *_):
    """Takes the place of rank 1, with our own classes and another secret, and offers a checkpoint of its own."""
    store = AuthenticatedStore(store_of_torchrun(host, port, attempt), b"another guess", 20.0)
    print("ready", flush=True)
    store.set("device/1", "cpu:1")
    store.set("ready/1", "")
    try:
        group = ProcessGroup(store, 1, [Device("cpu:0"), Device("cpu:1")], address, 20.0, b"a guess")
        group.all_gather(pack({"call": "", "value": [[10**6, 10**6], ["forged"]]}))
        print("inside", flush=True)
    except (LockstepError, RuntimeError) as problem:
        print("refused:", problem, flush=True)


if __name__ == "__main__":
    how, *arguments = sys.argv[1:]
    globals()[how](*arguments)
