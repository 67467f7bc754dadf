"""A cost that was measured for a few sizes, for any size."""

from bisect import bisect_left
from collections.abc import Iterable
from typing import NamedTuple


class Curve(NamedTuple):
    """Straight lines between measured points; beyond them, the line through the two that are nearest.

    >>> curve_of([(10, 2.0), (20, 3.0)]).at(40)
    5.0
    >>> curve_of([(10, 2.0)]).at(40)
    8.0
    """

    points: tuple[tuple[float, float], ...]  # size and cost, by size

    def at(self, size: float) -> float:
        """The cost for a size, never less than nothing. One point: it grows with the size."""
        if size <= 0 or not self.points:
            return 0.0
        if len(self.points) == 1:
            ((known, cost),) = self.points
            return cost * size / known if known else cost
        sizes = [known for known, _ in self.points]
        right = min(max(bisect_left(sizes, size), 1), len(sizes) - 1)
        (x0, y0), (x1, y1) = self.points[right - 1 : right + 1]
        slope = (y1 - y0) / (x1 - x0)
        if size > sizes[-1]:
            slope = max(slope, 0.0)
        found = y0 + (size - x0) * slope
        if size < sizes[0]:  # a line that is steeper than through the origin would end below zero
            return max(found, self.points[0][1] * size / sizes[0])
        return max(found, 0.0)

    def nearest(self, size: float) -> float:
        """The size itself; beyond those that were measured, the last of them."""
        return min(max(size, self.points[0][0]), self.points[-1][0])

    def within(self, size: float) -> float:
        """The cost for a size; beyond those that were measured, that of the last of them."""
        return self.at(self.nearest(size))

    @property
    def fixed(self) -> float:
        """The part of the cost that does not grow with the size."""
        if len(self.points) < 2:
            return 0.0
        (x0, y0), (x1, y1) = self.points[0], self.points[-1]
        return min(max(0.0, y0 - x0 * (y1 - y0) / (x1 - x0)), y0)

    def scaled(self, factor: float) -> "Curve":
        """The same curve, so many times as high."""
        return Curve(tuple((size, cost * factor) for size, cost in self.points))


def curve_of(points: Iterable[tuple[float, float]]) -> Curve:
    """The curve through these points; of several for one size, the last counts."""
    return Curve(tuple(sorted(dict(points).items())))


def sum_of_curves(curves: Iterable[Curve]) -> Curve:
    """The sum of curves, at all sizes where one of them was measured."""
    found = list(curves)
    sizes = sorted({size for curve in found for size, _ in curve.points})
    return Curve(tuple((size, sum(curve.at(size) for curve in found)) for size in sizes))


def lower(one: Curve, other: Curve) -> Curve:
    """The lower of two curves, where both were measured; what one of them has alone stays."""
    known = dict(other.points)
    return curve_of([*other.points, *((size, min(cost, known.get(size, cost))) for size, cost in one.points)])
