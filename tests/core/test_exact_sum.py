"""Partial sums have exactly the sum of the numbers."""

import math

from hypothesis import given
from hypothesis import strategies as st

from lockstep.core.exact_sum import partial_sums

NUMBERS = st.lists(st.floats(-1e200, 1e200), max_size=60)


@given(NUMBERS, NUMBERS)
def test_a_sum_can_be_continued_and_is_rounded_once(first, second):
    assert math.fsum(partial_sums(first) + second) == math.fsum(first + second)
    assert math.fsum(partial_sums(partial_sums(first) + second)) == math.fsum(first + second)


def test_many_numbers_are_a_few():
    assert len(partial_sums(0.1 * number for number in range(100_000))) < 40
