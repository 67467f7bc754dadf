"""The slices of a layer, on symbols: every slice once, and the same brackets on every rank."""

import pytest

from lockstep.parallel.tensor import layer_shares
from lockstep.schedules.reduction_tree import Node, sum_of


def brackets(start, stop):
    """The tree of some slices, from its definition: the left side is the largest power of two that leaves a rest."""
    if stop - start == 1:
        return start
    left = 1
    while 2 * left < stop - start:
        left *= 2
    return brackets(start, start + left), brackets(start + left, stop)


def pair(left, right):
    return left, right


@pytest.mark.parametrize("num_slices", [*range(1, 9), 13, 16, 31])
@pytest.mark.parametrize("num_ranks", range(1, 9))
def test_every_rank_ends_with_the_tree_over_all_slices(num_slices, num_ranks):
    shares = layer_shares(num_slices, num_ranks)
    assert len(shares) == num_ranks
    assert [at for share in shares for at in share.slices] == list(range(num_slices))
    assert max(len(share.slices) for share in shares) - min(len(share.slices) for share in shares) <= 1
    sent = {}
    for share in shares:
        for node in share.nodes:  # what a rank can add from its own slices
            assert set(range(node.first, node.first + node.num_leaves)) <= set(share.slices)
            assert node not in sent
            sent[node] = sum_of(node, leaf=lambda at: at, add=pair)
    for share in shares:
        held = dict(sent)
        for node, left, right in share.sums:
            held[node] = held[left], held[right]
        assert held[Node(0, num_slices)] == brackets(0, num_slices)
        used = {side for _, *sides in share.sums for side in sides}
        assert set(sent) <= used | {Node(0, num_slices)}, "nothing is sent that nobody needs"


def test_more_ranks_than_slices_leave_the_last_ones_without():
    assert [list(share.slices) for share in layer_shares(2, 4)] == [[0], [1], [], []]
    assert layer_shares(2, 4)[3].nodes == ()
