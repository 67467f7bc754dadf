"""Pictures: the curves of a run, and the comparison of several."""

import io
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, StrMethodFormatter
from matplotlib.transforms import ScaledTranslation

from lockstep.report.events import EpochDone

STYLES = ["-", "--", "-.", ":"]  # equal runs have equal curves: dashes let all of them be seen
COLORS = ["#2563c9", "#d9730d", "#1d8a5b", "#a2459f", "#b3372f", "#4a7f8c"]
SOFT = "#5d6677"
LEAST_ROWS = 10  # of text, in the height of a picture
NAME_CHARACTERS = 62  # of a line of a name, in half of a picture


class Picture(Figure):
    """A figure that a notebook shows without any set-up."""

    def _repr_png_(self) -> bytes:
        out = io.BytesIO()
        self.savefig(out, dpi=100, format="png")
        return out.getvalue()


class Caption(NamedTuple):
    """What a picture is of."""

    title: str = ""
    settings: str = ""


NO_CAPTION = Caption()


class Line(NamedTuple):
    """Some numbers against others, as one line of a comparison."""

    label: str
    xs: Sequence[float]
    ys: Sequence[float]


class Curves(NamedTuple):
    """The left side of a comparison: how good, against the epoch or the learning rate."""

    lines: Sequence[Line]
    x_label: str
    y_label: str


class TargetBar(NamedTuple):
    """How long a run took to be good enough."""

    label: str
    seconds: float | None  # None: it never was
    num_samples: int | None = None  # that it was trained on until then

    def __str__(self) -> str:
        if self.seconds is None:
            return f"{self.label}: not reached"
        return f"{self.label}: {self.seconds:.3g} s" + (f", {self.num_samples:,} samples" if self.num_samples else "")


class Times(NamedTuple):
    """The right side: a bar for each setting, until it was good enough."""

    title: str
    bars: Sequence[TargetBar]


def draw_curve(
    history: list[EpochDone],
    out: Path | BinaryIO,
    caption: Caption = NO_CAPTION,
    steps: Sequence[tuple[float, float]] = (),  # epoch (a fraction), loss of a batch
) -> None:
    """The loss and the accuracy of a run against the epoch, written as PNG."""
    figure = curve_figure(history, caption, steps)
    figure.savefig(out, dpi=150, format="png")


def curve_figure(
    history: list[EpochDone], caption: Caption = NO_CAPTION, steps: Sequence[tuple[float, float]] = ()
) -> Figure:
    """The picture of a run: its training loss, and beside it the test accuracy, or the loss of the test samples."""
    tested = _tested(history)
    figure = Picture(figsize=(7.6 if tested else 4.2, 3.4), layout="constrained")
    panels: Any = figure.subplots(1, 2 if tested else 1, squeeze=False)[0]
    last = max([done.epoch for done in history] + [1])
    epochs = [done.epoch for done in history]
    panels[0].plot([x for x, _ in steps], [y for _, y in steps], color=COLORS[0], linewidth=0.7, alpha=0.35)
    _plot(panels[0], epochs, [done.train_loss for done in history], "training loss", last)
    _fit_losses(panels[0])
    if tested:
        _plot(panels[1], epochs, [_value(done, tested) for done in history], tested, last)
        _fit_values(panels[1], tested)
    _describe(figure, caption, 105)
    return figure


def _plot(axes: Any, epochs: list[int], values: list[Any], what: str, last: int) -> None:
    axes.plot(epochs, values, color=COLORS[0], marker="o", markersize=4, clip_on=False)
    axes.set_title(f"{what}, {values[-1]:.4g} at the end" if values else what, fontsize="small", loc="left")
    _finish(axes)
    _fit_epochs(axes, last)


def _fit_epochs(axes: Any, last: int) -> None:
    """An axis of whole epochs, from 0."""
    axes.set_xlabel("epoch", fontsize="small")
    axes.set_xlim(0, last)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def _fit_values(axes: Any, what: str) -> None:
    """All of an accuracy; losses from 0."""
    if "accuracy" in what:
        axes.set_ylim(0.0, 1.0)
    else:
        _fit_losses(axes)


def _fit_losses(axes: Any) -> None:
    """Losses from 0, where none is below it."""
    if axes.dataLim.y0 >= 0 and axes.dataLim.y1 > 0:
        axes.set_ylim(bottom=0.0)


