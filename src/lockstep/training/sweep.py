"""A sweep of runs, compared: the text's first and second exercises, from Python and from the command line."""

import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from lockstep.config import TYPES, RunConfig, check_batch, settings_in
from lockstep.core.errors import ConfigError, Interrupted, RunError
from lockstep.core.files import printable
from lockstep.core.plain_types import fitting
from lockstep.core.settings import IDENTITY
from lockstep.core.torchrun_env import prints_result
from lockstep.report.console import fetch_progress
from lockstep.report.events import EpochDone, Result
from lockstep.report.run_files import EPOCH, RecordedRun, read_recorded
from lockstep.report.runlog import check_folder, read_settings
from lockstep.training.checkpoint import how_to_resume
from lockstep.training.compared_rows import Row
from lockstep.training.comparison import ALWAYS, Comparison, with_reasons
from lockstep.training.run import run
from lockstep.training.setup import prepare, with_engine
from lockstep.training.sweep_file import LISTS, Sweep, Values, refuse_other
from lockstep.training.task import UserObjects
from lockstep.training.time_to_target import check_target
from lockstep.training.train import settings_of


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
    sweep, folder = Sweep(base, grid, scale_batch, target), None if out is None else Path(out)
    if folder is not None and resume:
        refuse_other(folder, sweep)
    return run_sweep(sweep, folder, objects, quiet=quiet, resume=resume)


def run_sweep(
    sweep: Sweep,
    folder: Path | None,
    objects: UserObjects | None = None,
    *,
    quiet: bool = False,
    resume: bool = False,
) -> Comparison:
    """The comparison of all runs, each recorded in a subfolder of `folder`, with compare.csv and compare.png."""
    runs = sweep.runs()
    if folder is not None and not (resume and folder.is_dir()):
        check_folder(folder)
    with fetch_progress() as progress:
        num_train = prepare(runs[0], objects, progress).task.num_train
    for config in runs:
        check_batch(config.batch_size, num_train, config.data)
    if folder is not None and prints_result():
        sweep.save(folder)
    varied = [name for name in ALWAYS if len({getattr(config, name) for config in runs}) > 1]
    rows, diverged = [], {}
    for number, config in enumerate(map(with_engine, runs), start=1):
        name = _name(config, varied)
        if not quiet:
            print(f"run {number} of {len(runs)}: {name}", file=sys.stderr, flush=True)
        out = None if folder is None else folder / name
        continues = resume and out is not None and os.path.isfile(out / "config.json")
        result = _finished(config, out) if continues and out is not None else None
        if result is None:
            try:
                with resumed_as_a_sweep(replace(config, out=out), folder):
                    result = run(replace(config, out=out), objects, quiet=quiet, resume=continues)
            except RunError as problem:  # with this learning rate, say: the others are trained all the same
                if not problem.has_diverged:
                    raise
                diverged[name] = str(problem).partition(". ")[0]
                if not quiet:
                    print(f"lockstep: {name}: {diverged[name]}", file=sys.stderr, flush=True)
                continue
        rows.append(Row({**vars(config), **_made_with(out)}, result))
    if not rows:
        raise RunError(f"All runs have diverged: {with_reasons(diverged)}. Try smaller learning rates (--lr).")
    found = Comparison(rows, folder, sweep.target, diverged)
    if folder is not None and prints_result():
        found.save(folder)
    return found


@contextmanager
def resumed_as_a_sweep(config: RunConfig, folder: Path | None) -> Iterator[None]:
    """Errors of a run of a sweep say how to resume the sweep, and not the one run."""
    if folder is None:
        yield
        return
    command = f"lockstep compare --resume --out {shlex.quote(str(folder))}"
    hint = f" In a program, use resume=True. Resume with: {command}"
    try:
        yield
    except KeyboardInterrupt:
        raise Interrupted(f"interrupted.{hint}") from None
    except RunError as error:
        of_run = how_to_resume(config)
        if of_run and of_run in str(error):
            error.args = (str(error).replace(of_run, hint),)
        elif isinstance(error, Interrupted):
            error.args = (f"{str(error).partition(' To start over, ')[0]}{hint}",)
        raise


def _made_with(out: Path | None) -> dict[str, Any]:
    """What the recorded settings of a run have besides its own: the hash of the data, versions, the processor."""
    try:
        recorded = {} if out is None else read_settings(out)
    except ConfigError:  # another machine has it
        recorded = {}
    return {name: recorded[name] for name in ("data_sha256", "made_with") if name in recorded}


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


def compare_recorded(folders: Sequence[Path]) -> Comparison:
    """The comparison of runs that are finished."""
    rows = []
    for folder, name in zip(folders, _short_names(folders), strict=True):
        recorded = read_recorded(folder)
        result = _result(recorded)
        if result is None:
            hint = f"Finish it: lockstep train --resume --out {folder}"
            raise ConfigError(f"{folder} is a run that has not finished: it has no good result.json. {hint}.")
        rows.append(Row(fitting(recorded.config, TYPES), result, printable(name)))
    return Comparison(rows)


def _short_names(folders: Sequence[Path]) -> list[str]:
    """The names of the folders; the paths where two have the same name."""
    names = [folder.resolve().name for folder in folders]
    return names if len(set(names)) == len(names) else [str(folder) for folder in folders]


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
