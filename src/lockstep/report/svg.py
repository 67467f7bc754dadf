"""Charts as inline SVG: they scale, print, and take their colours from the page, so that light and dark both work."""

import math
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

WIDTH, HEIGHT = 460, 250
LEFT, RIGHT, TOP, BOTTOM = 50, 16, 12, 38
MAX_POINTS = 600  # of a curve: more than a screen can show


class Series(NamedTuple):
    """One curve: its name, its points, and which of the page's colours it has."""

    name: str
    points: Sequence[tuple[float, float]]
    color: int = 0
    is_faint: bool = False  # the steps behind the epochs


class Chart(NamedTuple):
    """What a chart shows."""

    title: str
    unit: str
    series: Sequence[Series]
    x_range: tuple[float, float]
    y_range: tuple[float, float] | None = None  # None: that of the points
    marks: Sequence[tuple[float, str]] = ()  # where something happened, and what
    x_label: str = "epoch"


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round numbers from `low` to `high`.

    >>> ticks(0, 1), ticks(0.3, 8)
    ([0.0, 0.2, 0.4, 0.6, 0.8, 1.0], [2.0, 4.0, 6.0, 8.0])
    """
    span = (high - low) or abs(high) or 1.0
    rough = span / about
    size = 10.0 ** math.floor(math.log10(rough))
    step = min((factor * size for factor in (1, 2, 5, 10)), key=lambda candidate: abs(candidate - rough))
    first = math.ceil(low / step - 1e-9)
    return [round(number * step, 12) for number in range(first, math.floor(high / step + 1e-9) + 1)]


def label(value: float) -> str:
    """A number for an axis.

    >>> label(0.2), label(1250), label(12500), label(3.0), label(0.00025)
    ('0.2', '1,250', '12.5k', '3', '2.5e-04')
    """
    if abs(value) >= 1e6:
        return f"{value / 1e6:g}M"
    if abs(value) >= 1e4:
        return f"{value / 1e3:g}k"
    return f"{value:,g}" if value == 0 or abs(value) >= 1e-3 else f"{value:.1e}"


def thinned(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Finite points, at most `MAX_POINTS` of them, the last one always."""
    finite = [(x, y) for x, y in points if math.isfinite(x) and math.isfinite(y)]
    every = -(-len(finite) // MAX_POINTS) or 1
    kept = finite[::every]
    return kept if not finite or kept[-1] == finite[-1] else [*kept, finite[-1]]


def line_chart(chart: Chart) -> str:
    """The chart as SVG; an empty string where there is nothing to show."""
    curves = [(series, thinned(series.points)) for series in chart.series]
    values = [y for _, points in curves for _, y in points]
    if not values:
        return ""
    low, high = chart.y_range or padded(min(values), max(values))
    left, right = chart.x_range

    def place(x: float, y: float) -> tuple[float, float]:
        across = LEFT + (WIDTH - LEFT - RIGHT) * (x - left) / ((right - left) or 1.0)
        return across, HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (min(max(y, low), high) - low) / (
            (high - low) or 1.0
        )

    parts = [f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(chart.title)}">']
    for y in ticks(low, high):
        _, at = place(left, y)
        parts.append(f'<path class="grid" d="M{LEFT} {at:.1f}H{WIDTH - RIGHT}"/>')
        parts.append(f'<text class="tick" x="{LEFT - 7}" y="{at + 3.5:.1f}" text-anchor="end">{label(y)}</text>')
    for x in [x for x in ticks(left, right, 6) if right - left < 2 or x == int(x)]:
        at, _ = place(x, low)
        parts.append(
            f'<text class="tick" x="{at:.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{label(x)}</text>'
        )
    parts.append(f'<text class="axis" x="{WIDTH - RIGHT}" y="{HEIGHT - 4}" text-anchor="end">{chart.x_label}</text>')
    parts.append(f'<path class="base" d="M{LEFT} {HEIGHT - BOTTOM}H{WIDTH - RIGHT}"/>')
    for x, what in chart.marks:
        at, _ = place(x, low)
        parts.append(f'<g class="mark"><title>{escape(what)}</title><path d="M{at:.1f} {TOP}V{HEIGHT - BOTTOM}"/></g>')
    for series, points in curves:
        parts += _curve(series, [place(x, y) for x, y in points], points)
    return "".join([*parts, "</svg>"])


def padded(low: float, high: float) -> tuple[float, float]:
    """A range with a little room; from 0 where that is near. It is a tenth of the values at least: noise is no trend.

    >>> padded(0.0, 2.0), padded(2.3024, 2.3038)
    ((0.0, 2.12), (2.18791, 2.41829))
    """
    if 0 <= low < 0.4 * high or low == high > 0:
        return 0.0, high + (0.06 * (high - low) or 0.1 * high)
    room = max(0.06 * (high - low), (0.1 * max(abs(low), abs(high)) - (high - low)) / 2) or 1.0
    return round(low - room, 12), round(high + room, 12)


def _curve(series: Series, places: list[tuple[float, float]], points: list[tuple[float, float]]) -> list[str]:
    if not places:
        return []
    faint = " faint" if series.is_faint else " later" if series.color else ""  # equal runs have equal curves: dashes
    path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
    found = [f'<path class="line c{series.color}{faint}" d="{path}"/>'] if len(places) > 1 else []
    if series.is_faint:
        return found
    if len(places) <= 40:
        for (x, y), (at, value) in zip(places, points, strict=True):
            told = escape(f"{series.name}, {at:g}: {value:.4g}")
            found.append(
                f'<circle class="dot c{series.color}" cx="{x:.1f}" cy="{y:.1f}" r="2.6"><title>{told}</title></circle>'
            )
    return found


class Bar(NamedTuple):
    """A part of a row, from where to where, of a kind that has a colour."""

    kind: str
    start: float
    end: float
    color: str = ""  # a class of the page's; without one, that of the kind


class Row(NamedTuple):
    """A row of bars: its name, the bars, and a number at its end."""

    name: str
    bars: Sequence[Bar]
    number: str = ""


def rows_chart(title: str, rows: Sequence[Row], end: float) -> str:
    """Rows of bars, times in milliseconds. Places are shares of the width, so that text keeps its size on a phone."""

    def place(ms: float) -> float:
        return 100 * min(max(0.0, ms), end) / (end or 1.0)

    marks = ticks(0, end, 8)
    lines = "".join(f'<line class="grid" x1="{place(ms):.2f}%" x2="{place(ms):.2f}%" y2="100%"/>' for ms in marks)
    has_numbers = "with-numbers" if any(row.number for row in rows) else ""
    parts = [f'<div class="rows {has_numbers}" role="img" aria-label="{escape(title)}">']
    for row in rows:
        size = (4, 12) if row.name.startswith("+") else (2, 18)  # what overlaps with the row above is thinner
        bars = "".join(_rectangle(bar, place(bar.start), place(bar.end), size) for bar in joined(row.bars))
        parts.append(f'<div><span class="row-name">{escape(row.name)}</span><svg>{lines}{bars}</svg>')
        parts.append(f'<span class="row-number">{escape(row.number)}</span></div>')
    texts = []
    for ms in marks:
        if 0 < place(marks[-1]) - place(ms) < 14 and place(marks[-1]) > 94:
            continue  # the last one has a unit, and stands to its left
        anchor = "end" if place(ms) > 94 else "middle" if place(ms) > 2 else "start"
        unit = " ms" if ms == marks[-1] else ""
        texts.append(f'<text class="tick" x="{place(ms):.2f}%" y="12" text-anchor="{anchor}">{label(ms)}{unit}</text>')
    return "".join([*parts, f'<div><span></span><svg class="ticks">{"".join(texts)}</svg><span></span></div></div>'])


def _rectangle(bar: Bar, start: float, end: float, size: tuple[int, int]) -> str:
    told = escape(f"{bar.kind}: {bar.end - bar.start:.2f} ms")
    left, width = min(start, end), max(abs(end - start), 0.1)
    box = f'x="{left:.2f}%" y="{size[0]}" width="{width:.2f}%" height="{size[1]}"'
    return f'<rect class="k-{bar.color or kind_class(bar.kind)}" {box}><title>{told}</title></rect>'


def joined(bars: Sequence[Bar]) -> list[Bar]:
    """Neighbours of one kind as one bar: a rank works on several shards one after the other."""
    found: list[Bar] = []
    for bar in bars:
        if found and found[-1].kind == bar.kind and bar.start - found[-1].end < 1e-6:
            found[-1] = found[-1]._replace(end=bar.end)
        else:
            found.append(bar)
    return found


def kind_class(kind: str) -> str:
    """The class of a kind of work in the page's style.

    >>> kind_class("forward and backward"), kind_class("something new")
    ('compute', 'other')
    """
    known = {"forward": "forward", "backward": "backward", "forward and backward": "compute", "wait": "wait"}
    known |= {name: name for name in ("exchange", "update", "data")}
    return known.get(kind, "other")


def epochs_range(last: float) -> tuple[float, float]:
    """The axis of a run of so many epochs: from 0, to 1 at least."""
    return 0.0, max(1.0, last)
