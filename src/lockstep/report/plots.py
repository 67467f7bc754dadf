"""Pictures: the accuracy curve as the text's Animator draws it, and the comparison's."""

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from lockstep.report.events import EpochDone


def draw_curve(history: list[EpochDone], path: Path) -> None:
    """Test accuracy against epoch, written to `path` as PNG; a loss where there is no accuracy."""
    figure, axes = _axes()
    what = _what(history)
    axes.plot([done.epoch for done in history], _values(history, what), marker=".", clip_on=False)
    _finish(figure, axes, len(history), path, what)


def draw_curves(curves: dict[str, list[EpochDone]], path: Path) -> None:
    """Several runs' accuracy in one picture, written to `path` as PNG."""
    figure, axes = _axes(width=6.4, height=4.0)
    styles = ["-", "--", "-.", ":"]
    what = _what([done for history in curves.values() for done in history])
    for number, (label, history) in enumerate(curves.items()):
        axes.plot(
            [done.epoch for done in history],
            _values(history, what),
            styles[number % len(styles)],  # equal runs lie on each other: dashes let both be seen
            marker=".",
            clip_on=False,
            label=label,
        )
    axes.legend(fontsize="small")
    _finish(figure, axes, max(map(len, curves.values())), path, what)


def _axes(width: float = 4.2, height: float = 3.0) -> tuple[Figure, Any]:
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.add_subplot()


def _what(history: list[EpochDone]) -> str:
    """What all epochs have: accuracy, else the loss of the test samples, else that of the training samples."""
    if all(done.test_accuracy is not None for done in history):
        return "test acc"
    return "test loss" if all("loss" in done.metrics for done in history) else "train loss"


def _values(history: list[EpochDone], what: str) -> list[float | None]:
    if what == "test acc":
        return [done.test_accuracy for done in history]
    return [done.metrics["loss"] if what == "test loss" else done.train_loss for done in history]


def _finish(figure: Figure, axes: Any, num_epochs: int, path: Path, what: str) -> None:
    axes.set(xlabel="epoch", ylabel=what, xlim=(1, num_epochs) if num_epochs > 1 else (0.5, 1.5))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(visible=True)
    figure.savefig(path, dpi=150, format="png")
