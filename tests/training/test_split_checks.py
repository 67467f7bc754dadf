"""What does not go together with a split is refused with a sentence, before anything is written."""

import random

import numpy as np
import pytest
import torch
from torch import nn

import lockstep
from lockstep.core.errors import ConfigError
from training.split_models import VECTORS, CalledTwice, Skip, seeded

DRAW = torch.rand  # as `from torch import rand` would


class Own(torch.optim.SGD):
    """An optimizer of one's own."""


def own_loss(output, y):
    return (output[torch.arange(len(y)), y] ** 2,)


def why_refused(tmp_path, **settings):
    how = {"model": seeded(Skip), "data": VECTORS, "epochs": 1, "batch_size": 20, "shards": 8, "quiet": True}
    with pytest.raises(ConfigError) as refused:
        lockstep.train(out=tmp_path / "run", **{**how, **settings})
    assert refused.value.exit_status == 2
    assert not (tmp_path / "run").exists()
    return str(refused.value)


NETWORK, LAYERS, SHARDED = (
    {"split": "network=2"},
    {"split": "layers=2", "slices": 4},
    {"devices": 2, "update": "sharded"},
)
TOGETHER = [
    (NETWORK, {"exchange": "ring"}, "--split network=2 does not go together with --exchange ring. Use sharded, gather"),
    (LAYERS, {"exchange": "ring"}, "--split layers=2 does not go together with --exchange ring. Use sharded, gather"),
    (SHARDED, {"exchange": "ring"}, "--update sharded does not go together with --exchange ring. Use sharded, gather"),
    (NETWORK, {"balance": "measured"}, "--split network=2 does not go together with --balance measured. Use equal"),
    (SHARDED, {"balance": "measured"}, "--update sharded does not go together with --balance measured. Use equal"),
    (NETWORK, {"batch_norm": "sync"}, "--split network=2 does not go together with --batch-norm sync. Use shard"),
    (LAYERS, {"batch_norm": "sync"}, "--split layers=2 does not go together with --batch-norm sync. Use shard"),
    ({"slices": 4, "devices": 2}, {"batch_norm": "sync"}, "--slices 4 does not go together with --batch-norm sync."),
    (NETWORK, {"compile": True}, "--split network=2 does not go together with --compile. Use no compilation"),
    ({"slices": 4, "devices": 1}, {"compile": True}, "--slices 4 does not go together with --compile."),
    (NETWORK, {"over": "batch", "loss": own_loss}, "--split network=2 does not go together with --over batch. Use a"),
    (
        SHARDED,
        {"heal": True, "engine": "processes"},
        "--update sharded does not go together with --heal with --engine processes. Use --engine inprocess",
    ),
]


@pytest.mark.parametrize(("split", "more", "sentence"), TOGETHER, ids=lambda value: str(value)[:40])
def test_settings_that_need_the_whole_model_on_every_device(tmp_path, split, more, sentence):
    found = why_refused(tmp_path, **split, **more)
    assert found.startswith(sentence)
    assert found.endswith(", or --split data.")


def test_stages_need_a_network_that_is_split(tmp_path):
    assert why_refused(tmp_path, devices=2, stages="middle") == (
        "--stages middle names stages, and the network is not split. Use --split network."
    )


def test_more_devices_than_slices(tmp_path):
    assert why_refused(tmp_path, split="layers=4", slices=3) == (
        "4 devices cannot share 3 slices of a layer: some would never have work. Use at most 3 devices for the layers, "
        "or more slices (--slices; other weights)."
    )


def test_a_loss_of_the_model_itself(tmp_path):
    class WithLoss(Skip):
        def loss(self, output, y):
            return nn.functional.cross_entropy(output, y, reduction="none")

    assert why_refused(tmp_path, model=seeded(WithLoss), loss="model", split="network=2") == (
        "A loss of the model itself (--loss model) needs the whole model. Use --split data."
    )


