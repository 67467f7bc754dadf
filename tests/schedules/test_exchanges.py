"""What every exchange promises about its transfers; that they add up in the tree is proved in `test_proof.py`."""

from collections import Counter

import pytest

from lockstep.core.errors import ConfigError
from lockstep.partition.ranks import split_over_ranks
from lockstep.schedules.exchanges import collective_for
from lockstep.schedules.exchanges.collective import Collective, pipelined


def vectors_moved(collective: Collective, num_ranks: int):
    """For each rank, the vectors it sends and the vectors it receives."""
    sent, received = [0.0] * num_ranks, [0.0] * num_ranks
    for round_ in collective.rounds:
        for source, target, *_ in round_.transfers:
            sent[source] += 1 / collective.num_chunks
            received[target] += 1 / collective.num_chunks
    return sent, received


@pytest.mark.parametrize("num_ranks", [2, 4, 8, 16])
def test_sharded_moves_what_its_documentation_says_and_has_no_hub(num_ranks):
    sent, received = vectors_moved(collective_for("sharded", tuple(split_over_ranks(16, num_ranks))), num_ranks)
    assert sent == pytest.approx([2 * (num_ranks - 1) / num_ranks] * num_ranks)
    assert received == pytest.approx(sent)


@pytest.mark.parametrize("num_ranks", [2, 4, 8, 16])
def test_gather_goes_through_rank_0(num_ranks):
    sent, received = vectors_moved(collective_for("gather", tuple(split_over_ranks(16, num_ranks))), num_ranks)
    assert sent == [num_ranks - 1] + [1] * (num_ranks - 1)
    assert received == sent


@pytest.mark.parametrize("num_ranks", [2, 4, 8, 16])
def test_tree_needs_two_log_k_rounds(num_ranks):
    collective = collective_for("tree", tuple(split_over_ranks(16, num_ranks)))
    assert len(collective.rounds) == 2 * (num_ranks.bit_length() - 1)


@pytest.mark.parametrize("num_ranks", range(2, 9))
def test_ring_talks_to_the_right_neighbour_only(num_ranks):
    collective = collective_for("ring", tuple(split_over_ranks(16, num_ranks)))
    for round_ in collective.rounds:
        assert all(target == (source + 1) % num_ranks for source, target, *_ in round_.transfers)
        assert max(Counter(t.source for t in round_.transfers).values(), default=0) <= 1


def test_one_rank_exchanges_nothing():
    assert collective_for("sharded", (range(8),)).rounds == ()


def test_an_unknown_exchange_is_refused_with_the_nearest_name():
    with pytest.raises(ConfigError, match=r"no exchange called 'shaded'. Did you mean 'sharded'\?"):
        collective_for("shaded", (range(8),))


@pytest.mark.parametrize("num_buckets", [1, 2, 5])
@pytest.mark.parametrize("num_rounds", [0, 1, 4])
def test_rounds_of_a_bucket_come_in_order_and_at_most_two_buckets_are_ahead(num_buckets, num_rounds):
    order = pipelined(num_buckets, num_rounds)
    assert sorted(order) == [(bucket, round_) for bucket in range(num_buckets) for round_ in range(num_rounds + 1)]
    for bucket in range(num_buckets):
        assert [round_ for other, round_ in order if other == bucket] == list(range(num_rounds + 1))
    for position, (bucket, round_) in enumerate(order):
        begun = {other for other, _ in order[: position + 1]}
        assert max(begun) <= bucket + 2 * max(round_, 1)
