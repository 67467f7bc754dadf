"""Ranks in a grid, and what is written after --split."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.core.errors import ConfigError
from lockstep.partition.grid import Grid, grid_for, num_devices_of, parse_split

SIZES = st.integers(1, 5)


@given(SIZES, SIZES, SIZES)
def test_every_rank_has_a_place_of_its_own(data, network, layers):
    grid = Grid(data, network, layers)
    places = [grid.at(rank) for rank in range(grid.num_ranks)]
    assert len(set(places)) == grid.num_ranks == data * network * layers
    assert [grid.rank(place) for place in places] == list(range(grid.num_ranks))
    for rank, at in enumerate(places):
        same = [other for other, there in enumerate(places) if there[1:] == at[1:]]
        assert list(grid.replicas_of(rank)) == same
        assert grid.replicas_of(rank)[at.data] == rank
    assert grid_for(str(grid), grid.num_ranks) == grid


def test_ranks_that_share_layers_are_neighbours():
    grid = Grid(data=2, network=2, layers=2)
    assert [tuple(grid.at(rank)) for rank in (0, 1, 2, 4)] == [(0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0)]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("data", Grid(data=4)),
        ("network", Grid(network=4)),
        ("layers", Grid(layers=4)),
        ("network=4", Grid(network=4)),
        ("data=2,network=2", Grid(data=2, network=2)),
        ("network=2, data=2", Grid(data=2, network=2)),
        ("layers=2,data=1,network=2", Grid(network=2, layers=2)),
    ],
)
def test_a_split_of_four_devices(text, found):
    assert grid_for(text, 4) == found


@pytest.mark.parametrize(
    ("text", "at"),
    [
        ("", "'its end'"),
        ("data=2,", "'its end'"),
        ("pipeline", "'pipeline'"),
        ("data=2,data=2", "'data=2'"),
        ("network=0", "'network=0'"),
        ("network=-1", "'network=-1'"),
        ("network=4097", "'network=4097'"),
        ("network=2.5", "'network=2.5'"),
        ("layers=", "'layers='"),
        ("data=2;network=2", "'data=2;network=2'"),
    ],
)
def test_what_cannot_be_read_is_said_with_the_place(text, at):
    with pytest.raises(ConfigError) as refused:
        parse_split(text)
    assert str(refused.value) == (
        f"--split {text} cannot be read at {at}. There are data, network, layers, alone or with numbers of devices "
        f"whose product is used: --split network, --split data=2,network=2."
    )


def test_products_need_numbers():
    with pytest.raises(ConfigError) as refused:
        parse_split("data,network=2")
    assert str(refused.value) == "--split data,network=2 needs a number for each: --split data=2,network=2."


@pytest.mark.parametrize(
    ("text", "num_devices", "sentence"),
    [
        (
            "network=3",
            2,
            "--split network=3 is for 3 devices, and there are 2. Use as many (--devices 3), or --split network for "
            "all of them.",
        ),
        (
            "data=2,network=2",
            3,
            "--split data=2,network=2 is for 4 devices, and there are 3. Use as many (--devices 4), or another "
            "--split.",
        ),
        (
            "data=1",
            2,
            "--split data=1 is for 1 device, and there are 2. Use as many (--devices 1), or --split data for all of "
            "them.",
        ),
    ],
)
def test_another_number_of_devices_is_refused(text, num_devices, sentence):
    with pytest.raises(ConfigError) as refused:
        grid_for(text, num_devices)
    assert str(refused.value) == sentence


def test_the_number_of_devices_is_the_product_if_there_are_numbers():
    assert num_devices_of("data=2,network=3") == 6
    assert num_devices_of("layers=4") == 4
    assert num_devices_of("network") is None
