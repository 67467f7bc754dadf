"""The waterfall of the report: a bar for each part, where the one before it ends; files are not trusted."""

import re

import pytest

from lockstep.report.waterfall_chart import waterfall_of

GOOD = {
    "step_ms": 10.0, "perfect_ms": 4.0, "parts": {"loading": 1.0, "exposed exchange": 4.5}, "rest_ms": 0.5,
    "advice": "Do this.", "num_devices": 2, "notes": ["It was short."],
}  # fmt: skip


def test_every_part_begins_where_the_one_before_it_ends():
    found = waterfall_of(GOOD)
    bars = [
        tuple(map(float, bar)) for bar in re.findall(r'<rect [^>]*x="([\d.]+)%"[^>]*width="([\d.]+)%"', found.chart)
    ]
    perfect, *parts, measured = bars
    assert len(parts) == 3
    end = sum(perfect)
    for start, width in parts:
        assert start == pytest.approx(end, abs=0.2)
        end = start + width
    assert sum(measured) == pytest.approx(end, abs=0.2)
    assert found.said == ["It was short.", "Do this."]
    assert "2 times as fast as one" in found.chart


def test_a_part_that_is_negative_goes_back():
    chart = waterfall_of({**GOOD, "parts": {"loading": 7.0}, "rest_ms": -1.0}).chart
    assert 'width="-' not in chart


@pytest.mark.parametrize(
    "wrong",
    [{}, {"parts": 3}, {**GOOD, "step_ms": "a"}, {**GOOD, "parts": {"loading": None}}, {**GOOD, "rest_ms": 1e999}],
)
def test_what_is_not_whole_is_not_shown(wrong):
    assert waterfall_of(wrong) is None


def test_a_rest_of_almost_nothing_is_no_negative_zero():
    assert "-0.00" not in re.findall(r'class="row-number">([^<]*)', waterfall_of({**GOOD, "rest_ms": -0.0002}).chart)


def test_names_are_escaped():
    chart = waterfall_of({**GOOD, "parts": {"<script>": 1.0}}).chart
    assert "<script>" not in chart
