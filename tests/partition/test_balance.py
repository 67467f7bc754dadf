"""Shares by measured time: faster ranks get more shards, the bits do not change."""

import threading
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import lockstep
from lockstep.partition.balance import WINDOW, Balance, MeasuredBalance, balance_for, shares
from lockstep.partition.ranks import split_over_ranks


@given(st.integers(1, 64), st.lists(st.floats(1e-4, 1e4), min_size=1, max_size=8))
def test_every_shard_has_one_rank_and_every_rank_a_shard_if_there_are_enough(num_shards, times):
    counts = shares(num_shards, times)
    assert sum(counts) == num_shards
    assert min(counts) >= (1 if num_shards >= len(times) else 0)


@given(st.integers(1, 12), st.lists(st.floats(0.1, 10), min_size=2, max_size=2))
def test_no_other_share_of_two_ranks_is_done_earlier(num_shards, times):
    def longest(counts):
        return max(count * time for count, time in zip(counts, times, strict=True))

    others = [[first, num_shards - first] for first in range(1, num_shards)]
    assert all(longest(shares(num_shards, times)) <= longest(other) * (1 + 1e-9) for other in others)


def lengths(balance, num_shards, num_ranks):
    return [len(own) for own in balance.ranges(num_shards, num_ranks)]


def test_shares_are_equal_until_enough_was_measured_and_then_follow_the_speed():
    balance = MeasuredBalance()
    for _ in range(WINDOW):
        assert lengths(balance, 16, 2) == [8, 8]
        balance.record_times(balance.ranges(16, 2), [8.0, 16.0])
    assert lengths(balance, 16, 2) == [11, 5]
    assert lengths(balance, 3, 2) == [2, 1], "a short batch"


def test_shares_move_again_when_a_rank_slows_down_and_when_it_recovers():
    balance, speeds = MeasuredBalance(), [1.0, 1.0]

    def train(num_steps):
        for _ in range(num_steps):
            ranges = balance.ranges(16, 2)
            balance.record_times(ranges, [len(own) * time for own, time in zip(ranges, speeds, strict=True)])
        return lengths(balance, 16, 2)

    assert train(10) == [8, 8]
    speeds[0] = 3.0
    assert train(10) == [4, 12]
    speeds[0] = 1.0
    assert train(10) == [8, 8]


def test_one_disturbed_step_and_small_differences_move_nothing():
    balance = MeasuredBalance()
    for step in range(20):
        ranges = balance.ranges(8, 2)
        balance.record_times(ranges, [40.0 if step == 10 else 4.0, 4.1])
        assert lengths(balance, 8, 2) == [4, 4]


def test_another_number_of_ranks_begins_anew():
    balance = MeasuredBalance()
    for _ in range(WINDOW):
        balance.record_times(balance.ranges(8, 2), [1.0, 3.0])
    assert lengths(balance, 8, 2) == [6, 2]
    assert lengths(balance, 8, 3) == [3, 3, 2]


def test_names():
    assert type(balance_for("equal")) is Balance
    assert type(balance_for("measured")) is MeasuredBalance
    assert list(balance_for("equal").ranges(8, 3)) == split_over_ranks(8, 3)


class Slow(nn.Linear):
    """Slower on the second device; counts the shards of each."""

    seen = {}  # noqa: RUF012

    def forward(self, X):
        if self.training:
            name = threading.current_thread().name
            self.seen[name] = self.seen.get(name, 0) + 1
            time.sleep(0.004 if name.endswith("-1") else 0.001)
        return super().forward(X)


@pytest.mark.parametrize("balance", ["equal", "measured"])
def test_a_slow_device_gets_fewer_shards_and_the_bits_stay(balance):
    torch.manual_seed(0)
    data = torch.rand(480, 6), torch.randint(3, (480,))
    model = Slow(6, 3)
    Slow.seen = {}
    how = {"model": model, "data": data, "batch_size": 16, "shards": 16, "epochs": 1, "quiet": True}
    result = lockstep.train(devices=2, balance=balance, verify_every=0, **how)
    first, second = Slow.seen["lockstep-rank-0"], Slow.seen["lockstep-rank-1"]
    assert first + second == 480
    assert (first == second) if balance == "equal" else (second < 0.75 * first)
    assert result.weights_sha256 == lockstep.train(devices=1, **how).weights_sha256
