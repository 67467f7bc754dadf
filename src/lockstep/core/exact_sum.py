"""Sums of many numbers that are rounded once, like `math.fsum`, and can be continued."""

from collections.abc import Iterable


def partial_sums(numbers: Iterable[float]) -> list[float]:
    """A few numbers whose exact sum is that of all these finite ones (Shewchuk 1997).

    >>> import math
    >>> many = [1e16, 1.0, -1e16, 0.1] * 1000
    >>> len(partial_sums(many)) < 5, math.fsum(partial_sums(many)) == math.fsum(many)
    (True, True)
    """
    sums: list[float] = []
    for number in numbers:
        kept = 0
        for other in sums:
            larger, smaller = (number, other) if abs(number) >= abs(other) else (other, number)
            number = larger + smaller
            lost = smaller - (number - larger)  # by rounding
            if lost:
                sums[kept] = lost
                kept += 1
        sums[kept:] = [number]
    return sums
