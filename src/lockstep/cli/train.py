"""`lockstep train`: the text's experiment, or a model and data of your own, on k devices."""

from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer

from lockstep.cli import options


@options.with_settings()
def train(
    context: typer.Context,
    resume: Annotated[
        bool, typer.Option("--resume", help="Resume the run in --out, on any devices; settings default to its own.")
    ] = False,
    json: options.Json = False,
    **settings: Any,
) -> None:
    """Train a model and record the run."""
    from lockstep.config import RunConfig
    from lockstep.core.torchrun_env import prints_result
    from lockstep.report.runlog import new_folder, to_json
    from lockstep.training.run import run

    chosen = options.config_settings(settings)
    if resume and chosen["out"] is not None:
        chosen |= recorded_settings(context, chosen["out"])
    is_named = resume or chosen["out"] is not None
    with nullcontext(chosen["out"]) if is_named else new_folder(name_of(chosen)) as chosen["out"]:
        result = run(RunConfig(**chosen), resume=resume)
    if prints_result():
        typer.echo(to_json(result.summary()) if json else result.lines())


def recorded_settings(context: typer.Context, folder: Path) -> dict[str, Any]:
    """The settings of the run in `folder` that are not given now. A file never names code to run."""
    from lockstep.config import field_of, settings_in
    from lockstep.core.entry_points import is_entry_point
    from lockstep.core.errors import ConfigError
    from lockstep.core.settings import IDENTITY
    from lockstep.report.runlog import read_settings

    names = {option: field_of(option).name for option in context.params if option not in ("out", "resume", "json")}
    given = {names[o] for o in names if str(context.get_parameter_source(o)) != "ParameterSource.DEFAULT"}
    identity = {each.name for each in settings_in(IDENTITY)}
    if not (folder / "config.json").is_file():
        if not given & identity:
            raise ConfigError(f"There is no run in {folder} to resume. To start one there, give its settings.")
        return {}
    recorded = read_settings(folder)
    found = {name: recorded[name] for name in names.values() if name in recorded and name not in given}
    named = [(name, value) for name, value in found.items() if name in identity and isinstance(value, str)]
    if own := [(n, v) for n, v in named if is_entry_point(v) or v.endswith(" given in Python")]:
        wanted = " ".join(f"--{n} {v if is_entry_point(v) else 'package.file:function'}" for n, v in own)
        what = " and ".join(f"{name} {value}" for name, value in own)
        raise ConfigError(
            f"The run in {folder} has code of your own: {what}. Lockstep never imports code that only config.json "
            f"names: add {wanted}."
        )
    return found


def name_of(settings: dict[str, Any]) -> str:
    """A name for a folder: of `package.file:function` and of a path only the last part."""
    return "-".join(Path(name.rpartition(":")[2] or name).stem for name in (settings["model"], settings["data"]))
