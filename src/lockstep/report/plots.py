"""Pictures: the curves of a run, and the comparison of several."""

import io
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, StrMethodFormatter

from lockstep.report.events import EpochDone

STYLES = ["-", "--", "-.", ":"]  # equal runs have equal curves: dashes let all of them be seen
COLORS = ["#2563c9", "#d9730d", "#1d8a5b", "#a2459f", "#b3372f", "#4a7f8c"]
SOFT = "#5d6677"


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


class Target(NamedTuple):
    """How long a run took to be good enough."""

    label: str
    seconds: float | None  # None: it never was
    num_samples: int | None = None  # that it was trained on until then


def draw_curve(
    history: list[EpochDone],
    path: Path,
    caption: Caption = NO_CAPTION,
    steps: Sequence[tuple[float, float]] = (),  # epoch (a fraction), loss of a batch
) -> None:
    """The loss and the accuracy of a run against the epoch, written to `path` as PNG."""
    figure = curve_figure(history, caption, steps)
    figure.savefig(path, dpi=150, format="png")


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
    panels[0].set_ylim(bottom=0.0)
    if tested:
        _plot(panels[1], epochs, [_value(done, tested) for done in history], tested, last)
        panels[1].set_ylim(*((0.0, 1.0) if tested == "test accuracy" else (0.0, None)))
    if caption.title:
        figure.suptitle(caption.title, fontsize="medium", fontweight="bold")
    if caption.settings:
        figure.supxlabel("\n".join(textwrap.wrap(caption.settings, 105)), fontsize="x-small", color=SOFT)
    return figure


def _plot(axes: Any, epochs: list[int], values: list[Any], what: str, last: int) -> None:
    axes.plot(epochs, values, color=COLORS[0], marker="o", markersize=4, clip_on=False)
    axes.set(xlabel="epoch", xlim=(0, last))
    axes.set_title(f"{what}, {values[-1]:.4g} at the end" if values else what, fontsize="small", loc="left")
    _finish(axes)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


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


def draw_comparison(
    lines: Sequence[Line], axes_labels: tuple[str, str], targets: Sequence[Target], target: str, path: Path
) -> None:
    """What a comparison answers: how good, with which setting; and how long that takes. Written to `path` as PNG."""
    comparison_figure(lines, axes_labels, targets, target).savefig(path, dpi=150, format="png")


def comparison_figure(
    lines: Sequence[Line], axes_labels: tuple[str, str], targets: Sequence[Target], target: str
) -> Figure:
    """Lines on the left, and on the right the time until `target` was reached."""
    height = max(3.4, 1.3 + 0.32 * len(targets))
    figure = Picture(figsize=(9.6, height), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(1.15, 1))
    for number, line in enumerate(lines):
        style = STYLES[number // len(COLORS) % len(STYLES)]
        left.plot(
            line.xs, line.ys, style, color=COLORS[number % len(COLORS)], marker="o", markersize=4, label=line.label
        )
    x_label, y_label = axes_labels
    left.set(xlabel=x_label)
    left.set_title(y_label, fontsize="small", loc="left")
    if x_label == "learning rate":
        xs = sorted({x for line in lines for x in line.xs})
        if min(xs) > 0 and max(xs) / min(xs) >= 3:
            left.set_xscale("log")
        left.set_xticks(xs, [f"{x:g}" for x in xs])
        left.minorticks_off()
    else:
        left.xaxis.set_major_locator(MaxNLocator(integer=True))
    if "accuracy" in y_label:
        left.set_ylim(0.0, 1.0)
    if len(lines) > 1 or (lines and lines[0].label):
        left.legend(fontsize="small", frameon=False)
    _finish(left)
    _draw_targets(right, targets, target)
    return figure


def _draw_targets(axes: Any, targets: Sequence[Target], title: str) -> None:
    seconds = [each.seconds or 0.0 for each in targets]
    axes.barh(range(len(targets)), seconds, color=COLORS[0], height=0.6)
    for number, each in enumerate(targets):
        text = "  not reached" if each.seconds is None else f"  {each.seconds:.3g} s"
        text += f", {each.num_samples:,} samples" if each.num_samples else ""
        axes.text(seconds[number], number, text, va="center", fontsize="small")
    axes.set_yticks(range(len(targets)), [each.label for each in targets], fontsize="small")
    axes.invert_yaxis()
    axes.set_title(title, fontsize="small", loc="left")
    axes.set_xlabel("seconds of training (lower is better)")
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.set_xlim(0, 1.6 * max([*seconds, 1e-9]))
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize="small")
