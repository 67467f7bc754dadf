"""Runs that are slow on purpose: the culprit is the largest part, the advice names it, and the parts add up."""

import json
import os
import signal
import threading
import time
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import nn

import lockstep
from lockstep.core.errors import ConfigError, Interrupted, RunError
from lockstep.core.tracing import SpanName
from lockstep.training.calibration import Calibration

NAPS = 0.02  # seconds: longer than anything else that these tiny models do
NAMES = {str(name) for name in SpanName}


def explained(**settings):
    """The explanation of a traced run; its parts add up."""
    result = lockstep.train(**{"trace": True, "quiet": True, "epochs": 2, "batch_size": 16, "lr": 0.1, **settings})
    return adds_up(lockstep.explain(result)), result


def adds_up(found):
    assert found.perfect_ms + sum(found.parts.values()) + found.rest_ms == pytest.approx(found.step_ms, rel=1e-3)
    assert abs(found.rest_ms) <= 0.05 * found.step_ms
    return found


def largest(found):
    return max(found.parts, key=found.parts.get)


def numbers(num_samples=64, width=8):
    X = np.random.RandomState(0).randn(num_samples, width).astype("float32")
    return X, X


class SlowData(torch.utils.data.Dataset):
    """Every sample takes a while to load."""

    def __len__(self):
        return 48

    def __getitem__(self, number):
        time.sleep(NAPS / 4)
        return torch.full((8,), number / 48), torch.zeros(8)


class Naps(nn.Module):
    """A layer that takes a while in the forward pass, perhaps on one rank only."""

    def __init__(self, seconds, only="", for_each_sample=False):
        super().__init__()
        self.linear, self.seconds, self.only, self.for_each_sample = nn.Linear(8, 8), seconds, only, for_each_sample

    def forward(self, X):
        if self.only in threading.current_thread().name:
            time.sleep(self.seconds * (len(X) if self.for_each_sample else 1))
        return self.linear(X)


def test_a_slow_data_set_is_loading():
    found, _ = explained(devices=2, shards=2, model=nn.Linear(8, 8), loss="mse", data=SlowData(), workers=0)
    assert largest(found) == "loading"
    assert found.parts["loading"] > 15 * 1e3 * NAPS / 4
    assert found.advice.startswith("Loading: ")
    assert "--workers" in found.advice


def test_a_slow_rank_is_waited_for_and_named():
    found, _ = explained(devices=2, shards=4, model=Naps(NAPS, "lockstep-rank-1"), loss="mse", data=numbers(96))
    assert largest(found) == "waiting for the slower rank"
    assert found.straggler.rank == 1
    assert "Rank 1 (cpu:1)" in found.advice
    assert "--balance measured" in found.advice


def test_many_tiny_shards_are_too_small():
    found, _ = explained(devices=2, shards=16, model=Naps(NAPS / 4), loss="mse", data=numbers())
    assert largest(found) == "smaller shards"
    assert "2 shards instead of 16 (--shards 2)" in found.advice
    assert "other bits" in found.advice


def test_a_pipeline_with_too_few_shards_has_a_bubble():
    model = nn.Sequential(Naps(NAPS / 4, for_each_sample=True), Naps(NAPS / 4, for_each_sample=True))
    found, _ = explained(
        devices=2, split="network", stages="1", shards=2, model=model, loss="mse", data=numbers(), epochs=3
    )
    assert largest(found) == "bubble"
    assert "4 shards instead of 2" in found.advice


def test_an_evaluation_that_takes_most_of_the_time_is_named():
    X, y = numbers(16)
    model = Naps(NAPS)
    found, _ = explained(devices=1, shards=1, model=model, loss="mse", data=((X, y), numbers(2048)), epochs=4)
    assert largest(found) == "evaluation"


