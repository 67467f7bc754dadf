"""Settings in a file: `--config run.toml`, or the config.json that a run has recorded."""

import os
import tomllib
from pathlib import Path
from typing import Any

from lockstep.config import field_of, settings_in
from lockstep.core.entry_points import GIVEN, is_entry_point
from lockstep.core.errors import ConfigError
from lockstep.core.files import read_regular
from lockstep.core.registry import nearest
from lockstep.core.settings import IDENTITY, flag_of, option_of

MAX_BYTES = 1 << 20


def read_config(path: Path) -> dict[str, Any]:
    """The settings in a file, by their names in `RunConfig`. A .toml file may name code; a recorded run may not."""
    if os.path.isdir(path):
        path = path / "config.json"
    if not os.path.isfile(path):
        raise ConfigError(f"There is no file {path} (--config). Give a .toml file, or the config.json of a run.")
    if path.suffix == ".toml":
        return _named(_read_toml(path), path)
    if path.suffix != ".json":
        raise ConfigError(f"{path} is neither .toml nor .json (--config). Settings are read from these.")
    from lockstep.report.runlog import read_settings_file

    recorded = read_settings_file(path)
    found = known_settings(recorded)
    for name in recorded.keys() - found.keys():  # a run records more than its settings
        if name != "logger" and (hint := _hint(name)):
            raise ConfigError(f"{path}: there is no setting {name!r}.{hint}")
    found.pop("out", None)  # that is the other run's folder
    refuse_code(found, f"The run of {path}")
    return found


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(read_regular(path, MAX_BYTES).decode())
    except (OSError, ValueError, RecursionError) as problem:
        raise ConfigError(f"{path} cannot be read: {problem}. Write lines like: batch-size = 256.") from problem


def _named(settings: dict[str, Any], path: Path) -> dict[str, Any]:
    """Settings by the names of options, with - or _, or by those of `RunConfig`."""
    found: dict[str, Any] = {}
    for option, value in settings.items():
        try:
            name = field_of(option.replace("-", "_")).name
        except StopIteration:
            known = [flag_of(each)[2:] for each in settings_in()]
            hint = _hint(option) or f" There are: {', '.join(known)}."
            raise ConfigError(f"{path}: there is no setting {option!r}.{hint}") from None
        if name in found:
            raise ConfigError(f"{path} has {option_of(field_of(name))} twice. Leave one out.")
        is_list = name == "devices" and isinstance(value, list)
        found[name] = ",".join(map(str, value)) if is_list else value
    return found


def _hint(option: str) -> str:
    """The setting that was probably meant, written with - or _ like `option`."""
    known = [name for each in settings_in() for name in (option_of(each), each.name)]
    return nearest(option, known if "_" in option else [name.replace("_", "-") for name in known])


def known_settings(recorded: dict[str, Any]) -> dict[str, Any]:
    """Those entries of a config.json that are settings. A logger of the user's own is code, and is left out."""
    found = {each.name: recorded[each.name] for each in settings_in() if each.name in recorded}
    if found.get("logger") not in (None, "tensorboard"):
        del found["logger"]
    return found


def refuse_code(found: dict[str, Any], whose: str) -> None:
    """Refuses settings of a recorded run that are code: it would be code that only a file names."""
    identity = {each.name for each in settings_in(IDENTITY)}
    named = [(name, value) for name, value in found.items() if name in identity and isinstance(value, str)]
    if own := [(n, v) for n, v in named if is_entry_point(v) or v.endswith(GIVEN)]:
        wanted = " ".join(f"--{n} {v if is_entry_point(v) else 'package.module:function'}" for n, v in own)
        what = " and ".join(f"{name} {value}" for name, value in own)
        raise ConfigError(
            f"{whose} has code of your own: {what}. Lockstep never imports code that only config.json "
            f"names: add {wanted}."
        )
