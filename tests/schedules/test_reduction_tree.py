"""The fixed tree."""

import itertools
import math

import pytest

from lockstep.schedules.reduction_tree import Node, children, maximal_nodes, missing_sums, sum_of


def written_out(num_leaves: int) -> str:
    return sum_of(Node(0, num_leaves), leaf=str, add=lambda a, b: f"({a}+{b})")


def test_the_tree_is_the_one_in_the_documentation():
    assert written_out(1) == "0"
    assert written_out(3) == "((0+1)+2)"
    assert written_out(5) == "(((0+1)+(2+3))+4)"
    assert written_out(8) == "(((0+1)+(2+3))+((4+5)+(6+7)))"


@pytest.mark.parametrize("num_leaves", range(1, 65))
def test_the_tree_is_as_flat_as_can_be(num_leaves):
    depth = sum_of(Node(0, num_leaves), leaf=lambda _: 0, add=lambda a, b: 1 + max(a, b))
    assert depth == math.ceil(math.log2(num_leaves))


@pytest.mark.parametrize("num_leaves", range(1, 33))
def test_the_tree_of_fewer_leaves_is_what_is_left_of_a_larger_one(num_leaves):
    def add(a, b):
        return a if b is None else (a, b)

    def leaf(i):
        return i if i < num_leaves else None

    alone = sum_of(Node(0, num_leaves), leaf=lambda i: i, add=add)
    for larger in range(num_leaves, 65):
        assert sum_of(Node(0, larger), leaf, add) == alone


@pytest.mark.parametrize("num_leaves", range(1, 65))
def test_few_vectors_are_alive_at_a_time(num_leaves):
    alive, most = 0, 0

    def leaf(_):
        nonlocal alive, most
        alive += 1
        most = max(most, alive)

    def add(_a, _b):
        nonlocal alive
        alive -= 1

    sum_of(Node(0, num_leaves), leaf, add)
    assert most <= math.ceil(math.log2(num_leaves)) + 1


@pytest.mark.parametrize("num_shards", [1, 2, 5, 8, 13, 64])
def test_maximal_nodes_cover_a_range_and_cannot_be_joined(num_shards):
    tree_pairs = set()

    def collect(node):
        if node.num_leaves > 1:
            left, right = children(node)
            tree_pairs.add((left, right))
            collect(left)
            collect(right)

    collect(Node(0, num_shards))
    for start in range(num_shards + 1):
        for stop in range(start, num_shards + 1):
            nodes = maximal_nodes(range(start, stop), num_shards)
            covered = [leaf for node in nodes for leaf in range(node.first, node.first + node.num_leaves)]
            assert covered == list(range(start, stop))
            assert not any(pair in tree_pairs for pair in itertools.pairwise(nodes))


def test_missing_sums_complete_the_tree_in_order():
    known = {Node(0, 2), Node(2, 1), Node(3, 1), Node(4, 4)}
    assert missing_sums(known, 8) == [Node(2, 2), Node(0, 4), Node(0, 8)]
    assert missing_sums({Node(0, 8)}, 8) == []
