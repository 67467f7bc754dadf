"""Where the time of a step went, as a picture: from a perfect speed-up down to what was measured."""

import math
from html import escape
from typing import Any, NamedTuple

from lockstep.core.files import printable
from lockstep.report.svg import label, ticks

ROW, LABELS, NUMBERS, WIDTH = 27, 210, 76, 940


class Waterfall(NamedTuple):
    """A waterfall as the page shows it."""

    chart: str  # SVG
    step_ms: float
    perfect_ms: float
    num_devices: int
    said: list[str]  # below it


def waterfall_of(explanation: dict[str, Any]) -> Waterfall | None:
    """The waterfall of a recorded explanation; None where there is none, or none that is whole. It is not trusted."""
    parts, notes = explanation.get("parts"), explanation.get("notes")
    named = {name: explanation.get(name) for name in ("step_ms", "perfect_ms", "rest_ms")}
    values = [*named.values(), *parts.values()] if isinstance(parts, dict) else []
    if not values or not all(isinstance(ms, (int, float)) and math.isfinite(ms) for ms in values):
        return None
    number = explanation.get("num_devices")
    k = number if isinstance(number, int) else 1
    rows = [("one device, nothing else" if k == 1 else f"{k} times faster than one", float(named["perfect_ms"] or 0))]
    rows += [(printable(str(name)), float(ms)) for name, ms in [*(parts or {}).items(), ("rest", named["rest_ms"])]]
    said = [*(notes if isinstance(notes, list) else []), explanation.get("advice", "")]
    step = float(named["step_ms"] or 0)
    chart = _chart(rows, step)
    return Waterfall(chart, step, rows[0][1], k, [printable(str(each)) for each in said if each])


def _chart(rows: list[tuple[str, float]], step: float) -> str:
    height = ROW * (len(rows) + 1) + 34
    end = max([step, *(sum(ms for _, ms in rows[: number + 1]) for number in range(len(rows)))])

    def place(ms: float) -> float:
        return LABELS + (WIDTH - LABELS - NUMBERS) * max(0.0, ms) / (end or 1.0)

    title = "Where the time of a step went"
    parts = [f'<svg class="rows" viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{title}">']
    for ms in ticks(0, end, 8):
        parts.append(f'<path class="grid" d="M{place(ms):.1f} 4V{height - 26}"/>')
        text = f'x="{place(ms):.1f}" y="{height - 10}" text-anchor="middle"'
        parts.append(f'<text class="tick" {text}>{label(ms)}</text>')
    so_far = 0.0
    for number, (name, ms) in enumerate(rows):
        parts += _row(number, name, (so_far, so_far + ms), ms, "k-compute" if number == 0 else "k-exchange", place)
        so_far += ms
    parts += _row(len(rows), "measured", (0.0, step), step, "k-other", place)
    parts.append(f'<text class="axis" x="{WIDTH - 2}" y="{height - 10}" text-anchor="end">ms</text>')
    return "".join([*parts, "</svg>"])


def _row(number: int, name: str, bar: tuple[float, float], ms: float, kind: str, place: Any) -> list[str]:
    top = ROW * number + 6
    x, stop = place(min(bar)), place(max(bar))
    size = f'x="{x:.1f}" y="{top}" width="{max(stop - x, 0.8):.1f}" height="{ROW - 9}"'
    return [
        f'<text class="row-name" x="{LABELS - 10}" y="{top + 13}" text-anchor="end">{escape(name)}</text>',
        f'<rect class="{kind}" {size}><title>{escape(name)}: {ms:.2f} ms</title></rect>',
        f'<text class="tick" x="{stop + 6:.1f}" y="{top + 13}">{ms:.2f}</text>',
    ]
