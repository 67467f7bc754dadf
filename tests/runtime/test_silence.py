"""Workers that nobody waits for: the supervisor notices when they are silent, and not when they are slow."""

import json
import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from lockstep.runtime.launch import silence
from lockstep.runtime.launch.private_store import PrivateStore
from lockstep.runtime.launch.silence import SilenceWatch, state_and_ticks

LIMIT = 10.0  # seconds of silence


@pytest.fixture
def world(monkeypatch):
    """A clock, and the state and ticks of the only process, number 7, which belongs to worker 3."""
    found = SimpleNamespace(now=100.0, process=("S", 5), store=PrivateStore())
    monkeypatch.setattr(silence, "time", SimpleNamespace(monotonic=lambda: found.now))
    monkeypatch.setattr(silence, "state_and_ticks", lambda process: found.process)
    found.watch = SilenceWatch(found.store, LIMIT)
    return found


def seconds_until_found(world, happens=lambda number: None, each=0.5):
    """How long it took; None where it was not found in three times the limit."""
    began = world.now
    for number in range(int(3 * LIMIT / each)):
        world.now += each
        happens(number)
        if world.watch.find_silent({3: 7}) == [3]:
            return world.now - began
    return None


@pytest.mark.parametrize("state", ["T", "S", "D", "Z", ""])
def test_who_does_nothing_is_found_when_the_time_is_over(world, state):
    world.process = (state, 5)
    assert LIMIT < seconds_until_found(world) <= LIMIT + 1.5


def test_who_sends_heartbeats_is_not_silent(world):
    assert seconds_until_found(world, lambda number: world.store.set("heartbeat/3", str(number))) is None


def test_who_computes_without_heartbeats_is_not_silent(world):
    def compute(number):
        world.process = ("S", number // 8)  # now and then

    assert seconds_until_found(world, compute) is None


def test_who_waits_for_a_processor_is_not_silent(world):
    world.process = ("R", 5)
    assert seconds_until_found(world) is None


def test_time_in_which_the_supervisor_was_stopped_does_not_count(world):
    world.watch.find_silent({3: 7})
    world.now += 1000.0
    assert world.watch.find_silent({3: 7}) == []
    world.now += 1000.0
    assert world.watch.find_silent({3: 7}) == []
    assert seconds_until_found(world) > LIMIT - 3


def test_it_says_where_the_worker_was(world):
    assert world.watch.describe(3, 7) == "has never sent a heartbeat; it sends no heartbeat"
    said = {"count": 9, "step": 4, "phase": "update", "line": "nets.py:12"}
    world.store.set("heartbeat/3", json.dumps(said))
    world.process = ("T", 5)
    assert world.watch.describe(3, 7) == "is in update of step 4, at nets.py:12; it is stopped (SIGSTOP)"


def test_the_system_says_who_is_stopped_and_who_computes():
    child = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        before = state_and_ticks(child.pid)[1]
        while state_and_ticks(child.pid)[1] == before:
            time.sleep(0.01)
        os.kill(child.pid, signal.SIGSTOP)
        while state_and_ticks(child.pid)[0] != "T":
            time.sleep(0.01)
    finally:
        child.kill()
        child.wait()
    assert state_and_ticks(child.pid) == ("", 0)
