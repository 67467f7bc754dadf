"""A sweep of runs, compared: the text's first and second exercises, from Python and from the command line."""

import os
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, TypeVar

from lockstep.backends import devices_for, load_backend
from lockstep.config import TYPES, RunConfig, check_batch, check_ranks, settings_in
from lockstep.core.errors import ConfigError
from lockstep.core.plain_types import fitting
from lockstep.core.settings import IDENTITY
from lockstep.report.console import fetch_progress
from lockstep.report.events import EpochDone, Result
from lockstep.report.run_files import EPOCH, RecordedRun, read_recorded
from lockstep.report.runlog import check_folder
from lockstep.training.comparison import MORE, Comparison, Row
from lockstep.training.run import run
from lockstep.training.setup import prepare, with_engine
from lockstep.training.task import UserObjects
from lockstep.training.time_to_target import check_target
from lockstep.training.train import settings_of

N = TypeVar("N", int, float, str)
Values = str | int | float | Iterable[Any]  # one value, a list, or values with commas
LISTS: dict[str, tuple[Callable[[Any], Any], str]] = {  # settings that may be swept -> their type, an example
    "devices": (int, "1,2"),
    "batch_size": (int, "128,256"),
    "lr": (float, "0.1,0.2,0.4"),
    "shards": (int, "4,8"),
    "optimizer": (str, "sgd,adam"),
    "exchange": (str, "sharded,tree"),
    "engine": (str, "inprocess,processes"),
}


def compare(
    devices: Values = (1, 2),
    batch_size: Values = 256,
    lr: Values | None = None,
    *,
    scale_batch: bool = False,
    target: float | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    quiet: bool = False,
    **settings: Any,
) -> Comparison:
    """Trains a sweep of runs and compares them: numbers of devices, batch sizes, learning rates, and more.

    `devices`, `batch_size`, `lr`, `shards`, `optimizer`, `exchange` and `engine` take one value or a list; all other
    settings are those of `lockstep.train`. With `scale_batch`, k devices have batches k times as large. `target` is the
    test accuracy that samples and seconds are counted to; without it, 95 % of the best. With `out`, the
    runs are recorded in this folder, with compare.csv and compare.png; with `resume`, those in it that are finished are
    not trained again.

    >>> found = compare([1, 2], batch_size=500, data="fashion-mnist-mini", epochs=1, quiet=True)
    >>> [row.num_devices for row in found.rows], len({result.weights_sha256 for result in found.results})
    ([1, 2], 1)
    """
    grid: dict[str, Values] = {"devices": devices, "batch_size": batch_size}
    if lr is not None:
        grid["lr"] = lr
    grid |= {name: settings.pop(name) for name in LISTS if name in settings and not callable(settings[name])}
    base, objects = settings_of(settings)
    check_target(target, is_accuracy=base.loss == RunConfig().loss)
    folder = None if out is None else Path(out)
    found = run_sweep(make_sweep(base, grid, scale_batch), folder, objects, quiet=quiet, resume=resume)
    found.wanted = target
    if folder is not None:
        found.save(folder)
    return found


def make_sweep(base: RunConfig, grid: dict[str, Values], scale_batch: bool = False) -> list[RunConfig]:
    """The runs of the sweep, checked; those that differ in the number of devices only follow each other.

    All run on one kind of device: on GPUs if there are some, else on logical CPU devices.
    """
    values = {name: _values(given, name) for name, given in grid.items()}
    counts, sizes = values.pop("devices"), values.pop("batch_size")
    for count in counts:
        if count < 1:
            given = ",".join(map(str, counts))
            raise ConfigError(f"--devices {given}: {count} is not a number of devices. Write numbers from 1 on: 1,2.")
        for shards in values.get("shards", [base.num_shards]):
            check_ranks(count, shards)
    most = devices_for(load_backend(base.backend), max(counts))
    names = {"lr": "learning_rate", "shards": "num_shards"}
    runs = []
    for combination in product(sizes, *values.values(), counts):
        size, *own, k = combination
        chosen = {names.get(name, name): value for name, value in zip(values, own, strict=True)}
        if "optimizer" in chosen and "lr" not in values:  # every optimizer has a default of its own
            chosen["learning_rate"] = None
        runs.append(replace(base, devices=",".join(most[:k]), batch_size=k * size if scale_batch else size, **chosen))
    return runs


