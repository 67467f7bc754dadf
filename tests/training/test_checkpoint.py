"""Checkpoints and --resume: a run continues after its last checkpoint, on any devices, with the same bits."""

import errno
import fcntl
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import lockstep as library
from lockstep.core.errors import ConfigError, RunError
from lockstep.core.serialization import pack, unpack
from lockstep.report import runlog
from lockstep.training import checkpoint
from lockstep.training.checkpoint import Checkpoints, Progress
from training.background_command import BackgroundCommand

OFTEN = ("--checkpoint-every", 2, "--keep-checkpoints", 100)
FEW = ("--batch-size", 4, "--shards", 4, "--epochs", 2)  # six steps an epoch


def snapshot(folder):
    """All that is in a folder: names, kinds and bytes."""
    return {path.relative_to(folder): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


def steps_in(folder):
    """The steps that there are checkpoints of."""
    return [int(path.stem.removeprefix("step-")) for path in sorted((folder / "checkpoints").iterdir())]


def rewind(folder, step, to=None):
    """The folder of a run that was killed right after it saved its checkpoint of `step`."""
    if to is not None:
        folder = Path(shutil.copytree(folder, to))
    for path in (folder / "checkpoints").iterdir():
        if int(path.stem.removeprefix("step-")) > step:
            path.unlink()
    assert max(steps_in(folder)) == step
    for name in ("result.json", "curve.png", "weights.safetensors"):
        (folder / name).unlink(missing_ok=True)
    return folder


def bits(answer):
    """What must be the same however often a run was stopped, from a command's output or a result."""
    result = answer.summary() if isinstance(answer, library.Result) else answer.json
    names = ("weights_sha256", "buffers_sha256", "first_loss", "steps", "test_accuracy", "metrics")
    history = [{name: done[name] for name in done if name != "seconds"} for done in result["history"]]
    return {**{name: result[name] for name in names}, "history": history}


def damage(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def refused(answer, *parts):
    """A command that was refused: status 2, one sentence, which has `parts`."""
    assert answer.status == 2, answer.err
    assert answer.out == ""
    assert answer.err.startswith("lockstep: ")
    assert answer.err.count("\n") == 1
    for part in parts:
        assert part in answer.err


def some_long(names, *long):
    """Parameters of a test, of which some belong to the long suite."""
    return [pytest.param(name, marks=pytest.mark.long) if name in long else name for name in names]


# --- the same bits


SETTINGS = {
    "sgd": ["--momentum", 0.9, "--weight-decay", 0.01, "--schedule", "cosine", "--warmup", 5, "--clip-norm", 0.5],
    "adam": ["--optimizer", "adam"],
    "linear": ["--optimizer", "adamw", "--schedule", "linear", "--weight-decay", 0.1],
    "lenet-bn": ["--model", "lenet-bn", "--batch-size", 8, "--momentum", 0.5, "--lr", 0.05, "--schedule", "cosine"],
    "sync": ["--model", "lenet-bn", "--batch-norm", "sync", "--optimizer", "adam"],
    "numpy": ["--backend", "numpy", "--optimizer", "adam", "--warmup", 5],
}


@pytest.mark.parametrize("name", some_long(SETTINGS, "linear", "lenet-bn"))
def test_resume_in_mid_epoch_on_other_devices_gives_the_same_bits(lockstep, few, tmp_path, name):
    settings = ("train", "--data", few, *FEW, *SETTINGS[name])
    undisturbed = lockstep(*settings, "--devices", 1, "--checkpoint-every", 0, "--json")
    begun = lockstep(*settings, *OFTEN, "--devices", 1, "--out", "run", "--json")
    assert undisturbed.status == begun.status == 0, begun.err
    assert bits(begun) == bits(undisturbed)
    middle = max(steps_in(tmp_path / "run"))
    for step, devices, engine in ((2, 3, ()), (middle - 2, 2, ("--exchange", "tree", *OFTEN))):
        folder = rewind(tmp_path / "run", step, tmp_path / f"from{step}")
        answer = lockstep("train", "--resume", "--out", folder, "--devices", devices, *engine, "--json")
        assert answer.status == 0, answer.err
        assert f"continuing after step {step}" in answer.err
        assert bits(answer) == bits(undisturbed)
        events = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        assert [event["step"] for event in events if event["event"] == "resumed"] == [step]


def test_a_run_that_is_stopped_after_every_checkpoint_gives_the_same_bits(lockstep, few, tmp_path):
    settings = ("train", "--data", few, *FEW, "--momentum", 0.9)
    whole = lockstep(*settings, *OFTEN, "--devices", 2, "--out", "whole", "--json")
    folder = rewind(tmp_path / "whole", 2, tmp_path / "run")
    for step, devices in ((4, 3), (8, 1), (10, 4)):
        assert lockstep("train", "--resume", "--out", "run", *OFTEN, "--devices", devices).status == 0
        rewind(folder, step)
    answer = lockstep("train", "--resume", "--out", "run", "--devices", 2, "--json")
    assert bits(answer) == bits(whole)


def test_resume_from_between_the_last_step_of_an_epoch_and_its_evaluation(lockstep, few, tmp_path, monkeypatch):
    saved, save = [], Checkpoints.save

    def kept(checkpoints, checkpoint):
        path = save(checkpoints, checkpoint)
        saved.append((path.name, path.read_bytes(), len(checkpoint.progress.history)))
        return path

    monkeypatch.setattr(Checkpoints, "save", kept)
    settings = ("train", "--data", few, *FEW, "--checkpoint-every", 6)
    whole = lockstep(*settings, "--devices", 1, "--out", "run", "--json")
    name, before_the_end, num_epochs = saved[0]
    assert (name, num_epochs) == ("step-000006.safetensors", 0)
    assert saved[1][::2] == (name, 1)
    folder = rewind(tmp_path / "run", 6)
    (folder / "checkpoints" / name).write_bytes(before_the_end)
    assert bits(lockstep("train", "--resume", "--out", "run", "--devices", 3, "--json")) == bits(whole)


class Net(nn.Module):
    """Dropout, batch norm, and buffers that are not in the state dict but change the output."""

    def __init__(self):
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)
        self.register_buffer("scale", torch.ones(1), persistent=False)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64), persistent=False)

    def forward(self, x):
        if self.training:
            self.scale.lerp_(x.mean().reshape(1), 0.1)
            self.calls += 1
        hidden = nn.functional.dropout(self.norm(self.a(x)).relu(), 0.3, self.training)
        return self.b(hidden * self.scale) + 0.01 * self.calls


