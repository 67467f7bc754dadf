"""What the picture of a run says besides its curves: a title, a caption, and the losses of single batches."""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from lockstep.core.errors import ConfigError, first_line
from lockstep.core.files import printable
from lockstep.report.events import EpochDone, Result, RunStarted
from lockstep.report.plots import Caption, curve_figure, draw_curve
from lockstep.report.result_tables import device_names
from lockstep.report.run_files import read_recorded


def curve_png(folder: Path, started: RunStarted | None, history: list[EpochDone]) -> tuple[bytes, str]:
    """The picture of a run as PNG, or why there is none: a run is complete without it."""
    out = io.BytesIO()
    try:
        draw_curve(history, out, caption_of(started, history), steps_of(folder))
    except Exception as problem:  # of the library that draws, which also reads files
        why = first_line(problem)
        return b"", f"curve.png could not be drawn: {why}. `lockstep report {folder}` has the same curves."
    return out.getvalue(), ""


def caption_of(started: RunStarted | None, history: list[EpochDone]) -> Caption:
    """Title and caption of a run's picture."""
    if started is None:
        return Caption()
    settings = {**started.config, "model": started.model or started.config["model"]}
    return _caption(settings, started.backend_version, started.devices, history)


def result_figure(result: Result) -> Figure:
    """The picture of a result: that of curve.png; losses of single batches are known where the run was recorded."""
    history, settings = list(result.history), result.settings
    if settings:
        caption = _caption(settings, result.backend_version, result.devices, history)
    else:
        about = f"{result.steps} steps; {result.backend} {result.backend_version}; {device_names(result.devices)}"
        caption = Caption(settings=about)
    return curve_figure(history, caption, steps_of(result.run) if result.run is not None else ())


def _caption(config: dict[str, Any], version: str, devices: Sequence[str], history: list[EpochDone]) -> Caption:
    seconds = sum(done.seconds for done in history) / max(1, len(history))
    parts = [
        f"batch {config['batch_size']} in {config['num_shards']} shards",
        f"{config['optimizer']}{_rate(config)}",
        f"seed {config['seed']}",
        f"{len(history)} of {config['num_epochs']} epochs of {seconds:.3g} s",
        f"{config['backend']} {version}",
        f"{len(devices)} device{'s' * (len(devices) > 1)} ({device_names(devices)})",
    ]
    title = f"{config['model']} on {Path(str(config['data'])).name}"
    return Caption(printable(title), printable("; ".join(parts)))


def common_caption(settings: Sequence[dict[str, Any]], results: Sequence[Result]) -> Caption:
    """Title and caption of a comparison: what all runs have in common."""

    def common(name: str, text: str) -> list[str]:
        values = list(dict.fromkeys(str(each.get(name)) for each in settings))
        return [text.format(values[0])] if len(values) == 1 and values[0] != "None" else []

    def named(name: str) -> str:
        return " and ".join(dict.fromkeys(Path(str(each.get(name))).name for each in settings))

    lengths = sorted({len(result.history) for result in results})
    epochs = (
        f"{lengths[0]} epoch{'s' * (lengths[0] > 1)}" if len(lengths) == 1 else f"{lengths[0]} to {lengths[-1]} epochs"
    )
    versions = dict.fromkeys(f"{result.backend} {result.backend_version}" for result in results)
    parts = [
        *common("batch_size", "batch {}"),
        *common("num_shards", "{} shards"),
        *common("optimizer", "{}"),
        *common("learning_rate", "lr {}"),
        *common("seed", "seed {}"),
        epochs,
        ", ".join(versions),
    ]
    return Caption(printable(f"{named('model')} on {named('data')}"), printable("; ".join(parts)))


def _rate(config: dict[str, Any]) -> str:
    return "" if config["learning_rate"] is None else f", lr {config['learning_rate']:g}"


def steps_of(folder: Path) -> list[tuple[float, float]]:
    """The losses of single batches that the run has written down, by epoch as a fraction."""
    try:
        run = read_recorded(folder)
    except ConfigError:
        return []
    found = [(each["step"] / run.steps_per_epoch, each.get("loss")) for each in run.steps]
    return [(epoch, loss) for epoch, loss in found if isinstance(loss, (int, float))]
