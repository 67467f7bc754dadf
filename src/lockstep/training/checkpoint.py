"""Checkpoints: everything a run needs to resume, in one file that is complete or not there.

A checkpoint is a safetensors file. Its header holds the rest as JSON: the identity of its run, its progress, and the
SHA-256 of all of it. A run resumes from it on any number of devices, with any engine or exchange.
"""

import math
import re
import shlex
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.backends import Backend
from lockstep.config import RunConfig, settings_in
from lockstep.core.device import Device
from lockstep.core.entry_points import GIVEN, is_entry_point
from lockstep.core.errors import ConfigError, RunError
from lockstep.core.exact_sum import partial_sums
from lockstep.core.files import read_regular, what_to_do, write_whole
from lockstep.core.layout import Array
from lockstep.core.serialization import CorruptData, NotSerializable, pack, unpack
from lockstep.core.settings import IDENTITY
from lockstep.report.events import EpochDone
from lockstep.training.task import Task

NUM_KEPT = 1 << 14  # losses of shards: a checkpoint must not grow with the length of an epoch
FILE_NAME = re.compile(r"step-(\d{6,18})\.safetensors")


@dataclass
class Progress:
    """How far a run is."""

    step: int = 0  # steps that are done
    passes: int = 0  # forward and backward passes that are done, where a step can have several
    epoch: int = 1  # the current one, which is not done
    losses: list[float] = field(default_factory=list)  # of the shards of the current epoch so far
    weights: list[float] = field(default_factory=list)  # the same, where the loss has weights of its own
    seconds: float = 0.0  # of training in the current epoch so far
    first_loss: float = float("nan")
    notes: list[str] = field(default_factory=list)  # what may have changed the bits on the way
    history: list[EpochDone] = field(default_factory=list)  # of the epochs that are done

    def add_losses(self, losses: list[float], weights: list[float]) -> None:
        """Adds those of a step. Of a long epoch, only the last are kept one by one: their sum stays exact."""
        for kept, new in ((self.losses, losses), (self.weights, weights)):
            kept += new
            if len(kept) > 2 * NUM_KEPT and all(map(math.isfinite, kept)):
                kept[:-NUM_KEPT] = partial_sums(kept[:-NUM_KEPT])


@dataclass(frozen=True)
class Checkpoint:
    """A run at the end of a step."""

    run: dict[str, Any]  # `identity_of` it
    made_with: dict[str, str]  # versions and kind of device: others may round differently
    progress: Progress
    weights: dict[str, Array]
    states: dict[str, Any]  # a `ReplicaState`: the optimizer's state of each parameter, and what they have in common

    def packed(self) -> bytes:
        """The checkpoint as bytes."""
        numbers = {name: np.array(getattr(self.progress, name), np.float64) for name in ("losses", "weights")}
        progress = {**asdict(self.progress), **numbers}
        return pack({each.name: getattr(self, each.name) for each in fields(self)} | {"progress": progress})


def unpacked(data: bytes) -> Checkpoint:
    """The checkpoint that was packed; `CorruptData` if `data` differs from one in any byte."""
    tree = unpack(data, is_strict=False)
    try:
        progress = tree["progress"]
        history = [EpochDone(**done) for done in progress["history"]]
        numbers = {name: progress[name].tolist() for name in ("losses", "weights")}
        progress = Progress(**{**progress, **numbers, "history": history})
        found = Checkpoint(**{**tree, "progress": progress})
        _check_plausible(found)
        if found.packed() != data:
            raise ValueError("other bytes for the same checkpoint")
    except (KeyError, TypeError, ValueError, AttributeError) as problem:
        raise CorruptData("what it holds is not a checkpoint") from problem
    return found