class Exact(torch.optim.Optimizer):
    """Its state has bfloat16 and float64 tensors, and numbers in lists and tuples."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.05, "pair": (0.9, 1)})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["pair"] = (group["pair"][0], group["pair"][1] + 1)
            for param in group["params"]:
                state = self.state[param]
                if not state:
                    state["short"] = torch.zeros_like(param, dtype=torch.bfloat16)
                    state["long"] = torch.zeros_like(param, dtype=torch.float64)
                    state["norms"] = []
                state["short"].mul_(0.9).add_(param.grad.bfloat16())
                state["long"].mul_(0.999).add_(param.grad.double() / 3)
                state["norms"] = [*state["norms"], float(param.grad.norm())][-2:]
                param -= group["lr"] * (state["short"].float() + state["long"].float() / group["pair"][1])
                param *= 1 - 1e-4 * sum(state["norms"])


MODULES = {
    "adam": {"optimizer": "adam", "lr": 0.01},
    "one cycle": {
        "optimizer": lambda params: torch.optim.Adam(params, lr=0.01),
        "scheduler": lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=20),
    },
    "milestones": {
        "optimizer": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True),
        "scheduler": lambda optimizer: torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4, 4, 7], 0.5),
    },
    "bfloat16 and float64": {"optimizer": Exact, "schedule": "cosine", "warmup": 2},
    "bf16": {"optimizer": "adamw", "precision": "bf16", "clip_norm": 0.1},
}


@pytest.fixture
def vectors():
    """40 training and 10 test samples of six numbers, with labels of three classes."""
    generator = torch.Generator().manual_seed(0)
    X, y = torch.rand(50, 6, generator=generator), torch.randint(3, (50,), generator=generator)
    return (X[:40], y[:40]), (X[40:], y[40:])


@pytest.mark.parametrize("name", some_long(MODULES, "milestones", "bf16"))
@pytest.mark.filterwarnings("ignore:This device has no bfloat16 arithmetic")
def test_resume_with_a_module_of_the_users_own_gives_the_same_bits(vectors, tmp_path, name):
    settings = {"model": Net, "data": vectors, "batch_size": 8, "shards": 4, "epochs": 2, "quiet": True}
    settings |= MODULES[name]
    undisturbed = library.train(**settings, devices=2)
    begun = library.train(**settings, devices=1, out=tmp_path / "run", checkpoint_every=1, keep_checkpoints=100)
    assert bits(begun) == bits(undisturbed)
    assert steps_in(tmp_path / "run") == list(range(1, 11))
    for step, devices in ((3, 4), (7, 2)):
        folder = rewind(tmp_path / "run", step, tmp_path / f"from{step}")
        result = library.train(**settings, devices=devices, out=folder, resume=True)
        assert bits(result) == bits(undisturbed)
        assert list(result.buffers) == ["norm.running_mean", "norm.running_var", "norm.num_batches_tracked"]


def test_another_scheduler_is_refused(vectors, tmp_path):
    settings = {"model": Net, "data": vectors, "batch_size": 8, "shards": 4, "epochs": 1, "quiet": True, "devices": 1}
    library.train(**settings, **MODULES["one cycle"], out=tmp_path / "run", checkpoint_every=2)
    rewind(tmp_path / "run", 4)
    before = snapshot(tmp_path / "run")
    for scheduler, how in ((None, "a"), (MODULES["milestones"]["scheduler"], "another")):
        sentence = rf"^The checkpoint was saved with {how} scheduler\. Resume with the same .*--out\)\.$"
        with pytest.raises(ConfigError, match=sentence):
            library.train(
                **settings,
                optimizer=MODULES["one cycle"]["optimizer"],
                scheduler=scheduler,
                out=tmp_path / "run",
                resume=True,
            )
        assert snapshot(tmp_path / "run") == before


class Odd(torch.optim.SGD):
    """Its state has a set, which no checkpoint can hold."""

    def step(self, closure=None):
        super().step()
        self.state[self.param_groups[0]["params"][0]]["odd"] = {1, 2}


class Wide(nn.Module):
    """Has a buffer of a dtype that no safetensors file can hold."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(6, 3)
        self.register_buffer("phase", torch.ones(2, dtype=torch.complex128), persistent=False)

    def forward(self, x):
        return self.a(x)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (
            {"model": Net, "optimizer": lambda params: Odd(params, lr=0.1)},
            r"The Odd keeps a set as optimizer\.odd, which",
        ),
        ({"model": Wide}, "phase"),
    ],
    ids=["optimizer", "buffer"],
)
def test_a_state_that_cannot_be_saved_is_an_error_that_names_it(vectors, tmp_path, settings, sentence):
    with pytest.raises(RunError, match=sentence):
        library.train(
            **settings, data=vectors, batch_size=8, shards=4, epochs=1, devices=1, out=tmp_path / "run", quiet=True
        )
    assert list((tmp_path / "run").rglob(".part-*")) == []


