"""The settings of a run: what cannot be is refused with the option to change."""

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.config import MAX_SEED, MAX_SHARDS, RunConfig, check_ranks
from lockstep.errors import ConfigError


def test_the_settings_that_a_run_has_unless_told_otherwise_are_those_of_the_text():
    config = RunConfig()
    assert (config.model, config.data, config.batch_size, config.learning_rate, config.num_epochs) == (
        "lenet",
        "fashion-mnist",
        256,
        0.2,
        10,
    )
    assert (config.num_shards, config.seed, config.backend, config.exchange) == (8, 0, "torch", "sharded")
    assert (config.devices, config.data_dir, config.out) == (None, None, None)


def test_equal_settings_are_equal_and_frozen():
    assert RunConfig(seed=1) == RunConfig(seed=1) != RunConfig(seed=2)
    with pytest.raises(dataclasses.FrozenInstanceError):
        RunConfig().seed = 1


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("batch_size", 0, "A batch of 0 samples cannot be trained on. Use --batch-size 1 or more."),
        ("batch_size", -5, "A batch of -5 samples cannot be trained on. Use --batch-size 1 or more."),
        ("learning_rate", 0.0, "The learning rate 0.0 does not train. Use a positive number: --lr 0.2."),
        ("learning_rate", -0.1, "The learning rate -0.1 does not train. Use a positive number: --lr 0.2."),
        ("learning_rate", math.nan, "The learning rate nan does not train. Use a positive number: --lr 0.2."),
        ("learning_rate", math.inf, "The learning rate inf does not train. Use a positive number: --lr 0.2."),
        ("num_epochs", 0, "0 epochs leave nothing to do. Use --epochs 1 or more."),
        ("num_shards", 0, "A batch cannot be cut into 0 shards. Use --shards 1 to 4096."),
        ("num_shards", 4097, "A batch cannot be cut into 4097 shards. Use --shards 1 to 4096."),
        ("seed", -1, "The seed -1 is out of range. Use --seed 0 to 4294967295."),
        ("seed", 2**32, "The seed 4294967296 is out of range. Use --seed 0 to 4294967295."),
    ],
)
def test_what_cannot_be_is_refused_with_the_value_and_the_option(name, value, sentence):
    with pytest.raises(ConfigError) as refused:
        RunConfig(**{name: value})
    assert str(refused.value) == sentence
    assert refused.value.exit_status == 2


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("batch_size", 1),
        ("learning_rate", 5e-324),
        ("num_epochs", 1),
        ("num_shards", 1),
        ("num_shards", MAX_SHARDS),
        ("seed", MAX_SEED),
    ],
)
def test_the_last_value_that_can_be_is_good(name, value):
    assert getattr(RunConfig(**{name: value}), name) == value


def test_a_replaced_record_is_checked_again():
    with pytest.raises(ConfigError):
        dataclasses.replace(RunConfig(), num_epochs=0)


@given(num_ranks=st.integers(1, 20), num_shards=st.integers(1, 20))
def test_there_are_at_most_as_many_devices_as_shards(num_ranks, num_shards):
    if num_ranks <= num_shards:
        check_ranks(num_ranks, num_shards)
    else:
        with pytest.raises(ConfigError, match=f"--shards {num_ranks} "):
            check_ranks(num_ranks, num_shards)


@pytest.mark.parametrize(("num_shards", "shards"), [(1, "1 shard:"), (2, "2 shards:")])
def test_too_many_devices_are_refused_with_both_ways_out(num_shards, shards):
    with pytest.raises(ConfigError) as refused:
        check_ranks(3, num_shards)
    assert str(refused.value).startswith(f"3 devices cannot share {shards} some would never have work.")
    assert f"Use at most {num_shards} devices, or --shards 3" in str(refused.value)


@pytest.mark.parametrize("wrong", [{"batch_size": 2.5}, {"num_epochs": "3"}, {"seed": None}, {"learning_rate": "fast"}])
def test_a_setting_of_another_type_is_refused(wrong):
    with pytest.raises(ConfigError, match=r"must be a (whole )?number"):
        RunConfig(**wrong)
