"""Batches into shards, shards to ranks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.core.errors import ConfigError
from lockstep.partition.batch import even_ranges, split_into_shards
from lockstep.partition.ranks import split_over_ranks

counts = st.integers(1, 300)


@given(num_samples=st.integers(0, 1000), num_parts=counts)
def test_part_sizes_differ_by_at_most_one_larger_first_and_lose_nothing(num_samples, num_parts):
    sizes = [len(part) for part in even_ranges(num_samples, num_parts)]
    assert sum(sizes) == num_samples
    assert len(sizes) == num_parts
    assert sizes == sorted(sizes, reverse=True)
    assert max(sizes) - min(sizes) <= 1


@given(num_samples=counts, num_shards=counts)
def test_shards_are_contiguous_and_never_empty(num_samples, num_shards):
    shards = split_into_shards(num_samples, num_shards)
    assert len(shards) == min(num_samples, num_shards)
    assert [sample for shard in shards for sample in shard] == list(range(num_samples))
    assert all(len(shard) > 0 for shard in shards)


@given(num_shards=counts, num_ranks=counts)
def test_each_shard_has_one_rank(num_shards, num_ranks):
    ranges = split_over_ranks(num_shards, num_ranks)
    assert len(ranges) == num_ranks
    assert [shard for shards in ranges for shard in shards] == list(range(num_shards))


def test_no_parts_are_refused():
    with pytest.raises(ConfigError, match="cannot be cut into 0 parts"):
        even_ranges(10, 0)