# --- which are kept


def test_the_last_checkpoints_are_kept_and_no_temporary_files_are_left(lockstep, few, tmp_path):
    for keep in (1, 3):
        run = tmp_path / f"keep{keep}"
        how = ("--checkpoint-every", 2, "--keep-checkpoints", keep)
        answer = lockstep("train", "--data", few, *FEW, "--devices", 1, *how, "--out", run)
        assert answer.status == 0, answer.err
        assert steps_in(run) == [8, 10, 12][-keep:]
        assert sorted(os.listdir(run)) == [
            "checkpoints",
            "config.json",
            "curve.png",
            "metrics.jsonl",
            "result.json",
            "weights.safetensors",
        ]


def test_there_is_a_checkpoint_after_each_epoch_or_none(lockstep, few, tmp_path):
    settings = ("train", "--data", few, *FEW, "--devices", 1)
    assert lockstep(*settings, "--out", "run").status == 0
    assert steps_in(tmp_path / "run") == [6, 12]
    assert lockstep(*settings, "--out", "none", "--checkpoint-every", 0).status == 0
    assert not (tmp_path / "none" / "checkpoints").exists()


def test_other_files_in_the_folder_of_checkpoints_are_left_alone(lockstep, few, tmp_path):
    assert lockstep("train", "--data", few, *FEW, "--devices", 1, "--out", "run").status == 0
    rewind(tmp_path / "run", 6)
    others = {name: tmp_path / "run" / "checkpoints" / name for name in ("notes.txt", "step-1.safetensors", "step-x")}
    for path in others.values():
        path.write_text("mine")
    answer = lockstep("train", "--resume", "--out", "run", "--devices", 1, "--keep-checkpoints", 1)
    assert answer.status == 0, answer.err
    assert all(path.read_text() == "mine" for path in others.values())
    assert (tmp_path / "run" / "checkpoints" / "step-000012.safetensors").is_file()


def test_half_written_files_of_a_killed_run_are_removed_on_resume(lockstep, few, tmp_path):
    assert lockstep("train", "--data", few, *FEW, "--devices", 1, "--out", "run").status == 0
    folder = rewind(tmp_path / "run", 6)
    for name in (".part-weights.safetensors", "checkpoints/.part-step-000007.safetensors"):
        (folder / name).write_bytes(b"half")
    assert lockstep("train", "--resume", "--out", "run", "--devices", 1).status == 0
    assert list(folder.rglob(".part-*")) == []


@pytest.fixture(scope="module")
def begun(few, tmp_path_factory):
    """A run under a cosine schedule, its result, and the steps of its checkpoints: 2, 4, 6, 8, 10."""
    folder = tmp_path_factory.mktemp("begun") / "run"
    result = library.train(
        1,
        batch_size=4,
        num_epochs=2,
        data=few,
        num_shards=4,
        schedule="cosine",
        out=folder,
        checkpoint_every=2,
        keep_checkpoints=100,
        quiet=True,
    )
    return rewind(folder, 10), bits(result)


@pytest.fixture
def run(begun, tmp_path):
    """A copy of it."""
    return Path(shutil.copytree(begun[0], tmp_path / "run"))


# --- damaged ones


def test_a_damaged_checkpoint_is_named_and_the_one_before_it_is_used(lockstep, begun, run):
    newest, before = (run / "checkpoints" / f"step-{step:06d}.safetensors" for step in (10, 8))
    damage(newest)
    answer = lockstep("train", "--resume", "--out", "run", *OFTEN, "--devices", 2, "--json")
    assert answer.status == 0, answer.err
    assert "run/checkpoints/step-000010.safetensors is damaged: its SHA-256 is not that of what it holds." in answer.err
    assert "The one before it is used." in answer.err
    assert "continuing after step 8" in answer.err
    assert bits(answer) == begun[1]
    rewind(run, 8)
    damage(before)
    (run / "checkpoints" / "step-000006.safetensors").write_bytes(b"")
    answer = lockstep("train", "--resume", "--out", "run", "--devices", 3, "--json")
    assert answer.err.count("is damaged: ") == 2
    assert "continuing after step 4" in answer.err
    assert bits(answer) == begun[1]


def test_damaged_checkpoints_only_are_refused(lockstep, run):
    for path in (run / "checkpoints").iterdir():
        damage(path)
    before = snapshot(run)
    answer = lockstep("train", "--resume", "--out", "run")
    refused(answer, "run/checkpoints/step-000002.safetensors is damaged: its SHA-256 is not that of what it holds.")
    assert "There is no other checkpoint to resume from." in answer.err
    assert snapshot(run) == before


