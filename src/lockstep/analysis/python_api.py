"""`lockstep.plan`: the plan of a run, from Python."""

import sys
from collections.abc import Sequence
from typing import Any

from lockstep.analysis.check import CHECK_TIMES, checked
from lockstep.analysis.plan import Plan, PlanOptions, make_plan, own_shards, splits_in
from lockstep.training.train import ONLY_OBJECTS, settings_of


def plan(
    max_devices: int | None = None,
    *,
    shards: str | int | Sequence[int] | None = None,
    link: str | None = None,
    device_speed: str | float | Sequence[float] | None = None,
    device_memory: str | float | Sequence[float] | None = None,
    check: bool = False,
    seconds: float = 40.0,
    quiet: bool = False,
    **settings: Any,
) -> Plan:
    """What up to `max_devices` devices will bring: predicted time, memory and limits of every way to split the work.

    `settings` are those of `lockstep.train`: a name or an object each for model, data, loss and optimizer. The devices
    at hand are measured for about `seconds`, and every configuration is executed on a clock with these costs. `shards`
    are the numbers of shards to look at, like "4,8"; the first is the run's own. `link` ("25GB/s,10us"),
    `device_speed` ("1,0.5") and `device_memory` ("80GB") describe devices that are not there. With `check`, what this
    machine can run is run, and the error of the prediction is in the rows. Nothing is written.

    >>> found = plan(1, shards=2, batch_size=8, data="fashion-mnist-mini", seconds=0.1, quiet=True)
    >>> found.recommended.split, found.notes[0]
    ('data', 'one device is best')
    """

    def log(text: str) -> None:
        if not quiet:
            print(text, file=sys.stderr)

    numbers = as_option(shards)
    config, objects = settings_of({**settings, **own_shards(numbers)})
    given = [
        name for name in ("model", "data", "loss", "optimizer", *ONLY_OBJECTS) if getattr(objects, name) is not None
    ]
    hardware = as_option(link), as_option(device_speed), as_option(device_memory, unit="B")
    asked = PlanOptions(max_devices, numbers, *hardware, splits_in(settings.get("split")), seconds)
    found, loaded = make_plan(config, objects if given else None, asked, log)
    return checked(found, config, loaded, log, CHECK_TIMES * seconds) if check else found


def as_option(value: Any, unit: str = "") -> str | None:
    """A value as the command line has it.

    >>> as_option([1, 0.5]), as_option(8e9, unit="B"), as_option("80GB", unit="B"), as_option(None)
    ('1,0.5', '8000000000.0B', '80GB', None)
    """
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, (list, tuple)):
        return ",".join(as_option(part, unit) or "" for part in value)
    return f"{value}{unit}"
