"""Where a module is cut, what its stages hold, and the sentences where it cannot be cut."""

from itertools import pairwise

import pytest
import torch
from torch import nn

import lockstep
from lockstep.core.errors import ConfigError
from lockstep.replicas.stage_module import StageModule
from lockstep.replicas.stages import cut_module, find_stages
from training.split_models import (
    IMAGES,
    VECTORS,
    CalledTwice,
    Deciding,
    InPlace,
    Residual,
    RootDropout,
    Skip,
    Tied,
    Unused,
    seeded,
    sequential,
)


def stages_of(module, starts):
    cut = cut_module(module, starts)
    return [StageModule(seeded_copy(module), cut, stage) for stage in range(len(starts) + 1)]


def seeded_copy(module):
    copy = type(module)() if type(module) is not nn.Sequential else sequential()
    copy.load_state_dict(module.state_dict())
    return copy.train(module.training)


def through(stages, X):
    for stage in stages[:-1]:
        X = stage(*X) if isinstance(X, tuple) else stage(X)
    return stages[-1](*X) if isinstance(X, tuple) else stages[-1](X)


CUTS = [
    (sequential, IMAGES, ["1", "7"]),
    (sequential, IMAGES, ["0.1", "2"]),
    (Residual, IMAGES, ["blocks.1", "blocks.2"]),
    (Residual, IMAGES, ["blocks.0.norm2", "head"]),
    (Skip, VECTORS, ["right", "last"]),
    (Skip, VECTORS, ["left", "right", "middle", "last"]),
    (Skip, VECTORS, ["middle", "last"]),
    (Skip, VECTORS, ["middle", "last", "short"]),
    (Tied, VECTORS, ["middle"]),
    (CalledTwice, VECTORS, ["middle"]),
    (CalledTwice, VECTORS, ["again", "last"]),
    (Unused, VECTORS, ["middle", "last"]),
    (RootDropout, VECTORS, ["middle", "last"]),
    (InPlace, VECTORS, ["middle"]),
]


@pytest.mark.parametrize(("make", "data", "starts"), CUTS, ids=lambda value: getattr(value, "__name__", None))
@pytest.mark.parametrize("is_training", [True, False])
def test_stages_one_after_the_other_are_the_module(make, data, starts, is_training):
    module = seeded(make)().train(is_training)
    stages, copy = [stage.train(is_training) for stage in stages_of(module, starts)], seeded_copy(module)
    torch.manual_seed(1)
    expected = copy(data[0])
    torch.manual_seed(1)
    assert torch.equal(through(stages, data[0]), expected)


@pytest.mark.parametrize(("make", "data", "starts"), CUTS, ids=lambda value: getattr(value, "__name__", None))
def test_every_parameter_and_buffer_is_in_one_stage_under_its_own_name(make, data, starts):
    module = seeded(make)()
    stages = stages_of(module, starts)
    for kind in ("named_parameters", "named_buffers"):
        names = [name for stage in stages for name, _ in getattr(stage, kind)()]
        assert sorted(names) == sorted(name for name, _ in getattr(module, kind)())


def test_a_graph_in_eval_mode_has_no_dropout():
    first, *_ = stages_of(seeded(RootDropout)(), ["middle", "last"])
    X = VECTORS[0]
    assert torch.equal(first.eval()(X)[0], first.eval()(X)[0])
    assert not torch.equal(first.train()(X)[0], first.train()(X)[0])


def test_what_a_later_stage_needs_crosses_every_cut():
    stages = stages_of(seeded(Skip)(), ["left", "right", "middle", "last"])
    assert [len(stage(*X)) for stage, X in crossing(stages[:-1])] == [1, 2, 2, 2]


def crossing(stages):
    X = (VECTORS[0],)
    for stage in stages:
        yield stage, X
        X = stage(*X)


def test_stages_of_equal_cost_are_found_and_are_the_same_each_time():
    module = nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(512, 512), nn.ReLU())))
    found = find_stages(module, 3, None, torch.zeros(4, 512))
    assert found == find_stages(module, 3, None, torch.zeros(4, 512))
    bounds = [0, *map(int, found.starts), 12]
    in_stages = [module[start:stop] for start, stop in pairwise(bounds)]
    assert [sum(isinstance(layer, nn.Linear) for layer in stage) for stage in in_stages] == [2, 2, 2]
    assert found.places == (0, 1, 2)