FORGED = {
    "run": [[], {}, None],
    "made_with": [5, {}],
    "weights": [5, {}, {"W1": np.zeros(2)}],
    "states": [None, {}, {"0:1": None}, {"0:1": {"optimizer": [np.zeros(3)]}}, {"0:1": {"optimizer": 5}}],
    "step": ["8", -1, 10**9, 2.5, None],
    "epoch": [0, "2", 10**9],
    "losses": [[], np.zeros((2, 2)), np.zeros(0)],
    "history": [[], {}, [{}], [{"epoch": 1}], [{"epoch": 1, "seconds": "a", "train_loss": [], "test_accuracy": {}}]],
    "seconds": ["a", None],
    "first_loss": ["a", []],
}


@pytest.mark.parametrize(("name", "number"), [(name, number) for name in FORGED for number in range(len(FORGED[name]))])
def test_a_forged_checkpoint_never_gives_a_traceback(lockstep, run, name, number):
    """Its SHA-256 is right, its content is not."""
    tree = unpack((run / "checkpoints" / "step-000010.safetensors").read_bytes())
    (tree if name in tree else tree["progress"])[name] = FORGED[name][number]
    rewind(run, 2)
    (run / "checkpoints" / "step-000002.safetensors").write_bytes(pack(tree))
    answer = lockstep("train", "--resume", "--out", "run", "--devices", 1)
    assert answer.status in (0, 1, 2)
    assert "Traceback" not in answer.err
    assert answer.status == 0 or answer.err.splitlines()[-1].startswith("lockstep: ")


def cannot_read(monkeypatch, unreadable):
    """The disk has an error at this file, for now."""
    read = checkpoint.read_regular

    def read_regular(path, max_bytes):
        if path.name == unreadable.name:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return read(path, max_bytes)

    monkeypatch.setattr(checkpoint, "read_regular", read_regular)


@pytest.mark.parametrize("keep", [1, 2])
@pytest.mark.parametrize("how", ["is damaged", "cannot be read: Input/output error"])
def test_a_newer_checkpoint_that_is_skipped_does_not_push_out_others(lockstep, begun, run, monkeypatch, keep, how):
    rewind(run, 8)
    skipped = run / "checkpoints" / "step-000008.safetensors"
    damage(skipped) if how == "is damaged" else cannot_read(monkeypatch, skipped)
    save, seen = Checkpoints.save, []

    def checked(checkpoints, checkpoint):
        path = save(checkpoints, checkpoint)
        seen.append(path.is_file())
        assert checkpoint.progress.step > 7 or skipped.is_file()  # it is not removed: it may be readable later
        return path

    monkeypatch.setattr(Checkpoints, "save", checked)
    settings = ("--checkpoint-every", 1, "--keep-checkpoints", keep)
    answer = lockstep("train", "--resume", "--out", "run", "--devices", 1, *settings, "--json")
    assert answer.status == 0, answer.err
    assert f"step-000008.safetensors {how}" in answer.err
    assert "continuing after step 6" in answer.err
    assert bits(answer) == begun[1]
    assert all(seen)
    assert steps_in(run) == [11, 12][-keep:]


# --- what cannot be resumed


OTHERS = {
    "--shards 2": "shards: 4 there, 2 now",
    "--batch-size 6": "batch size: 4 there, 6 now",
    "--model lenet-bn": "model: 'lenet' there, 'lenet-bn' now",
    "--data fashion-mnist-mini": "few.npz' there, 'fashion-mnist-mini' now",
    "--seed 1": "seed: 0 there, 1 now",
    "--lr 0.1": "learning rate: 0.2 there, 0.1 now",
    "--optimizer adam": "optimizer: 'sgd' there, 'adam' now",
    "--epochs 3": "num epochs: 2 there, 3 now",
    "--schedule linear": "schedule: 'cosine' there, 'linear' now",
    "--schedule constant": "schedule: 'cosine' there, 'constant' now",
    "--warmup 3": "warmup: 0 there, 3 now",
    "--momentum 0.5": "momentum: 0.0 there, 0.5 now",
    "--weight-decay 0.1": "weight decay: None there, 0.1 now",
    "--clip-norm 1": "clip norm: None there, 1.0 now",
    "--backend numpy": "backend: 'torch' there, 'numpy' now",
    "--shards 2 --seed 1": "shards: 4 there, 2 now; seed: 0 there, 1 now",
}


@pytest.mark.parametrize("others", OTHERS)
def test_other_settings_are_refused_and_named_and_nothing_is_touched(lockstep, run, others):
    before = snapshot(run)
    answer = lockstep("train", "--resume", "--out", "run", "--devices", 1, *others.split())
    refused(answer, "The run in run has other settings: ", OTHERS[others], "Use those, or another --out.")
    assert snapshot(run) == before


def test_other_data_in_the_same_file_is_refused(lockstep, few, tmp_path):
    data = tmp_path / "data.npz"
    shutil.copy(few, data)
    assert lockstep("train", "--data", data, *FEW, "--devices", 1, "--out", "run").status == 0
    rewind(tmp_path / "run", 6)
    before = snapshot(tmp_path / "run")
    with np.load(few) as good:
        arrays = dict(good)
    arrays["X_train"][3, 4, 5] ^= 1
    np.savez(data, **arrays)
    refused(lockstep("train", "--resume", "--out", "run", "--devices", 1), "SHA-256 of the data: ")
    assert snapshot(tmp_path / "run") == before


