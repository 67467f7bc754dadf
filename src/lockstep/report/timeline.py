"""What a trace shows of a step: a row for each device, and the time of a step by part."""

from statistics import median
from typing import Any, NamedTuple

from lockstep.report.svg import Bar, Row, kind_class, rows_chart

ORDER = ("data", "forward", "backward", "forward and backward", "exchange", "update", "wait")


class StepTimeline(NamedTuple):
    """One step of a traced run, the one of median length, and the mean over its steps."""

    step: int
    timeline: str  # HTML
    parts: str  # HTML: the mean time of each part, by device
    kinds: list[tuple[str, str]]  # the legend: kind, class
    rows: list[tuple[str, dict[str, float]]]  # device -> kind -> milliseconds
    total: float  # milliseconds of a step, mean


def timeline_of(trace: list[dict[str, Any]]) -> StepTimeline | None:
    """The timeline in a trace of Chrome's format; None where it has no steps."""
    names = _rank_rows(trace)
    spans: dict[int, dict[Any, list[Bar]]] = {}  # step -> row -> bars
    for entry in trace:
        step, numbers = (entry.get("args") or {}).get("step"), (entry.get("ts"), entry.get("dur"))
        is_span = entry.get("ph") == "X" and isinstance(entry.get("tid"), (int, str)) and entry["tid"] in names
        if is_span and isinstance(step, int) and all(isinstance(n, (int, float)) for n in numbers):
            start = entry["ts"] / 1e3
            bar = Bar(str(entry.get("name")), start, start + entry["dur"] / 1e3)
            spans.setdefault(step, {}).setdefault(entry.get("tid"), []).append(bar)
    steps = sorted(spans)[1:] or sorted(spans)  # kernels are loaded in the first
    if not steps:
        return None
    lengths = {step: _end(spans[step]) - _start(spans[step]) for step in steps}
    middle = median(lengths.values())
    shown = min(steps, key=lambda step: (abs(lengths[step] - middle), step))
    origin = _start(spans[shown])
    rows = [
        Row(
            _row_name(names.get(row, str(row))),
            [Bar(b.kind, b.start - origin, b.end - origin) for b in spans[shown][row]],
        )
        for row in names
        if row in spans[shown]
    ]
    means = [(_row_name(names[row]), _mean(spans, steps, row)) for row in names if ", " not in names[row]]
    found = dict.fromkeys(bar.kind for row in rows for bar in row.bars) | dict.fromkeys(k for _, m in means for k in m)
    kinds = sorted(found, key=lambda kind: ORDER.index(kind) if kind in ORDER else len(ORDER))
    total = max((sum(by_kind.values()) for _, by_kind in means), default=0.0)
    stacked = [Row(name, _stacked(by_kind)) for name, by_kind in means]
    return StepTimeline(
        shown,
        rows_chart("One step, a row for each device", rows, lengths[shown]),
        rows_chart("The time of a step by part", stacked, total),
        [(kind, kind_class(kind)) for kind in kinds],
        means,
        total,
    )


def _rank_rows(trace: list[dict[str, Any]]) -> dict[Any, str]:
    """The names of the rows that ranks have; the loop has one too."""
    named = [e for e in trace if e.get("name") == "thread_name" and isinstance(e.get("args"), dict)]
    found = {e["tid"]: str(e["args"].get("name")) for e in named if isinstance(e.get("tid"), (int, str))}
    return {row: name for row, name in found.items() if name.startswith("rank ")}


def _row_name(name: str) -> str:
    """`rank 0 (cpu:0)` as `cpu:0`, with its rank; what overlaps is marked by a plus.

    >>> _row_name("rank 1 (cuda:0)"), _row_name("rank 1, overlapped exchange"), _row_name("rank 1, on the GPU")
    ('1 · cuda:0', '+ exchange', '+ on the GPU')
    """
    if ", " in name:
        return "+ exchange" if "overlapped" in name else "+ on the GPU"
    rank, _, device = name.removeprefix("rank ").partition(" (")
    return f"{rank} · {device.rstrip(')')}" if device else name


def _start(rows: dict[Any, list[Bar]]) -> float:
    return min(bar.start for bars in rows.values() for bar in bars)


def _end(rows: dict[Any, list[Bar]]) -> float:
    return max(bar.end for bars in rows.values() for bar in bars)


def _mean(spans: dict[int, dict[Any, list[Bar]]], steps: list[int], row: Any) -> dict[str, float]:
    found: dict[str, float] = {}
    for step in steps:
        for bar in spans[step].get(row, []):
            found[bar.kind] = found.get(bar.kind, 0.0) + (bar.end - bar.start) / len(steps)
    return dict(sorted(found.items(), key=lambda item: ORDER.index(item[0]) if item[0] in ORDER else len(ORDER)))


def _stacked(by_kind: dict[str, float]) -> list[Bar]:
    bars, at = [], 0.0
    for kind, ms in by_kind.items():
        bars.append(Bar(kind, at, at + ms))
        at += ms
    return bars
