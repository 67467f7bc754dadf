"""Gradients that leave while others are still computed: they do, and nothing else changes."""

import itertools
import json
import threading
import time

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import lockstep
from lockstep.backends.torch_gradient import Filling
from lockstep.runtime.bucket_queue import Departures
from lockstep.runtime.barrier import Arrivals
from lockstep.runtime.thread_transport import Traffic
from lockstep.core.errors import RankTimeout, RankError, RunError
from lockstep.core.layout import Layout

SMALL = 0.002  # megabytes: the models of these tests have about ten parts
SAMPLES = np.random.RandomState(0)
X = SAMPLES.rand(64, 12).astype(np.float32)
Y = SAMPLES.randint(0, 4, 64)


def layers(*first):
    torch.manual_seed(0)
    return nn.Sequential(*first, nn.Linear(12, 40), nn.ReLU(), nn.Linear(40, 40), nn.ReLU(), nn.Linear(40, 4))


def trained(model=layers, **settings):
    how = {"devices": 2, "bucket_mb": SMALL, "epochs": 2, "batch_size": 16, "lr": 0.1, "quiet": True, "shards": 4}
    return lockstep.train(model=model, data=(X, Y), **{**how, **settings})


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


def test_parts_are_exchanged_before_backward_is_over(monkeypatch):
    exchanged, go_on = [threading.Event(), threading.Event()], Traffic.go_on
    steps, waited = itertools.count(), []

    def seen(self, rank, number, round_):
        go_on(self, rank, number, round_)
        if (number, round_) == (0, 1) and len(self.places) > 1:  # the last layer has been sent and added up
            exchanged[rank].set()

    def wait():  # 2 steps with 4 shards each
        number = next(steps)
        if number == 3:
            assert not any(event.is_set() for event in exchanged)  # in the first step, it is only looked at
        if number == 4:
            for event in exchanged:
                event.clear()
        if number >= 6:  # the last shard of each rank is in backward
            waited.append(all(event.wait(30) for event in exchanged))

    monkeypatch.setattr(Traffic, "go_on", seen)
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
    rows = {event["tid"] for event in json.loads((late.run / "trace.json").read_text())}
    assert rows == {0, 1}


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
def test_bits_do_not_depend_on_when_gradients_leave(make, engine):
    expected = trained(make, devices=1, bucket_mb=0)
    for k in (2, 3):
        for exchange in ("sharded", "tree"):
            found = trained(make, devices=k, engine=engine, exchange=exchange)
            assert found.weights_sha256 == expected.weights_sha256
            assert found.buffers_sha256 == expected.buffers_sha256


def test_flat_models_leave_early_too():
    how = {"data": "fashion-mnist-mini", "epochs": 1, "lr": 0.2, "quiet": True}
    hashes = {lockstep.train(devices=k, bucket_mb=mb, **how).weights_sha256 for k, mb in [(1, 0), (2, 0.05), (3, 0.01)]}
    assert len(hashes) == 1


class Changing(Reentrant):
    """Only later does it do so, when nobody looks any more."""

    calls = itertools.count()

    def forward(self, X):
        if next(Changing.calls) > 8:
            return super().forward(X)
        return self.last(self.middle(self.middle(self.first(X)).relu()).relu())


def test_a_gradient_that_comes_again_after_it_has_left_is_an_error():
    with pytest.raises(RunError, match=r"gradient of middle.* has left .*--bucket-mb 0"):
        trained(Changing, bucket_mb=0.0005)


def test_an_error_in_backward_ends_everybody(monkeypatch):
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
            trained(with_first, timeout=0.5)
    finally:
        done.set()


def test_parts_leave_in_order_and_a_cancelled_one_is_not_waited_for():
    departures = Departures()
    departures.leave(0, lambda: {"node": 1})
    assert departures.wait_for(0) == {"node": 1}
    threading.Timer(0.05, departures.cancel).start()
    with pytest.raises(threading.BrokenBarrierError):
        departures.wait_for(1)


def test_a_vector_is_told_of_from_its_end_on():
    layout, told = Layout(("a", "b", "c"), ((3,), (2, 2), (5,))), []

    def ready(vector, start, mark):
        mark()()
        told.append((start, vector[start:].clone()))

    filling = Filling(layout, torch.device("cpu"), ready)
    assert filling.put(1, torch.full((4,), 2.0))
    assert not told
    assert filling.put(2, torch.full((5,), 3.0))
    assert not filling.put(2, torch.zeros(5))
    ((start, part),) = told
    assert start == 16
    assert part.tolist() == [2.0] * 4 + [0.0] * 12 + [3.0] * 5
    assert filling.complete().tolist() == [0.0] * 16 + part.tolist()  # the first never came


def test_nobody_passes_a_barrier_before_all_have_come_and_who_waits_is_sent_home():
    arrivals, passed = Arrivals(3), []

    def go(rank):
        for turn in range(50):
            passed.append((turn, rank))
            arrivals.wait(rank)

    threads = [threading.Thread(target=go, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert [turn for turn, _ in passed] == sorted(turn for turn, _ in passed)
    assert len(passed) == 150
    threading.Timer(0.05, arrivals.cancel).start()
    with pytest.raises(threading.BrokenBarrierError):
        arrivals.wait(0)
    with pytest.raises(threading.BrokenBarrierError):
        Arrivals(2, timeout=0.05).wait(1)
