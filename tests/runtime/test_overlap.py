"""Gradients that are exchanged while others are still computed: they are, and nothing else changes."""

import itertools
import json
import threading
import time
from collections import Counter

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import lockstep
from lockstep.backends.torch.gradient_vector import GradientVector
from lockstep.core.errors import RankError, RankTimeout, RunError
from lockstep.core.layout import Layout
from lockstep.runtime import interpreter
from lockstep.runtime.bucket_queue import BucketQueue, nothing_to_wait_for
from lockstep.runtime.thread_transport import RankQueues
from lockstep.runtime.transport import Cancelled
from lockstep.schedules.instructions import Wait

wait_for_transfers = interpreter._HANDLERS[Wait]
SMALL = 0.002  # megabytes: the models of these tests have about ten buckets
SAMPLES = np.random.RandomState(0)
X = SAMPLES.rand(64, 12).astype(np.float32)
Y = SAMPLES.randint(0, 4, 64)


def layers(*first):
    torch.manual_seed(0)
    return nn.Sequential(*first, nn.Linear(12, 40), nn.ReLU(), nn.Linear(40, 40), nn.ReLU(), nn.Linear(40, 4))


def trained(model=layers, **settings):
    how = {"devices": 2, "bucket_mb": SMALL, "epochs": 2, "batch_size": 16, "lr": 0.1, "quiet": True, "shards": 4}
    how["verify_every"] = 0  # steps as they come
    return lockstep.train(model=model, data=(X, Y), **{**how, **settings})


def wait_for_threads():
    """A rank that hung goes on when it is let go: it must not meet the next test."""
    for thread in threading.enumerate():
        if thread.name.startswith("lockstep"):
            thread.join(30)


class Through(torch.autograd.Function):
    """Does something in the backward pass, when all later layers have their gradients."""

    does = staticmethod(lambda: None)

    @staticmethod
    def forward(ctx, X, weight):
        return X * weight

    @staticmethod
    def backward(ctx, grad):
        Through.does()
        return None, grad.sum(0)


class First(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(12))

    def forward(self, X):
        return Through.apply(X, self.weight)


def with_first():
    return layers(First())


def test_buckets_are_exchanged_before_backward_is_over(monkeypatch):
    exchanged = {}  # (rank, step): the last layer has been received
    calls, waited = Counter(), []

    def seen(self, instruction):
        wait_for_transfers(self, instruction)
        if instruction.number == 0:
            exchanged.setdefault((self.rank.number, self.rank.position.step), threading.Event()).set()

    def wait():  # 2 steps in which each rank has 2 shards
        thread = threading.current_thread().name
        calls[thread] += 1
        if calls[thread] == 2:  # in the first step, it is only found out whether gradients come once
            assert not exchanged
        if calls[thread] == 4:
            waited.append(all(exchanged.setdefault((rank, 2), threading.Event()).wait(30) for rank in range(2)))

    monkeypatch.setitem(interpreter._HANDLERS, Wait, seen)
    monkeypatch.setattr(Through, "does", staticmethod(wait))
    trained(with_first, epochs=1, batch_size=32)
    assert waited == [True, True]


@pytest.mark.parametrize("engine", ["inprocess", "processes"])
def test_the_overlap_is_in_the_trace(monkeypatch, tmp_path, engine):
    monkeypatch.setattr(Through, "does", staticmethod(lambda: time.sleep(0.02)))
    early = trained(with_first, engine=engine, trace=True, out=tmp_path / "early")
    late = trained(with_first, engine=engine, trace=True, bucket_mb=0, out=tmp_path / "late")
    assert early.weights_sha256 == late.weights_sha256
    events = [event for event in json.loads((early.run / "trace.json").read_text()) if event["ph"] == "X"]
    for rank in range(2):  # each by itself: it may exchange what has left while another is in backward

        def spans(name, row):
            own = [event for event in events if event["name"] == name and event["tid"] == row]
            return [(event["ts"], event["ts"] + event["dur"]) for event in own]

        inside = spans("backward", 2 * rank)
        assert any(
            start < begin and end < stop for begin, end in spans("exchange", 2 * rank + 1) for start, stop in inside
        )
    events = json.loads((late.run / "trace.json").read_text())
    rows = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert rows == {"rank 0 (cpu:0)", "rank 1 (cpu:1)", "the training loop"}


def convolutions():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Unflatten(1, (3, 2, 2)), nn.Conv2d(3, 20, 2, padding=1), nn.BatchNorm2d(20), nn.ReLU(),
        nn.Flatten(), nn.Linear(180, 20), nn.Dropout(0.2), nn.Linear(20, 4),
    )  # fmt: skip


class Unused(nn.Module):
    """Some parameters never get a gradient, some are used twice, and their order is not that of the layers."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.last, self.never = nn.Linear(20, 4), nn.Linear(30, 30)
        self.middle, self.first = nn.Linear(20, 20), nn.Linear(12, 20)

    def forward(self, X):
        return self.last(self.middle(self.middle(self.first(X)).relu()).relu())


class Reentrant(nn.Module):
    """Its middle is computed again in backward, twice: the middle's gradients come twice."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.middle, self.last = nn.Linear(12, 20), nn.Linear(20, 20), nn.Linear(20, 4)

    def forward(self, X):
        hidden = self.first(X)
        for _ in range(2):
            hidden = checkpoint(self.middle, hidden, use_reentrant=True).relu()
        return self.last(hidden)


