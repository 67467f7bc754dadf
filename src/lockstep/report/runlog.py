"""A run's folder: config.json, metrics.jsonl, result.json, curve.png, weights.safetensors, checkpoints/, ...

A file appears under its name only when it is complete; metrics.jsonl alone grows, a line an event. A run that stopped
early has no result.json, and the weights after its last finished epoch.
"""

import contextlib
import errno
import fcntl
import json
import math
import os
import platform
import stat
import time
from collections.abc import Iterator
from dataclasses import asdict
from importlib import import_module
from itertools import chain, count
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.numpy import load, save

from lockstep.core.errors import ConfigError, RunError
from lockstep.core.files import PART, read_regular, what_to_do, write_whole
from lockstep.core.interrupts import undone_when_terminated
from lockstep.core.layout import Array
from lockstep.core.torchrun_env import prints_result
from lockstep.report.events import EpochDone, Event, Incident, RunDone, RunStarted, RunStopped, StepDone, Traced
from lockstep.report.step_sampling import StepSampling

MAX_JSON_BYTES = 1 << 20
OWN_FILES = ("config.json", "metrics.jsonl", "result.json", "weights.safetensors", "ema.safetensors", "checkpoints")
LOCK_SECONDS = 10.0  # to wait for the processes of a run that was killed