def _values(given: Values, name: str) -> list[Any]:
    kind, example = LISTS[name]
    is_list = isinstance(given, Iterable) and not isinstance(given, str)
    try:
        parts = list(given) if is_list else str(given).split(",")  # type: ignore[arg-type]
        found = list(dict.fromkeys(kind(part) for part in parts))
    except (ValueError, TypeError) as wrong:
        what = f"--{name.replace('_', '-')} {given}"
        raise ConfigError(f"{what}: not a list of numbers. Write them with commas: {example}.") from wrong
    if not found:
        raise ConfigError(f"--{name.replace('_', '-')} is empty. Write values with commas: {example}.")
    return found


def run_sweep(
    sweep: list[RunConfig],
    folder: Path | None,
    objects: UserObjects | None = None,
    *,
    quiet: bool = False,
    resume: bool = False,
) -> Comparison:
    """The results of all runs, each recorded in a subfolder of `folder`."""
    if folder is not None and not (resume and folder.is_dir()):
        check_folder(folder)
    with fetch_progress() as progress:
        num_train = prepare(sweep[0], objects, progress).task.num_train
    for config in sweep:
        check_batch(config.batch_size, num_train, config.data)
    varied = [name for name in MORE if len({getattr(config, name) for config in sweep}) > 1]
    rows = []
    for number, config in enumerate(map(with_engine, sweep), start=1):
        name = _name(config, varied)
        if not quiet:
            print(f"run {number} of {len(sweep)}: {name}", file=sys.stderr, flush=True)
        out = None if folder is None else folder / name
        continues = resume and out is not None and os.path.isfile(out / "config.json")
        result = _finished(config, out) if continues and out is not None else None
        if result is None:
            result = run(replace(config, out=out), objects, quiet=quiet, resume=continues)
        rows.append(_row(config.devices, config.batch_size, config.learning_rate, vars(config), result))
    return Comparison(rows, folder)


def _finished(config: RunConfig, out: Path) -> Result | None:
    """The result of the run in a folder, if it is this one and has come to its end."""
    recorded = read_recorded(out)
    for each in settings_in(IDENTITY):
        found, wanted = recorded.config.get(each.name), getattr(config, each.name)
        if found != wanted:
            words = each.name.replace("_", " ")
            raise ConfigError(
                f"The run in {out} has the {words} {found}, and {wanted} is wanted. Choose another --out."
            )
    return _result(recorded) if recorded.config.get("num_epochs") == config.num_epochs else None


def _name(config: RunConfig, varied: Sequence[str]) -> str:
    name = f"k{str(config.devices).count(',') + 1}-batch{config.batch_size}-lr{config.learning_rate!r}"
    short = {"num_shards": "shards"}
    return name + "".join(f"-{short.get(each, '')}{getattr(config, each)}" for each in varied)


def _row(devices: Any, batch_size: int, rate: float | None, settings: dict[str, Any], result: Result) -> Row:
    more = {name: settings.get(name) for name in MORE}
    return Row(len(result.devices) or str(devices).count(",") + 1, batch_size, rate, more, result)


def compare_recorded(folders: Sequence[Path]) -> Comparison:
    """The comparison of runs that are finished."""
    rows = []
    for folder in folders:
        recorded = read_recorded(folder)
        result = _result(recorded)
        if result is None:
            hint = f"Finish it: lockstep train --resume --out {folder}"
            raise ConfigError(f"{folder} is a run that has not finished: it has no good result.json. {hint}.")
        config = fitting(recorded.config, TYPES)
        rows.append(_row(None, config.get("batch_size") or 0, config.get("learning_rate"), config, result))
    return Comparison(rows)


def _result(recorded: RecordedRun) -> Result | None:
    """The result of a recorded run, without its weights; None where it has none, or none that is whole."""
    try:
        plain = dict(recorded.result)
        history = [EpochDone(**fitting(done, EPOCH)) for done in plain.pop("history")]
        first = float("nan") if plain["first_loss"] is None else plain["first_loss"]
        found = {**plain, "run": recorded.folder, "history": history, "params": {}, "first_loss": first}
        return Result(**found) if history else None
    except (TypeError, KeyError):
        return None