@pytest.mark.parametrize("make", [layers, convolutions, Unused, Reentrant])
@pytest.mark.parametrize("engine", ["inprocess", "processes"])
def test_bits_do_not_depend_on_when_gradients_are_exchanged(make, engine):
    expected = trained(make, devices=1, bucket_mb=0)
    for k in (2, 3):
        for exchange in ("sharded", "tree"):
            found = trained(make, devices=k, engine=engine, exchange=exchange)
            assert found.weights_sha256 == expected.weights_sha256
            assert found.buffers_sha256 == expected.buffers_sha256


def test_gradients_of_flat_models_are_exchanged_early_too():
    how = {"data": "fashion-mnist-mini", "epochs": 1, "lr": 0.2, "quiet": True}
    hashes = {lockstep.train(devices=k, bucket_mb=mb, **how).weights_sha256 for k, mb in [(1, 0), (2, 0.05), (3, 0.01)]}
    assert len(hashes) == 1


class Changing(Reentrant):
    """Only later does it do so, after the first step."""

    calls = itertools.count()

    def forward(self, X):
        if next(Changing.calls) > 8:
            return super().forward(X)
        return self.last(self.middle(self.middle(self.first(X)).relu()).relu())


def test_a_gradient_that_comes_again_while_it_is_exchanged_is_an_error():
    with pytest.raises(RunError, match=r"gradient of middle.* is being exchanged.*--bucket-mb 0"):
        trained(Changing, bucket_mb=0.0005)


def test_an_error_in_backward_ends_all_ranks(monkeypatch):
    count = iter(range(100))

    def fail():
        if next(count) == 7:
            raise ValueError("no more")

    monkeypatch.setattr(Through, "does", staticmethod(fail))
    with pytest.raises(RankError, match=r"forward and backward.*no more"):
        trained(with_first)
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("lockstep")]


def test_who_hangs_in_backward_is_named(monkeypatch):
    done, count = threading.Event(), iter(range(100))
    monkeypatch.setattr(Through, "does", staticmethod(lambda: done.wait(20) if next(count) == 7 else None))
    try:
        with pytest.raises(RankTimeout, match=r"rank \d \(cpu:\d\) is in forward and backward of step 2"):
            trained(with_first, timeout=2.0)
    finally:
        done.set()
        wait_for_threads()


@pytest.mark.parametrize("bucket_mb", [0, SMALL])
def test_who_hangs_in_the_exchange_is_named_with_that_phase(monkeypatch, bucket_mb):
    done, count = threading.Event(), itertools.count()

    def hang(self, instruction):
        if self.rank.number == 1 and next(count) == 3:
            done.wait(20)
        wait_for_transfers(self, instruction)

    monkeypatch.setitem(interpreter._HANDLERS, Wait, hang)
    try:
        with pytest.raises(RankTimeout, match=r"rank 1 \(cpu:1\) is in exchange of step \d"):
            trained(timeout=2.0, bucket_mb=bucket_mb)
    finally:
        done.set()
        wait_for_threads()


@pytest.mark.parametrize("bucket_mb", [0, SMALL])
@pytest.mark.parametrize("error", [ValueError, TimeoutError])  # the latter is not our own deadline's
def test_an_error_in_the_exchange_names_that_phase(monkeypatch, error, bucket_mb):
    count = itertools.count()

    def fail(self, instruction):
        if next(count) == 5:
            raise error("no more")
        wait_for_transfers(self, instruction)

    monkeypatch.setitem(interpreter._HANDLERS, Wait, fail)
    with pytest.raises(RankError, match=rf"rank \d \(cpu:\d\), during exchange: {error.__name__}: no more"):
        trained(bucket_mb=bucket_mb)
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("lockstep")]


def test_buckets_come_in_order_and_a_cancelled_one_is_not_waited_for():
    queue, vector = BucketQueue([range(4, 8), range(0, 4)]), torch.zeros(8)
    queue.on_ready(vector, 5, nothing_to_wait_for)  # nothing is complete yet
    queue.on_ready(vector, 3, nothing_to_wait_for)
    assert queue.wait() is vector
    threading.Timer(0.05, queue.cancel).start()
    with pytest.raises(Cancelled):
        queue.wait()


def test_a_vector_is_ready_from_its_end():
    layout, ready = Layout(("a", "b", "c"), ((3,), (2, 2), (5,))), []

    def on_ready(vector, start, record_event):
        record_event()()
        ready.append((start, vector[start:].clone()))

    gradient = GradientVector(layout, torch.device("cpu"), on_ready)
    assert gradient.put(1, torch.full((4,), 2.0))
    assert not ready
    assert gradient.put(2, torch.full((5,), 3.0))
    assert not gradient.put(2, torch.zeros(5))
    ((start, part),) = ready
    assert start == 16
    assert part.tolist() == [2.0] * 4 + [0.0] * 12 + [3.0] * 5 + [0.0] * 11
    assert gradient.complete().tolist() == [0.0] * 16 + part.tolist()  # the first never came


def test_a_message_that_does_not_come_is_waited_for_until_the_deadline_or_a_cancellation():
    queues = RankQueues(2, timeout=None)
    queues.put(0, 1, "first")
    assert queues.get(0, 1) == "first"
    threading.Timer(0.05, queues.cancel).start()
    for _ in range(2):  # now, and later
        with pytest.raises(Cancelled):
            queues.get(0, 1) if _ == 0 else queues.get(1, 0)
    with pytest.raises(Cancelled):
        RankQueues(2, timeout=0.05).get(0, 1)