def test_more_epochs_are_allowed_where_the_learning_rate_does_not_depend_on_them(lockstep, few, tmp_path):
    settings = ("train", "--data", few, *FEW, "--momentum", 0.9, "--warmup", 3)
    longer = lockstep(*settings, "--epochs", 3, "--devices", 1, "--json")
    assert lockstep(*settings, *OFTEN, "--devices", 1, "--out", "run").status == 0
    rewind(tmp_path / "run", 10, tmp_path / "middle")
    for folder in ("run", "middle"):
        answer = lockstep("train", "--resume", "--out", folder, "--epochs", 3, "--devices", 2, "--json")
        assert answer.status == 0, answer.err
        assert bits(answer) == bits(longer)
        assert len(json.loads((tmp_path / folder / "result.json").read_text())["history"]) == 3


def test_a_run_with_more_epochs_is_resumed_to_its_new_end(lockstep, few, tmp_path):
    settings = ("train", "--data", few, *FEW, "--devices", 1)
    assert lockstep(*settings, "--out", "run").status == 0
    longer = lockstep("train", "--resume", "--out", "run", *OFTEN, "--epochs", 3, "--devices", 1, "--json")
    rewind(tmp_path / "run", 16)
    answer = lockstep("train", "--resume", "--out", "run", "--devices", 2, "--json")
    assert answer.status == 0, answer.err
    assert bits(answer) == bits(longer)


@pytest.mark.parametrize("step", [8, 12])
def test_fewer_epochs_than_were_begun_are_refused(lockstep, few, tmp_path, step):
    """A run in the middle of its second epoch is not the end of one that has one epoch."""
    assert lockstep("train", "--data", few, *FEW, *OFTEN, "--devices", 1, "--out", "run").status == 0
    rewind(tmp_path / "run", step)
    before = snapshot(tmp_path / "run")
    refused(lockstep("train", "--resume", "--out", "run", "--devices", 1, "--epochs", 1), "(--epochs)")
    assert snapshot(tmp_path / "run") == before


# --- folders


def test_resume_without_a_folder_is_refused(lockstep, few, tmp_path):
    refused(lockstep("train", "--resume", "--data", few, *FEW), "There is no run to resume. Name its folder: --out")
    assert os.listdir(tmp_path) == []
    with pytest.raises(ConfigError, match="There is no run to resume"):
        library.train(1, data=few, batch_size=4, resume=True)


def test_a_folder_that_is_no_run_is_refused_and_left_alone(lockstep, few, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "letter.txt").write_text("dear")
    answer = lockstep("train", "--resume", "--data", few, *FEW, "--out", "run")
    refused(answer, "run is not a run: it has no config.json. Choose another --out.")
    assert snapshot(tmp_path / "run") == {Path("letter.txt"): b"dear"}
    refused(lockstep("train", "--resume", "--data", few, *FEW, "--out", "run/letter.txt"), "letter.txt is a file")


