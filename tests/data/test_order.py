"""The order of samples: a permutation that depends on (seed, epoch) alone, the same in every version of numpy."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.core.random import keyed_random
from lockstep.data.order import sample_order

numbers = st.integers(0, 2**32 - 1)


@given(seed=numbers, epoch=numbers, num_samples=st.integers(0, 500))
def test_every_sample_comes_once(seed, epoch, num_samples):
    order = sample_order(seed, epoch, num_samples)
    assert order.dtype == np.int64
    assert sorted(order.tolist()) == list(range(num_samples))


@given(seed=numbers, epoch=numbers)
def test_the_order_depends_on_nothing_that_was_drawn_before(seed, epoch):
    first = sample_order(seed, epoch, 100)
    np.random.seed(7)
    sample_order(seed, epoch + 1 if epoch < 2**32 - 1 else 0, 1000)
    keyed_random(seed, epoch).rand(10)
    assert sample_order(seed, epoch, 100).tobytes() == first.tobytes()


def test_every_seed_and_epoch_has_an_order_of_its_own():
    orders = {sample_order(seed, epoch, 100).tobytes() for seed in range(10) for epoch in range(10)}
    assert len(orders) == 100


def test_the_global_generator_is_left_alone():
    np.random.seed(5)
    expected = np.random.rand()
    np.random.seed(5)
    sample_order(0, 0, 100)
    assert np.random.rand() == expected


@pytest.mark.parametrize(
    ("seed", "epoch", "first"),
    [
        (0, 0, [47227, 10317, 44756, 9653, 12207, 52529, 38246, 35142]),
        (0, 1, [1703, 45577, 31994, 36180, 22642, 17566, 48850, 12623]),
        (1, 0, [17821, 5339, 50069, 15991, 9695, 33295, 41800, 45981]),
        (2**32 - 1, 9, [7880, 52966, 41316, 50347, 22248, 56209, 15293, 5144]),
    ],
)
def test_the_order_of_a_whole_epoch_is_pinned(seed, epoch, first):
    assert sample_order(seed, epoch, 60_000)[:8].tolist() == first


def test_a_small_order_is_pinned():
    assert sample_order(0, 0, 10).tolist() == [8, 2, 4, 3, 6, 0, 9, 1, 5, 7]
