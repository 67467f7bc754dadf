"""One hash of weights and buffers, and the same metrics, however data, network, layers and update are split."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset

import lockstep
from training.split_models import GRAPHS, IMAGES, VECTORS, Residual, seeded, sequential

ADAMW = {"optimizer": "adamw", "lr": 0.01}
CLIPPED = {"momentum": 0.9, "clip_norm": 0.05, "lr": 0.05}
TOKENS = torch.randint(9, (30, 7), generator=torch.Generator().manual_seed(1))


def own(make, data, **how):
    return {"model": seeded(make), "data": (data, data), **how}


@pytest.fixture(scope="module")
def cases(few):
    images = {"data": few, "batch_size": 20}
    return {
        "sequential": own(sequential, IMAGES, **ADAMW),
        "sequential, clipped": own(sequential, IMAGES, **CLIPPED),
        "residual": own(Residual, IMAGES, **ADAMW),
        "residual, clipped": own(Residual, IMAGES, **CLIPPED),
        "lenet": {"model": "lenet", **images, "lr": 0.2},
        "lenet, clipped": {"model": "lenet", **images, **CLIPPED},
        "lenet-bn": {"model": "lenet-bn", **images, **ADAMW},
        "mlp": {"model": "mlp", **images, **CLIPPED},
        "transformer": {"model": "transformer", "data": ((TOKENS[:, :-1], TOKENS[:, 1:]),) * 2, **ADAMW},
        **{name: own(make, VECTORS, **CLIPPED) for name, make in GRAPHS.items()},
    }


DAILY = {"batch_size": 28, "epochs": 2, "shards": 4, "quiet": True, "verify_every": 3, "checkpoint_every": 0}
ALONE: dict = {}


def trained(case, **how):
    how = {**DAILY, **case, **how}
    if "split" in how and "=" in how["split"]:
        how.pop("devices", None)
    return lockstep.train(**how)


def summary(result):
    """What has to be equal."""
    epochs = [(done.train_loss, done.test_accuracy, done.metrics) for done in result.history]
    return result.weights_sha256, result.buffers_sha256, epochs, list(result.params), result.steps


def differing(cases, name, splits, **how):
    """Those of the splits that end with anything else than one device does."""
    key = (name, tuple(sorted(how.items())))
    if key not in ALONE:
        ALONE[key] = summary(trained(cases[name], devices=1, **how))
    return [split for split in splits if summary(trained(cases[name], **split, **how)) != ALONE[key]]


NETWORK = [{"split": "network=2"}, {"split": "network=3", "pipeline": "gpipe"}]
UPDATE = [{"devices": 2, "update": "sharded"}, {"devices": 3, "update": "sharded", "exchange": "tree"}]
PRODUCTS = [{"split": "data=2,network=2"}, {"split": "data=2,network=2", "update": "sharded", "pipeline": "gpipe"}]
MODELS = [
    "sequential", "sequential, clipped", "residual", "residual, clipped", "lenet", "lenet, clipped", "lenet-bn", "mlp",
    "transformer",
]  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("splits", [NETWORK, UPDATE, PRODUCTS], ids=["network", "update", "products"])
def test_one_hash_for_every_split(cases, name, splits):
    assert not differing(cases, name, splits)


@pytest.mark.parametrize("name", ["sequential, clipped", "lenet, clipped", "transformer"])
def test_four_stages(cases, name):
    assert not differing(cases, name, [{"split": "network=4", "pipeline": order} for order in ("1f1b", "gpipe")])


@pytest.mark.parametrize("name", ["sequential", "lenet"])
def test_batches_of_a_few_samples_and_fewer_shards_than_stages(cases, name):
    splits = [{"split": "network=3"}, {"split": "data=2,network=2"}, {"devices": 3, "update": "sharded"}]
    assert not differing(cases, name, splits, batch_size=7, epochs=1)
    assert not differing(cases, name, [{"split": "network=3"}], shards=1, epochs=1)


@pytest.mark.parametrize("name", ["skip", "lenet, clipped"])
def test_a_batch_of_one_sample(cases, name):
    """All ranks but those of the first data rank have no shard."""
    splits = [{"split": "data=2,network=2", "update": update} for update in ("replicated", "sharded")]
    assert not differing(cases, name, [*splits, {"split": "network=2"}], batch_size=1, epochs=1)


@pytest.mark.parametrize("name", GRAPHS)
def test_graphs_that_are_harder_to_cut(cases, name):
    """Skip connections, several tensors, tied weights, layers that are called twice, writes in place."""
    splits = [{"split": "network=2"}, {"split": "network=3", "pipeline": "gpipe"}, {"split": "data=2,network=2"}]
    assert not differing(cases, name, splits)


# --- slices: other bits, and the same for every split

LAYERS = [{"split": "layers=2"}, {"split": "layers=4"}]
WITH_SLICES = [
    {"devices": 2},
    {"split": "data=2,layers=2", "update": "sharded"},
    {"split": "network=2"},
    {"split": "network=2,layers=2", "pipeline": "gpipe"},
]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("splits", [LAYERS, WITH_SLICES], ids=["layers", "products"])
def test_one_hash_for_every_split_with_the_same_slices(cases, name, splits):
    assert not differing(cases, name, splits, slices=4, epochs=1)


@pytest.mark.parametrize("name", GRAPHS)
def test_graphs_that_are_harder_to_cut_in_slices(cases, name):
    splits = [{"split": "layers=2"}, {"split": "network=2"}, {"split": "network=2,layers=2"}]
    if name == "called twice":  # its layer in slices cannot be in two stages: refused
        splits = [{"split": "layers=2"}, {"split": "network=2", "stages": "last"}]
    assert not differing(cases, name, splits, slices=4, epochs=1)


def test_a_layer_of_fewer_units_than_slices_has_fewer_of_them(cases):
    splits = [{"split": "layers=2"}, {"split": "layers=5"}, {"split": "layers"} | {"devices": 7}]
    assert not differing(cases, "skip", splits, slices=7, epochs=1, shards=8)


def test_the_slices_are_part_of_the_run(cases):
    hashes = {trained(cases["residual"], devices=1, slices=n, epochs=1).weights_sha256 for n in (None, 2, 3)}
    assert len(hashes) == 3
    default = trained(cases["skip"], split="layers=2", epochs=1)
    assert default.weights_sha256 == trained(cases["skip"], devices=1, slices=8, epochs=1).weights_sha256


def test_parameters_have_their_own_names_and_shapes_after_training_in_slices(cases):
    result = trained(cases["sequential"], split="network=2,layers=2", slices=4, epochs=1)
    expected = sequential().state_dict()
    found = {**result.params, **result.buffers}
    assert {name: array.shape for name, array in found.items()} == {n: tuple(t.shape) for n, t in expected.items()}
    for name, tensor in result.module.state_dict().items():
        assert torch.equal(tensor, torch.from_numpy(found[name]).to(tensor.dtype).reshape(tensor.shape))


# --- one at a time, against what the parts are said to be


def test_the_update_and_the_stages_share_out_memory(cases):
    def memory(**how):
        return trained(cases["mlp"] | {"momentum": 0.9}, epochs=1, **how).device_memory

    (whole,) = memory(devices=1)
    for two in (memory(split="network=2"), memory(split="layers=2", slices=4)):
        for kind in ("parameters", "gradient", "optimizer"):
            assert sum(of_rank[kind] for of_rank in two) == pytest.approx(whole[kind], rel=0.01), kind
            assert max(of_rank[kind] for of_rank in two) < 0.95 * whole[kind], kind
    sharded = memory(devices=4, update="sharded")
    assert {of_rank["parameters"] for of_rank in sharded} == {whole["parameters"]}
    assert sum(of_rank["optimizer"] for of_rank in sharded) == whole["optimizer"]


class TwoInputs(nn.Module):
    """Takes two tensors, by position or by name, and gives several."""

    def __init__(self):
        super().__init__()
        self.left, self.right, self.last = nn.Linear(6, 8), nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x, z):
        hidden = self.left(x).relu() * self.right(z)
        return {"hidden": hidden, "scores": self.last(hidden)}


@pytest.mark.parametrize("by_name", [False, True])
def test_several_inputs_and_outputs(by_name):
    X, y = VECTORS
    inputs = {"x": X, "z": X.flip(0)} if by_name else (X, X.flip(0))

    def loss(output, y):
        losses = F.cross_entropy(output["scores"], y, reduction="none") + output["hidden"].square().mean(1)
        return losses.sum(), (y >= 0).sum()

    case = own(TwoInputs, (inputs, y), loss=loss)
    expected = summary(trained(case, devices=1))
    for split in ("network=2", "network=3", "data=2,network=2"):
        assert summary(trained(case, split=split)) == expected, split
    assert summary(trained(case, devices=1, slices=4)) == summary(trained(case, split="layers=2", slices=4))


class Noise(nn.Module):
    """Draws random numbers between layers, also in eval mode."""

    def __init__(self):
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, X):
        hidden = self.first(X)
        hidden = self.middle(hidden + 0.1 * torch.randn_like(hidden))
        return self.last(hidden * torch.bernoulli(torch.full_like(hidden, 0.5)))


def test_random_numbers_continue_in_the_next_stage():
    case = own(Noise, VECTORS)
    expected = summary(trained(case, devices=1))
    for split in ("network=2", "network=3", "data=2,network=2"):
        assert summary(trained(case, split=split)) == expected, split


@pytest.mark.parametrize("more", [{}, {"slices": 4}], ids=["whole", "slices"])
def test_bfloat16(cases, more):
    splits = [{"split": "layers=2"}] if more else [{"devices": 2, "update": "sharded"}]
    assert not differing(cases, "sequential", [{"split": "network=2"}, *splits], precision="bf16", epochs=1, **more)


class Squares(Dataset):
    """A map-style dataset."""

    def __init__(self, num_samples):
        self.num_samples = num_samples

    def __len__(self):
        return self.num_samples

    def __getitem__(self, index):
        return VECTORS[0][index], VECTORS[1][index]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_dataset_that_is_loaded_sample_by_sample(cases, workers):
    case = cases["skip"] | {"data": (Squares(30), Squares(10))}
    expected = summary(trained(case, devices=1, workers=0))
    for split in ({"split": "network=2"}, {"split": "data=2,network=2"}, {"devices": 2, "update": "sharded"}):
        assert summary(trained(case, workers=workers, **split)) == expected


def test_metrics_of_ones_own_and_of_all_samples_together(cases):
    def sum_of_all(outputs, targets):
        return float(outputs.sum())

    metrics = {"squared": lambda output, y: (output**2).mean(1), "sum": lockstep.WholeSetMetric(sum_of_all)}
    case = cases["skip"] | {"metrics": metrics}
    expected = trained(case, devices=1).metrics
    assert set(expected) >= {"squared", "sum"}
    for split in ("network=2", "data=2,network=2", "data=2"):
        assert trained(case, split=split).metrics == expected


def test_callbacks_see_the_whole_model(cases):
    seen = []

    def on_epoch(state):
        seen.append((state.epoch, sorted(state.weights()), state.evaluate()))

    result = trained(cases["skip"], split="network=2", on_epoch=on_epoch)
    assert [epoch for epoch, _, _ in seen] == [1, 2]
    assert seen[-1][1] == sorted(result.params)
    assert seen[-1][2]["accuracy"] == result.test_accuracy


def test_a_moving_average_of_the_weights(cases):
    expected = trained(cases["sequential"], devices=1, ema=0.5, epochs=1).ema
    assert expected
    for split in ({"split": "network=2"}, {"devices": 2, "update": "sharded"}):
        found = trained(cases["sequential"], ema=0.5, epochs=1, **split).ema
        assert list(found) == list(expected)
        assert all((found[name] == expected[name]).all() for name in expected), split


def test_a_scheduler_and_an_optimizer_with_groups_of_ones_own(cases):
    def optimizer(params):
        return torch.optim.RMSprop([{"params": params[:3], "lr": 0.01}, {"params": params[3:]}], lr=0.001)

    case = {name: value for name, value in cases["skip"].items() if name not in ("momentum", "lr")}
    case |= {"optimizer": optimizer, "scheduler": lambda found: torch.optim.lr_scheduler.ExponentialLR(found, 0.9)}
    expected = summary(trained(case, devices=1))
    for split in ({"devices": 2, "update": "sharded"}, {"devices": 3, "update": "sharded"}):
        assert summary(trained(case, **split)) == expected


@pytest.mark.parametrize("name", ["Adagrad", "Adafactor", "RAdam"])
def test_optimizers_of_pytorch(cases, name):
    case = {setting: value for setting, value in cases["skip"].items() if setting not in ("momentum", "lr")}
    case |= {"optimizer": lambda params: getattr(torch.optim, name)(params, lr=0.01), "epochs": 1}
    expected = summary(trained(case, devices=1))
    for split in ({"split": "network=2"}, {"devices": 2, "update": "sharded"}):
        assert summary(trained(case, **split)) == expected


@pytest.mark.parametrize("split", ["network=2", "data=2", "layers=2"])
def test_a_state_that_is_there_from_the_start_is_shared_out(cases, split):
    case = {setting: value for setting, value in cases["mlp"].items() if setting not in ("momentum", "lr")}
    case |= {"optimizer": lambda params: torch.optim.Adagrad(params, lr=0.01), "epochs": 1, "slices": 4}
    (whole,) = trained(case, devices=1).device_memory
    found = [rank["optimizer"] for rank in trained(case, split=split, update="sharded").device_memory]
    assert sum(found) == pytest.approx(whole["optimizer"], rel=0.01)


@pytest.mark.parametrize("split", [{"devices": 1}, {"split": "network=2"}, {"split": "layers=2"}], ids=str)
def test_a_slice_has_a_name_by_which_it_can_be_put_into_a_group(cases, split):
    seen = []

    def optimizer(named_parameters):
        biases = [param for name, param in named_parameters if name.endswith("bias")]
        rest = [param for name, param in named_parameters if name.endswith("weight")]
        seen.append((len(biases), len(rest), len(named_parameters)))
        return torch.optim.SGD([{"params": biases, "weight_decay": 0.0}, {"params": rest}], lr=0.1, weight_decay=0.1)

    case = {setting: value for setting, value in cases["skip"].items() if setting not in ("momentum", "lr")}
    trained(case | {"optimizer": optimizer, "epochs": 1}, slices=4, **split)
    assert seen
    assert all(num_biases == num_weights == num / 2 for num_biases, num_weights, num in seen)


def test_an_error_in_a_stage_names_its_rank(cases):
    class Fails(nn.Module):
        def forward(self, X):
            if X.requires_grad:
                raise ValueError("no more")
            return X

    def make():
        return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), Fails(), nn.Linear(8, 3))

    with pytest.raises(lockstep.LockstepError, match=r"rank 1 \(cpu:1\), during forward and backward: .*no more"):
        trained(own(make, VECTORS), split="network=2", stages="2")


def test_a_tensor_that_shares_memory_across_a_cut_is_not_written_to():
    class Writes(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.middle, self.last = nn.Linear(6, 8), nn.Linear(6, 8), nn.Linear(8, 3)

        def forward(self, X):
            hidden = self.first(X) * 1
            part = hidden[:, :4]
            again = self.middle(X)
            part.mul_(2)
            return self.last(hidden + again)

    case = own(Writes, VECTORS)
    assert trained(case, split="network=2", stages="last").weights_sha256 == trained(case, devices=1).weights_sha256
    with pytest.raises(lockstep.LockstepError, match="writes to a tensor in place that shares its memory with another"):
        trained(case, split="network=2", stages="middle")


class OwnStatistics(nn.Module):
    """Keeps a running mean of its own, which is read where the output is made; `last` may write to it as well."""

    def __init__(self, last_writes=False):
        super().__init__()
        self.register_buffer("mean", torch.zeros(6))
        self.first, self.middle, self.last = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.last_writes = last_writes

    def forward(self, X):
        self.mean.mul_(0.9).add_(X.detach().mean(0) * 0.1)
        hidden = self.middle(torch.relu(self.first(X)))
        output = self.last(hidden)
        if self.last_writes:
            self.mean.add_(1)
        return output + self.mean.sum() * torch.arange(3)


class ReadsNormStatistics(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.first, self.middle, self.last = nn.BatchNorm1d(6), *OwnStatistics().children()

    def forward(self, X):
        hidden = self.middle(torch.relu(self.first(self.norm(X))))
        return self.last(hidden) + self.norm.running_mean.sum() * torch.arange(3)


@pytest.mark.parametrize("model", [OwnStatistics, ReadsNormStatistics])
@pytest.mark.parametrize("order", ["1f1b", "gpipe"])
def test_a_buffer_crosses_a_cut_with_the_value_that_the_shard_has_given_it(model, order):
    case = own(model, VECTORS, batch_size=15)
    whole = trained(case, devices=1, shards=4)
    for stages in ("last", "middle,last"):
        places = len(stages.split(",")) + 1
        for _ in range(3):  # the first stage is already at the next shard, sometimes
            cut = trained(case, split=f"network={places}", stages=stages, pipeline=order, shards=4)
            assert (cut.weights_sha256, cut.buffers_sha256) == (whole.weights_sha256, whole.buffers_sha256)


@pytest.mark.parametrize("stages", ["last", "middle,last"])
def test_a_buffer_of_an_earlier_stage_is_not_written_to(stages):
    case = own(lambda: OwnStatistics(last_writes=True), VECTORS)
    with pytest.raises(lockstep.LockstepError, match=r"writes to a tensor in place that .* is a buffer"):
        trained(case, split=f"network={len(stages.split(',')) + 1}", stages=stages)


def test_a_batch_of_one_shard_goes_there_and_back_with_a_sharded_update():
    def make():
        return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.Linear(8, 3))

    X, y = VECTORS[0][:21], VECTORS[1][:21]  # the last batch has one sample
    case = own(make, (X, y), batch_size=10)
    there_and_back = {"split": "data=2,network=2", "stages": "2,4"}
    hashes = [trained(case, **how).weights_sha256 for how in ({"devices": 1}, there_and_back)]
    hashes += [trained(case, **there_and_back, update="sharded").weights_sha256]
    assert len(set(hashes)) == 1


# --- ranks that are processes

SOME = [{"split": "network=2"}, {"split": "layers=2"}, {"devices": 2, "update": "sharded"}]


@pytest.mark.parametrize("split", SOME, ids=str)
def test_ranks_may_be_processes(cases, split):
    slices = {"slices": 4} if "layers" in split.get("split", "") else {}
    assert not differing(cases, "sequential, clipped", [{"engine": "processes", **split}], epochs=1, **slices)


PROCESSES = [
    *({"split": f"network={n}", "pipeline": order} for n in (2, 3) for order in ("1f1b", "gpipe")),
    {"split": "data=2,network=2"},
    {"split": "data=2,network=2", "update": "sharded"},
    {"devices": 3, "update": "sharded"},
]


@pytest.mark.long
@pytest.mark.parametrize("name", [*MODELS, *GRAPHS])
def test_ranks_may_be_processes_for_every_model(cases, name):
    assert not differing(cases, name, [{"engine": "processes", **split} for split in PROCESSES])
    sliced = [split for split in (*LAYERS, *WITH_SLICES) if name != "called twice" or "network" not in str(split)]
    assert not differing(cases, name, [{"engine": "processes", **split} for split in sliced], slices=4, epochs=1)


@pytest.mark.long
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("batch_size", [20, 7])
@pytest.mark.parametrize("order", ["1f1b", "gpipe"])
def test_every_cell(cases, name, batch_size, order):
    splits = [{"split": f"data={n}", "update": update} for n in (2, 3, 4) for update in ("replicated", "sharded")]
    splits += [{"split": f"network={n}"} for n in (2, 3, 4)]
    splits += [{"split": "data=2,network=2", "update": update} for update in ("replicated", "sharded")]
    assert not differing(
        cases, name, [{"pipeline": order, **split} for split in splits], batch_size=batch_size, shards=8
    )
