"""A recorded run, read back from its folder for people to look at. Files are not trusted, and may end half-way."""

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_type_hints

from lockstep.core.errors import ConfigError
from lockstep.core.files import read_regular
from lockstep.core.plain_types import fitting
from lockstep.report.events import EpochDone, Result
from lockstep.report.runlog import read_settings

MAX_METRICS_BYTES, MAX_TRACE_BYTES, MAX_RESULT_BYTES = 1 << 28, 1 << 28, 1 << 24
METRICS = {"metrics": dict[str, float | None]}  # None: it was not finite
EPOCH = get_type_hints(EpochDone) | METRICS
RESULT = get_type_hints(Result) | METRICS | {"history": list[dict[str, Any]], "run": Any, "first_loss": float | None}
TRACE = {"ts": float, "dur": float, "tid": int | str, "ph": str, "name": str, "args": dict[str, Any]}
LINE = {  # the types of what is read of a line of metrics.jsonl
    **dict.fromkeys(("step", "epoch", "steps_per_epoch", "num_parameters", "num_train_samples", "num_restarts"), int),
    **dict.fromkeys(("time", "seconds"), float),
    **dict.fromkeys(("loss", "train_loss", "test_accuracy", "learning_rate", "samples_per_second"), float | None),
    **dict.fromkeys(("devices", "notes"), list[str]),
    **dict.fromkeys(("event", "sentence", "reason", "model", "backend_version"), str),
}
CURVES = ("started", "step", "epoch", "done", "traced")  # all other events are incidents
CONTINUES = ("continuing after step ", "all ", "There is no checkpoint in ")  # what a resumed run begins with
MAX_DEPTH = 3  # of folders below the one that is searched for runs


@dataclass
class RecordedRun:
    """What the files of a run say. Of steps and epochs that were repeated after a crash, the last ones count."""

    folder: Path
    config: dict[str, Any]
    result: dict[str, Any] = field(default_factory=dict)  # empty where it did not end
    started: list[dict[str, Any]] = field(default_factory=list)  # each time that it started or resumed
    steps: list[dict[str, Any]] = field(default_factory=list)
    epochs: list[dict[str, Any]] = field(default_factory=list)
    incidents: list[dict[str, Any]] = field(default_factory=list)  # event, time, step, sentence
    traced: str = ""  # what the trace shows, in a sentence
    explanation: dict[str, Any] = field(default_factory=dict)  # where the time of a step went, if it was traced
    status: str = "not finished"

    @property
    def name(self) -> str:
        """The name of its folder."""
        return self.folder.resolve().name

    @property
    def start(self) -> dict[str, Any]:
        """What it said when it last started; empty where it did not come so far."""
        return self.started[-1] if self.started else {}

    @property
    def devices(self) -> list[str]:
        """Its devices at the end."""
        return list(map(str, self.result.get("devices") or self.start.get("devices") or []))

    @property
    def steps_per_epoch(self) -> int:
        """Steps of one epoch."""
        return max(1, number(self.start.get("steps_per_epoch"), 1))

    @property
    def accuracy(self) -> float | None:
        """The test accuracy after the last epoch."""
        last = self.result or (self.epochs[-1] if self.epochs else {})
        value = last.get("test_accuracy")
        return value if isinstance(value, (int, float)) else None

    @property
    def seconds_per_epoch(self) -> float | None:
        """The mean over the epochs that ended."""
        if isinstance(value := self.result.get("seconds_per_epoch"), (int, float)):
            return value
        seconds = [each["seconds"] for each in self.epochs]
        return sum(seconds) / len(seconds) if seconds else None

    @property
    def weights_sha256(self) -> str:
        """The hash of the weights; empty where the run did not end."""
        return str(self.result.get("weights_sha256") or "")

    @property
    def began(self) -> float | None:
        """When it was started first, in seconds since 1970."""
        times = [each["time"] for each in self.started if isinstance(each.get("time"), (int, float))]
        return times[0] if times else None


def number(value: Any, otherwise: int) -> int:
    """`value` if it is an integer."""
    return value if isinstance(value, int) else otherwise


