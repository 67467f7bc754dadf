"""The arguments of `lockstep.train`: each setting once, by any of its names."""

import inspect
import traceback
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


@pytest.mark.parametrize(
    ("wrong", "meant"), [("epoch", "epochs"), ("learning_rat", "learning_rate"), ("on_epochs", "on_epoch")]
)
def test_an_unknown_keyword_is_a_type_error_with_the_nearest_name(wrong, meant):
    with pytest.raises(TypeError, match=rf"^unexpected keyword argument '{wrong}'\. Did you mean '{meant}'\? See help"):
        lockstep.train(data="fashion-mnist-mini", **{wrong: 1})


def test_a_keyword_that_is_near_to_none_gets_the_list_of_what_python_takes():
    with pytest.raises(
        TypeError, match=r"'xyzzy'\. There are: num_gpus, batch_size, lr, num_epochs, resume, .*metrics"
    ):
        lockstep.train(data="fashion-mnist-mini", xyzzy=1)


@pytest.mark.parametrize("wrong", [{"data": "fashion-mnist-min"}, {"model": "lenett"}, {"epoch": 1}, {"batch_size": 0}])
def test_a_wrong_setting_has_a_short_traceback(wrong):
    with pytest.raises((ConfigError, TypeError)) as refused:
        lockstep.train(quiet=True, **{"data": "fashion-mnist-mini", **wrong})
    shown = traceback.format_exception(refused.value)
    assert "During handling" not in "".join(shown)
    assert len(traceback.extract_tb(refused.value.__traceback__)) <= 2  # this test, and `train`


def test_an_error_in_a_function_of_the_users_keeps_its_own_traceback():
    def broken():
        return 1 / 0

    with pytest.raises(ConfigError) as refused:
        lockstep.train(data="fashion-mnist-mini", model=broken, quiet=True)
    assert "return 1 / 0" in "".join(traceback.format_exception(refused.value))


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
