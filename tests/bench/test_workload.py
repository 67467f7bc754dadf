"""The workload of all contenders: the same samples in the same order, and the same settings."""

from dataclasses import replace
from itertools import islice

import numpy as np
import pytest

from lockstep.bench.workload import MODELS, load_samples, parse_settings, workload_for
from lockstep.config import RunConfig
from lockstep.core.device import Device
from lockstep.core.errors import ConfigError
from lockstep.data import load_dataset
from lockstep.data.order import sample_order

TWO = [Device("cpu:0"), Device("cpu:1")]


@pytest.mark.parametrize("model", MODELS)
def test_the_workload_of_every_model_is_a_valid_run(model):
    workload, _ = workload_for(model, TWO, data="fashion-mnist-mini")
    config = workload.config()
    assert isinstance(config, RunConfig)
    assert (config.devices, config.check_every, config.out) == ("cpu:0,cpu:1", 0, None)


def test_overrides_replace_defaults():
    workload, notes = workload_for("resnet18", TWO, num_steps=7, batch_size=None, settings={"exchange": "tree"})
    assert (workload.num_steps, workload.batch_size, workload.config().exchange) == (7, 64, "tree")
    assert "64" in notes[0]
    assert workload_for("resnet18", TWO, batch_size=128)[1] == []
    assert workload_for("resnet18", [Device("cuda:0")])[0].batch_size == 256


def test_a_model_for_every_framework_is_measured_in_fp32():
    workload, notes = workload_for("lenet", TWO, "bf16")
    assert workload.precision == "fp32"
    assert "fp32 only" in notes[0]
    assert workload_for("transformer", TWO, "bf16")[0].precision == "bf16"


def test_samples_are_full_batches_and_tokens_for_the_transformer():
    workload, _ = workload_for("lenet", TWO, data="fashion-mnist-mini")
    assert load_samples(workload).X_train.shape == (1792, 1, 28, 28)
    tokens = load_samples(replace(workload, model="transformer"))
    np.testing.assert_array_equal(tokens.X_train[:, 1:], tokens.y_train[:, :-1])
    np.testing.assert_array_equal(
        tokens.X_train[0], load_dataset("fashion-mnist-mini").X_train[0, 0, ::4, ::4].reshape(-1)[:-1]
    )


def test_the_parts_of_two_ranks_are_the_batches_of_our_own_run():
    from lockstep.bench.contenders.batches import sample_indices

    workload, _ = workload_for("lenet", TWO, batch_size=4)
    steps = zip(sample_indices(workload, 8, range(2)), sample_indices(workload, 8, range(2, 4)), strict=True)
    seen = [index for parts in islice(steps, 4) for part in parts for index in part.tolist()]
    assert seen == [*sample_order(0, 0, 8), *sample_order(0, 1, 8)]


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        ({"model": "lenett"}, "There is no model to measure called 'lenett'. Did you mean 'lenet'?"),
        ({"num_steps": 0}, "A trial of 0 steps measures nothing."),
        ({"batch_size": 7}, "A batch of 7 samples cannot be cut into 2 equal parts"),
        ({"precision": "fp99", "model": "mlp"}, "precision must be bf16, fp32 or tf32, got 'fp99' (--precision)."),
    ],
)
def test_an_invalid_workload_is_refused(overrides, sentence):
    with pytest.raises(ConfigError) as error:
        workload_for(**{"model": "lenet", "devices": TWO, **overrides})
    assert sentence in str(error.value)


@pytest.mark.parametrize("entry", ["nonsense", "nonsense=1", "batch_size=3", "engine=processes"])
def test_settings_that_must_be_the_same_for_all_are_refused(entry):
    with pytest.raises(ConfigError, match=f"--set {entry}: "):
        parse_settings([entry])
