"""The one order in which gradients are ever added: a fixed binary tree over shard numbers.

A node is split after the largest power of two of its leaves, so nodes are the blocks of a binary counter:

    S = 8        ((0+1)+(2+3)) + ((4+5)+(6+7))
    S = 5        ((0+1)+(2+3)) + 4
    S = 3        (0+1)+2

Three things follow, and each is used:
- the tree is as flat as possible: ceil(log2 S) additions deep;
- the tree of n leaves is what is left of any larger tree when the leaves from n on are missing, so a batch with
  fewer samples than shards needs no rule of its own;
- going through the leaves in order and adding two nodes as soon as both are there keeps at most
  ceil(log2 S) + 1 vectors alive.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple, TypeVar

V = TypeVar("V")


class Node(NamedTuple):
    """The sum of `num_leaves` leaves from `first` on. A leaf has one; the total has S."""

    first: int
    num_leaves: int


def children(node: Node) -> tuple[Node, Node]:
    """The two nodes whose sum is `node`.

    >>> children(Node(0, 5))
    (Node(first=0, num_leaves=4), Node(first=4, num_leaves=1))
    """
    left = 1 << ((node.num_leaves - 1).bit_length() - 1)  # the largest power of two below num_leaves
    return Node(node.first, left), Node(node.first + left, node.num_leaves - left)


def sum_of(node: Node, leaf: Callable[[int], V], add: Callable[[V, V], V]) -> V:
    """The value of `node`, in the tree's order. A leaf is asked for just before it is needed.

    >>> sum_of(Node(0, 5), leaf=str, add=lambda a, b: f"({a}+{b})")
    '(((0+1)+(2+3))+4)'
    """
    if node.num_leaves == 1:
        return leaf(node.first)
    left, right = children(node)
    left_sum = sum_of(left, leaf, add)
    return add(left_sum, sum_of(right, leaf, add))


def sum_with_brackets(parts: Sequence[V], add: Callable[[V, V], V]) -> V:
    """The sum of `parts` in the brackets of a tree with as many leaves.

    >>> sum_with_brackets(["a", "b", "c"], add=lambda left, right: f"({left}+{right})")
    '((a+b)+c)'
    """
    return sum_of(Node(0, len(parts)), parts.__getitem__, add)


@cache
def brackets_of(num_parts: int) -> str:
    """The same sum as an expression of x0, x1, ..., for kernels that add several parts at once.

    >>> brackets_of(3)
    '((x0+x1)+x2)'
    """
    return sum_with_brackets([f"x{number}" for number in range(num_parts)], "({}+{})".format)


def left_of_last_leaf(node: Node) -> list[Node]:
    """The nodes that are added to the last leaf of `node`, in the order of the leaves: the last of them first.

    >>> left_of_last_leaf(Node(0, 7))
    [Node(first=0, num_leaves=4), Node(first=4, num_leaves=2)]
    """
    found = []
    while node.num_leaves > 1:
        left, node = children(node)
        found.append(left)
    return found


def maximal_nodes(shards: range, num_shards: int) -> list[Node]:
    """The largest nodes of the tree that lie within `shards`, in order: what one rank can add up alone.

    >>> maximal_nodes(range(3, 8), num_shards=8)
    [Node(first=3, num_leaves=1), Node(first=4, num_leaves=4)]
    """

    def within(node: Node) -> list[Node]:
        start, stop = node.first, node.first + node.num_leaves
        if shards.start <= start and stop <= shards.stop:
            return [node]
        if stop <= shards.start or shards.stop <= start:
            return []
        left, right = children(node)
        return within(left) + within(right)

    return within(Node(0, num_shards)) if shards else []


def missing_sums(known: set[Node], num_shards: int) -> list[Node]:
    """The nodes to add up, in order, to get from the `known` nodes to the total.

    >>> missing_sums({Node(0, 2), Node(2, 1), Node(3, 1)}, num_shards=4)
    [Node(first=2, num_leaves=2), Node(first=0, num_leaves=4)]
    """

    def above(node: Node) -> list[Node]:
        if node in known:
            return []
        left, right = children(node)
        return above(left) + above(right) + [node]

    return above(Node(0, num_shards))
