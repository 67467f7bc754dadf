"""`lockstep train`: the text's experiment, or a model and data of your own, on k devices."""

import os
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer

from lockstep.cli import options
from lockstep.cli.output import note


@options.with_settings()
def train(
    context: typer.Context,
    config: Annotated[
        Path | None,
        typer.Option(
            "--config",
            help="A .toml file with settings by the names of these options, or the config.json of a run. What is given "
            "on the command line takes precedence.",
            show_default=False,
        ),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Resume the run in --out, on any devices; settings default to its own.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check everything, say what would be trained, and train nothing.")
    ] = False,
    quiet: options.Quiet = False,
    json: options.Json = False,
    **settings: Any,
) -> None:
    """Train a model and record the run."""
    from lockstep.cli.config_file import read_config
    from lockstep.config import RunConfig
    from lockstep.core.torchrun_env import prints_result
    from lockstep.report.runlog import new_folder, to_json
    from lockstep.training.dry_run import dry_run as without_training
    from lockstep.training.run import run

    chosen, given = options.config_settings(settings), options.given_settings(context)
    if config is not None:
        in_file = {name: value for name, value in read_config(config).items() if name not in given}
        chosen, given = chosen | in_file, given | set(in_file)
    if resume and chosen["out"] is not None:
        recorded = recorded_settings(Path(chosen["out"]), given)
        chosen |= for_other_devices(recorded, {name: chosen[name] for name in given})
    if dry_run:
        described = without_training(RunConfig(**chosen), resume)
        typer.echo(to_json(described.facts) if json else "\n".join(described.lines))
        return
    is_named = resume or chosen["out"] is not None
    with nullcontext(chosen["out"]) if is_named else new_folder(name_of(chosen)) as chosen["out"]:
        result = run(RunConfig(**chosen), quiet=quiet, resume=resume)
    if prints_result():
        if quiet and not is_named and not json:  # nobody could know where
            note(f"recorded in {result.run}")
        typer.echo(to_json(result.summary()) if json else result.lines())


def recorded_settings(folder: Path, given: set[str]) -> dict[str, Any]:
    """The settings of the run in `folder` that are not given now. A file never names code to run."""
    from lockstep.cli.config_file import known_settings, refuse_code
    from lockstep.config import settings_in
    from lockstep.core.errors import ConfigError
    from lockstep.core.settings import IDENTITY
    from lockstep.report.runlog import read_settings

    if not os.path.isfile(folder / "config.json"):  # False, not an error, where it cannot be looked at
        if not given & {each.name for each in settings_in(IDENTITY)}:
            raise ConfigError(f"There is no run in {folder} to resume. To start one there, give its settings.")
        return {}
    found = {n: value for n, value in known_settings(read_settings(folder)).items() if n not in given}
    refuse_code(found, f"The run in {folder}")
    return found


def for_other_devices(recorded: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """Recorded settings, without those of a split that is not the one of now: devices, split and stages are one choice.

    >>> for_other_devices({"devices": 3}, {"split": "data=2,network=2"})
    {}
    >>> for_other_devices({"split": "network=4", "stages": "b,c,d"}, {"devices": 2})
    {'split': 'network'}
    """
    from lockstep.partition.grid import AUTO, num_devices_of, parse_split

    split = given.get("split", recorded.get("split"))
    wanted = None if split in (None, AUTO) else num_devices_of(split)
    others = {name: value for name, value in recorded.items() if name != "stages"}
    if "split" in given:
        return {name: value for name, value in others.items() if name != "devices" or wanted is None}
    if split is None or wanted is None or given.get("devices") is None or _number_of(given["devices"]) == wanted:
        return recorded
    kinds = list(parse_split(split))
    return others | {"split": kinds[0] if len(kinds) == 1 else AUTO}


def _number_of(devices: Any) -> int:
    """How many devices `--devices` names."""
    return int(devices) if str(devices).isdecimal() else str(devices).count(",") + 1


def name_of(settings: dict[str, Any]) -> str:
    """A name for a folder: of `package.module:function` and of a path only the last part."""
    return "-".join(Path(name.rpartition(":")[2] or name).stem for name in (settings["model"], settings["data"]))