def test_blocks_are_opened_where_there_are_few_layers():
    starts = find_stages(Residual(), 4, None, IMAGES[0]).starts
    assert len(starts) >= 3
    assert any(name.count(".") > 1 for name in starts)


# --- sentences

SENTENCES = [
    (Skip, 2, ["nonesuch"], r"There is no layer called 'nonesuch' to begin a stage with\. There are: first, left, .*"),
    (Skip, 3, ["last", "left"], r"The stages last, left do not come in this order in the network: give them in .*"),
    (Skip, 3, ["left", "left"], r".*left"),
    (Skip, 2, ["first"], r".*first"),
    (Skip, 2, ["left", "right", "last"], r"2 devices have 1 cuts between their stages, and 3 layers are named\. .*"),
    (Unused, 2, ["never"], r"The forward method does not call never, so no stage can begin with it\. Name other .*"),
    (
        Deciding,
        2,
        None,
        r"Deciding cannot be cut into stages: its forward method cannot be traced \(.*control flow.*\)\. A cut has to "
        r"lie between layers .*Name other cut points \(stages=\[\.\.\.\]\), or split the data instead \(--split data\)",
    ),
    (lambda: nn.Sequential(nn.Linear(6, 3)), 2, None, r"A network that can be cut into 1 part cannot have 2 stages.*"),
]


@pytest.mark.parametrize(("make", "num_stages", "names", "sentence"), SENTENCES, ids=range(len(SENTENCES)))
def test_what_cannot_be_cut_is_refused_with_a_sentence(make, num_stages, names, sentence):
    with pytest.raises(ConfigError, match=f"^{sentence}") as refused:
        find_stages(make(), num_stages, names, VECTORS[0])
    assert refused.value.exit_status == 2
    assert str(refused.value).endswith((".", "..."))


def test_named_stages_are_used_and_said(vectors, capsys):
    hashes = set()
    for how in ({"devices": 1}, {"split": "network=2", "stages": "middle"}, {"split": "network=2", "stages": "last"}):
        result = lockstep.train(
            model=seeded(Skip), data=vectors, batch_size=20, epochs=1, shards=4, checkpoint_every=0, **how
        )
        hashes.add(result.weights_sha256)
    assert len(hashes) == 1
    shown = capsys.readouterr()
    assert "The network is cut before middle." in shown.out + shown.err
    assert "The network is cut before last." in shown.out + shown.err


def test_stages_may_go_through_all_devices_and_back(vectors):
    how = {"model": seeded(Skip), "data": vectors, "batch_size": 20, "epochs": 1, "shards": 4, "quiet": True}
    expected = lockstep.train(devices=1, checkpoint_every=0, **how)
    for order in ("1f1b", "gpipe"):
        for split in ("network=2", "data=2,network=2"):
            found = lockstep.train(split=split, stages="right,last", pipeline=order, checkpoint_every=0, **how)
            assert found.weights_sha256 == expected.weights_sha256


def test_fewer_shards_than_stages_says_what_it_costs(vectors, capsys):
    lockstep.train(
        model=seeded(Skip), data=vectors, split="network=3", shards=2, epochs=1, batch_size=20, checkpoint_every=0
    )
    shown = capsys.readouterr()
    assert "2 shards cannot keep 3 stages busy: they are idle for 50 % of the time." in shown.out + shown.err


class Masked(nn.Module):
    """Reads a buffer that belongs to no layer."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("mask", torch.ones(4), persistent=False)

    def forward(self, X):
        return self.last(self.first(X) * self.mask)


def test_a_stage_that_has_moved_reads_its_buffers_where_they_are_now():
    module = Masked()
    stage = StageModule(module, cut_module(module, ["last"]), 0).to("meta")
    assert stage.mask.is_meta
    (moved,) = stage(torch.ones(2, 4, device="meta"))
    assert moved.is_meta