def _describe(figure: Figure, caption: Caption, num_characters: int) -> None:
    """A title above the picture, and below it the settings."""
    if caption.title:
        figure.suptitle(textwrap.fill(caption.title, num_characters * 2 // 3), fontsize="medium", fontweight="bold")
    if caption.settings:
        figure.supxlabel(textwrap.fill(caption.settings, num_characters), fontsize="x-small", color=SOFT)


def _finish(axes: Any) -> None:
    axes.grid(visible=True, color="#e8ebf0")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize="small")


def _tested(history: list[EpochDone]) -> str:
    """What all epochs have of the test samples: accuracy, else a loss, else nothing."""
    if history and all(done.test_accuracy is not None for done in history):
        return "test accuracy"
    return "test loss" if history and all("loss" in done.metrics for done in history) else ""


def _value(done: EpochDone, what: str) -> float | None:
    return done.test_accuracy if what == "test accuracy" else done.metrics["loss"]


def comparison_figure(curves: Curves, times: Times | None, caption: Caption = NO_CAPTION) -> Figure:
    """Lines on the left, and on the right, where there is a target, the time until it was reached."""
    names = [textwrap.fill(line.label, NAME_CHARACTERS) for line in curves.lines]
    labels = [textwrap.fill(str(bar), NAME_CHARACTERS) for bar in times.bars] if times else []
    num_rows = sum(name.count("\n") + 1 for name in names), sum(label.count("\n") + 2.2 for label in labels)
    height = max(2.9 + 0.17 * num_rows[0], 1.5 + 0.17 * num_rows[1])
    figure = Picture(figsize=(9.6 if times else 5.2, height), layout="constrained")
    panels: Any = figure.subplots(1, 2 if times else 1, squeeze=False)[0]
    _draw_lines(panels[0], curves, names)
    if times:
        _draw_bars(panels[1], times, labels)
    _describe(figure, caption, 130 if times else 70)
    return figure


def _draw_lines(axes: Any, curves: Curves, names: Sequence[str]) -> None:
    for number, (line, name) in enumerate(zip(curves.lines, names, strict=True)):
        style = STYLES[number // len(COLORS) % len(STYLES)]
        color = COLORS[number % len(COLORS)]
        axes.plot(line.xs, line.ys, style, color=color, marker="o", markersize=4, label=name, clip_on=False)
    axes.set_title(curves.y_label, fontsize="small", loc="left")
    xs = sorted({x for line in curves.lines for x in line.xs})
    if curves.x_label == "epoch":
        _fit_epochs(axes, max([1, *map(int, xs)]))
    else:
        axes.set_xlabel(curves.x_label, fontsize="small")
        if min(xs) > 0 and max(xs) / min(xs) >= 3:
            axes.set_xscale("log")
        axes.set_xticks(xs, [f"{x:g}" for x in xs])
        axes.minorticks_off()
    _fit_values(axes, curves.y_label)
    if any(names):  # below: long names leave the lines their room
        below = axes.transAxes + ScaledTranslation(-0.1, -0.4, axes.figure.dpi_scale_trans)  # inches
        axes.legend(
            fontsize="small",
            frameon=False,
            loc="upper left",
            bbox_to_anchor=(0, 0),
            bbox_transform=below,
            borderaxespad=0,
        )
    _finish(axes)


def _draw_bars(axes: Any, times: Times, labels: Sequence[str]) -> None:
    """A bar for each setting, its name above it: long names would leave the bars no room."""
    seconds = [bar.seconds or 0.0 for bar in times.bars]
    top, middles = 0.0, []
    for label in labels:
        axes.text(0, top, label, va="top", fontsize="small", transform=axes.get_yaxis_transform())
        top += label.count("\n") + 1
        middles.append(top + 0.4)
        top += 1.2
    axes.barh(middles, seconds, color=COLORS[0], height=0.6)
    axes.set_ylim(max(top, LEAST_ROWS), 0)
    axes.set_yticks([])
    axes.set_title(times.title, fontsize="small", loc="left")
    axes.set_xlabel("seconds of training (lower is better)", fontsize="small")
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.set_xlim(0, 1.05 * max([*seconds, 1e-9]))
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(labelsize="small")
