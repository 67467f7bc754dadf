"""One or several recorded runs as one HTML page: it holds everything it shows, and loads nothing from anywhere."""

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from lockstep.core.files import printable
from lockstep.report.result_tables import short
from lockstep.report.run_files import RecordedRun, read_trace
from lockstep.report.svg import Chart, Series, epochs_range, line_chart
from lockstep.report.timeline import StepTimeline, timeline_of
from lockstep.report.waterfall_chart import Waterfall, waterfall_of

NUM_COLORS = 6
BAD = ("killed", "lost", "stopped")
MARKED = ("killed", "lost", "resumed", "healed")


class Setting(NamedTuple):
    """One row of the table of settings."""

    group: str
    name: str
    values: list[str]  # of each run
    is_default: bool

    @property
    def differs(self) -> bool:
        """Whether the runs have different values."""
        return len(set(self.values)) > 1


class Fact(NamedTuple):
    """One row of the comparison: what was found, of each run."""

    name: str
    values: list[str]
    is_code: bool = False

    @property
    def differs(self) -> bool:
        """Whether the runs have different values."""
        return len(set(self.values)) > 1


class ShownRun(NamedTuple):
    """A run as the page shows it."""

    run: RecordedRun
    command: str  # that repeats it
    about: str
    notes: list[str]  # that it began with
    tiles: list[tuple[str, str]]
    timeline: StepTimeline | None
    waterfall: Waterfall | None
    memory: list[tuple[str, str, float]]  # device, text, share of the largest
    incidents: list[dict[str, str]]
    versions: list[tuple[str, str]]


