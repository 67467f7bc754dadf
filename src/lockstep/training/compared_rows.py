"""The rows of a comparison: a run with its settings, what it may be compared with, and a name for it."""

from collections.abc import Callable, Hashable, Iterable, Sequence
from math import prod
from typing import Any, NamedTuple

from lockstep.config import field_of, settings_in
from lockstep.core.plain_types import fits
from lockstep.core.settings import AGREED, IDENTITY, option_of
from lockstep.report.events import Result
from lockstep.report.runlog import to_json
from lockstep.schedules.exchanges import KEEPS_THE_TREE
from lockstep.training.time_to_target import steady_seconds

OWN_COLUMNS = ("batch_size", "learning_rate")  # that every table has
SPEED = (
    *(each.name for each in settings_in(AGREED)),
    "engine",
    "capture",
    "workers",
)  # the weights do not depend on these
SHOWN = tuple(dict.fromkeys((*(each.name for each in settings_in(IDENTITY)), *SPEED)))


class Speed(NamedTuple):
    """How fast a run was."""

    seconds_per_epoch: float
    samples_per_second: float


class Row(NamedTuple):
    """One run of a comparison."""

    settings: dict[str, Any]  # by their names in `RunConfig`; of a recorded run, all that its config.json has
    result: Result
    name: str = ""  # of a run that was there already

    @property
    def num_devices(self) -> int:
        """How many devices it had at its end."""
        return len(self.result.devices)

    @property
    def batch_size(self) -> int:
        """Samples of one update."""
        return self.settings.get("batch_size") or 0

    @property
    def learning_rate(self) -> float | None:
        """The learning rate; None where the optimizer is the user's own."""
        return self.settings.get("learning_rate")

    @property
    def accuracy(self) -> float:
        """The test accuracy; -1 where there are no test samples."""
        return -1.0 if self.result.test_accuracy is None else self.result.test_accuracy

    @property
    def steady_speed(self) -> Speed | None:
        """The speed after the first epoch, which includes the warm-up; None where there is no other epoch."""
        seconds = steady_seconds(self.result.history)
        per_epoch = self.result.samples_per_second * self.result.seconds_per_epoch
        return Speed(seconds, per_epoch / seconds) if seconds else None

    @property
    def data(self) -> Hashable:
        """What it was trained on: the hash of the data, where it is known, or their name."""
        sha256 = self.settings.get("data_sha256")
        return sha256 if isinstance(sha256, str) else self.settings.get("data")

    @property
    def same_weights(self) -> Hashable:
        """Runs for which this is equal must have the same weights: every setting that the bits depend on is in it."""
        found = {each.name: self.settings.get(each.name) for each in settings_in(IDENTITY) if each.name != "data"}
        if self.settings.get("schedule") != "constant":  # the learning rate of a step depends on it
            found["num_epochs"] = self.settings.get("num_epochs")
        exchange = self.settings.get("exchange")
        found |= {"exchange": None if exchange in KEEPS_THE_TREE else exchange, "data": self.data}
        made_with = self.settings.get("made_with")
        found["made_with"] = made_with if fits(made_with, dict[str, str]) else None
        return to_json({**found, "steps": self.result.steps})

    @property
    def same_speed(self) -> Hashable:
        """Runs for which this is equal differ in their devices only."""
        return self.same_weights, to_json({name: self.settings.get(name) for name in SPEED})


def grouped(rows: Iterable[Row], key: Callable[[Row], Any]) -> dict[Any, list[Row]]:
    """The rows by what `key` says of them."""
    groups: dict[Any, list[Row]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return groups


class Labels:
    """Names for runs: what each has that others do not."""

    def __init__(self, rows: Sequence[Row]) -> None:
        def differs(name: str) -> bool:
            return len({repr(row.settings.get(name)) for row in rows}) > 1

        self.varying = [name for name in SHOWN if differs(name)]
        self._shows_devices = len({row.num_devices for row in rows}) > 1 or not (self.varying or rows[0].name)

    def of(self, row: Row, *without: str) -> str:
        """The name of a run, without these settings."""
        parts = {"run": row.name} if row.name else {}
        parts |= {"num_devices": f"k={row.num_devices}"} if self._shows_devices else {}
        short = {"batch_size": "batch"}
        for name in self.varying:
            value = row.settings.get(name)
            parts[name] = f"{short.get(name) or option_of(field_of(name))} {'default' if value is None else value}"
        return ", ".join(text for name, text in parts.items() if name not in without)

    def in_a_sentence(self, *rows: Row) -> str:
        """What runs are called in a sentence: by their names, where they have some; what they share is said once."""
        return joined([row.name or self.of(row) for row in rows])


def joined(names: list[str]) -> str:
    """The names of several runs as one: what they have in common is said once.

    >>> joined(["k=1, batch 256", "k=2, batch 256"])
    'k=1 and k=2, batch 256'
    """
    parts = [name.split(", ") for name in names]
    if len({len(each) for each in parts}) > 1:
        return "; ".join(names)
    columns = [list(dict.fromkeys(column)) for column in zip(*parts, strict=True)]
    if prod(map(len, columns)) != len(names):  # not every combination is among them
        return "; ".join(names)
    return ", ".join(map(listed, columns))


def listed(parts: Iterable[Any]) -> str:
    """
    >>> listed([1, 2, 4])
    '1, 2 and 4'
    """
    *most, last = map(str, parts)
    return f"{', '.join(most)} and {last}" if most else last