@pytest.mark.parametrize("engine", ["inprocess", "processes"])
def test_a_traced_run_records_what_every_device_did(lockstep, tiny, tmp_path, engine):
    how = ("--data", tiny, "--batch-size", 65, "--epochs", 1, "--devices", 2, "--engine", engine, "--json")
    plain = lockstep("train", *how, "--out", tmp_path / "plain")
    answer = lockstep("train", *how, "--trace", "--out", tmp_path / "run")
    assert answer.status == 0, answer.err
    assert answer.json["weights_sha256"] == plain.json["weights_sha256"]  # what is measured after it changes no bit
    assert not (tmp_path / "plain" / "trace.json").exists()
    assert plain.json["explanation"] == {}
    found = answer.json["explanation"]
    assert json.loads((tmp_path / "run" / "result.json").read_text())["explanation"] == found
    told = lockstep("explain", tmp_path / "run", "--json")
    assert told.status == 0, told.err
    assert told.json == {n: found[n] for n in ("step_ms", "perfect_ms", "parts", "rest_ms", "advice")}
    assert found["perfect_ms"] > 0
    assert lockstep("explain", tmp_path / "run").out.endswith(found["advice"] + "\n")
    assert engine == "processes" or found["advice"] in answer.err  # workers write to the terminal themselves
    events = json.loads((tmp_path / "run" / "trace.json").read_text())
    rows = {e["args"]["name"]: (e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    assert {name for name in rows if name.startswith("rank")} == {"rank 0 (cpu:0)", "rank 1 (cpu:1)"}
    assert len({process for process, _ in rows.values()}) == (2 if engine == "processes" else 1)
    assert {e["name"] for e in events if e["ph"] == "X"} <= NAMES
    for rank in range(2):
        row = rows[f"rank {rank} (cpu:{rank})"]
        own = sorted((e for e in events if e["ph"] == "X" and (e["pid"], e["tid"]) == row), key=lambda e: e["ts"])
        assert all(a["ts"] + a["dur"] <= b["ts"] + 0.01 for a, b in pairwise(own))
        counted = Counter(event["name"] for event in own)
        steps = answer.json["steps"]
        updates = [event["args"]["step"] for event in own if event["name"] == "update"]
        assert updates == [*range(1, steps + 1)]  # those of the measurement after the run are not among them
        assert counted["forward"] == counted["backward"] == 4 * steps  # each rank has four shards
        shards = {event["args"]["shard"] for event in own if event["name"] == "forward"}
        assert shards == set(range(4 * rank, 4 * rank + 4))
        assert {"data", "exchange", "wait"} <= set(counted)


@pytest.mark.parametrize("split", [{"split": "network"}, {"split": "layers"}, {"update": "sharded", "devices": 2}])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_a_traced_run_of_a_split_model_has_the_weights_of_one_that_is_not(split, optimizer):
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), nn.Linear(16, 8))
    how = {"model": model, "loss": "mse", "data": numbers(), "devices": 2, "optimizer": optimizer, **split}
    plain = lockstep.train(quiet=True, epochs=2, batch_size=16, lr=0.1, **how)
    found, result = explained(**how)
    assert result.weights_sha256 == plain.weights_sha256
    assert result.buffers_sha256 == plain.buffers_sha256
    assert found.perfect_ms > 0


class Fixed(nn.Linear):
    """A model that takes shards of four samples, and no others."""

    def forward(self, X):
        return super().forward(X.view(4, 8))


@pytest.mark.parametrize("how", [{}, {"engine": "processes"}, {"split": "network", "stages": "1"}])
def test_a_model_that_takes_shards_of_one_size_only_is_explained_without_others(how):
    found, result = explained(devices=2, shards=4, model=nn.Sequential(Fixed(8, 8), Fixed(8, 8)), loss="mse",
                              data=numbers(), **how)  # fmt: skip
    assert found.notes == []
    assert result.steps == 8


