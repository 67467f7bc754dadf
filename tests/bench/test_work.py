"""What all contenders do: the same samples in the same order, and settings that are the same for all."""

from dataclasses import replace

import numpy as np
import pytest

from lockstep.bench.contenders import CONTENDERS, Contender, usual_contenders
from lockstep.bench.record import contenders_for, split_names
from lockstep.bench.work import MODELS, parse_settings, samples_of, work_for
from lockstep.config import RunConfig
from lockstep.data import load_dataset
from lockstep.data.order import sample_order
from lockstep.core.device import Device
from lockstep.core.errors import ConfigError

TWO = [Device("cpu:0"), Device("cpu:1")]


@pytest.mark.parametrize("model", MODELS)
def test_the_work_for_every_model_is_a_run_of_ours(model):
    work, _ = work_for(model, TWO, data="fashion-mnist-mini")
    config = work.config()
    assert isinstance(config, RunConfig)
    assert (config.devices, config.check_every, config.out) == ("cpu:0,cpu:1", 0, None)


def test_what_is_given_comes_before_what_is_usual():
    work, notes = work_for("resnet18", TWO, num_steps=7, batch_size=None, settings={"exchange": "tree"})
    assert (work.num_steps, work.batch_size, work.config().exchange) == (7, 64, "tree")
    assert "64" in notes[0]
    assert work_for("resnet18", TWO, batch_size=128)[1] == []
    assert work_for("resnet18", [Device("cuda:0")])[0].batch_size == 256


def test_a_model_for_every_framework_stays_in_float32():
    work, notes = work_for("lenet", TWO, "bf16")
    assert work.precision == "fp32"
    assert "fp32 only" in notes[0]
    assert work_for("transformer", TWO, "bf16")[0].precision == "bf16"


def test_samples_are_whole_batches_and_tokens_for_the_transformer():
    work, _ = work_for("lenet", TWO, data="fashion-mnist-mini")
    assert samples_of(work).X_train.shape == (1792, 1, 28, 28)
    tokens = samples_of(replace(work, model="transformer"))
    np.testing.assert_array_equal(tokens.X_train[:, 1:], tokens.y_train[:, :-1])
    np.testing.assert_array_equal(
        tokens.X_train[0], load_dataset("fashion-mnist-mini").X_train[0, 0, ::4, ::4].reshape(-1)[:-1]
    )


def test_the_parts_of_two_ranks_are_the_samples_of_our_own_batches():
    from lockstep.bench.contenders.feeds import SampleNumbers

    work, _ = work_for("lenet", TWO, batch_size=4)
    first, second = SampleNumbers(work, 8, range(2)), SampleNumbers(work, 8, range(2, 4))
    seen = [number for _ in range(4) for part in (first, second) for number in part.next_step().tolist()]
    assert seen == [*sample_order(0, 0, 8), *sample_order(0, 1, 8)]


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"model": "lenett"}, "There is no model to measure called 'lenett'. Did you mean 'lenet'?"),
        ({"num_steps": 0}, "A trial of 0 steps measures nothing."),
        ({"batch_size": 7}, "A batch of 7 samples cannot be cut into 2 equal parts"),
        ({"precision": "fp99", "model": "mlp"}, "There is no precision called 'fp99'."),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(given, sentence):
    with pytest.raises(ConfigError) as refused:
        work_for(**{"model": "lenet", "devices": TWO, **given})
    assert sentence in str(refused.value)


@pytest.mark.parametrize("entry", ["nonsense", "nonsense=1", "batch_size=3", "engine=processes"])
def test_settings_that_a_contender_cannot_have_are_refused(entry):
    with pytest.raises(ConfigError, match=f"--set {entry}: "):
        parse_settings([entry])


def test_lists_of_names():
    assert split_names("ddp, text,,ddp") == ["ddp", "text"]
    assert contenders_for("ddp,text", 2, False) == ["lockstep", "text", "ddp"]
    with pytest.raises(ConfigError, match="There is no contender called 'dpp'"):
        contenders_for("dpp", 2, False)


def test_who_is_measured_depends_on_the_devices():
    assert "lockstep-1-device" in usual_contenders(2, False)
    assert "lockstep-1-device" not in usual_contenders(1, True)
    assert "lockstep-1-shard" in usual_contenders(1, True)
    assert "lockstep-1-shard" not in usual_contenders(2, False)


def test_a_package_that_is_missing_is_said_with_the_way_to_get_it():
    assert Contender("x:x", "", ("surely_not_there",)).problem() == "not installed: pip install 'lockstep[bench]'"
    assert Contender("x:x", "", ("surely_not_there", "numpy")).problem() == ""
    assert CONTENDERS["ddp"].problem() == ""