def read_recorded(folder: Path) -> RecordedRun:
    """The run in a folder, finished or not."""
    if not os.path.isfile(folder / "config.json"):
        raise ConfigError(f"{folder} is not a run: it has no config.json. Give the folder of one, like runs/NAME.")
    run = RecordedRun(folder, read_settings(folder))
    if os.path.isfile(folder / "result.json"):
        result = _json(folder / "result.json", MAX_RESULT_BYTES)
        run.result = fitting(result, RESULT) if isinstance(result, dict) else {}
    steps: dict[int, dict[str, Any]] = {}
    epochs: dict[int, dict[str, Any]] = {}
    last: str = ""
    for line in _lines(folder / "metrics.jsonl"):
        kind = str(line.get("event"))
        if kind == "step" and _has_numbers(line, "step"):
            steps[line["step"]] = line
        elif kind == "epoch" and _has_numbers(line, "epoch", "seconds", "train_loss"):
            epochs[line["epoch"]] = line
        elif kind in ("started", "resumed"):
            at = number(line.get("step"), 0)
            if kind == "resumed":
                said = [note for each in run.started for note in each.get("notes") or []]
                run.incidents += _resumed(line, last, max(steps, default=0), said)
            steps = {step: each for step, each in steps.items() if step <= at}
            run.started.append(line)
        elif kind == "traced":
            run.traced, found = str(line.get("sentence", "")), line.get("explanation")
            run.explanation = found if isinstance(found, dict) else {}
        elif kind not in CURVES:
            sentence = str(line.get("sentence") or line.get("reason") or "")
            at_step = line.get("step") or max(steps, default=0)
            run.incidents.append({"event": kind, "time": line.get("time"), "step": at_step, "sentence": sentence})
        last = kind if kind not in ("step", "traced") else last
    run.steps = [steps[step] for step in sorted(steps)]
    run.epochs = [epochs[epoch] for epoch in sorted(epochs)]
    run.status = _status(run, last)
    return run


def _status(run: RecordedRun, last: str) -> str:
    """Whether a run is under way, came to its end, was stopped, or ended without a word (killed)."""
    if is_under_way(run.folder):
        return "running"
    if run.result or last == "stopped":
        return "finished" if run.result else "stopped"
    return "killed" if run.started else "not finished"


def is_under_way(folder: Path) -> bool:
    """Whether a run holds the lock of its folder now. A run that starts to resume at this moment tries again."""
    try:
        found = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return False
    try:
        fcntl.flock(found, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # a file system without locks
        return False
    finally:
        os.close(found)  # which gives the lock back
    return False


def _resumed(line: dict[str, Any], last: str, last_step: int, said: list[str]) -> list[dict[str, Any]]:
    """What a resumed run says about itself, but for what it has said before; a run that was killed could not say so."""
    at, when = number(line.get("step"), 0), line.get("time")
    found = []
    if not line.get("num_restarts") and last not in ("stopped", "done", "early_stop"):
        sentence = (
            f"The run ended without a word after step {last_step} or later: it was killed, or the machine failed."
        )
        found.append({"event": "killed", "time": None, "step": last_step, "sentence": sentence})
    resumed = f"continuing after step {at}"
    for note in [str(note).rstrip(".") for note in line.get("notes") or [] if note not in said]:
        if note.startswith(CONTINUES):
            resumed = note
        else:
            kind = "note" if not line.get("num_restarts") else "killed" if " was killed by " in note else "lost"
            found.append({"event": kind, "time": when, "step": last_step, "sentence": f"{note}."})
    return [*found, {"event": "resumed", "time": when, "step": at, "sentence": f"{resumed}."}]


def read_trace(run: RecordedRun) -> list[dict[str, Any]]:
    """The entries of trace.json; none where there is no such file."""
    path = run.folder / "trace.json"
    found = _json(path, MAX_TRACE_BYTES) if os.path.isfile(path) else []
    return [fitting(entry, TRACE) for entry in found if isinstance(entry, dict)] if isinstance(found, list) else []


def find_runs(folder: Path) -> list[RecordedRun]:
    """All runs in a folder and below it; those that cannot be read are left out."""
    found = []
    for path in sorted(_folders(folder, MAX_DEPTH)):
        if os.path.isfile(path / "config.json"):
            try:
                found.append(read_recorded(path))
            except ConfigError:
                continue
    return found


def _folders(folder: Path, depth: int) -> Iterator[Path]:
    yield folder
    if depth and not os.path.exists(folder / "config.json"):
        with suppress(OSError), os.scandir(folder) as entries:  # what cannot be looked at is left out
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    yield from _folders(Path(entry.path), depth - 1)


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of a file that are JSON objects: the last one may be half a line."""
    if not os.path.isfile(path):
        return
    for line in _bytes(path, MAX_METRICS_BYTES).splitlines():
        try:
            found = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(found, dict):
            yield fitting(found, LINE)


def _has_numbers(line: dict[str, Any], *names: str) -> bool:
    return all(isinstance(line.get(name), (int, float)) for name in names)


def _json(path: Path, max_bytes: int) -> Any:
    try:
        return json.loads(_bytes(path, max_bytes))
    except (ValueError, RecursionError) as problem:
        raise ConfigError(f"{path} is damaged: {problem}. Restore the file, or remove it.") from problem


def _bytes(path: Path, max_bytes: int) -> bytes:
    try:
        return read_regular(path, max_bytes)
    except (OSError, ValueError) as problem:
        raise ConfigError(f"{path} cannot be read: {problem}. Restore the file, or remove it.") from problem
