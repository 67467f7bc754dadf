"""A picture of a schedule, as SVG: time to the right, a row for each device, a box for each pass of a shard.

The colour of a box is its stage; forward passes are light, backward passes dark, and what is hatched is idle. It is
readable on light and on dark pages. `schedules/timeline.py` makes the boxes, `tools/schedule_pictures.py` the pictures
in the documentation.
"""

from collections.abc import Sequence
from html import escape
from typing import NamedTuple

FORWARD, BACKWARD, UPDATE, IDLE = "forward", "backward", "update", "idle"
UNIT, ROW, GAP = 22, 26, 6  # pixels: a second of the clock, a row, and between two of them
LEFT, TOP, BOTTOM, RIGHT = 134, 34, 38, 14
MIN_WIDTH, LETTER = 330, 7  # of the legend, and of a letter of the title
COLOURS = (  # of a stage: a forward pass, and a backward pass
    ("#9ecbff", "#1f6feb"),
    ("#ffd08a", "#b35900"),
    ("#8ddfb0", "#1a7f4b"),
    ("#e0bfff", "#8250df"),
    ("#ffb3c7", "#c0316a"),
    ("#8fe0e6", "#117a86"),
    ("#dde08a", "#76771a"),
    ("#cbd0d8", "#5b6472"),
)
STYLE = """
  text { font: 12px system-ui, sans-serif; fill: #3d444d }
  .shard { font-size: 11px; text-anchor: middle }
  .forward { fill: #14181d }
  .backward { fill: #ffffff }
  .small { font-size: 11px; fill: #59636e }
  .title { font-weight: 600 }
  .idle { stroke: #59636e; stroke-opacity: .38 }
  .row { fill: #818b98; fill-opacity: .10 }
  .axis { stroke: #818b98; fill: none }
  @media (prefers-color-scheme: dark) {
    text { fill: #d1d7e0 }
    .forward { fill: #14181d }
    .backward { fill: #ffffff }
    .small { fill: #9198a1 }
    .idle { stroke: #9198a1; stroke-opacity: .5 }
  }
"""


class Box(NamedTuple):
    """What a device does, from when to when."""

    rank: int
    kind: str  # FORWARD, BACKWARD or UPDATE
    shard: int
    stage: int
    start: float
    end: float


def idle_share(boxes: Sequence[Box]) -> float:
    """The share of the time of all devices in which they wait.

    >>> idle_share([Box(0, FORWARD, 0, 0, 0, 1), Box(1, FORWARD, 0, 1, 1, 2)])
    0.5
    """
    num_ranks, end = len({box.rank for box in boxes}), max(box.end for box in boxes)
    return 1 - sum(box.end - box.start for box in boxes) / (num_ranks * end)


def draw_schedule(boxes: Sequence[Box], title: str) -> str:
    """The picture. `title` is written above it, and the idle share of the time at its end."""
    num_ranks, end = max(box.rank for box in boxes) + 1, max(box.end for box in boxes)
    bottom = TOP + num_ranks * (ROW + GAP) - GAP
    said = f"{title}: {100 * idle_share(boxes):.0f} % idle"
    width = LEFT + max(UNIT * end, MIN_WIDTH, LETTER * len(said)) + RIGHT
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_number(width)} {bottom + BOTTOM}" '
        f'width="{_number(width)}" height="{bottom + BOTTOM}" role="img">',
        f"<title>{escape(said)}</title>",
        f"<style>{STYLE}</style>",
        '<defs><pattern id="idle" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
        '<line class="idle" x1="0" y1="0" x2="0" y2="6"/></pattern></defs>',
        f'<text class="title" x="{LEFT}" y="18">{escape(said)}</text>',
    ]
    for rank in range(num_ranks):
        parts += _row(rank, sorted({box.stage for box in boxes if box.rank == rank}), end, boxes)
    parts += [*map(_drawn, boxes), *_legend(bottom, end, [box.kind for box in boxes])]
    return "\n".join([*parts, "</svg>", ""])


def _row(rank: int, stages: Sequence[int], end: float, boxes: Sequence[Box]) -> list[str]:
    """A device's name, what it holds, and the time that there is; boxes will cover what it uses of that."""
    y, middle = TOP + rank * (ROW + GAP), TOP + rank * (ROW + GAP) + ROW / 2 + 4
    area = f'x="{LEFT}" y="{y}" width="{_number(UNIT * end)}" height="{ROW}" rx="3"'
    found = [f'<text x="0" y="{_number(middle)}">device {rank}</text>']
    if any(box.stage for box in boxes):
        held = f"stage{'s' * (len(stages) > 1)} {', '.join(map(str, stages))}"
        found.append(f'<text class="small" x="{LEFT - 8}" y="{_number(middle)}" text-anchor="end">{held}</text>')
    return [*found, f'<rect class="row" {area}/>', f'<rect fill="url(#idle)" {area}/>']


def _drawn(box: Box) -> str:
    x, y = LEFT + UNIT * box.start, TOP + box.rank * (ROW + GAP)
    forward, backward = COLOURS[box.stage % len(COLOURS)]
    fill = {FORWARD: forward, BACKWARD: backward}.get(box.kind, COLOURS[-1][0])
    width = UNIT * (box.end - box.start) - 1
    drawn = f'<rect fill="{fill}" x="{_number(x + 0.5)}" y="{y}" width="{_number(width)}" height="{ROW}" rx="3"/>'
    if box.kind == UPDATE:
        return drawn
    at = f'x="{_number(x + 0.5 + width / 2)}" y="{_number(y + ROW / 2 + 4)}"'
    return f'{drawn}<text class="shard {box.kind}" {at}>{box.shard}</text>'


def _legend(bottom: int, end: float, kinds: Sequence[str]) -> list[str]:
    """Below the rows: an arrow for the time, and what the boxes mean."""
    y, tip = bottom + 9, LEFT + UNIT * end
    found = [f'<path class="axis" d="M{LEFT} {y}H{_number(tip)}m-5 -4l5 4l-5 4"/>']
    x, y = LEFT, bottom + 19
    fills = {FORWARD: COLOURS[0][0], BACKWARD: COLOURS[0][1], UPDATE: COLOURS[-1][0], IDLE: "url(#idle)"}
    for kind, fill in fills.items():
        if kind in (*kinds, IDLE):
            area = f'x="{x}" y="{y}" width="16" height="12" rx="2"'
            found.append(f'<rect class="row" {area}/><rect fill="{fill}" {area}/>')
            found.append(f'<text class="small" x="{x + 21}" y="{y + 10}">{kind}</text>')
            x += 38 + 6 * len(kind)
    return [*found, f'<text class="small" x="{x}" y="{y + 10}">a number is a shard</text>']


def _number(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")
