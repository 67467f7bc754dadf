"""The process that watches over workers: it may die, and it may be interrupted at any moment."""

import subprocess
import sys

START = """
import ctypes, os, signal, sys, time
from lockstep.core.device import Device
from lockstep.core.errors import Interrupted
from lockstep.runtime.launch import supervisor

def supervise(work, num_workers=2, timeout=60.0):
    devices = [Device(f"cpu:{n}") for n in range(num_workers)]
    supervisor.Supervisor(devices, work, timeout, False, 3).supervise(quiet=True)
"""
KILLED = """
def work(client):
    ctypes.CDLL(None).prctl(1, 0)  # the system does not end it together with the supervisor
    if client.worker == 0:
        os.kill(os.getppid(), signal.SIGKILL)
    while True:
        client.is_to_stop()
        time.sleep(0.01)

supervise(work)
"""
INTERRUPTED_IN_FORK = """
# two signals while a worker is being forked: an exception in a callback of `os.fork` would be lost
parent, signals = os.getpid(), [signal.SIGINT, signal.SIGTERM]
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in what runs in the background
def between():
    while os.getpid() == parent and signals:
        os.kill(parent, signals.pop())
os.register_at_fork(after_in_parent=between)

def work(client):
    while True:
        client.is_to_stop()
        time.sleep(0.01)

try:
    supervise(work)
except Interrupted as problem:
    print(problem)
"""
INTERRUPTED_AND_HANGING = """
supervisor.END_FACTOR = 0.01

def work(client):
    if client.worker == 0:
        os.kill(os.getppid(), signal.SIGTERM)
    while True:
        time.sleep(0.01)

try:
    supervise(work)
except Interrupted as problem:
    print(problem)
"""
STRANGER = """
from lockstep.core.errors import PeerFailure
from lockstep.runtime.launch import worker_client

attempts = []
class Group(worker_client.ProcessGroup):
    # on rank 1, a stranger is connected in the place of rank 0 the first times
    def __init__(self, store, rank, *others, **more):
        super().__init__(store, rank, *others, **more)
        attempts.append(rank)
        if rank == 1 and len(attempts) - 1 < 2:
            os.write(1, b"attempt\\n")
            raise PeerFailure("a stranger.")

worker_client.ProcessGroup = Group

def work(client):
    group = client.connect(client.join(0))
    assert group.all_gather(b"all") == [b"all", b"all"]
    os.write(1, b"connected\\n")
    if client.worker:
        client.wait_for_next(client.join(0))

supervise(work)
"""


def output_of(program):
    return subprocess.run([sys.executable, "-c", START + program], capture_output=True, text=True, timeout=60)


def test_workers_whose_supervisor_was_killed_end_without_a_word():
    done = output_of(KILLED)  # over when all of them have closed standard error
    assert done.returncode == -9
    assert done.stderr == ""


def test_a_second_interrupt_is_not_lost_in_a_fork():
    done = output_of(INTERRUPTED_IN_FORK)
    assert done.stdout == "interrupted a second time: the workers were ended at once.\n"
    assert done.stderr == ""


def test_workers_that_hang_when_the_run_is_interrupted_are_ended():
    done = output_of(INTERRUPTED_AND_HANGING)
    assert done.stdout == "interrupted, and the workers have not stopped in 0.6 s: they were ended.\n"
    assert done.stderr == ""


def test_ranks_that_a_stranger_was_faster_than_connect_once_more():
    done = output_of(STRANGER)
    assert done.stderr == ""
    assert sorted(done.stdout.splitlines()) == ["attempt"] * 2 + ["connected"] * 2


def test_who_is_always_slower_than_a_stranger_is_told():
    done = output_of(STRANGER.replace("< 2", "< 1000"))
    assert "10 times, not all ranks were connected to each other: a stranger. End the other program" in done.stderr