@pytest.mark.parametrize("split", [NETWORK, SHARDED, LAYERS], ids=str)
def test_an_optimizer_of_ones_own(tmp_path, split):
    assert why_refused(tmp_path, optimizer=lambda params: Own(params, 0.1), **split) == (
        "Own is an optimizer of your own, which may look at several parameters at once, so its parameters cannot be on "
        "several devices. Use one of torch.optim without them, or every device with the whole model and its update "
        "(--split data --update replicated)."
    )


@pytest.mark.parametrize("split", [NETWORK, SHARDED, LAYERS], ids=str)
def test_an_optimizer_that_needs_sparse_gradients(tmp_path, split):
    assert why_refused(tmp_path, optimizer=torch.optim.SparseAdam, **split) == (
        "The optimizer SparseAdam cannot be used: SparseAdam does not support dense gradients, please consider Adam "
        "instead. It gets a dense gradient for each parameter, and no closure that computes the model again. Use one "
        "that needs no more, like torch.optim.AdamW."
    )


def hooked(params):
    optimizer = torch.optim.SGD(params, 0.1)

    def clip(*args):
        nn.utils.clip_grad_norm_(params, 1.0)

    optimizer.register_step_pre_hook(clip)
    return optimizer


def patched(params):
    optimizer = torch.optim.SGD(params, 0.1)
    optimizer.step = lambda closure=None: None
    return optimizer


@pytest.mark.parametrize("optimizer", [hooked, patched])
def test_an_optimizer_with_a_hook_or_a_step_of_ones_own(tmp_path, optimizer):
    found = why_refused(tmp_path, optimizer=optimizer, **SHARDED)
    assert found.startswith("The optimizer SGD has hooks, or a step, of your own, which may look at several parameters")


def test_an_optimizer_that_is_made_from_values_of_parameters(tmp_path):
    def optimizer(params):
        return torch.optim.SGD([param for param in params if param.norm() > 0], 0.1)

    found = why_refused(tmp_path, optimizer=optimizer, **SHARDED)
    assert found.startswith("The function for the optimizer fails for parameters without values: ")
    assert "Let it look at names and shapes only, or every device with the whole model" in found


def test_another_number_of_devices(tmp_path):
    found = why_refused(tmp_path, devices=3, split="data=2,network=2")
    assert (
        found
        == "--split data=2,network=2 is for 4 devices, and there are 3. Use as many (--devices 4), or another --split."
    )


def test_a_module_that_cannot_be_cut(tmp_path):
    class Decides(nn.Sequential):
        def forward(self, X):
            return super().forward(X if X.sum() > 0 else -X)

    found = why_refused(tmp_path, model=lambda: Decides(nn.Linear(6, 8), nn.Linear(8, 3)), split="network=2")
    assert found.startswith("Decides cannot be cut into stages: its forward method cannot be traced (")


def test_a_layer_in_slices_that_two_stages_call(tmp_path):
    found = why_refused(tmp_path, model=seeded(CalledTwice), split="network=2", stages="middle", slices=4)
    assert found == (
        "The layer of again.weight is called in two stages, and is in slices (--slices): it cannot be in both. Name "
        "cut points that leave its calls in one stage (stages=[...]), or leave --slices out."
    )


def test_batch_norm_that_two_stages_call(tmp_path):
    class Shared(Skip):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(8)

        def forward(self, X):
            return self.last(self.norm(self.left(self.norm(self.first(X)).relu())))

    assert refused_network(tmp_path, seeded(Shared), stages="left", shards=2) == (
        "norm is used in two stages, and cannot be traced, as it would have to be. Name cut points that leave all its "
        "calls in one stage (stages=[...]), or split the data (--split data)."
    )


@pytest.mark.parametrize("stages", ["nonesuch", "fc2,fc1", "fc1,fc1"], ids=["unknown", "order", "twice"])
def test_layers_of_lenet_are_named(lockstep, few, tmp_path, stages):
    split = "network=2" if "," not in stages else "network=3"
    answer = lockstep("train", "--data", few, "--split", split, "--stages", stages, "--out", "run", "--batch-size", 20)
    assert answer.status == 2
    assert len(answer.err.strip().splitlines()) == 1
    assert not (tmp_path / "run").exists()


def refused_network(tmp_path, make, **settings):
    return why_refused(tmp_path, model=make, **{"split": "network=2", **settings})