class RunLog:
    """Writes events to the run's folder, which it owns from `claim` to `close`."""

    def __init__(self, folder: Path, is_resumed: bool = False) -> None:
        self.folder, self._is_resumed = folder, is_resumed
        self._lock: int | None = None
        self._is_new = False
        self._started: RunStarted | None = None
        check_folder(folder, is_resumed)

    def claim(self) -> None:
        """Makes the folder and locks it: of several runs that want it at the same moment, all but one are refused."""
        try:
            self._is_new = not self.folder.exists()
            self.folder.mkdir(parents=True, exist_ok=True)
            lock = os.open(self.folder, os.O_RDONLY)
        except OSError as problem:
            raise ConfigError(f"{self.folder} cannot be made: {problem.strerror}. Choose another --out.") from problem
        deadline = time.monotonic() + (LOCK_SECONDS if self._is_resumed else 0.0)
        while self._lock is None:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self._lock = lock
            except OSError as problem:  # a run that was killed a moment ago may not have ended yet
                if time.monotonic() >= deadline:
                    os.close(lock)
                    what = "Wait for it, or end it" if self._is_resumed else "Choose another --out"
                    raise ConfigError(f"Another run is under way in {self.folder}. {what}.") from problem
                time.sleep(0.1)
        try:
            is_ours = self._is_resumed or is_empty(self.folder)
        except OSError as problem:
            self.close()
            raise ConfigError(f"{self.folder} cannot be read: {problem.strerror}. Choose another --out.") from problem
        if not is_ours:
            self.close()
            raise ConfigError(f"Another run has just started in {self.folder}. Choose another --out.")

    def close(self) -> None:
        """Unlocks the folder; removes it where it was made and is still empty."""
        if self._lock is not None:
            if self._is_new:
                with contextlib.suppress(OSError):  # it is not empty
                    self.folder.rmdir()
            with contextlib.suppress(OSError):  # of a disk that fails: it is closed all the same
                os.close(self._lock)
            self._lock = None

    def write(self, event: Event) -> None:
        """Records one event; of steps, one in every `--log-every`."""
        try:
            match event:
                case RunStarted():
                    if self._is_resumed:
                        for part in (*self.folder.glob(".part-*"), *self.folder.glob("checkpoints/.part-*")):
                            part.unlink(missing_ok=True)  # an incomplete file of a run that was killed
                    settings = {**event.config, "data_sha256": event.data_sha256, "made_with": event.made_with}
                    settings["versions"] = {"lockstep": package_version(), "python": platform.python_version()}
                    self._text("config.json", to_json(settings, indent=2))
                    is_new = event.step == 0 and event.num_restarts == 0
                    self._started, self._steps = event, StepSampling(event)
                    self._line("started" if is_new else "resumed", asdict(event))
                case StepDone():
                    if values := self._steps.sampled(event):
                        self._line("step", {"epoch": event.epoch, "step": event.step, **values})
                case Incident():
                    self._line(event.kind, {"sentence": event.sentence})
                case EpochDone():
                    self._line("epoch", asdict(event))
                case Traced():
                    self._text("trace.json", to_json(event.chrome))
                    self._line("traced", {"sentence": event.sentence, "explanation": event.explanation})
                case RunDone(result):
                    self._weights_and_curve({**result.params, **result.buffers}, result.history)
                    if result.ema:
                        write_whole(self.folder / "ema.safetensors", lambda path: path.write_bytes(save(result.ema)))
                    fields = result.summary()
                    self._text("result.json", to_json(fields, indent=2))
                    self._line("done", {name: value for name, value in fields.items() if name != "history"})
                case RunStopped():
                    self._line("stopped", {"epoch": event.epoch, "step": event.step, "reason": event.reason})
                    if event.weights:
                        (self.folder / "ema.safetensors").unlink(missing_ok=True)  # that of earlier weights
                    self._weights_and_curve(event.weights, event.history)
        except OSError as problem:
            why = f"{problem.strerror}. {what_to_do(problem)}, or choose another --out"
            raise RunError(f"{self.folder} cannot be written to: {why}.") from problem

    def _weights_and_curve(self, weights: dict[str, Array], history: list[EpochDone]) -> None:
        from lockstep.report.run_picture import curve_png  # matplotlib takes half a second to load: now, not before

        if weights:  # none where no epoch was finished since the run was resumed
            write_whole(self.folder / "weights.safetensors", lambda path: path.write_bytes(save(weights)))
        if history:
            picture, problem = curve_png(self.folder, self._started, history)
            if picture:
                write_whole(self.folder / "curve.png", lambda path: path.write_bytes(picture))
            else:
                self._line("note", {"sentence": problem})

    def _text(self, name: str, content: str) -> None:
        write_whole(self.folder / name, lambda path: path.write_text(content + "\n", encoding="utf-8"))

    def _line(self, kind: str, fields: dict[str, Any]) -> None:
        def opener(path: str, flags: int) -> int:
            descriptor = os.open(path, flags | os.O_NOFOLLOW, 0o666)
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                os.close(descriptor)
                raise OSError(errno.ESPIPE, "It is not a regular file", str(path))
            return descriptor

        with open(self.folder / "metrics.jsonl", "ab+", opener=opener) as out:
            if out.tell():
                out.seek(-1, os.SEEK_END)
                if out.read(1) != b"\n":  # half a line, of a run that was killed
                    out.write(b"\n")
            out.write(to_json({"event": kind, "time": round(time.time(), 3), **fields}).encode() + b"\n")


@contextlib.contextmanager
def new_folder(name: str) -> Iterator[Path]:
    """A new folder under runs/, named after what is run and when; removed again if it stays empty.

    It is made at once: runs that start in the same second get different ones. Under torchrun, one rank makes it.
    """
    name = f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    parent, names = Path("runs"), chain([name], (f"{name}-{number}" for number in count(2)))
    if not prints_result():
        yield parent / name
        return
    made = [parent] if not parent.exists() else []
    with undone_when_terminated():
        folder = next(folder for folder in map(parent.joinpath, names) if _is_made(folder))
        try:
            yield folder
        finally:
            with contextlib.suppress(OSError):  # not empty
                for path in (folder, *made):
                    path.rmdir()


def _is_made(folder: Path) -> bool:
    """Makes a folder; False if it exists. One that cannot be made is refused where the run starts."""
    try:
        folder.mkdir(parents=True)
    except FileExistsError:
        return False
    except OSError:
        pass
    return True