def _check_plausible(found: Checkpoint) -> None:
    """Refuses a forged checkpoint: one with a correct SHA-256 that no run has saved."""
    progress, parts = found.progress, (found.run, found.made_with, found.weights, found.states)
    if not all(isinstance(part, dict) for part in parts) or set(found.states) != {"units", "common"}:
        raise ValueError("a part is missing, or is no dict")
    if not all(isinstance(part, dict) for part in found.states.values()):
        raise ValueError("a part of the optimizer's state is no dict")
    counts = [progress.step, progress.passes, progress.epoch, *(done.epoch for done in progress.history)]
    if any(type(count) is not int or count < 0 for count in counts) or progress.epoch != len(progress.history) + 1:
        raise ValueError("step or epoch cannot be")
    texts = [*progress.notes, *found.run, *found.made_with, *found.made_with.values(), *found.weights]
    texts += [name for done in progress.history for name in done.metrics]
    if not isinstance(progress.notes, list) or not all(isinstance(text, str) for text in texts):
        raise ValueError("a name or a note is no text")
    numbers = [progress.seconds, progress.first_loss, *progress.losses, *progress.weights]
    for done in progress.history:
        numbers += [done.seconds, done.train_loss, *done.metrics.values()]
        numbers += [] if done.test_accuracy is None else [done.test_accuracy]
    arrays = [(array, np.ndarray) for array in found.weights.values()]
    if not all(isinstance(value, kind) for value, kind in [*arrays, *((number, float) for number in numbers)]):
        raise ValueError("a weight is no array, or a number no float")


def identity_of(config: RunConfig, task: Task) -> dict[str, Any]:
    """What the bits of a run depend on."""
    identity = {each.name: getattr(config, each.name) for each in settings_in(IDENTITY)}
    identity |= {"data_sha256": task.data_sha256, "num_train": task.num_train}
    if config.schedule != "constant":  # the learning rate of a step then depends on it
        identity["num_epochs"] = config.num_epochs
    return identity


def made_with(backend: Backend, device: Device) -> dict[str, str]:
    """What may round differently elsewhere: where it differs, a run resumes with a warning."""
    software = {"version of the backend": backend.version(), "kind of device": device.kind}
    return {**software, **backend.kernel_choice(device)}


def differences(checkpoint: Checkpoint, now: dict[str, str]) -> list[str]:
    """What is not as it was when the checkpoint was made, as sentences."""
    then, later = checkpoint.made_with, "from now on the bits may differ"
    return [
        f"The checkpoint was made with another {name}, {then.get(name)}, and this is {now.get(name)}: {later}."
        for name in {**then, **now}
        if then.get(name) != now.get(name)
    ]


def check_same_run(run: dict[str, Any], identity: dict[str, Any], config: RunConfig) -> None:
    """Refuses to resume a run with other settings, and says which differ."""
    names = [name for name in {**identity, **run} if identity.get(name) != run.get(name)]
    if "data_sha256" in names and "data" in names:
        names.remove("data_sha256")
    if names:
        words = {"num_shards": "shards", "data_sha256": "SHA-256 of the data", "num_train": "training samples"}
        named = [(words.get(name, name.replace("_", " ")), run.get(name), identity.get(name)) for name in names]
        differences = "; ".join(f"{name}: {theirs!r} there, {ours!r} now" for name, theirs, ours in named)
        if config.out is None:
            objects = [name for name, theirs, _ in named if isinstance(theirs, str) and theirs.endswith(GIVEN)]
            again = f"Give what was an object again: {', '.join(f'{name}=' for name in objects)}" if objects else ""
            hint = again or "Leave them out, or use those"
            raise ConfigError(f"What was saved has other settings: {differences}. {hint}.")
        raise ConfigError(f"The run in {config.out} has other settings: {differences}. Use those, or another --out.")


