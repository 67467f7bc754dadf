"""The settings of a run: what cannot be is refused with the option to change."""

import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.config import MAX_SEED, MAX_SHARDS, RunConfig, check_batch, check_ranks
from lockstep.core.errors import ConfigError


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
        ("batch_size", 0, "A batch of 0 samples cannot be trained on. Use 1 or more (--batch-size)."),
        ("batch_size", -5, "A batch of -5 samples cannot be trained on. Use 1 or more (--batch-size)."),
        ("learning_rate", 0.0, "The learning rate 0.0 does not train. Use a positive number, like 0.2 (--lr)."),
        ("learning_rate", -0.1, "The learning rate -0.1 does not train. Use a positive number, like 0.2 (--lr)."),
        ("learning_rate", math.nan, "The learning rate nan does not train. Use a positive number, like 0.2 (--lr)."),
        ("learning_rate", math.inf, "The learning rate inf does not train. Use a positive number, like 0.2 (--lr)."),
        ("num_epochs", 0, "0 epochs leave nothing to do. Use 1 or more (--epochs)."),
        ("num_shards", 0, "A batch cannot be cut into 0 shards. Use 1 to 4096 (--shards)."),
        ("num_shards", 4097, "A batch cannot be cut into 4097 shards. Use 1 to 4096 (--shards)."),
        ("seed", -1, "The seed -1 is out of range. Use 0 to 4294967295 (--seed)."),
        ("seed", 2**32, "The seed 4294967296 is out of range. Use 0 to 4294967295 (--seed)."),
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
        with pytest.raises(ConfigError, match=rf"Use at most {num_shards} devices, or {num_ranks} shards \(--shards;"):
            check_ranks(num_ranks, num_shards)


@pytest.mark.parametrize(("num_shards", "shards"), [(1, "1 shard:"), (2, "2 shards:")])
def test_too_many_devices_are_refused_with_both_ways_out(num_shards, shards):
    with pytest.raises(ConfigError) as refused:
        check_ranks(3, num_shards)
    assert str(refused.value) == (
        f"3 devices cannot share {shards} some would never have work. "
        f"Use at most {num_shards} devices, or 3 shards (--shards; another run, with other bits)."
    )


@given(batch_size=st.integers(1, 20), num_samples=st.integers(1, 20))
def test_a_batch_is_at_most_as_large_as_the_data(batch_size, num_samples):
    if batch_size <= num_samples:
        check_batch(batch_size, num_samples, "mine.npz")
    else:
        with pytest.raises(ConfigError) as refused:
            check_batch(batch_size, num_samples, "mine.npz")
        assert str(refused.value) == (
            f"A batch of {batch_size} samples is larger than mine.npz, which has {num_samples} for training. "
            f"Use at most {num_samples} (--batch-size)."
        )


WHOLE = ("batch_size", "num_epochs", "num_shards", "seed")


@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize("wrong", [2.5, 2.0, "3", None, [3], np.float32(3)], ids=repr)
def test_what_is_no_whole_number_is_refused(name, wrong):
    with pytest.raises(ConfigError) as refused:
        RunConfig(**{name: wrong})
    assert str(refused.value) == f"{name} is {wrong!r}. It must be a whole number."


@pytest.mark.parametrize("wrong", ["fast", [0.2], 1j, 10**400], ids=["text", "list", "complex", "huge"])
def test_a_learning_rate_that_is_no_number_is_refused(wrong):
    with pytest.raises(ConfigError) as refused:
        RunConfig(learning_rate=wrong)
    assert str(refused.value) == f"The learning rate is {wrong!r}. It must be a number."


@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize("kind", [np.int64, np.uint8, np.int16])
def test_whole_numbers_of_numpy_become_plain_ones(name, kind):
    config = RunConfig(**{name: kind(3)})
    assert type(getattr(config, name)) is int
    assert config == RunConfig(**{name: 3})


@pytest.mark.parametrize("given", [1, np.float64(1), np.float32(1), np.int64(1)], ids=repr)
def test_the_learning_rate_becomes_a_plain_float(given):
    config = RunConfig(learning_rate=given)
    assert type(config.learning_rate) is float
    assert config.learning_rate == 1.0


def test_settings_from_numpy_are_recorded_as_json():
    config = RunConfig(batch_size=np.int64(8), learning_rate=np.float32(0.5), seed=np.uint32(7))
    recorded = json.loads(json.dumps(dataclasses.asdict(config)))
    assert (recorded["batch_size"], recorded["learning_rate"], recorded["seed"]) == (8, 0.5, 7)


def test_files_and_folders_of_data_mean_the_same_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = RunConfig(data="some/mine.npz", data_dir=Path("data"))
    assert config.data == str(tmp_path / "some" / "mine.npz")
    assert config.data_dir == tmp_path / "data"
    assert RunConfig(data_dir="data").data_dir == tmp_path / "data"
    monkeypatch.chdir("/")
    assert dataclasses.replace(config) == config


def test_a_named_data_set_stays_a_name_and_the_folder_to_record_in_stays_as_it_is_given():
    config = RunConfig(data="fashion-mnist-mini", out=Path("runs/one"))
    assert (config.data, config.out) == ("fashion-mnist-mini", Path("runs/one"))