def test_batch_norm_and_dropout_are_as_in_a_run_that_is_not_traced():
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), nn.Linear(16, 8))
    how = {"model": model, "loss": "mse", "data": numbers(), "devices": 2, "momentum": 0.9, "ema": 0.9}
    plain = lockstep.train(quiet=True, epochs=2, batch_size=16, lr=0.1, **how)
    _, result = explained(**how)
    assert (result.weights_sha256, result.buffers_sha256) == (plain.weights_sha256, plain.buffers_sha256)
    assert plain.ema
    assert all(np.array_equal(result.ema[name], plain.ema[name]) for name in plain.ema)


def test_a_calibration_leaves_weights_buffers_and_optimizer_state_as_they_are(monkeypatch):
    before, seen = Calibration.references, []

    def compared(self, memory):
        (replica, *_) = self._replicas.local
        states = [(replica.fingerprints(), repr(replica.state_dict()))]
        found = before(self, memory)
        states.append((replica.fingerprints(), repr(replica.state_dict())))
        seen.append(states)
        return found

    monkeypatch.setattr(Calibration, "references", compared)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), nn.Linear(16, 8))
    explained(
        model=model, loss="mse", data=numbers(60), devices=2, shards=4, optimizer="adamw"
    )  # the last batch is short
    ((first, second),) = seen
    assert first == second


@pytest.mark.parametrize("engine", ["inprocess", "processes"])
def test_without_a_folder_the_trace_is_in_the_result(engine):
    found, result = explained(devices=2, shards=2, model=nn.Linear(8, 8), loss="mse", data=numbers(), engine=engine)
    assert {event["name"] for event in result.trace if event["ph"] == "X"} <= NAMES
    assert "trace" not in result.summary()
    assert result.explain() == found


@pytest.mark.parametrize("engine", ["inprocess", "processes"])
def test_an_interrupted_run_keeps_its_trace(tmp_path, engine):
    def stop(state):
        if state.step == 3:
            os.kill(os.getppid() if engine == "processes" else os.getpid(), signal.SIGTERM)
            time.sleep(0.3)  # until it has arrived

    with pytest.raises(Interrupted):
        explained(
            devices=2, shards=2, model=nn.Linear(8, 8), loss="mse", data=numbers(512), on_step=stop, engine=engine,
            out=tmp_path / "run",
        )  # fmt: skip
    events = json.loads((tmp_path / "run" / "trace.json").read_text())
    assert len({event["tid"] for event in events if event["name"] == "update"}) == 2
    found = adds_up(lockstep.explain(tmp_path / "run"))
    assert "not told apart" in found.notes[0]
    assert not (tmp_path / "run" / "result.json").exists()


def test_a_run_that_fails_keeps_its_trace(tmp_path):
    def fail(state):
        if state.step == 3:
            raise ValueError("mine")

    with pytest.raises(RunError, match="mine"):
        explained(
            devices=2, shards=2, model=nn.Linear(8, 8), loss="mse", data=numbers(), on_step=fail, out=tmp_path / "run"
        )
    adds_up(lockstep.explain(tmp_path / "run"))


def test_a_run_that_was_not_traced_cannot_be_explained(tmp_path):
    result = lockstep.train(1, quiet=True, model=nn.Linear(8, 8), loss="mse", data=numbers(), epochs=1, batch_size=16,
                            out=tmp_path / "run")  # fmt: skip
    for run in (result, tmp_path / "run"):
        with pytest.raises(ConfigError, match=r"was not traced. Train again with --trace"):
            lockstep.explain(run)


def test_damaged_files_are_refused_in_a_sentence(lockstep, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text("{}")
    for found in ({"step_ms": 1}, {"step_ms": "x" * 9}, [1], {"parts": 3}):
        line = json.dumps({"event": "traced", "sentence": "a", "explanation": found})
        (tmp_path / "run" / "metrics.jsonl").write_text(line + "\n")
        answer = lockstep("explain", tmp_path / "run")
        assert answer.status == 2
        assert answer.err.count("\n") == 1
