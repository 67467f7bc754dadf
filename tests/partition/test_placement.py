"""Who holds which part of the model, and who updates it."""

from hypothesis import given
from hypothesis import strategies as st

from lockstep.partition.grid import Grid
from lockstep.partition.placement import Part, Placement, owned_ranges


def test_parts_of_a_product():
    placement = Placement(Grid(data=2, network=2, layers=2), stages=(0, 1))
    assert placement.part_of(0) == Part((0,), 2, 0, 2)
    assert placement.part_of(3) == Part((1,), 2, 1, 2)
    assert placement.part_of(4) == placement.part_of(0)
    assert placement.owners == [0, 1, 2, 3]
    assert not placement.is_replicated


def test_a_rank_may_hold_several_stages():
    assert Placement(Grid(network=2), stages=(0, 1, 0)).part_of(0).stages == (0, 2)


def test_replicas_that_share_an_update_are_numbered_by_their_data():
    placement = Placement(Grid(data=3), shards_update=True)
    assert [placement.part_of(rank)[-2:] for rank in range(3)] == [(0, 3), (1, 3), (2, 3)]
    assert placement.is_replicated
    assert not placement.every_rank_has_all
    assert Placement(Grid(data=3)).every_rank_has_all
    assert all(placement.part_of(rank).is_whole for rank in range(3))


@given(st.lists(st.integers(1, 100), max_size=20), st.integers(1, 8))
def test_every_parameter_has_one_owner_and_shares_are_about_equal(sizes, num_owners):
    found = owned_ranges(sizes, num_owners)
    assert len(found) == num_owners
    assert [number for own in found for number in own] == list(range(len(sizes)))
    for own in found:  # an owner may have one parameter more than its share, half of it on either side
        entries = [sizes[number] for number in own]
        assert sum(entries) <= sum(sizes) / num_owners + max(entries, default=0)
