"""The arguments of `lockstep.train`: each setting once, by any of its names."""

import inspect
from pathlib import Path

import pytest

import lockstep
from lockstep.config import RunConfig, settings_in
from lockstep.core.errors import ConfigError
from lockstep.core.settings import option_of


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"epochs": 5, "num_epochs": 10}, "num_epochs and epochs"),
        ({"epochs": 10, "num_epochs": 10}, "num_epochs and epochs"),
        ({"num_gpus": 2, "devices": 2}, "num_gpus and devices"),
        ({"num_gpus": 2, "devices": ["cpu:0", "cpu:1"]}, "num_gpus and devices"),
        ({"shards": 8, "num_shards": 8}, "shards and num_shards"),
        ({"lr": 0.1, "learning_rate": 0.1}, "lr and learning_rate"),
    ],
)
def test_a_setting_by_two_names_is_refused(settings, names):
    with pytest.raises(ConfigError, match=rf"^train got both {names}\. Give it one of them\.$"):
        lockstep.train(data="fashion-mnist-mini", quiet=True, **settings)


def test_none_leaves_a_setting_to_its_other_name(few):
    how = {"data": few, "batch_size": 4, "quiet": True}
    result = lockstep.train(2, devices=None, epochs=1, num_epochs=None, shards=None, num_shards=4, lr=None, **how)
    assert result.devices == ["cpu:0", "cpu:1"]
    assert len(result.history) == 1
    assert result.weights_sha256 == lockstep.train(1, num_epochs=1, num_shards=4, **how).weights_sha256


def test_an_unknown_keyword_is_a_type_error_that_lists_the_settings():
    with pytest.raises(
        TypeError, match=r"unexpected keyword argument 'epoch'\. There are: devices, batch_size, lr, epo"
    ):
        lockstep.train(data="fashion-mnist-mini", epoch=1)


@pytest.mark.parametrize("name", ["model", "data", "loss", "optimizer"])
def test_none_is_refused_with_what_is_allowed(name):
    with pytest.raises(ConfigError, match=rf"^The {name} is None\. Leave it out for the default, or give a name, "):
        lockstep.train(**{"data": "fashion-mnist-mini", "quiet": True, name: None})


def test_other_settings_that_cannot_be_none_are_refused():
    for name in ("seed", "schedule", "exchange", "batch_norm", "timeout"):
        with pytest.raises(ConfigError, match=r"must be .*, got None"):
            lockstep.train(**{"data": "fashion-mnist-mini", "quiet": True, name: None})


def test_the_signature_has_every_setting_with_its_default():
    parameters = inspect.signature(lockstep.train).parameters
    assert list(parameters)[:4] == ["num_gpus", "batch_size", "lr", "num_epochs"]
    for each in settings_in():
        if option_of(each) not in ("batch_size", "lr"):
            assert parameters[option_of(each)].default == each.default
    assert {"scheduler", "metrics", "resume", "quiet"} <= set(parameters)


def test_paths_may_be_given_as_path_or_text(few, tmp_path):
    how = {"batch_size": 8, "epochs": 1, "devices": 1, "quiet": True}
    results = [lockstep.train(data=kind(few), out=kind(tmp_path / kind.__name__), **how) for kind in (str, Path)]
    assert results[0].weights_sha256 == results[1].weights_sha256
    assert [result.run for result in results] == [tmp_path / "str", tmp_path / Path.__name__]
    assert RunConfig(data=few).data == str(few)
