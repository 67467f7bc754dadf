"""`lockstep report`: recorded runs as an HTML page, with their settings and the commands that repeat them."""

import shlex
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from lockstep.config import RunConfig, settings_in
from lockstep.core.entry_points import GIVEN, is_entry_point
from lockstep.core.errors import ConfigError, LockstepError
from lockstep.core.files import printable, write_whole
from lockstep.core.settings import flag_of
from lockstep.report.page import Setting, render_page
from lockstep.report.run_files import RecordedRun, read_recorded

NOT_REPEATED = ("out", "data_dir")  # where the files are is not part of the run


def write_report(folders: Sequence[Path], out: Path | None) -> Path:
    """Writes the report of some runs; of one run, into its folder, unless told."""
    runs = [read_recorded(folder) for folder in folders]
    if out is None:
        out = folders[0] / "report.html" if len(folders) == 1 else folders[0].absolute().parent / "report.html"
    if out.is_dir():
        out = out / "report.html"
    page = render_page(runs, compared_settings(runs), [repeat_command(run) for run in runs])
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_whole(out, lambda path: path.write_text(page, "utf-8", "backslashreplace"))
    except OSError as problem:
        raise ConfigError(f"{out} cannot be written: {problem.strerror}. Choose another --out.") from problem
    return out


def compared_settings(runs: Sequence[RecordedRun]) -> list[Setting]:
    """Every setting, by group, with its value in each run."""
    defaults = RunConfig()
    found = []
    for each in settings_in():
        if each.name == "out":  # the runs are named by it
            continue
        values = [run.config.get(each.name) for run in runs]
        is_default = all(value is None or value == getattr(defaults, each.name) for value in values)
        found.append(Setting(each.metadata["group"], flag_of(each)[2:], [_text(value) for value in values], is_default))
    return found


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "-" if value is None else printable(str(value))


def repeat_command(run: RecordedRun) -> str:
    """The command line that trains the same weights again; what was given in Python is named as such."""
    config, parts, notes = run.config, ["lockstep", "train"], []
    defaults = default_settings(config)
    for each in settings_in():
        value = config.get(each.name)
        if each.name in NOT_REPEATED or value is None or value == defaults.get(each.name):
            continue
        flag = flag_of(each)
        if isinstance(value, str) and value.endswith(GIVEN):
            notes.append(f"# {flag[2:]}: {value}")
        elif isinstance(value, bool):
            parts.append(flag if value else f"--no-{flag[2:]}")
        else:
            parts += [flag, shlex.quote(str(value))]
    return "\n".join(map(printable, [*notes, " ".join(parts)]))


def default_settings(config: dict[str, Any]) -> dict[str, Any]:
    """What the settings would be if only the optimizer was given: it decides the learning rate."""
    optimizer = config.get("optimizer")
    named = isinstance(optimizer, str) and not is_entry_point(optimizer)
    try:
        defaults = RunConfig(optimizer=optimizer) if named and optimizer else RunConfig()
    except LockstepError:
        defaults = RunConfig()
    found = {each.name: getattr(defaults, each.name) for each in fields(defaults)}
    return found | {"optimizer": RunConfig().optimizer}
