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


def on_cores(part, num_devices=3, num_cores=2, **others):
    settings = {"devices": ",".join(f"cpu:{i}" for i in range(num_devices)), "balance": "equal"}
    parts = dict.fromkeys(PARTS, 1.0) | {part: 40.0}
    others = {"num_here": num_devices, "num_cores": num_cores} | others
    return advice_for(Case(100.0, parts, settings, num_devices, 8, **others))


@pytest.mark.parametrize("part", ["exposed exchange", "waiting for the slower rank", "shared hardware"])
def test_more_devices_than_cores_are_told_so(part):
    assert on_cores(part).endswith(
        "3 devices share 2 cores of one machine: they take turns, and more than 2 bring no speed. Use as many devices "
        "as cores (--devices 2): the same bits."
    )
    assert "share 2 cores" not in on_cores(part, num_devices=2)
    assert "share 2 cores" not in on_cores(part, num_here=1)  # of several machines
    assert "share" not in on_cores("loading")


def test_only_devices_with_a_link_between_them_are_told_to_use_a_faster_one():
    assert "faster link" not in on_cores("exposed exchange", num_devices=2)
    assert "faster link" in on_cores("exposed exchange", num_devices=2, num_here=1)
    assert "faster link" in advice("exposed exchange", devices="cuda:0,cuda:1")


class Predicted:
    """A what-if with one answer."""

    num_copies = 2

    def __init__(self, ms):
        self.ms = ms

    def balanced_ms(self, step_ms):
        return self.ms

    def step_ms(self, step_ms, num_shards):
        return self.ms

    def numbers(self):
        return [4, 16]


@pytest.mark.parametrize(("ms", "is_advised"), [(99.0, False), (97.5, False), (96.0, True)])
def test_a_change_that_brings_next_to_nothing_is_not_advised(ms, is_advised):
    how = {"num_devices": 2, "what_if": Predicted(ms)}
    for part, option in [
        ("waiting for the slower rank", "--balance"),
        ("smaller shards", "--shards"),
        ("bubble", "--shards"),
    ]:
        sentence = on_cores(part, **how)
        assert (option in sentence) == is_advised
        assert (f"{ms:.2f} instead of" in sentence) == is_advised
