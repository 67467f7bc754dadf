"""Chains of layers on devices of different speeds and memory: no other cut is better, of all that there are."""

import math
import random
from itertools import combinations, pairwise, permutations

import pytest

from lockstep.partition.chain import Chain, StageDevice, place_in_any_order, place_stages


def brute_force(chain, places, in_flight):
    """The time of the slowest stage of the best cut of all; infinite where none fits."""
    best, num_layers = math.inf, len(chain.costs)
    for cuts in combinations(range(1, num_layers), len(places) - 1):
        slowest = 0.0
        for at, (start, stop) in enumerate(pairwise([0, *cuts, num_layers])):
            layers = range(start, stop)
            used = sum(chain.memory[n] + in_flight[at] * chain.kept[n] for n in layers)
            crossing = (chain.crossing[start - 1] if start else 0) + (
                chain.crossing[stop - 1] if stop < num_layers else 0
            )
            time = sum(chain.costs[n] for n in layers) / places[at].speed + crossing
            slowest = max(slowest, math.inf if used > places[at].memory else time)
        best = min(best, slowest)
    return best


def random_chain(draw, max_layers=12):
    """Integers, so that sums are exact in any order."""
    num_layers = draw.randint(1, max_layers)
    numbers = [[float(draw.randint(0, 40)) for _ in range(num_layers)] for _ in range(4)]
    return Chain(numbers[0], numbers[1][1:], numbers[2], numbers[3])


def random_places(draw, chain, number):
    total = sum(chain.memory) + number * sum(chain.kept)
    return [
        StageDevice(draw.choice([0.5, 1.0, 2.0, 4.0]), draw.choice([math.inf, float(draw.randint(0, int(total) + 1))]))
        for _ in range(number)
    ]


def cost_of(chain, places, in_flight, found):
    """The time of the slowest stage of a cut, which has to fit."""
    one = Chain(chain.costs, chain.crossing, chain.memory, chain.kept)
    slowest = 0.0
    for at, (start, stop) in enumerate(pairwise([0, *found.starts, len(chain.costs)])):
        place = places[found.order[at]]
        assert start < stop
        assert sum(one.memory[n] + in_flight[at] * one.kept[n] for n in range(start, stop)) <= place.memory
        crossing = (one.crossing[start - 1] if start else 0) + (one.crossing[stop - 1] if stop < len(one.costs) else 0)
        slowest = max(slowest, sum(one.costs[start:stop]) / place.speed + crossing)
    return slowest


def test_a_thousand_random_chains_are_cut_as_well_as_can_be():
    draw, num_fitting = random.Random(0), 0
    for _ in range(1000):
        chain = random_chain(draw)
        number = draw.randint(1, min(5, len(chain.costs)))
        places = random_places(draw, chain, number)
        in_flight = [number - at for at in range(number)]
        found, best = place_stages(chain, places, in_flight), brute_force(chain, places, in_flight)
        assert (math.inf if found is None else found.cost) == best
        if found is not None:
            num_fitting += 1
            assert cost_of(chain, places, in_flight, found) == best
    assert 300 < num_fitting < 1000  # both happen


def test_the_best_order_of_the_devices_is_found_too():
    draw = random.Random(1)
    for _ in range(150):
        chain = random_chain(draw, max_layers=8)
        number = draw.randint(1, min(4, len(chain.costs)))
        places = random_places(draw, chain, number)
        in_flight = [number - at for at in range(number)]
        found = place_in_any_order(chain, places, in_flight)
        best = min(brute_force(chain, order, in_flight) for order in permutations(places))
        assert (math.inf if found is None else found.cost) == best
        if found is not None:
            assert sorted(found.order) == list(range(number))
            assert cost_of(chain, places, in_flight, found) == best


def test_more_devices_than_layers_have_no_cut():
    assert place_stages(Chain([1.0]), [StageDevice(), StageDevice()]) is None
    assert place_in_any_order(Chain([1.0]), [StageDevice(), StageDevice()]) is None


@pytest.mark.parametrize("num_layers", [100, 300])
def test_a_slow_device_gets_less(num_layers):
    found = place_stages(Chain([1.0] * num_layers), [StageDevice(speed=3), StageDevice(speed=1)])
    assert found.starts == [3 * num_layers // 4]
