"""What the picture of a run says besides its curves: a title, a caption, and the losses of single batches."""

from pathlib import Path
from typing import Any

from lockstep.core.errors import ConfigError
from lockstep.core.files import printable
from lockstep.report.events import EpochDone, RunStarted
from lockstep.report.plots import Caption
from lockstep.report.run_files import read_recorded


def caption_of(started: RunStarted | None, history: list[EpochDone]) -> Caption:
    """Title and caption of a run's picture."""
    if started is None:
        return Caption()
    config = started.config
    title = f"{started.model or config['model']} on {Path(str(config['data'])).name}"
    seconds = sum(done.seconds for done in history) / max(1, len(history))
    devices = f"{len(started.devices)} device{'s' * (len(started.devices) > 1)} ({', '.join(started.devices)})"
    parts = [
        f"batch {config['batch_size']} in {config['num_shards']} shards",
        f"{config['optimizer']}{_rate(config)}",
        f"seed {config['seed']}",
        f"{len(history)} of {config['num_epochs']} epochs of {seconds:.3g} s",
        f"{config['backend']} {started.backend_version}",
        devices,
    ]
    return Caption(printable(title), printable("; ".join(parts)))


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
