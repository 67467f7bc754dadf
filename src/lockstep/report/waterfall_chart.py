"""Where the time of a step went, as a picture: from a perfect speed-up down to what was measured."""

import math
from typing import Any, NamedTuple

from lockstep.core.files import printable
from lockstep.report.svg import Bar, Row, rows_chart


class Waterfall(NamedTuple):
    """A waterfall as the page shows it."""

    chart: str  # HTML
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
    rows = [("one device, nothing else" if k == 1 else f"{k} times as fast as one", float(named["perfect_ms"] or 0))]
    rows += [(printable(str(name)), float(ms)) for name, ms in [*(parts or {}).items(), ("rest", named["rest_ms"])]]
    said = [*(notes if isinstance(notes, list) else []), explanation.get("advice", "")]
    step = float(named["step_ms"] or 0)
    chart = _chart(rows, step)
    return Waterfall(chart, step, rows[0][1], k, [printable(str(each)) for each in said if each])


def _chart(rows: list[tuple[str, float]], step: float) -> str:
    """A bar for each part, which begins where the one before it ends, and one for what was measured."""
    drawn, so_far, end = [], 0.0, step
    for number, (name, ms) in enumerate(rows):
        bar = Bar(name, so_far, so_far + ms, "exchange" if number else "compute")
        drawn.append(Row(name, [bar], f"{round(ms, 2) + 0.0:,.2f}"))  # -0.0 is 0
        so_far += ms
        end = max(end, so_far)
    measured = Row("measured", [Bar("measured", 0.0, step, "other")], f"{step:,.2f}")
    return rows_chart("Where the time of a step went", [*drawn, measured], end)
