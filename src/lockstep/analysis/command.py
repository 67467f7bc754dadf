"""The command line, or the call, that runs a configuration."""

import shlex
from pathlib import Path
from typing import Any

from lockstep.analysis.step_costs import Configuration
from lockstep.config import DEFAULT_SLICES, RunConfig, settings_in
from lockstep.core.settings import flag_of, option_of

CHOSEN = ("devices", "num_shards", "split", "stages", "num_slices", "balance")  # by the plan


def command_of(config: RunConfig, configuration: Configuration, is_python: bool = False) -> str:
    """The line to copy: the settings that differ from the defaults, and what the plan chose.

    >>> from lockstep.partition.grid import Grid
    >>> command_of(RunConfig(batch_size=64), Configuration(Grid(data=2), num_shards=8))
    'lockstep train --devices 2 --batch-size 64 --shards 8'
    """
    chosen = chosen_settings(config, configuration)
    defaults = RunConfig(optimizer=config.optimizer)
    values: dict[str, Any] = {}
    for each in settings_in():
        value = chosen.get(each.name) if each.name in CHOSEN else getattr(config, each.name)
        is_default = value is None or (each.name not in CHOSEN and value == getattr(defaults, each.name))
        if not is_default or (each.name == "optimizer" and value != each.default):
            values[each.name] = value
    if is_python:
        said = {option_of(each): values[each.name] for each in settings_in() if each.name in values}
        return f"lockstep.train({', '.join(f'{name}={_plain(value)!r}' for name, value in said.items())})"
    words = ["lockstep", "train"]
    for each in settings_in():
        if each.name in values:
            words += _flag(flag_of(each), values[each.name])
    return shlex.join(words)


def chosen_settings(config: RunConfig, configuration: Configuration) -> dict[str, Any]:
    """The settings that a plan chooses for a configuration; those that stay at their defaults are left out."""
    grid, found = configuration.grid, dict[str, Any](num_shards=configuration.num_shards)
    listed = str(config.devices).split(",") if isinstance(config.devices, str) else []
    has_list = len(listed) > 1 and len(listed) >= configuration.num_devices
    found["devices"] = ",".join(listed[: configuration.num_devices]) if has_list else configuration.num_devices
    ways = [name for name, number in grid._asdict().items() if number > 1]
    if ways not in ([], ["data"]):
        found["split"] = ways[0] if len(ways) == 1 else str(grid)
    if configuration.starts:
        found["stages"] = ",".join(configuration.starts)
    if grid.layers > 1 or config.num_slices:
        found["num_slices"] = config.num_slices or DEFAULT_SLICES
    if configuration.is_balanced:
        found["balance"] = "measured"
    return found


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else value


def _flag(flag: str, value: Any) -> list[str]:
    if isinstance(value, bool):
        return [flag if value else f"--no-{flag[2:]}"]
    return [flag, str(value)]
