"""Checkpoints: everything a run needs to go on, in one file that is whole or not there.

A checkpoint is a safetensors file. Its header holds the rest as JSON: which run it belongs to, how far it is, and the
SHA-256 of all of it. A run goes on from it on any number of devices, with any engine or exchange.
"""

import re
import shlex
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.config import RunConfig, settings_in
from lockstep.core.device import Device
from lockstep.core.entry_points import is_entry_point
from lockstep.core.errors import ConfigError, RunError
from lockstep.core.layout import Array
from lockstep.core.serialization import CorruptData, NotSerializable, pack, unpack
from lockstep.core.settings import IDENTITY
from lockstep.report.events import EpochDone
from lockstep.report.runlog import what_to_do, write_whole


@dataclass
class Progress:
    """How far a run is."""

    step: int = 0  # steps that are done
    epoch: int = 1  # the one under way
    losses: list[float] = field(default_factory=list)  # of its shards so far
    seconds: float = 0.0  # of training in it so far
    first_loss: float = float("nan")
    history: list[EpochDone] = field(default_factory=list)  # of the epochs that are done


@dataclass(frozen=True)
class Checkpoint:
    """A run at the end of a step."""

    run: dict[str, Any]  # `identity_of` it
    made_with: dict[str, str]  # versions and kind of device: others may round differently
    progress: Progress
    weights: dict[str, Array]
    states: dict[str, Any]  # the optimizer's state, by the part of the model that it belongs to

    def packed(self) -> bytes:
        """The checkpoint as bytes."""
        progress = {**asdict(self.progress), "losses": np.array(self.progress.losses, np.float64)}
        return pack(
            {
                "run": self.run,
                "made_with": self.made_with,
                "progress": progress,
                "weights": self.weights,
                "states": self.states,
            }
        )


def unpacked(data: bytes) -> Checkpoint:
    """The checkpoint that was packed; `CorruptData` if it is not one, to the last byte."""
    tree = unpack(data, is_strict=False)
    try:
        progress = Progress(
            **{
                **tree["progress"],
                "losses": tree["progress"]["losses"].tolist(),
                "history": [EpochDone(**done) for done in tree["progress"]["history"]],
            }
        )
        found = Checkpoint(tree["run"], tree["made_with"], progress, tree["weights"], tree["states"])
        _check_forged(found)
        if found.packed() != data:
            raise ValueError("other bytes stand for the same")
    except (KeyError, TypeError, ValueError, AttributeError) as problem:
        raise CorruptData("what it holds is not a checkpoint") from problem
    return found


def _check_forged(found: Checkpoint) -> None:
    """Refuses what no run has saved, though its SHA-256 is right."""
    progress = found.progress
    if (
        not all(isinstance(part, dict) for part in (found.run, found.made_with, found.weights, found.states))
        or not found.states
    ):
        raise ValueError("a part is missing")
    if not all(isinstance(array, np.ndarray) for array in found.weights.values()):
        raise ValueError("weights are arrays")
    if type(progress.step) is not int or progress.step < 0 or progress.epoch != len(progress.history) + 1:
        raise ValueError("the steps do not fit together")
    numbers = [progress.seconds, progress.first_loss, *progress.losses]
    for done in progress.history:
        numbers += [done.seconds, done.train_loss, *done.metrics.values()]
    if not all(isinstance(number, float) for number in numbers):
        raise ValueError("numbers are numbers")


def identity_of(config: RunConfig, data_sha256: str | None, num_train: int) -> dict[str, Any]:
    """What the bits of a run depend on."""
    identity = {each.name: getattr(config, each.name) for each in settings_in(IDENTITY)}
    identity |= {"data_sha256": data_sha256, "num_train": num_train}
    if config.schedule != "constant":  # the rate of a step then depends on how many there will be
        identity["num_epochs"] = config.num_epochs
    return identity


def made_with(backend_version: str, devices: list[Device]) -> dict[str, str]:
    """What may round differently elsewhere: where it differs, a run goes on, and the user is told."""
    return {"backend_version": backend_version, "kind of device": devices[0].kind}


