"""Stages of equal cost, against all cuts that there are."""

from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.core.errors import ConfigError
from lockstep.partition.stages import (
    Stages,
    balanced_stages,
    choose_stages,
    folded_stages,
    load_of,
    there_and_back,
)


def largest_cost(costs, crossing, cuts):
    bounds = [0, *cuts, len(costs)]
    return max(
        sum(costs[start:stop])
        + (crossing[start - 1] if start else 0)
        + (crossing[stop - 1] if stop < len(costs) else 0)
        for start, stop in pairwise(bounds)
    )


@given(st.data())
def test_no_other_cuts_have_a_faster_slowest_stage(data):
    costs = data.draw(st.lists(st.integers(0, 50), min_size=1, max_size=9))
    crossing = data.draw(st.lists(st.integers(0, 20), min_size=len(costs) - 1, max_size=len(costs) - 1))
    num_stages = data.draw(st.integers(1, len(costs)))
    cuts = balanced_stages(costs, crossing, num_stages)
    options = combinations(range(1, len(costs)), num_stages - 1)
    best = min(largest_cost(costs, crossing, option) for option in options)
    assert list(cuts) == sorted(set(cuts))
    assert len(cuts) == num_stages - 1
    assert all(0 < cut < len(costs) for cut in cuts)
    assert largest_cost(costs, crossing, cuts) == best


def test_a_cut_where_little_crosses_it_is_preferred():
    assert balanced_stages([2, 2, 2, 2], [0, 0, 0], 2) == [2]
    assert balanced_stages([2, 2, 2, 2], [0, 9, 9], 2) == [1]


@pytest.mark.parametrize(("num_layers", "parts"), [(1, "1 part"), (3, "3 parts")])
def test_more_stages_than_layers_are_refused(num_layers, parts):
    with pytest.raises(ConfigError) as refused:
        balanced_stages([1.0] * num_layers, [0.0] * (num_layers - 1), 4)
    assert str(refused.value) == (
        f"A network that can be cut into {parts} cannot have 4 stages: a stage would be empty. Use at most "
        f"{num_layers} stages, or split the batch instead (--split data)."
    )


# --- there and back


@given(st.data())
def test_no_other_way_there_and_back_has_a_smaller_load(data):
    num_places = data.draw(st.integers(2, 3))
    num_layers = data.draw(st.integers(2 * num_places - 1, 8))
    costs, memory = (
        data.draw(st.lists(st.integers(0, 50), min_size=num_layers, max_size=num_layers)) for _ in range(2)
    )
    places = there_and_back(num_places)
    starts = folded_stages(costs, memory, num_places)
    assert sorted(set(starts)) == starts
    assert len(starts) == len(places) - 1
    best = min(
        load_of(costs, memory, Stages(list(option), places))
        for option in combinations(range(1, num_layers), len(places) - 1)
    )
    assert load_of(costs, memory, Stages(starts, places)) == pytest.approx(best)


def test_a_device_gets_two_stages_where_work_and_memory_lie_at_different_ends():
    even = choose_stages([1] * 8, [1] * 8, [0] * 7, 2)
    assert even == ([4], (0, 1))
    work_first = choose_stages([8, 4, 2, 1, 1], [1, 1, 2, 4, 8], [0] * 4, 2)
    assert work_first.places == (0, 1, 0)
    assert load_of([8, 4, 2, 1, 1], [1, 1, 2, 4, 8], work_first) < 0.7


def test_few_layers_and_no_memory_go_straight():
    assert choose_stages([8, 1], [1, 8], [0], 2).places == (0, 1)
    assert choose_stages([8, 4, 2, 1, 1], [0] * 5, [0] * 4, 2).places == (0, 1)
    assert choose_stages([1, 1, 1], [1, 1, 1], [0, 0], 1) == ([], (0,))