@pytest.mark.parametrize("is_there", [True, False])
def test_resume_in_an_empty_folder_starts_at_step_1(lockstep, few, tmp_path, is_there):
    if is_there:
        (tmp_path / "run").mkdir()
    settings = ("train", "--data", few, *FEW, "--devices", 1, "--json")
    answer = lockstep(*settings, "--resume", "--out", "run")
    assert answer.status == 0, answer.err
    assert "There is no checkpoint in run: starting at step 1." in answer.err
    assert bits(answer) == bits(lockstep(*settings))
    events = [json.loads(line)["event"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [event for event in events if event != "step"] == ["started", "epoch", "epoch", "done"]


def test_a_run_that_was_killed_before_its_first_checkpoint_starts_over_with_its_own_settings(lockstep, begun, run):
    shutil.rmtree(run / "checkpoints")
    answer = lockstep("train", "--resume", "--out", "run", "--devices", 2, "--json")
    assert answer.status == 0, answer.err
    assert bits(answer) == begun[1]


def test_resume_of_a_finished_run_gives_its_result_again(lockstep, begun, run):
    first = lockstep("train", "--resume", "--out", "run", "--devices", 2, "--json")
    weights = (run / "weights.safetensors").read_bytes()
    again = lockstep("train", "--resume", "--out", "run", "--devices", 3, "--json")
    assert again.status == 0, again.err
    assert bits(again) == bits(first) == begun[1]
    assert (run / "weights.safetensors").read_bytes() == weights


def test_half_a_line_in_the_metrics_is_ended_before_new_ones_are_written(lockstep, run):
    half = '{"event": "epoch", "epo'
    with (run / "metrics.jsonl").open("a") as file:
        file.write(half)
    assert lockstep("train", "--resume", "--out", "run", "--devices", 1).status == 0
    lines = (run / "metrics.jsonl").read_text().splitlines()
    assert lines.count(half) == 1
    new = [json.loads(line)["event"] for line in lines[lines.index(half) + 1 :]]
    assert [event for event in new if event != "step"] == ["resumed", "epoch", "done"]


@pytest.mark.parametrize(
    "record",
    [b"", b"{", b"[]", b'{"momentum": null}', b'{"batch_size": null}', b'{"seed": "x"}', b'{"data": "\\u0000.npz"}']
    + [b'{"num_epochs": 1.5}', b'{"model": 5}', b'{"data": 5}', b'{"optimizer": []}', b'{"batch_norm": null}']
    + [b'{"learning_rate": "a"}', b'{"model": null}', b'{"num_shards": 1e999}', b'{"clip_norm": {}}'],
)
def test_an_invalid_config_json_is_refused_in_a_sentence(lockstep, run, record):
    (run / "config.json").write_bytes(record)
    before = snapshot(run)
    refused(lockstep("train", "--resume", "--out", "run", "--devices", 1))
    assert snapshot(run) == before


# --- user code


OWN = """
import os, time
import torch
from torch import nn

class Slow(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x):
        if self.training and "MARKS" in os.environ:
            with open(os.environ["MARKS"], "a") as marks:
                marks.write(".")
            time.sleep(float(os.environ["SLEEP"]))
        return self.b(nn.functional.dropout(self.a(x).relu(), 0.3, self.training))

def make_model():
    return Slow()

def make_data():
    generator = torch.Generator().manual_seed(0)
    X, y = torch.rand(80, 6, generator=generator), torch.randint(3, (80,), generator=generator)
    return (X[:64], y[:64]), (X[64:], y[64:])
"""
MINE = ("--model", "slow_file:make_model", "--data", "slow_file:make_data")
SLOW = ("train", *MINE, "--batch-size", 8, "--shards", 4, "--epochs", 2, "--momentum", 0.9)  # eight steps an epoch


@pytest.fixture
def own(lockstep, tmp_path, monkeypatch):
    """Runs a command in a folder with a file of the user's own."""
    (tmp_path / "slow_file.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "slow_file", raising=False)
    return lockstep


def test_code_named_in_config_json_is_not_run(own, tmp_path):
    whole = own(*SLOW, "--devices", 1, "--out", "run", "--json")
    folder = rewind(tmp_path / "run", 8)
    before = snapshot(folder)
    answer = own("train", "--resume", "--out", "run")
    assert answer.err == (
        "lockstep: The run in run has code of your own: model slow_file:make_model and data slow_file:make_data. "
        "Lockstep never imports code that only config.json names: add --model slow_file:make_model "
        "--data slow_file:make_data.\n"
    )
    assert answer.status == 2
    (tmp_path / "evil.py").write_text("open('broken-in', 'w')")
    config = (folder / "config.json").read_text()
    for name in ("model", "data", "loss", "optimizer"):
        plain = {"model": "lenet", "data": "fashion-mnist-mini"}
        (folder / "config.json").write_text(json.dumps({**json.loads(config), **plain, name: "evil:f"}))
        refused(own("train", "--resume", "--out", "run"), f"The run in run has code of your own: {name} evil:f.")
    assert not (tmp_path / "broken-in").exists()
    (folder / "config.json").write_text(config)
    assert snapshot(folder) == before
    answer = own("train", "--resume", "--out", "run", *MINE, "--devices", 3, "--json")
    assert answer.status == 0, answer.err
    assert bits(answer) == bits(whole)


# --- other processes


@contextmanager
def started(folder, *arguments, sleep=0.1):
    """`lockstep ARGUMENTS` in `folder`, in the background; `process.marks()` says how many shards it has begun."""
    marks = folder / "marks"
    process = BackgroundCommand(folder, arguments, MARKS=str(marks), SLEEP=str(sleep))
    process.marks = lambda: marks.stat().st_size if marks.exists() else 0
    try:
        yield process
    finally:
        process.kill_all()


def wait_for(process, condition):
    """Waits until something is so, while the process runs."""
    end = time.monotonic() + 60
    while not condition():
        assert process.poll() is None, process.err.read_text()
        assert time.monotonic() < end, "it does not start"
        time.sleep(0.01)


def test_a_folder_has_one_run_at_a_time_and_is_free_when_that_is_killed(own, tmp_path, monkeypatch):
    whole = own(*SLOW, "--devices", 1, "--json")
    with started(tmp_path, *SLOW, "--devices", 2, "--out", "run", "--checkpoint-every", 1) as process:
        wait_for(process, lambda: (tmp_path / "run" / "checkpoints" / "step-000002.safetensors").exists())
        monkeypatch.setattr(runlog, "LOCK_SECONDS", 0.2)
        refused(own(*SLOW, "--resume", "--out", "run"), "Another run is under way in run. Wait for it, or end it.")
        refused(own(*SLOW, "--out", "run"), "run is not empty: a run is never written over.", "(--resume)")
        assert process.poll() is None, "the first one continues"
        process.send_signal(signal.SIGKILL)
        process.wait(timeout=60)
    answer = own(*SLOW, "--resume", "--out", "run", "--devices", 3, "--json")
    assert answer.status == 0, answer.err
    assert re.search(r"continuing after step [2-9]", answer.err)
    assert bits(answer) == bits(whole)
    assert list((tmp_path / "run").rglob(".part-*")) == []


def test_two_runs_that_start_in_one_folder_at_the_same_moment(lockstep, few, tmp_path):
    (tmp_path / "run").mkdir()
    other = os.open(tmp_path / "run", os.O_RDONLY)
    try:
        fcntl.flock(other, fcntl.LOCK_EX)
        refused(lockstep("train", "--data", few, *FEW, "--out", "run"), "Another run is under way in run.")
    finally:
        os.close(other)
    assert os.listdir(tmp_path / "run") == []
    assert lockstep("train", "--data", few, *FEW, "--devices", 1, "--out", "run").status == 0


def test_resume_waits_for_a_run_that_is_about_to_end(lockstep, begun, run):
    with subprocess.Popen(
        ["flock", str(run), "sh", "-c", "echo; sleep 0.5"], stdout=subprocess.PIPE, text=True
    ) as other:
        other.stdout.readline()
        answer = lockstep("train", "--resume", "--out", "run", "--devices", 1, "--json")
    assert answer.status == 0, answer.err
    assert bits(answer) == begun[1]


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.long)])
def test_an_interrupted_run_saves_a_checkpoint_and_says_how_to_resume(own, tmp_path, number):
    whole = own(*SLOW, "--devices", 1, "--json")
    with started(tmp_path, *SLOW, "--devices", 2, "--out", "run") as process:
        wait_for(process, lambda: process.marks() > 4 * 2)
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert out == ""
    assert "Traceback" not in err
    found = re.fullmatch(
        r"lockstep: interrupted after step (\d)\. A checkpoint is in (run/checkpoints/step-00000\1\.safetensors)\. "
        r"In a program, use resume=True\. "
        r"Resume with: lockstep train --resume --out run --model slow_file:make_model --data slow_file:make_data",
        err.splitlines()[-1],
    )
    assert found, err
    assert 2 <= int(found[1]) <= 7, "in the first epoch"
    assert steps_in(tmp_path / "run") == [int(found[1])]
    _, *events = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    (stopped,) = [event for event in events if event["event"] != "step"]
    assert stopped.pop("time")
    assert stopped == {"event": "stopped", "epoch": 1, "step": int(found[1]), "reason": "interrupted"}
    answer = own("train", "--resume", "--out", "run", *MINE, "--devices", 3, "--json")
    assert answer.status == 0, answer.err
    assert bits(answer) == bits(whole)


