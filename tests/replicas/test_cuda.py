"""Modules on a GPU: the same bits on one and on several logical devices, precision, memory."""

import gc

import pytest
import torch
from torch import nn

import lockstep
from lockstep.backends.torch.kernels.hopper import can_replace
from lockstep.core.errors import OutOfMemory, RankError
from lockstep.models.lenet_bn import LeNetBN
from lockstep.models.resnet18 import ResNet18
from lockstep.models.transformer import Transformer
from lockstep.replicas.module_capture import CapturableModuleReplica

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU is visible on this machine"),
]
DEVICES = ["cuda:0", "cuda:0,cuda:0", "cuda:0,cuda:0,cuda:0"]


class Gru(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.gru = nn.Embedding(30, 16), nn.GRU(16, 24, batch_first=True)
        self.drop, self.out = nn.Dropout(0.2), nn.Linear(24, 5)

    def forward(self, X):
        return self.out(self.drop(self.gru(self.embed(X))[0][:, -1]))


def images(num_samples):
    torch.manual_seed(7)
    return torch.rand(num_samples, 1, 28, 28), torch.randint(10, (num_samples,))


def tokens(num_samples, next_ones):
    torch.manual_seed(8)
    X = torch.randint(30, (num_samples, 12))
    return X, X.roll(-1, 1) if next_ones else torch.randint(5, (num_samples,))


CASES = {
    "lenet-bn": (LeNetBN, images(197)),
    "resnet18": (lambda: ResNet18(in_channels=1), images(197)),
    "transformer": (lambda: Transformer(30, 12, dropout=0.2), tokens(197, True)),
    "gru": (Gru, tokens(197, False)),
}


@pytest.mark.parametrize(
    "settings", [{}, {"precision": "bf16"}, {"batch_norm": "sync"}, {"optimizer": "adamw"}], ids=str
)
@pytest.mark.parametrize("case", CASES)
def test_logical_devices_of_one_gpu_give_the_same_bits(case, settings):
    make, data = CASES[case]
    if "batch_norm" in settings and case in ("transformer", "gru"):
        pytest.skip("it has no batch norm")
    torch.manual_seed(1)
    module = make()
    rate = {"lr": 1e-3} if "optimizer" in settings else {"lr": 0.02, "momentum": 0.9}
    results = [
        lockstep.train(
            model=module, data=(data, data), devices=devices, batch_size=64, epochs=2, quiet=True, **rate, **settings
        )
        for devices in DEVICES
    ]
    assert len({result.weights_sha256 for result in results}) == 1
    assert len({result.buffers_sha256 for result in results}) == 1
    assert len({str(result.metrics) for result in results}) == 1
    assert results[0].peak_memory["cuda:0"] > 1e6


@pytest.mark.skipif(torch.cuda.is_available() and not can_replace(), reason="convolutions are cuDNN's on this GPU")
@pytest.mark.parametrize("precision", ["tf32", "bf16"])
def test_shards_that_go_together_have_the_bits_that_they_have_alone(precision, monkeypatch):
    groups, compute = [], CapturableModuleReplica._leaves_together

    def noted(self, shards, samples):
        groups.append(len(shards))
        return compute(self, shards, samples)

    monkeypatch.setattr(CapturableModuleReplica, "_leaves_together", noted)
    make, data = CASES["resnet18"]
    torch.manual_seed(1)
    how = {"model": make(), "data": (data, data), "batch_size": 66, "epochs": 2, "momentum": 0.9, "lr": 0.02}
    modes = [{"devices": "cuda:0"}, {"devices": "cuda:0,cuda:0"}, {"devices": "cuda:0", "capture": False}]
    results = [lockstep.train(**how, precision=precision, quiet=True, **mode) for mode in modes]
    assert groups.count(2) > 8  # they were not only tried
    assert len({result.weights_sha256 for result in results}) == 1
    assert len({result.buffers_sha256 for result in results}) == 1


def test_out_of_memory_names_a_number_of_shards_that_fits():
    X, y = images(2048)

    def train(shards):
        settings = {"devices": "cuda:0", "batch_size": 2048, "epochs": 1, "quiet": True}
        return lockstep.train(model=ResNet18(in_channels=1), data=(X, y), shards=shards, **settings)

    gc.collect()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved(0) + 1.2e9) / total)
    try:
        with pytest.raises(OutOfMemory) as refused:
            train(2)
        message = str(refused.value)
        assert message.startswith("rank 0 (cuda:0), during forward and backward: a shard of 1024 samples does not fit")
        fits = int(message.partition("--shards ")[2].split()[0])
        assert fits > 2
        assert train(fits).steps == 1
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def test_dropout_between_the_layers_of_a_cudnn_layer_is_refused_in_a_sentence():
    X, y = tokens(32, False)
    model = Gru()
    model.gru = nn.GRU(16, 24, num_layers=2, dropout=0.3, batch_first=True)
    with pytest.raises(RankError, match=r"for dropout in a recurrent layer: one layer at a time, nn\.Dropout between"):
        lockstep.train(model=model, data=(X, y), devices="cuda:0", batch_size=16, epochs=1, quiet=True)


class Squares(torch.utils.data.Dataset):
    """Samples that a loader makes."""

    def __len__(self):
        return 200

    def __getitem__(self, number):
        draw = torch.Generator().manual_seed(number)
        return torch.rand(6, generator=draw), number % 3


@pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")  # of JAX, which another test may have imported
def test_loaded_samples_are_captured_and_give_the_bits_of_eager_steps(capsys):
    def train(**how):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 3))
        how = {"batch_size": 64, "epochs": 2, "optimizer": "adamw", "lr": 1e-2, "workers": 2, **how}
        return lockstep.train(model=model, data=Squares(), **how).weights_sha256

    captured = train(devices="cuda:0")
    assert "CUDA graph capture is off" not in capsys.readouterr().err
    assert {train(devices=devices, capture=False) for devices in DEVICES} == {captured}
    assert train(devices="cuda:0,cuda:0") == captured


@pytest.mark.filterwarnings("ignore")  # of the compiler, which takes them for errors
def test_compiled_dropout_is_keyed_by_the_shard():
    make, data = CASES["transformer"]

    def train(**how):
        torch.manual_seed(1)
        return lockstep.train(
            model=make(), data=data, batch_size=64, epochs=1, optimizer="adamw", precision="bf16", compile=True,
            quiet=True, lr=1e-3, **how,
        )  # fmt: skip

    found = {train(devices=devices).weights_sha256 for devices in DEVICES[:2]}
    assert found == {train(devices="cuda:0", capture=False).weights_sha256}
