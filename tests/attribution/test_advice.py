"""One sentence for every part: it names the largest, and what a step would take without it."""

import pytest

from lockstep.attribution.advice import ADVICE, Case, advice_for
from lockstep.attribution.waterfall import PARTS


def advice(part, ms=40.0, **settings):
    parts = dict.fromkeys(PARTS, 1.0) | {part: ms}
    return advice_for(Case(100.0, parts, settings, 2, 8))


@pytest.mark.parametrize("part", PARTS)
def test_the_largest_part_is_named_with_what_there_is_to_gain(part):
    sentence = advice(part)
    assert sentence.startswith(f"{part[0].upper()}{part[1:]}: 40.00 of 100.00 ms. ")
    assert "60.00 instead of 100.00 ms" in sentence
    assert sentence.endswith(".")


def test_there_is_an_advice_for_every_part():
    assert set(ADVICE) == set(PARTS)


def test_small_parts_are_not_worth_a_change():
    assert advice("loading", ms=4.0) == "Nothing to change: no part takes more than 5 % of a step."


def test_the_number_of_workers_is_doubled():
    assert "--workers 16" in advice("loading", workers=8)
    assert "--workers 4" in advice("loading", workers=0)


def test_only_gpus_are_told_to_capture():
    assert "--capture" in advice("launch and host", devices="cuda:0")
    assert "--capture" not in advice("launch and host", devices="cpu:0,cpu:1")


def test_a_run_that_is_balanced_already_is_not_told_to_balance():
    assert "--balance" not in advice("waiting for the slower rank", balance="measured")