def test_the_command_that_an_interrupted_run_names_resumes_it(lockstep, tiny, tmp_path):
    settings = ("train", "--data", tiny, "--batch-size", 4, "--shards", 2, "--epochs", 2, "--lr", 0.01)
    with started(tmp_path, *settings, "--devices", 2, "--out", "a run") as process:
        wait_for(process, lambda: process.err.exists() and "epoch 1/2" in process.err.read_text())
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    program, *arguments = shlex.split(err.splitlines()[-1].partition("Resume with: ")[2])
    assert program == "lockstep"
    answer = lockstep(*arguments, "--devices", 1, "--json")
    assert answer.status == 0, answer.err
    assert bits(answer) == bits(lockstep(*settings, "--devices", 1, "--checkpoint-every", 0, "--json"))


def test_an_interrupted_run_without_checkpoints_says_so(own, tmp_path):
    with started(tmp_path, *SLOW, "--devices", 2, "--out", "run", "--checkpoint-every", 0) as process:
        wait_for(process, lambda: process.marks() > 4)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "--resume" not in err
    assert "The metrics are in run. To start over, remove it or choose another --out." in err
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_a_second_interrupt_ends_the_run_at_once(own, tmp_path):
    with started(tmp_path, *SLOW, "--devices", 2, "--out", "run", sleep=60) as process:
        wait_for(process, lambda: process.marks() > 0)
        process.send_signal(signal.SIGINT)
        time.sleep(0.5)
        assert process.poll() is None, "the step under way is finished"
        process.send_signal(signal.SIGINT)
        began = time.monotonic()
        _, err = process.communicate(timeout=60)
    assert time.monotonic() - began < 45, "the step under way takes 60"
    assert process.returncode == 130, err
    assert "Traceback" not in err
    assert "lockstep: interrupted after step 0." in err


# --- disks


