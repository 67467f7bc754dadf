"""A run that continues with another split ends with the same hash; so does one whose worker was killed."""

import pytest

import lockstep
from lockstep.core.errors import LockstepError
from training.split_models import IMAGES, VECTORS, CalledTwice, Residual, Skip, seeded, sequential

SPLITS = {
    "alone": {"devices": 1},
    "data": {"devices": 2},
    "network": {"split": "network=2"},
    "pipeline": {"split": "network=3", "pipeline": "gpipe"},
    "sharded": {"devices": 2, "update": "sharded"},
    "product": {"split": "data=2,network=2", "update": "sharded"},
    "layers": {"split": "layers=2"},
    "all": {"split": "network=2,layers=2"},
}
PATHS = [
    ["network", "data", "sharded", "alone"],
    ["sharded", "pipeline", "product", "network"],
    ["alone", "product", "data", "pipeline"],
]
WITH_SLICES = [["layers", "network", "data", "layers"], ["sharded", "all", "layers", "alone"]]
MODELS = {
    "sequential": (sequential, IMAGES, {"optimizer": "adamw", "lr": 0.01, "ema": 0.9}),
    "residual": (Residual, IMAGES, {"momentum": 0.9, "clip_norm": 0.1, "schedule": "cosine"}),
    "skip": (Skip, VECTORS, {"optimizer": "adam", "clip_norm": 0.05}),
}


class Killed(Exception):
    """The run is over."""


def hashes(result):
    ema = {name: array.tobytes() for name, array in result.ema.items()}
    return result.weights_sha256, result.buffers_sha256, [done.train_loss for done in result.history], ema


def continued(model, path, tmp_path, **settings):
    """What a run ends with that is killed after steps 2, 4 and 6, with another split each time; and one that is not."""
    make, data, how = MODELS[model] if isinstance(model, str) else model
    how = {"batch_size": 8, "epochs": 2, "shards": 4, "quiet": True, **how, **settings}
    expected = lockstep.train(model=seeded(make), data=(data, data), devices=1, **how)
    assert expected.steps == 8
    for at, split in enumerate(path):

        def kill(state, last=2 * at + 3):
            if state.step == last:
                raise Killed

        last = at == len(path) - 1
        run = {"out": tmp_path / "run", "resume": at > 0, "checkpoint_every": 2, **how, **SPLITS[split]}
        if last:
            result = lockstep.train(model=seeded(make), data=(data, data), **run)
        else:
            with pytest.raises((Killed, LockstepError)):
                lockstep.train(model=seeded(make), data=(data, data), on_step=kill, **run)
    return hashes(result), hashes(expected)


@pytest.mark.parametrize("path", PATHS, ids="-".join)
@pytest.mark.parametrize("model", MODELS)
def test_a_run_that_was_killed_continues_with_any_split(model, path, tmp_path):
    found, expected = continued(model, path, tmp_path)
    assert found == expected


@pytest.mark.parametrize("path", WITH_SLICES, ids="-".join)
@pytest.mark.parametrize("model", MODELS)
def test_so_does_one_in_slices(model, path, tmp_path):
    found, expected = continued(model, path, tmp_path, slices=4)
    assert found == expected


CHANGES = [
    (["--split", "network=2", "--stages", "hidden"], ["--devices", 3]),
    (["--split", "data=2,network=2"], ["--devices", 3]),
    (["--devices", 3], ["--split", "data=2,network=2"]),
    (["--split", "network=2", "--stages", "hidden"], ["--split", "network=3"]),
    (["--split", "network=2", "--stages", "hidden"], ["--split", "data", "--devices", 1]),
    (["--split", "network=2", "--stages", "hidden"], ["--split", "auto"]),
    (["--split", "layers=2", "--slices", 4], ["--devices", "cpu:0,cpu:1,cpu:2"]),
]


@pytest.mark.parametrize(("before", "now"), CHANGES, ids=str)
def test_devices_or_a_split_that_are_given_replace_those_of_the_run(lockstep, few, tmp_path, before, now):
    """What is recorded of the old split does not stand in the way of the new one."""
    started = lockstep("train", "--data", few, "--batch-size", 8, "--epochs", 1, "--out", "run", *before, "--json")
    resumed = lockstep("train", "--resume", "--out", "run", "--epochs", 2, *now, "--json")
    assert resumed.status == 0, resumed.err
    slices = before[2:] if "--slices" in before else []
    whole = ("train", "--data", few, "--batch-size", 8, "--epochs", 2, "--devices", 1, "--out", "whole", "--json")
    assert resumed.json["weights_sha256"] == lockstep(*whole, *slices).json["weights_sha256"]
    assert resumed.json["steps"] == 2 * started.json["steps"]


def test_so_does_one_with_tied_layers_in_two_stages(tmp_path):
    found, expected = continued((CalledTwice, VECTORS, {"momentum": 0.9}), ["network", "sharded", "alone"], tmp_path)
    assert found == expected


def test_other_slices_are_another_run(tmp_path):
    how = {"model": seeded(Skip), "data": VECTORS, "batch_size": 10, "quiet": True, "out": tmp_path / "run"}
    lockstep.train(devices=1, epochs=1, **how)
    with pytest.raises(LockstepError, match=r"slices.*None.*4"):
        lockstep.train(devices=1, slices=4, epochs=2, resume=True, **how)


# --- the command line


LENET = ("--batch-size", 10, "--epochs", 2, "--shards", 4, "--momentum", 0.9, "--clip-norm", 0.5)


def test_lenet_is_split_continued_with_another_split_and_evaluated(lockstep, few):
    expected = lockstep("train", "--data", few, *LENET, "--devices", 1, "--json", "--out", "alone").json
    path = [("network", "network=4"), ("data", "data=2"), ("product", "data=2,network=2")]
    for at, (name, split) in enumerate(path):
        epochs = ("--epochs", at + 1) if at < 2 else ("--epochs", 2)
        answer = lockstep(
            "train", "--data", few, *LENET, *epochs, "--split", split, "--json", "--out", "run",
            *(["--resume"] if at else []),
        )  # fmt: skip
        assert answer.status == 0, (name, answer.err)
    assert answer.json["weights_sha256"] == expected["weights_sha256"]
    evaluated = lockstep("evaluate", "run", "--json")
    assert evaluated.status == 0, evaluated.err
    assert evaluated.json["test_accuracy"] == expected["test_accuracy"]


@pytest.mark.parametrize("split", ["network=2", "layers=2", "data=2,network=2"])
def test_a_run_of_every_split_is_evaluated(lockstep, few, split):
    trained = lockstep(
        "train", "--data", few, "--model", "lenet-bn", "--batch-size", 20, "--epochs", 1, "--shards", 4, "--split",
        split, "--out", "run", "--json",
    )  # fmt: skip
    assert trained.status == 0, trained.err
    for devices in (1, 2):
        evaluated = lockstep("evaluate", "run", "--json", "--devices", devices)
        assert evaluated.status == 0, evaluated.err
        assert evaluated.json["test_accuracy"] == trained.json["test_accuracy"]
