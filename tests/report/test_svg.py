"""Charts: round ticks, nothing outside the axes, points that are not numbers left out."""

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.report.svg import (
    HEIGHT,
    LEFT,
    MAX_POINTS,
    TOP,
    WIDTH,
    Bar,
    Chart,
    Row,
    Series,
    joined,
    label,
    line_chart,
    padded,
    rows_chart,
    ticks,
)

FINITE = st.floats(-1e9, 1e9, allow_nan=False)


@given(FINITE, st.floats(1e-6, 1e9))
def test_ticks_are_few_round_numbers_within_the_range(low, span):
    if abs(low) > 1e6 * span:
        return
    found = ticks(low, low + span)
    assert len(found) <= 12
    assert all(low - 1e-6 * span <= tick <= low + span * (1 + 1e-6) for tick in found)


@given(st.lists(st.tuples(st.floats(0, 8), FINITE | st.just(math.nan) | st.just(math.inf)), min_size=1, max_size=50))
def test_no_curve_leaves_its_chart(points):
    svg = line_chart(Chart("a", "b", [Series("s", points)], (0.0, 8.0)))
    places = re.findall(r"[ML]([\d.-]+) ([\d.-]+)", "".join(re.findall(r'class="line[^"]*" d="([^"]+)"', svg)))
    for x, y in places:
        assert LEFT - 0.1 <= float(x) <= WIDTH
        assert TOP - 0.1 <= float(y) <= HEIGHT
    assert "nan" not in svg


def test_a_chart_without_points_is_left_out_and_one_with_many_is_thinned():
    assert line_chart(Chart("a", "", [Series("s", [(1.0, math.nan)])], (0.0, 1.0))) == ""
    many = [(x / 1e4, float(x)) for x in range(10_001)]
    svg = line_chart(Chart("a", "", [Series("s", many)], (0.0, 1.0)))
    assert svg.count("L") <= MAX_POINTS + 1
    assert f"{WIDTH - 16:.1f} " in svg, "the last point is always there"


def test_names_are_escaped():
    svg = line_chart(Chart("<b>", "", [Series('"<i>', [(0.0, 1.0)])], (0.0, 1.0), marks=[(0.5, "a < b")]))
    assert "<b>" not in svg
    assert "<i>" not in svg
    assert "a &lt; b" in svg


@pytest.mark.parametrize(("low", "high"), [(2.3024, 2.3038), (0.71, 0.7101), (-5.0, -4.99)])
def test_noise_does_not_fill_the_axis(low, high):
    bottom, top = padded(low, high)
    assert bottom < low < high < top
    assert top - bottom >= 0.09 * max(abs(low), abs(high))


def test_a_real_trend_fills_the_axis():
    bottom, top = padded(1.4, 2.3)
    assert top - bottom < 1.2 * (2.3 - 1.4)


def test_thousands_have_separators():
    assert [label(value) for value in (999, 1000, 1279)] == ["999", "1,000", "1,279"]


@pytest.mark.parametrize("end", [0.0, 0.04, 9.0, 30.8, 35.4, 1234.5])
def test_the_unit_is_at_the_last_tick_of_every_chart_of_times(end):
    chart = rows_chart("a", [Row("0 · cpu:0", [Bar("update", 0.0, end)], "1.00")], end)
    texts = re.findall(r'<text [^>]*x="([\d.]+)%"[^>]*>([^<]*)</text>', chart)
    assert [text.endswith(" ms") for _, text in texts] == [False] * (len(texts) - 1) + [True]
    assert all(0 <= float(place) <= 100 for place, _ in texts)
    assert end == 0.0 or float(texts[-1][0]) - float(texts[-2][0]) > 10


@pytest.mark.parametrize("gap", [0.0, 0.5])
def test_neighbours_of_one_kind_are_one_bar(gap):
    bars = [Bar("forward", 0.0, 1.0), Bar("forward", 1.0 + gap, 2.0), Bar("wait", 2.0, 3.0)]
    assert len(joined(bars)) == (3 if gap else 2)