def check_same_run(run: dict[str, Any], identity: dict[str, Any], config: RunConfig) -> None:
    """Refuses to go on with another run than was begun, and says what differs."""
    names = [name for name in {**identity, **run} if identity.get(name) != run.get(name)]
    if "data_sha256" in names and "data" in names:
        names.remove("data_sha256")
    if names:
        words = {"num_shards": "shards", "data_sha256": "SHA-256 of the data", "num_train": "training samples"}
        differences = "; ".join(
            f"{words.get(name, name.replace('_', ' '))}: {run.get(name)!r} there, {identity.get(name)!r} now"
            for name in names
        )
        raise ConfigError(
            f"The run in {config.out} cannot go on as another one: {differences}. Use the same settings, or another "
            f"--out for a new run."
        )


def check_length(progress: Progress, config: RunConfig, num_train: int) -> None:
    """Refuses to end a run before the epoch that it is in, and a position that no run of this length has."""
    steps_per_epoch = -(-num_train // config.batch_size)
    if not (progress.epoch - 1) * steps_per_epoch <= progress.step <= progress.epoch * steps_per_epoch:
        raise ConfigError(
            f"The checkpoint in {config.out} is of step {progress.step} and epoch {progress.epoch}, which do not go "
            f"together: nobody has saved it. Choose another --out."
        )
    num_begun = len(progress.history) + bool(progress.losses)
    if num_begun > config.num_epochs:
        raise ConfigError(
            f"The run in {config.out} has begun {num_begun} epochs already. Use at least as many (--epochs)."
        )


def how_to_resume(config: RunConfig) -> str:
    """The command that resumes the run, as a sentence; nothing where there is no checkpoint."""
    if config.out is None or not Checkpoints(config.out, config.keep_checkpoints).paths():
        return ""
    own = [(name, getattr(config, name)) for name in ("model", "data", "loss", "optimizer")]
    given = "".join(f" --{name} {shlex.quote(value)}" for name, value in own if is_entry_point(value))
    command = f"lockstep train --resume --out {shlex.quote(str(config.out))}{given}"
    return f" In a program, use resume=True. Resume with: {command}"


class Checkpoints:
    """The checkpoints of a run's folder."""

    def __init__(self, folder: Path, keep: int) -> None:
        self.folder, self._keep = folder / "checkpoints", keep
        self._damaged: list[Path] = []

    def paths(self) -> list[Path]:
        """The files, the newest first."""
        found = {}
        if self.folder.is_dir():
            for path in self.folder.iterdir():
                if match := re.fullmatch(r"step-(\d{6,18})\.safetensors", path.name):
                    found[int(match[1])] = path
        return [found[step] for step in sorted(found, reverse=True)]

    def save(self, checkpoint: Checkpoint) -> Path:
        """Writes one, and removes the oldest if there are too many."""
        path = self.folder / f"step-{checkpoint.progress.step:06d}.safetensors"
        try:
            self.folder.mkdir(exist_ok=True)
            content = checkpoint.packed()
            write_whole(path, lambda temporary: temporary.write_bytes(content))
            for damaged in self._damaged:
                if damaged != path:
                    damaged.unlink(missing_ok=True)
            self._damaged = []
            for old in self.paths()[self._keep :]:
                old.unlink()
        except NotSerializable as problem:
            raise RunError(
                f"step {checkpoint.progress.step}: a checkpoint cannot hold all of this run: {problem}. Train without "
                f"checkpoints (--checkpoint-every 0), or keep it elsewhere."
            ) from problem
        except OSError as problem:
            last = self.paths()
            kept = f"The last one is {last[0]}" if last else "There is none yet"
            raise RunError(
                f"step {checkpoint.progress.step}: the checkpoint cannot be written to {self.folder}: "
                f"{problem.strerror}. {kept}. {what_to_do(problem)}, and go on with --resume."
            ) from problem
        return path

    def newest(self, note: Callable[[str], None]) -> tuple[Path, Checkpoint] | None:
        """The newest that is whole; None where there are none. Those that are damaged are named."""
        paths = self.paths()
        for number, path in enumerate(paths):
            try:
                return path, unpacked(path.read_bytes())
            except (OSError, CorruptData) as problem:
                why = problem.strerror if isinstance(problem, OSError) else str(problem)
                if number + 1 == len(paths):
                    raise ConfigError(
                        f"{path} is damaged: {why}. There is no other checkpoint to go on from. To begin anew, choose "
                        f"another --out."
                    ) from problem
                note(f"{path} is damaged: {why}. The one before it is used.")
                self._damaged.append(path)
        return None
