"""`--split auto`: the whole model where it fits, else the fewest stages that do; the same weights in any case."""

import pytest

import lockstep as package
from lockstep.config import RunConfig
from lockstep.core.errors import ConfigError
from lockstep.partition.chain import Chain, NamedChain
from lockstep.partition.grid import Grid
from lockstep.training import auto_split
from lockstep.training.auto_split import choose, with_split
from lockstep.training.task import UserObjects

FOUR = NamedChain(["a", "b", "c", "d"], Chain([1.0] * 4, (), [1000.0] * 4))  # 16 bytes of memory an entry


def chosen(num_devices, limit, found=FOUR, **settings):
    return choose(RunConfig(batch_size=8, **settings), UserObjects(), found, num_devices, limit)


@pytest.mark.parametrize(
    ("num_devices", "limit", "grid", "starts"),
    [
        (4, 64_000, Grid(4), None),
        (4, 32_000, Grid(2, 2), [2]),
        (4, 16_000, Grid(1, 4), [1, 2, 3]),
        (4, 100, Grid(1, 4), [1, 2, 3]),  # nothing fits: the most that can be done
        (3, 32_000, Grid(1, 3), [1, 2]),
        (1, 100, Grid(1), None),
    ],
)
def test_as_few_stages_as_fit(num_devices, limit, grid, starts):
    found, cuts = chosen(num_devices, limit)
    assert found == grid
    assert (None if cuts is None else cuts.starts) == starts


def test_fewer_shards_than_devices_need_stages():
    assert chosen(4, 1e9, num_shards=2)[0] == Grid(2, 2)
    with pytest.raises(ConfigError, match="8 devices cannot share 1 shard"):
        chosen(8, 1e9, num_shards=1)


def test_what_does_not_go_together_with_stages_keeps_the_model_whole():
    assert chosen(4, 16_000, batch_norm="sync")[0] == Grid(4)


def test_a_network_that_cannot_be_cut_stays_whole():
    assert chosen(4, 1, found=NamedChain([], Chain([])))[0] == Grid(4)


@pytest.mark.parametrize(("limit", "split"), [(1e12, "data=2"), (1.2e6, "network=2")])
def test_the_weights_are_those_of_one_device(few, monkeypatch, limit, split):
    monkeypatch.setattr(auto_split, "memory_limit", lambda devices: limit)
    settings = {"data": str(few), "batch_size": 8, "epochs": 1, "quiet": True}
    assert with_split(RunConfig(devices=2, data=str(few), batch_size=8, split="auto"), None)[0].split == split
    one, two = (package.train(**settings, devices=k, split=s) for k, s in ((1, "data"), (2, "auto")))
    assert one.weights_sha256 == two.weights_sha256


def test_the_user_is_told_when_nothing_fits(few, monkeypatch, lockstep):
    how = ("train", "--devices", 2, "--data", few, "--batch-size", 8, "--split", "auto", "--epochs", 1)
    assert "no split fits" not in lockstep(*how, "--dry-run").out
    monkeypatch.setattr(auto_split, "memory_limit", lambda devices: 10_000)
    for answer in (lockstep(*how, "--dry-run"), lockstep(*how)):
        assert answer.status == 0, answer.err
        said = " ".join((answer.out + answer.err).split())
        assert "no split fits. network=2 needs least, about" in said
        assert "which has 10 kB" in said


def test_stages_cannot_be_named_as_well(few):
    config = RunConfig(devices=2, data=str(few), split="auto", stages="conv2")
    with pytest.raises(ConfigError, match="--split auto finds the stages itself"):
        with_split(config, None)


def test_elsewhere_a_split_has_to_be_named():
    with pytest.raises(ConfigError, match="--split auto is chosen when a run starts"):
        package.compare(devices=1, split="auto", data="fashion-mnist-mini", epochs=1, quiet=True)