@contextmanager
def mounted(folder, *arguments):
    """Something mounted at `folder`, which is always unmounted; skips where that is not allowed."""
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("only root can mount a disk that is full or cannot be written to")
    folder.mkdir(exist_ok=True)
    done = subprocess.run(["mount", *arguments, folder], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"a disk cannot be mounted here: {done.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


@pytest.mark.parametrize("every", [2, pytest.param(6, marks=pytest.mark.long)])
def test_a_full_disk_ends_the_run_in_a_sentence_and_it_can_be_resumed_elsewhere(lockstep, few, tmp_path, every):
    """Every checkpoint has half a megabyte, and so have the weights; two fit."""
    settings = ("train", "--data", few, *FEW, "--epochs", 4, "--checkpoint-every", every)
    whole = lockstep(*settings, "--devices", 1, "--json")
    disk = tmp_path / "disk"
    with mounted(disk, "-t", "tmpfs", "-o", "size=1400k", "tmpfs"):
        answer = lockstep(*settings, "--devices", 1, "--out", disk / "run")
        assert answer.status == 1, answer.err
        assert answer.out == ""
        assert "Traceback" not in answer.err
        assert answer.err.count("lockstep: ") == 1
        assert answer.err.splitlines()[-1].startswith("lockstep: ")
        assert "No space left on device" in answer.err
        assert steps_in(disk / "run") == [every, 2 * every]
        if every == 2:
            assert f"lockstep: step 6: the checkpoint cannot be written to {disk}/run/checkpoints: " in answer.err
            assert f"The last one is {disk}/run/checkpoints/step-000004.safetensors." in answer.err
        assert list(disk.rglob(".part-*")) == []
        shutil.copytree(disk / "run", tmp_path / "elsewhere")
    answer = lockstep("train", "--resume", "--out", "elsewhere", "--devices", 2, "--json")
    assert answer.status == 0, answer.err
    assert f"continuing after step {2 * every}" in answer.err
    assert bits(answer) == bits(whole)


def test_a_folder_of_checkpoints_that_cannot_be_written_to_ends_the_run_in_a_sentence(lockstep, begun, run):
    checkpoints = run / "checkpoints"
    before = snapshot(checkpoints)
    with mounted(checkpoints, "--bind", "-o", "ro", checkpoints):
        answer = lockstep("train", "--resume", "--out", "run", "--devices", 1)
        assert answer.status == 1, answer.err
        assert "Traceback" not in answer.err
        last = answer.err.splitlines()[-1]
        assert last.startswith("lockstep: step 12: the checkpoint cannot be written to run/checkpoints: Read-only ")
        assert "The last one is run/checkpoints/step-000010.safetensors." in last
    assert snapshot(checkpoints) == before
    assert bits(lockstep("train", "--resume", "--out", "run", "--devices", 1, "--json")) == begun[1]


def test_a_file_called_checkpoints_ends_the_run_in_a_sentence(lockstep, run):
    shutil.rmtree(run / "checkpoints")
    (run / "checkpoints").write_text("mine")
    answer = lockstep("train", "--resume", "--out", "run", "--devices", 1)
    assert answer.status in (1, 2)
    assert "Traceback" not in answer.err
    assert answer.err.splitlines()[-1].startswith("lockstep: ")
    assert "run/checkpoints" in answer.err
    assert (run / "checkpoints").read_text() == "mine"


def test_one_that_was_skipped_does_not_push_out_a_good_one_later(tmp_path):
    def made(step):
        progress = checkpoint.Progress(step=step, first_loss=1.0)
        return checkpoint.Checkpoint({}, {}, progress, {"W": np.zeros(2, np.float32)}, {"units": {}, "common": {}})

    before = Checkpoints(tmp_path, keep=3)
    for step in (5, 8):
        before.save(made(step))
    (tmp_path / "checkpoints" / "step-000008.safetensors").write_bytes(b"damaged")
    again = Checkpoints(tmp_path, keep=2)
    path, _ = again.newest(lambda note: None, 1 << 20)
    assert path.name == "step-000005.safetensors"
    again.save(made(10))
    assert [path.name for path in again.paths()] == [f"step-{step:06d}.safetensors" for step in (10, 8, 5)]


def test_a_folder_of_checkpoints_that_cannot_be_listed_is_refused_in_a_sentence(tmp_path, monkeypatch):
    how = {"data": "fashion-mnist-mini", "batch_size": 500, "num_epochs": 1, "lr": 0.1, "quiet": True}
    library.train(1, out=tmp_path / "run", **how)

    def fails(checkpoints):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("lockstep.training.checkpoint.Checkpoints.paths", fails)
    with pytest.raises(ConfigError, match=r"run cannot be read: Input/output error\. Look for what fails on that disk"):
        library.train(1, out=tmp_path / "run", resume=True, **how)
    assert Checkpoints(tmp_path / "run", keep=3).last() is None


def test_a_checkpoint_does_not_grow_with_the_length_of_an_epoch_and_losses_stay_exact(monkeypatch):
    how = {"data": "fashion-mnist-mini", "epochs": 1, "batch_size": 32, "devices": 1, "lr": 0.2, "quiet": True}
    whole = library.train(**how)
    monkeypatch.setattr(checkpoint, "NUM_KEPT", 16)
    seen = []
    add = Progress.add_losses
    monkeypatch.setattr(Progress, "add_losses", lambda self, *new: [add(self, *new), seen.append(len(self.losses))])
    short = library.train(**how)
    assert short.history[0].train_loss == whole.history[0].train_loss
    assert len(seen) == 63
    assert max(seen) <= 64


def test_a_run_that_is_done_stays_as_it_is_when_it_is_resumed(lockstep, few, tmp_path):
    arguments = ("train", "--data", few, "--batch-size", 8, "--epochs", 2, "--out", "done", "--json")
    first = lockstep(*arguments, "--devices", 2)
    folder = tmp_path / "done"

    def contents():
        return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}

    before = contents()
    again = lockstep(*arguments, "--resume", "--devices", 1)
    assert again.status == 0, again.err
    assert "the run is done: it stays as it is" in again.err
    assert again.json["weights_sha256"] == first.json["weights_sha256"]
    assert contents() == before
    for lost in ("result.json", "weights.safetensors", "curve.png"):
        (folder / lost).unlink()
        assert lockstep(*arguments, "--resume", "--devices", 2).status == 0
        assert contents().keys() == before.keys(), "what was lost is written again"
        assert contents()["weights.safetensors"] == before["weights.safetensors"]
    longer = lockstep(*arguments, "--resume", "--devices", 1, "--epochs", 3)
    assert longer.json["steps"] == first.json["steps"] // 2 * 3
