"""Every exchange, proved right without any framework: a schedule is run on symbols instead of vectors."""

from collections import Counter

import pytest

from lockstep.core.errors import ConfigError
from lockstep.schedules.exchanges import EXCHANGES, KEEPS_THE_TREE, schedule_for
from lockstep.schedules.reduction_tree import Node, sum_of
from lockstep.schedules.exchanges.collective import Schedule, own_nodes
from lockstep.partition.ranks import split_over_ranks


def pair(left, right):
    return (left, right)


def tree_of(num_shards):
    """The expression that the total must be, brackets included."""
    return sum_of(Node(0, num_shards), leaf=lambda i: i, add=pair)


def leaves(expression):
    """The leaf numbers in an expression, with how often each occurs."""
    return leaves(expression[0]) + leaves(expression[1]) if isinstance(expression, tuple) else Counter([expression])


def run_symbolically(schedule: Schedule, ranges: list[range]):
    """For each rank and chunk, the expression that the rank ends with."""
    held = [
        {
            (chunk, node): sum_of(node, leaf=lambda i: i, add=pair)
            for node in nodes
            for chunk in range(schedule.num_chunks)
        }
        for nodes in own_nodes(ranges)
    ]
    for round_ in schedule.rounds:
        before = [dict(own) for own in held]
        for source, target, chunk, node in round_.transfers:
            assert source != target
            held[target][chunk, node] = before[source][chunk, node]  # KeyError: it was not there yet
        for addition in round_.additions:
            own = held[addition.rank]
            own[addition.chunk, addition.node] = (
                own[addition.chunk, addition.left],
                own[addition.chunk, addition.right],
            )
    return [[own[chunk, node] for chunk, node in enumerate(schedule.totals)] for own in held]


@pytest.mark.parametrize("name", EXCHANGES)
@pytest.mark.parametrize("num_ranks", range(1, 18))
def test_every_rank_ends_with_every_gradient_exactly_once(name, num_ranks):
    for num_shards in range(1, 65):
        ranges = split_over_ranks(num_shards, num_ranks)
        ends = run_symbolically(schedule_for(name, tuple(ranges)), ranges)
        if name in KEEPS_THE_TREE:
            expected = tree_of(num_shards)
            assert all(chunk == expected for rank in ends for chunk in rank)
        else:
            assert all(ends[0] == rank for rank in ends)
            assert all(leaves(chunk) == Counter(range(num_shards)) for chunk in ends[0])


UNEQUAL = [
    [range(0, 1), range(1, 8)],
    [range(0, 6), range(6, 7), range(7, 8)],
    [range(0, 0), range(0, 5), range(5, 8)],
    [range(0, 3), range(3, 3), range(3, 8), range(8, 8)],
]


@pytest.mark.parametrize("name", EXCHANGES)
@pytest.mark.parametrize("ranges", UNEQUAL, ids=str)
def test_any_assignment_of_shards_gives_the_same_tree(name, ranges):
    ends = run_symbolically(schedule_for(name, tuple(ranges)), ranges)
    if name in KEEPS_THE_TREE:
        assert all(chunk == tree_of(8) for rank in ends for chunk in rank)
    else:
        assert all(leaves(chunk) == Counter(range(8)) for rank in ends for chunk in rank)


def traffic(schedule: Schedule, num_ranks: int):
    """For each rank, the vectors it sends and the vectors it receives."""
    sent, received = [0.0] * num_ranks, [0.0] * num_ranks
    for round_ in schedule.rounds:
        for source, target, *_ in round_.transfers:
            sent[source] += 1 / schedule.num_chunks
            received[target] += 1 / schedule.num_chunks
    return sent, received


@pytest.mark.parametrize("num_ranks", [2, 4, 8, 16])
def test_sharded_moves_what_its_documentation_says_and_has_no_hub(num_ranks):
    sent, received = traffic(schedule_for("sharded", tuple(split_over_ranks(16, num_ranks))), num_ranks)
    assert sent == pytest.approx([2 * (num_ranks - 1) / num_ranks] * num_ranks)
    assert received == pytest.approx(sent)


@pytest.mark.parametrize("num_ranks", [2, 4, 8, 16])
def test_gather_goes_through_rank_0(num_ranks):
    sent, received = traffic(schedule_for("gather", tuple(split_over_ranks(16, num_ranks))), num_ranks)
    assert sent == [num_ranks - 1] + [1] * (num_ranks - 1)
    assert received == sent


@pytest.mark.parametrize("num_ranks", [2, 4, 8, 16])
def test_tree_needs_two_log_k_rounds(num_ranks):
    schedule = schedule_for("tree", tuple(split_over_ranks(16, num_ranks)))
    assert len(schedule.rounds) == 2 * (num_ranks.bit_length() - 1)


@pytest.mark.parametrize("num_ranks", range(2, 9))
def test_ring_talks_to_the_right_neighbour_only(num_ranks):
    schedule = schedule_for("ring", tuple(split_over_ranks(16, num_ranks)))
    for round_ in schedule.rounds:
        assert all(target == (source + 1) % num_ranks for source, target, *_ in round_.transfers)
        assert max(Counter(t.source for t in round_.transfers).values(), default=0) <= 1


def test_one_rank_exchanges_nothing():
    assert schedule_for("sharded", (range(8),)).rounds == ()


def test_an_unknown_exchange_is_refused_with_the_nearest_name():
    with pytest.raises(ConfigError, match=r"no exchange called 'shaded'. Did you mean 'sharded'\?"):
        schedule_for("shaded", (range(8),))
