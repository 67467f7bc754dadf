"""Traced runs on a GPU, captured and not: what the GPU did is a row of its own, in order, and the parts add up."""

import json
import os
import subprocess
import sys
from itertools import pairwise

import pytest
import torch

import lockstep

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU is visible on this machine"),
]
ROUNDED = 0.25  # microseconds: times in the file have one decimal
CLOCKS = 20_000.0  # microseconds that the clocks of GPU and host may be apart, while others use the GPU
MODELS = {"lenet": {"model": "lenet", "momentum": 0.9}, "lenet-bn": {"model": "lenet-bn", "optimizer": "adamw"}}
NUM_SHARDS = 4


def rows_of(trace):
    """The spans of each row, by its name."""
    names = {event["tid"]: event["args"]["name"] for event in trace if event["name"] == "thread_name"}
    found = {name: [] for name in names.values()}
    for event in trace:
        if event["ph"] == "X":
            found[names[event["tid"]]].append(event)
    return found


def end_of(span):
    return span["ts"] + span["dur"]


def check_times(spans, loop):
    """Nothing takes no time, or begins before the run or after it."""
    assert all(span["dur"] >= 0 for span in spans)
    assert sum(span["dur"] for span in spans) > 0
    assert min(span["ts"] for span in spans) > min(span["ts"] for span in loop) - CLOCKS
    assert max(map(end_of, spans)) < max(map(end_of, loop)) + CLOCKS
    assert all(first["ts"] <= second["ts"] + ROUNDED for first, second in pairwise(spans))


def check_explanation(found):
    assert found["perfect_ms"] + sum(found["parts"].values()) + found["rest_ms"] == pytest.approx(found["step_ms"])
    assert found["perfect_ms"] > 0


@pytest.mark.parametrize("capture", [True, False], ids=["captured", "eager"])
@pytest.mark.parametrize("k", [1, 2])
@pytest.mark.parametrize("model", MODELS)
def test_what_the_gpu_did_is_a_row_in_order(model, k, capture):
    result = lockstep.train(
        data="fashion-mnist-mini", epochs=2, devices=",".join(["cuda:0"] * k), shards=NUM_SHARDS, capture=capture,
        trace=True, quiet=True, **MODELS[model],
    )  # fmt: skip
    rows, steps = rows_of(result.trace), range(1, result.steps + 1)
    on_gpu = [row for row in rows if row.endswith(", on the GPU")]
    assert on_gpu == [f"rank {rank}, on the GPU" for rank in range(1 if capture else k)]
    for row in on_gpu:
        spans, loop = rows[row], rows["the training loop"]
        check_times(spans, loop)
        assert {span["args"]["step"] for span in spans} == set(steps)
        for first, second in pairwise(spans) if capture else ():  # one stream does one after the other
            assert end_of(first) <= second["ts"] + ROUNDED
            assert first["args"]["step"] <= second["args"]["step"]
        names = {span["name"] for span in spans}
        assert names >= ({"forward and backward"} if capture else {"data", "forward", "backward", "update"})
    if not capture:
        shards = {span["args"]["shard"] for row in on_gpu for span in rows[row] if span["name"] == "backward"}
        assert shards == set(range(NUM_SHARDS))
    check_explanation(lockstep.explain(result).plain())


@pytest.mark.parametrize("capture", ["--capture", "--no-capture"])
def test_a_command_with_a_process_for_each_rank_leaves_a_trace_of_all(tmp_path, capture):
    def command(*arguments):
        done = subprocess.run(
            [sys.executable, "-m", "lockstep", *arguments], capture_output=True, text=True, cwd=tmp_path, timeout=200,
            env={**os.environ, "LOCKSTEP_NCCL_SHARED_GPU": "1"},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout

    how = ("--data", "fashion-mnist-mini", "--epochs", "2", "--devices", "cuda:0,cuda:0", "--engine", "processes")
    command("train", *how, "--trace", capture, "--out", "run", "--json")
    rows = rows_of(json.loads((tmp_path / "run" / "trace.json").read_text()))
    for rank in range(2):
        spans = rows[f"rank {rank}, on the GPU"]
        check_times(spans, rows["the training loop"])
        assert {"forward and backward", "update"} <= {span["name"] for span in spans}
    check_explanation(json.loads(command("explain", "run", "--json")))


def test_a_split_network_is_traced_by_stage():
    result = lockstep.train(
        data="fashion-mnist-mini", epochs=1, model="lenet", split="network=2", devices="cuda:0,cuda:0",
        shards=NUM_SHARDS, trace=True, quiet=True,
    )  # fmt: skip
    rows = rows_of(result.trace)
    for rank in range(2):
        spans = rows[f"rank {rank}, on the GPU"]
        check_times(spans, rows["the training loop"])
        stages = {span["args"]["stage"] for span in spans if span["name"] in ("forward", "backward")}
        assert stages == {rank}
    check_explanation(lockstep.explain(result).plain())