def test_a_single_layer_cannot_be_cut(tmp_path):
    assert refused_network(tmp_path, lambda: nn.Linear(6, 3)) == (
        "Linear is one layer by itself, which cannot be cut into 2 stages. Split the layers or the data instead "
        "(--split layers, --split data)."
    )


@pytest.mark.parametrize(
    "context",
    [torch.no_grad, lambda: torch.autocast("cpu", torch.bfloat16), torch.inference_mode],
    ids=["no_grad", "autocast", "inference_mode"],
)
def test_a_setting_that_tracing_does_not_see(tmp_path, context):
    class Within(Skip):
        def forward(self, X):
            with context():
                hidden = self.first(X)
            return self.last(hidden.clone().relu().float())

    found = refused_network(tmp_path, seeded(Within), stages="last")
    assert found.startswith(
        "Within cannot be cut into stages: its forward method cannot be traced (first computes within "
        "torch.no_grad, autocast or the like, which stages would not: do that in a layer of its own)."
    )


@pytest.mark.parametrize(
    "draw", [random.random, np.random.rand, lambda: float(DRAW(1))], ids=["python", "numpy", "torch"]
)
def test_random_numbers_that_tracing_would_keep(tmp_path, draw):
    class Drops(Skip):
        def forward(self, X):
            return super().forward(X if draw() < 2 else -X)

    assert "(it draws random numbers which stages would not draw again: do that in a layer of" in refused_network(
        tmp_path, seeded(Drops), stages="last"
    )


def test_a_decision_by_a_random_number(tmp_path):
    class Drops(Skip):
        def forward(self, X):
            return super().forward(X if torch.rand(1) < 2 else -X)

    found = refused_network(tmp_path, seeded(Drops), stages="last")
    assert "cannot be traced (symbolically traced variables cannot be used as inputs to control flow)" in found


def test_a_tensor_from_elsewhere(tmp_path):
    ones = torch.ones(3)

    class Adds(Skip):
        def forward(self, X):
            return super().forward(X) + ones

    assert "(it uses a tensor that it has not made by a function of torch: make it a buffer)" in refused_network(
        tmp_path, seeded(Adds)
    )


def test_a_buffer_that_becomes_another_tensor(tmp_path):
    class Counts(Skip):
        def __init__(self):
            super().__init__()
            self.register_buffer("num_calls", torch.zeros((), dtype=torch.int64))

        def forward(self, X):
            self.num_calls += 1
            return super().forward(X)

    assert "(it gives the buffer num_calls another tensor: write to it in place, like add_(1))" in refused_network(
        tmp_path, seeded(Counts)
    )


@pytest.mark.parametrize(
    "register", ["register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook"]
)
def test_hooks_of_the_whole_model(tmp_path, register):
    def make():
        module = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
        getattr(module, register)(lambda *of_module: None)
        return module

    assert "(it has hooks, which stages would not call: register them at layers inside of it)" in refused_network(
        tmp_path, make
    )


def test_backward_hooks_of_what_is_cut(tmp_path):
    def make():
        inner = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8))
        inner.register_full_backward_hook(lambda *of_module: None)
        return nn.Sequential(inner, nn.ReLU(), nn.Linear(8, 3))

    assert "(0 has hooks, which stages would not call" in refused_network(tmp_path, make, stages="0.2")


def test_an_object_that_cannot_be_handed_over(tmp_path):
    class Pair:
        def __init__(self, X):
            self.hidden = X

    class First(nn.Linear):
        def forward(self, X):
            return Pair(super().forward(X))

    class Objects(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.middle, self.last = First(6, 8), nn.Linear(6, 8), nn.Linear(8, 3)

        def forward(self, X):
            pair, hidden = self.first(X), self.middle(X)
            return self.last(hidden + pair.hidden)

    assert refused_network(tmp_path, Objects, stages="middle") == (
        "Objects cannot be cut there: at first, a Pair crosses a cut between stages, and only tensors, numbers and "
        "plain tuples, lists and dicts of them can be handed to another device. Return one of these, or cut elsewhere "
        "(stages=[...])."
    )
