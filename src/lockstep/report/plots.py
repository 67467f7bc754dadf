"""Pictures: the accuracy of a run against the epoch, as the text's Animator draws it, and of several runs."""

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from lockstep.report.events import EpochDone

STYLES = ["-", "--", "-.", ":"]  # equal runs have equal curves: dashes let all of them be seen


def draw_curve(history: list[EpochDone], path: Path) -> None:
    """Test accuracy against epoch, written to `path` as PNG; a loss where there is no accuracy."""
    _draw({"": history}, path, (4.2, 3.0))


def draw_curves(curves: dict[str, list[EpochDone]], path: Path) -> None:
    """The same for several runs in one plot, with their names."""
    _draw(curves, path, (6.4, 4.0))


def _draw(curves: dict[str, list[EpochDone]], path: Path, inches: tuple[float, float]) -> None:
    figure = Figure(figsize=inches, layout="constrained")
    axes: Any = figure.add_subplot()
    what = _what([done for history in curves.values() for done in history])
    for number, (label, history) in enumerate(curves.items()):
        epochs, values = [done.epoch for done in history], [_value(done, what) for done in history]
        axes.plot(epochs, values, STYLES[number % len(STYLES)], marker=".", clip_on=False, label=label)
    if any(curves):
        axes.legend(fontsize="small")
    num_epochs = max(map(len, curves.values()))
    axes.set(xlabel="epoch", ylabel=what, xlim=(1, num_epochs) if num_epochs > 1 else (0.5, 1.5))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(visible=True)
    figure.savefig(path, dpi=150, format="png")


def _what(history: list[EpochDone]) -> str:
    """What all epochs have: accuracy, else the loss of the test samples, else that of the training samples."""
    if all(done.test_accuracy is not None for done in history):
        return "test acc"
    return "test loss" if all("loss" in done.metrics for done in history) else "train loss"


def _value(done: EpochDone, what: str) -> float | None:
    if what == "test acc":
        return done.test_accuracy
    return done.metrics["loss"] if what == "test loss" else done.train_loss
