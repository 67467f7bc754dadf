"""A sweep as data: its settings and the values of its grid, and compare.json, which remembers them in its folder."""

import os
from collections.abc import Callable, Iterable
from dataclasses import fields, replace
from itertools import product
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from lockstep.backends import devices_for, load_backend
from lockstep.config import RunConfig, check_ranks, field_of, settings_in
from lockstep.core.errors import ConfigError
from lockstep.core.files import write_whole
from lockstep.core.plain_types import fits
from lockstep.core.settings import flag_of
from lockstep.report.runlog import read_settings_file, to_json

NAME = "compare.json"
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
MAX_RUNS = 10_000  # of a sweep
MAY_CHANGE = ("num_epochs", "data_dir", "out", "keep_checkpoints", "log_every", "logger", "timeout", "workers")
KINDS = {"grid": dict[str, list[int | float | str]], "scale_batch": bool, "target": float | None}


class Sweep(NamedTuple):
    """Runs that differ in the values of a grid."""

    base: RunConfig
    grid: dict[str, Values]  # by the names of `LISTS`
    scale_batch: bool = False  # k devices have batches k times as large
    target: float | None = None  # the test accuracy that samples and seconds are counted to

    def values(self) -> dict[str, list[Any]]:
        """The grid, checked."""
        found = {name: values_of(given, name) for name, given in self.grid.items()}
        if (number := prod(map(len, found.values()))) > MAX_RUNS:
            raise ConfigError(f"The sweep has {number:,} runs. Give fewer values: at most {MAX_RUNS:,} runs are made.")
        return found

    def runs(self) -> list[RunConfig]:
        """The runs, checked; those that differ in the number of devices only follow each other.

        All run on one kind of device: on GPUs if there are some, else on logical CPU devices.
        """
        values = self.values()
        counts, sizes = values.pop("devices"), values.pop("batch_size")
        for count in counts:
            if count < 1:
                given = ",".join(map(str, counts))
                raise ConfigError(
                    f"--devices {given}: {count} is not a number of devices. Write numbers from 1 on: 1,2."
                )
            for shards in values.get("shards", [self.base.num_shards]):
                check_ranks(count, shards)
        most = devices_for(load_backend(self.base.backend), max(counts))
        names = {"lr": "learning_rate", "shards": "num_shards"}
        runs = []
        for combination in product(sizes, *values.values(), counts):
            size, *own, k = combination
            chosen = {names.get(name, name): value for name, value in zip(values, own, strict=True)}
            if "optimizer" in chosen and "lr" not in values:  # every optimizer has a default of its own
                chosen["learning_rate"] = None
            chosen["batch_size"] = k * size if self.scale_batch else size
            runs.append(replace(self.base, devices=",".join(most[:k]), **chosen))
        return runs

    def is_same(self, other: "Sweep") -> bool:
        """Whether both have the same runs, but for what a resumed sweep may change, like the number of epochs."""

        def compared(sweep: Sweep) -> list[dict[str, Any]]:
            return [{n: v for n, v in vars(run).items() if n not in MAY_CHANGE} for run in sweep.runs()]

        return compared(self) == compared(other)

    def save(self, folder: Path) -> None:
        """Writes compare.json into the sweep's folder, which is made."""
        settings = {name: value for name, value in vars(self.base).items() if name not in ("out", "logger")}
        plain = {"grid": self.values(), "scale_batch": self.scale_batch, "target": self.target, "settings": settings}
        try:
            folder.mkdir(parents=True, exist_ok=True)
            write_whole(folder / NAME, lambda path: path.write_text(to_json(plain, indent=2) + "\n", encoding="utf-8"))
        except OSError as problem:
            why = f"{folder} cannot be written to: {problem.strerror}"
            raise ConfigError(f"{why}. Choose another --out.") from problem


def has_sweep(folder: Path) -> bool:
    """Whether a sweep was started in a folder."""
    return os.path.isfile(folder / NAME)


def read_plain(folder: Path) -> dict[str, Any]:
    """What compare.json says, which is not trusted: `grid`, `scale_batch`, `target`, and known `settings`."""
    if not has_sweep(folder):
        raise ConfigError(f"There is no sweep in {folder} to resume: it has no {NAME}. Start one without --resume.")
    plain = read_settings_file(folder / NAME)
    settings: Any = plain.get("settings")
    is_good = isinstance(settings, dict) and all(fits(plain.get(name), kind) for name, kind in KINDS.items())
    if not is_good or not {"devices", "batch_size"} <= plain["grid"].keys() <= LISTS.keys():
        raise ConfigError(f"{folder / NAME} does not hold a sweep. Restore it, or choose another --out.")
    known = {each.name for each in settings_in()} - {"out", "logger"}
    return {**{name: plain[name] for name in KINDS}, "settings": {n: v for n, v in settings.items() if n in known}}


def sweep_of(plain: dict[str, Any], changes: dict[str, Any]) -> Sweep:
    """The sweep of a folder, with `changes`: by the names of the grid and of `RunConfig`, `scale_batch`, `target`."""
    grid = plain["grid"] | {name: value for name, value in changes.items() if name in LISTS}
    own = {name: changes.get(name, plain[name]) for name in ("scale_batch", "target")}
    known = {each.name for each in fields(RunConfig)} - LISTS.keys()
    settings = plain["settings"] | {name: value for name, value in changes.items() if name in known}
    return Sweep(RunConfig(**settings), grid, **own)


def resumed_sweep(folder: Path, plain: dict[str, Any], given: dict[str, Any]) -> Sweep:
    """The sweep of a folder; what is `given` and contradicts it is refused."""
    recorded = sweep_of(plain, {})
    for name, value in given.items():
        if not recorded.is_same(sweep_of(plain, {name: value})):
            flag, then = _flag(name), plain["grid"].get(name, plain["settings"].get(name, plain.get(name)))
            then = ",".join(map(str, then)) if isinstance(then, list) else then
            was = f"without {flag}" if then is None or then is False else f"with {flag} {then}"
            now = flag if value is True else f"{flag} {value}"
            raise ConfigError(
                f"The sweep in {folder} was started {was}, and {now} is another one. Leave {flag} out, or choose "
                f"another --out."
            )
    return sweep_of(plain, given)


def _flag(name: str) -> str:
    """What an option of `lockstep compare` is called."""
    return f"--{name.replace('_', '-')}" if name in (*LISTS, "scale_batch", "target") else flag_of(field_of(name))


def refuse_other(folder: Path, sweep: Sweep) -> None:
    """Refuses to continue a folder with another sweep than the one that was started there."""
    if not has_sweep(folder):
        return
    plain = read_plain(folder)
    if not sweep_of(plain, {}).is_same(sweep):
        raise ConfigError(f"The sweep in {folder} was started with other settings (see {NAME}). Choose another out.")


def values_of(given: Values, name: str) -> list[Any]:
    """The values of an option that takes several, each once."""
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