def check_length(progress: Progress, config: RunConfig, num_train: int) -> None:
    """Refuses a step and epoch that no run with these settings has, and fewer epochs than the run has begun."""
    steps_per_epoch = -(-num_train // config.batch_size)
    if not (progress.epoch - 1) * steps_per_epoch <= progress.step <= progress.epoch * steps_per_epoch:
        where = f"step {progress.step} in epoch {progress.epoch}"
        raise ConfigError(f"{config.out} has a checkpoint of {where}, which no run has saved. Choose another --out.")
    num_begun = len(progress.history) + bool(progress.losses)
    if num_begun > config.num_epochs:
        raise ConfigError(f"The run in {config.out} has begun {num_begun} epochs. Use at least as many (--epochs).")


def how_to_resume(config: RunConfig) -> str:
    """The command that resumes the run, as a sentence; empty where there is no checkpoint."""
    if config.out is None or Checkpoints(config.out, config.keep_checkpoints).last() is None:
        return ""
    own = [(name, getattr(config, name)) for name in ("model", "data", "loss", "optimizer")]
    options = [("out", str(config.out)), *((name, value) for name, value in own if is_entry_point(value))]
    command = " ".join(["lockstep train --resume", *(f"--{name} {shlex.quote(value)}" for name, value in options)])
    return f" In a program, use resume=True. Resume with: {command}"


def max_bytes_of(initial: dict[str, Array]) -> int:
    """More than a checkpoint of this model can have: weights, the optimizer's state, averages, losses of an epoch."""
    return (1 << 26) + 20 * sum(array.nbytes for array in initial.values())


def _step_of(path: Path) -> int:
    found = FILE_NAME.fullmatch(path.name)
    assert found is not None, "it was found by its name"
    return int(found[1])


class Checkpoints:
    """The checkpoints in a run's folder."""

    def __init__(self, folder: Path, keep: int) -> None:
        self.folder, self._keep = folder / "checkpoints", keep
        self._skipped: set[Path] = set()  # files that `newest` could not use: another time, they may be readable

    def paths(self) -> list[Path]:
        """The files, the newest first."""
        files = self.folder.iterdir() if self.folder.is_dir() else ()
        found = [(match, path) for path in files if (match := FILE_NAME.fullmatch(path.name))]
        return [path for _, path in sorted(found, key=lambda each: int(each[0][1]), reverse=True)]

    def last(self) -> Path | None:
        """The newest file, where there is one and the folder can be read: for a message."""
        try:
            return next((path for path in self.paths() if path.is_file()), None)
        except OSError:
            return None

    def save(self, checkpoint: Checkpoint) -> Path:
        """Writes a file, and removes the oldest."""
        step = checkpoint.progress.step
        path = self.folder / f"step-{step:06d}.safetensors"
        try:
            self.folder.mkdir(exist_ok=True)
            content = checkpoint.packed()
            write_whole(path, lambda temporary: temporary.write_bytes(content))
            self._skipped.discard(path)
            usable = [each for each in self.paths() if each not in self._skipped and not each.is_dir()]
            for old in [each for each in usable if _step_of(each) < step][self._keep - 1 :]:
                old.unlink()
        except NotSerializable as problem:
            raise RunError(
                f"step {step}: no checkpoint can be saved: {problem}. Use --checkpoint-every 0."
            ) from problem
        except OSError as problem:
            last = "There is none yet" if self.last() is None else f"The last one is {self.last()}"
            what = f"step {step}: the checkpoint cannot be written to {self.folder}: {problem.strerror}"
            raise RunError(f"{what}. {last}. {what_to_do(problem)}, and use --resume.") from problem
        return path

    def newest(self, note: Callable[[str], None], max_bytes: int) -> tuple[Path, Checkpoint] | None:
        """The newest that is not damaged; None where there is no file. Damaged ones are reported to `note`."""
        paths = self.paths()
        for number, path in enumerate(paths):
            try:
                found = unpacked(read_regular(path, max_bytes))
                if found.progress.step != _step_of(path):
                    raise CorruptData(f"it is a checkpoint of step {found.progress.step} under another name")
                return path, found
            except (OSError, CorruptData) as problem:
                what = f"{path} is damaged: {problem}"
                if isinstance(problem, OSError):
                    what = f"{path} cannot be read: {problem.strerror}"
                if number + 1 == len(paths):
                    what = f"{what}. There is no other checkpoint to resume from"
                    raise ConfigError(f"{what}. To start over, choose another --out.") from problem
                note(f"{what}. The one before it is used.")
                self._skipped.add(path)
        return None