def render_page(runs: Sequence[RecordedRun], settings: Sequence[Setting], commands: Sequence[str]) -> str:
    """The page as HTML."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("lockstep.report"), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    shown = [_shown(run, command) for run, command in zip(runs, commands, strict=True)]
    hashes = {run.weights_sha256 for run in runs}
    return environment.get_template("report.html").render(
        runs=shown,
        names=_names(runs),
        charts=_charts(runs),
        facts=_facts(runs) if len(runs) > 1 else [],
        settings=settings,
        groups=list(dict.fromkeys(each.group for each in settings)),
        same_weights=len(runs) > 1 and len(hashes) == 1 and "" not in hashes,
        made=time.strftime("%Y-%m-%d %H:%M"),
        title=" and ".join(_names(runs)) if len(runs) < 3 else f"{len(runs)} runs",
    )


def _names(runs: Sequence[RecordedRun]) -> list[str]:
    """The names of folders, or their paths where two are alike."""
    names = [printable(run.name) for run in runs]
    return [
        name if names.count(name) == 1 else printable(str(run.folder)) for run, name in zip(runs, names, strict=True)
    ]


def _shown(run: RecordedRun, command: str) -> ShownRun:
    peaks = {str(device): peak for device, peak in dict(run.result.get("peak_memory") or {}).items()}
    largest = max([peak for peak in peaks.values() if isinstance(peak, (int, float))], default=1) or 1
    made_with = run.config.get("made_with")
    versions = run.config.get("versions")
    return ShownRun(
        run,
        command,
        _about(run),
        [printable(str(note)) for note in (run.started[0].get("notes") or [] if run.started else [])],
        _tiles(run),
        timeline_of(read_trace(run)),
        waterfall_of(run.explanation),
        [(device, f"{peak / 1e6:,.0f} MB", peak / largest) for device, peak in peaks.items()],
        [_incident(each) for each in run.incidents],
        [
            (printable(str(name)), printable(str(version)))
            for found in (versions, made_with)
            for name, version in (found.items() if isinstance(found, dict) else ())
        ],
    )


def _about(run: RecordedRun) -> str:
    start, config = run.start, run.config
    model = start.get("model") or config.get("model")
    size = f" ({start['num_parameters']:,} parameters)" if isinstance(start.get("num_parameters"), int) else ""
    data = f"{config.get('data')}"
    if isinstance(start.get("num_train_samples"), int):
        data += f" ({start['num_train_samples']:,} training samples)"
    batch = f"batch {_counted(config.get('batch_size'))} in {config.get('num_shards')} shards"
    where = f"{config.get('backend')} {start.get('backend_version', '')} on {', '.join(run.devices)}"
    return printable(f"{model}{size} on {data}; {batch}; {where}")


def _tiles(run: RecordedRun) -> list[tuple[str, str]]:
    """The few numbers that matter most."""
    tiles = []
    if run.accuracy is not None:
        tiles.append((f"{run.accuracy:.4f}", "test accuracy"))
    if run.epochs:
        tiles.append((short(run.epochs[-1]["train_loss"]), "training loss"))
    if run.seconds_per_epoch is not None:
        tiles.append((f"{run.seconds_per_epoch:.2f} s", "an epoch"))
    speed = run.result.get("samples_per_second")
    if isinstance(speed, (int, float)):
        tiles.append((f"{speed:,.0f}", "samples/s"))
    epochs = f"{len(run.epochs)}/{run.config.get('num_epochs')}"
    return [*tiles, (epochs, "epochs"), (str(len(run.devices)), f"device{'s' * (len(run.devices) != 1)}")]


def _incident(found: dict[str, Any]) -> dict[str, str]:
    when, kind = found["time"], str(found["event"])
    return {
        "event": printable(kind),
        "time": time.strftime("%H:%M:%S", time.localtime(when)) if isinstance(when, (int, float)) else "",
        "step": _counted(found["step"]),
        "sentence": printable(str(found["sentence"])),
        "class": "bad" if kind in BAD else "",
    }


def _counted(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)


def _charts(runs: Sequence[RecordedRun]) -> list[tuple[str, str, str]]:
    """Title, unit and SVG of each chart that has something to show."""
    last = max([_last_epoch(run) for run in runs], default=1.0)
    marks = [
        (each["step"] / run.steps_per_epoch, f"{each['event']}: {each['sentence']}")
        for run in runs
        for each in run.incidents
        if each["event"] in MARKED and isinstance(each["step"], int)
    ]
    found = []
    for title, unit, of_steps, of_epochs, y_range in (
        ("Training loss", "mean over samples", "loss", "train_loss", None),
        ("Test accuracy", "share of test samples", None, "test_accuracy", (0.0, 1.0)),
        ("Throughput", "samples a second", "samples_per_second", "samples_per_second", None),
        ("Learning rate", "", "learning_rate", None, None),
    ):
        series = []
        for number, (run, name) in enumerate(zip(runs, _names(runs), strict=True)):
            color = number % NUM_COLORS
            if of_steps:
                points = [(e["step"] / run.steps_per_epoch, e[of_steps]) for e in run.steps if _is_number(e, of_steps)]
                series.append(Series(name, points, color, is_faint=of_epochs is not None))
            if of_epochs:
                epochs = [{"samples_per_second": _speed(run, each), **each} for each in run.epochs]
                values = [(float(e["epoch"]), e[of_epochs]) for e in epochs if _is_number(e, of_epochs)]
                series.append(Series(name, values, color))
        chart = line_chart(Chart(title, unit, series, epochs_range(last), y_range, marks))
        if chart:
            found.append((title, unit, chart))
    return found


def _speed(run: RecordedRun, epoch: dict[str, Any]) -> float | None:
    """Samples a second of an epoch."""
    num_samples = run.start.get("num_train_samples")
    return num_samples / epoch["seconds"] if isinstance(num_samples, int) and epoch["seconds"] > 0 else None


def _last_epoch(run: RecordedRun) -> float:
    epochs = float(run.epochs[-1]["epoch"]) if run.epochs else 0.0
    return max(epochs, run.steps[-1]["step"] / run.steps_per_epoch if run.steps else 0.0)


def _is_number(line: dict[str, Any], name: str) -> bool:
    return isinstance(line.get(name), (int, float)) and not isinstance(line[name], bool)


def _facts(runs: Sequence[RecordedRun]) -> list[Fact]:
    """What the runs came to, beside each other."""

    def of(make: Any) -> list[str]:
        return [printable(str(make(run))) for run in runs]

    def rounded(value: Any, digits: int) -> str:
        return f"{value:,.{digits}f}" if isinstance(value, (int, float)) else ""

    return [
        Fact("status", of(lambda run: run.status)),
        Fact("test accuracy", of(lambda run: rounded(run.accuracy, 4))),
        Fact("training loss", of(lambda run: rounded(run.epochs[-1]["train_loss"] if run.epochs else None, 4))),
        Fact("seconds an epoch", of(lambda run: rounded(run.seconds_per_epoch, 2))),
        Fact("samples/s", of(lambda run: rounded(run.result.get("samples_per_second"), 0))),
        Fact("steps", of(lambda run: _counted(run.result.get("steps", run.steps[-1]["step"] if run.steps else "")))),
        Fact("devices at the end", of(lambda run: ", ".join(run.devices))),
        Fact("incidents", of(lambda run: len(run.incidents))),
        Fact("weights sha256", of(lambda run: run.weights_sha256), is_code=True),
    ]
