"""A loop of one's own, whose model or update is split: the weights of one device, and of `lockstep.train`."""

import pytest
import torch

import lockstep
from lockstep.core.errors import ConfigError
from training.split_models import IMAGES, VECTORS, Skip, seeded, sequential

SPLITS = [
    {"devices": 2},
    {"split": "network=2"},
    {"split": "network=2", "pipeline": "gpipe", "stages": ["4"]},
    {"split": "data=2,network=2", "update": "sharded"},
    {"devices": 3, "update": "sharded"},
]
SLICED = [{"devices": 2}, {"split": "layers=2"}, {"split": "network=2,layers=2"}, {"split": "data=2,layers=2"}]
BATCHES = [(IMAGES[0][at : at + size], IMAGES[1][at : at + size]) for at, size in ((0, 12), (12, 11), (23, 7))]


def trainer(**settings):
    how = {"optimizer": "adamw", "lr": 0.01, "shards": 4, "clip_norm": 1.0, "ema": 0.5, "verify_every": 0, **settings}
    return lockstep.Trainer(seeded(sequential), example=BATCHES[0], **how)


def trained(**settings):
    """The hash, buffers and average after three steps, and what was said on the way."""
    with trainer(**settings) as found:
        losses = [found.step(batch).loss for batch in BATCHES]
        arrays = {**found.weights(), **{f"ema {name}": array for name, array in found.ema_weights().items()}}
        measured = found.evaluate([IMAGES])
        return found.weights_sha256, losses, measured, {name: array.tobytes() for name, array in arrays.items()}


@pytest.mark.parametrize(
    ("splits", "more"), [(SPLITS, {}), (SLICED, {"slices": 4})], ids=["network and update", "slices"]
)
def test_one_hash_for_every_split(splits, more):
    expected = trained(devices=1, **more)
    for split in splits:
        assert trained(**split, **more) == expected, split


@pytest.mark.parametrize("more", [{}, {"slices": 4}], ids=str)
def test_what_was_saved_with_one_split_continues_with_another(tmp_path, more):
    expected = trained(devices=1, **more)[0]
    with trainer(split="network=2", **more) as first:
        first.step(BATCHES[0])
        first.save(tmp_path / "saved")
    settings = {"split": "data=2", "update": "sharded", "verify_every": 0, "example": BATCHES[0]}
    with lockstep.Trainer.load(tmp_path / "saved", model=seeded(sequential), **settings) as second:
        second.step(BATCHES[1])
        second.save(tmp_path / "saved")
    settings = {"split": "layers=2" if more else "network=3", "verify_every": 0, "example": BATCHES[0]}
    with lockstep.Trainer.load(tmp_path / "saved", model=seeded(sequential), **settings) as third:
        third.step(BATCHES[2])
        assert third.weights_sha256 == expected


def test_the_trained_module_is_whole():
    with trainer(split="network=2") as found:
        found.step(BATCHES[0])
        module = found.trained_module()
    assert torch.isfinite(module.eval()(IMAGES[0])).all()


@pytest.mark.parametrize("split", [{"split": "network=2"}, {"devices": 2, "update": "sharded"}], ids=str)
def test_what_needs_the_whole_model_is_refused(split):
    with trainer(**split) as found:
        calls = [lambda: found.gradients(BATCHES[0]), lambda: found.apply(print), lambda: found.module]
        for call, name in zip(calls, ("gradients", "apply", "module"), strict=True):
            with pytest.raises(ConfigError, match=f"^Trainer.{name} needs the whole model, and its update, on every"):
                call()
        found.step(BATCHES[0])  # it goes on


@pytest.mark.parametrize("split", [{"split": "network=2"}, {"split": "layers=2"}, {"slices": 4}], ids=str)
def test_an_example_is_needed_to_know_shapes(split):
    with pytest.raises(ConfigError, match=r"give the Trainer a batch like those of your loop, example=\(inputs, "):
        lockstep.Trainer(seeded(Skip), **split)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"split": "network=2", "batch_norm": "sync"}, "--split network=2 does not go together with --batch-norm sync"),
        ({"devices": 2, "stages": "last"}, "--stages last names stages, and the network is not split"),
        ({"devices": 3, "split": "network=2"}, "--split network=2 is for 2 devices, and there are 3"),
        ({"split": "network=9"}, "A network that can be cut into 6 parts cannot have 9 stages"),
    ],
    ids=str,
)
def test_what_does_not_go_together_is_refused(settings, sentence):
    with pytest.raises(ConfigError) as refused:
        lockstep.Trainer(seeded(Skip), example=VECTORS, shards=16, **settings)
    assert str(refused.value).startswith(sentence)