def is_empty(folder: Path, *others: str) -> bool:
    """Whether nothing is in it, but `others`, and files that a run that was killed had begun to write."""
    return all(path.name.startswith(PART) or path.name in others for path in folder.iterdir())


def check_folder(folder: Path, is_resumed: bool = False) -> None:
    """Refuses a folder that cannot be made or written to, or has something in it that is not the run to resume."""
    try:
        nearest = next(path for path in (folder, *folder.absolute().parents) if path.exists())
        is_used = nearest == folder and folder.is_dir() and not is_empty(folder)
        problem = ""
        if is_used and not is_resumed:
            problem = "is not empty: a run is never written over. Resume the run in it (--resume), remove it, or choose"
        elif is_used and not (folder / "config.json").is_file() and not is_empty(folder, "metrics.jsonl"):
            problem = "is not a run: it has no config.json. Choose"
        elif is_used and (links := [name for name in OWN_FILES if (folder / name).is_symlink()]):
            problem = f"has a symbolic link as {links[0]}, which is not followed. Remove the link, or choose"
        elif not nearest.is_dir():
            problem = "is a file. Choose" if nearest == folder else f"cannot be made: {nearest} is a file. Choose"
        elif not os.access(nearest, os.W_OK | os.X_OK):
            problem = f"cannot be used: {nearest} is not writable. Choose"
    except OSError as error:
        raise ConfigError(f"{folder} cannot be used: {error.strerror}. Choose another --out.") from error
    if problem:
        raise ConfigError(f"{folder} {problem} another --out.")


def read_run(folder: Path) -> dict[str, Any]:
    """The settings of a finished run. The files are not trusted."""
    if not os.path.isfile(folder / "config.json"):
        raise ConfigError(f"{folder} is not a run: it has no config.json. Give the folder of one, like runs/NAME.")
    if not os.path.isfile(folder / "weights.safetensors"):
        hint = f"Finish it: lockstep train --resume --out {folder}"
        raise ConfigError(f"{folder} is a run that has not finished: it has no weights.safetensors. {hint}.")
    return read_settings(folder)


def read_weights(folder: Path, max_bytes: int) -> dict[str, Array]:
    """The weights of a finished run, whose model has no more bytes. The file is not trusted."""
    weights_file = folder / "weights.safetensors"
    try:
        return load(read_regular(weights_file, max_bytes))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as problem:
        raise ConfigError(f"{weights_file} is damaged: {problem}. Restore the file, or train again.") from problem


def read_settings(folder: Path) -> dict[str, Any]:
    """The settings in a run's config.json, which is not trusted."""
    return read_settings_file(folder / "config.json")


def read_settings_file(config_file: Path) -> dict[str, Any]:
    """The settings in a file like config.json."""
    try:
        config = json.loads(read_regular(config_file, MAX_JSON_BYTES))
    except (OSError, ValueError, RecursionError) as problem:
        raise ConfigError(f"{config_file} cannot be read: {problem}. Restore it, or choose another run.") from problem
    if not isinstance(config, dict):
        raise ConfigError(f"{config_file} does not hold the settings of a run. Restore it, or choose another run.")
    return config


def package_version() -> str:
    """Lockstep's own version, which stands at the top of the package, above what may be imported here."""
    return str(import_module("lockstep").__version__)


def to_json(value: Any, indent: int | None = None) -> str:
    """`value` as JSON; on one line unless `indent` is given."""
    return json.dumps(plain(value), indent=indent, allow_nan=False)


def plain(value: Any) -> Any:
    """The value as JSON can hold it: a number that is not finite becomes null, a path a string."""
    match value:
        case dict():
            return {name: plain(entry) for name, entry in value.items()}
        case list() | tuple():
            return [plain(entry) for entry in value]
        case float() if not math.isfinite(value):
            return None
        case Path():
            return str(value)
    return value
