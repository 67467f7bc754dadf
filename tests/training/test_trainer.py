"""`lockstep.Trainer`: a loop of one's own, with the bits of `lockstep.train` for any number of devices."""

import signal
import subprocess
import sys

import numpy as np
import pytest
import safetensors.numpy
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import lockstep
from lockstep.core.errors import ConfigError, DataError, LockstepError
from lockstep.data.order import sample_order

DRAW = torch.Generator().manual_seed(0)
X, Y = torch.randn(128, 6, generator=DRAW), torch.randint(3, (128,), generator=DRAW)
DEVICES = (1, 2, 3)


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 3))


def batches(num_epochs=2):
    """As `train` makes them."""
    for epoch in range(num_epochs):
        for part in torch.from_numpy(sample_order(0, epoch, len(X))).split(32):
            yield X[part], Y[part]


def same_for_all(run):
    """What `run(k)` gives, which is the same for any number of devices."""
    first, *others = [run(k) for k in DEVICES]
    assert others == [first] * len(others)
    return first


def test_a_loop_has_the_bits_of_train():
    def loop(k):
        with lockstep.Trainer(net(), optimizer="adam", lr=0.01, devices=k, shards=8) as trainer:
            losses = [trainer.step(batch).loss for batch in batches()]
            found = trainer.evaluate(DataLoader(TensorDataset(X, Y), batch_size=50))
            return trainer.weights_sha256, losses, found, trainer.num_steps

    sha256, losses, found, num_steps = same_for_all(loop)
    result = lockstep.train(
        2, model=net(), optimizer="adam", lr=0.01, data=(X.numpy(), Y.numpy()), batch_size=32, num_epochs=2, quiet=True
    )
    assert (sha256, num_steps) == (result.weights_sha256, 8)
    assert losses[0] == result.first_loss
    assert set(found) == {"loss", "accuracy"}


@pytest.mark.parametrize("kind", ["tensors", "arrays", "list", "dict", "named", "triple"])
def test_batches_of_any_form(kind):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.layer = nn.Linear(6, 3)

        def forward(self, X, name=None, labels=None):
            assert name is None or len(name) == len(X)
            return self.layer(X)

    forms = {
        "tensors": (X, Y),
        "arrays": (X.numpy().astype(np.float64), Y.numpy()),
        "list": [X, Y],
        "dict": {"X": X, "labels": Y},
        "named": {"X": X, "labels": Y, "name": [f"sample {number}" for number in range(len(X))]},
        "triple": (X, list(range(len(X))), Y),
    }

    def loss(output, y):
        return F.cross_entropy(output, y["labels"] if isinstance(y, dict) else y, reduction="none")

    def loop(k):
        with lockstep.Trainer(Net(), lr=0.1, loss=loss, devices=k) as trainer:
            trainer.step(forms[kind])
            return trainer.weights_sha256

    with lockstep.Trainer(Net(), lr=0.1, devices=1) as trainer:
        trainer.step((X, Y))
        assert same_for_all(loop) == trainer.weights_sha256


def test_accumulated_gradients_are_those_of_all_samples():
    def loop(k):
        with lockstep.Trainer(net(), optimizer="adamw", lr=0.01, devices=k) as trainer:
            for _ in range(3):
                for number in range(4):
                    trainer.gradients((X[32 * number : 32 * number + 32], Y[32 * number : 32 * number + 32]))
                trainer.update()
            return trainer.num_steps, trainer.weights_sha256

    assert same_for_all(loop)[0] == 3
    plain, linear = nn.Linear(6, 3), nn.Linear(6, 3)
    plain.load_state_dict(linear.state_dict())
    with lockstep.Trainer(linear, lr=0.1, devices=2) as trainer:
        for part in (slice(0, 100), slice(100, 128)):  # not a mean of means
            trainer.gradients((X[part], Y[part]))
        trainer.update()
        optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
        F.cross_entropy(plain(X), Y).backward()
        optimizer.step()
        torch.testing.assert_close(trainer.module.weight, plain.weight, rtol=0, atol=1e-6)


@pytest.mark.parametrize("settings", [{}, {"clip_norm": 0.1}], ids=["plain", "clipped"])
@pytest.mark.parametrize("k", DEVICES)
def test_a_step_is_its_gradients_and_the_update(k, settings):
    how = {"optimizer": "adam", "lr": 0.01, "devices": k, **settings}
    with lockstep.Trainer(net(), **how) as at_once, lockstep.Trainer(net(), **how) as apart:
        for batch in batches(1):
            loss = at_once.step(batch).loss
            assert apart.gradients(batch).loss == loss
            apart.update()
        assert at_once.weights_sha256 == apart.weights_sha256


@pytest.mark.parametrize("how", ["step", "gradients"])
def test_the_average_is_one_of_weights_and_merged_buffers(how):
    def loop(k):
        with lockstep.Trainer(net(), optimizer="adamw", lr=0.01, devices=k, ema=0.9) as trainer:
            expected = {name: torch.from_numpy(array).clone() for name, array in trainer.weights().items()}
            for batch in batches(1):
                if how == "step":
                    trainer.step(batch)
                else:
                    trainer.gradients(batch)
                    trainer.update()
                for name, array in trainer.weights().items():
                    new = torch.from_numpy(array)
                    expected[name] = expected[name].lerp(new, 0.1) if new.is_floating_point() else new.clone()
            average = trainer.ema_weights()
        assert {n: a.tobytes() for n, a in average.items()} == {n: t.numpy().tobytes() for n, t in expected.items()}
        return average["1.running_mean"].tobytes()

    assert len(same_for_all(loop)) == 64


def test_the_average_of_a_whole_run_is_the_same_for_any_devices():
    def run(k):
        how = {"batch_size": 32, "num_epochs": 2, "quiet": True, "lr": 0.1}
        result = lockstep.train(k, model=net(), data=(X.numpy(), Y.numpy()), ema=0.9, **how)
        return {name: array.tobytes() for name, array in result.ema.items()}

    assert set(same_for_all(run)) == set(net().state_dict())


def test_the_average_of_a_run_is_saved_beside_its_weights_and_written_again_if_it_was_lost(tmp_path):
    how = {"model": net(), "data": (X.numpy(), Y.numpy()), "batch_size": 32, "ema": 0.9, "quiet": True, "out": tmp_path}
    result = lockstep.train(2, num_epochs=1, lr=0.1, **how)
    file = tmp_path / "ema.safetensors"
    saved = safetensors.numpy.load_file(file)
    assert {n: a.tobytes() for n, a in saved.items()} == {n: a.tobytes() for n, a in result.ema.items()}
    assert saved.keys() == safetensors.numpy.load_file(tmp_path / "weights.safetensors").keys()
    content = file.read_bytes()
    file.write_bytes(content[:-1])
    lockstep.train(1, num_epochs=1, lr=0.1, resume=True, **how)
    assert file.read_bytes() == content


def test_sharpness_aware_minimization_with_the_functions_of_a_trainer():
    def climb(module):
        norm = torch.sqrt(sum(param.grad.square().sum() for param in module.parameters()))
        with torch.no_grad():
            module.moves = [0.05 * param.grad / norm for param in module.parameters()]
            for param, move in zip(module.parameters(), module.moves, strict=True):
                param.add_(move)

    def descend(module):
        with torch.no_grad():
            for param, move in zip(module.parameters(), module.moves, strict=True):
                param.sub_(move)

    def loop(k):
        with lockstep.Trainer(net(), lr=0.1, devices=k) as trainer:
            for batch in batches(1):
                trainer.gradients(batch)
                trainer.apply(climb)
                trainer.drop_gradients()
                trainer.gradients(batch)
                trainer.apply(descend)
                trainer.update()
            return trainer.weights_sha256

    first, *others = [loop(k) for k in DEVICES]
    assert others == [first, first]


@pytest.mark.parametrize("batch_norm", ["shard", "sync"])
def test_two_trainers_that_see_each_other(tmp_path, batch_norm):
    def bce(scores, y):
        return F.binary_cross_entropy_with_logits(scores.squeeze(1), y, reduction="none")

    def loop(k):
        torch.manual_seed(1)
        generator = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 6))
        discriminator = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.LeakyReLU(), nn.Linear(16, 1))
        how = {"optimizer": "adam", "lr": 1e-3, "devices": k, "batch_norm": batch_norm}
        with (
            lockstep.Trainer(discriminator, loss=bce, **how) as critic,
            lockstep.Trainer(generator, loss=lambda fake, y: bce(critic.module(fake), y), **how) as artist,
        ):
            for number in range(6):
                noise = torch.randn(32, 4, generator=torch.Generator().manual_seed(number))
                with torch.no_grad():
                    fake = artist.module(noise)
                critic.step((torch.cat([X[:32], fake]), torch.cat([torch.ones(32), torch.zeros(32)])))
                artist.step((noise, torch.ones(32)))
            for trainer in (critic, artist):
                trainer.save(tmp_path / "saved")  # compares the replicas, buffers included
            weights = [*critic.weights().values(), *artist.weights().values()]
            return [array.tobytes() for array in weights]

    first, *others = [loop(k) for k in DEVICES]
    assert others == [first, first]


def test_activation_checkpointing_with_dropout_draws_the_same_numbers_again():
    class Checkpointed(nn.Module):
        def __init__(self, on):
            super().__init__()
            self.on, self.inner, self.last = on, net(), nn.Linear(3, 3)

        def forward(self, X):
            return self.last(checkpoint(self.inner, X, use_reentrant=False) if self.on else self.inner(X))

    def loop(k, on):
        torch.manual_seed(0)
        with lockstep.Trainer(Checkpointed(on), lr=0.1, devices=k) as trainer:
            for batch in batches(1):
                trainer.step(batch)
            return trainer.weights_sha256

    assert {loop(k, on) for k in DEVICES for on in (True, False)} == {loop(1, False)}


def test_objects_are_given_again_to_a_trainer_that_is_loaded(tmp_path):
    optimizer = lambda params: torch.optim.SGD(params, 0.1)  # noqa: E731 - one without a name
    with lockstep.Trainer(net(), optimizer=optimizer, devices=1) as trainer:
        path = trainer.save(tmp_path / "saved")
    with pytest.raises(ConfigError, match="Give what was an object again: optimizer="):
        lockstep.Trainer.load(path, model=net())
    lockstep.Trainer.load(path, model=net(), optimizer=optimizer).close()


@pytest.mark.parametrize("k", DEVICES)
def test_a_saved_trainer_continues_on_other_devices(tmp_path, k):
    every = list(batches(3))
    with lockstep.Trainer(net(), optimizer="adam", lr=0.01, devices=2, ema=0.9) as trainer:
        for number, batch in enumerate(every):
            trainer.step(batch)
            if number == 4:
                path = trainer.save(tmp_path / "run" / "epoch1")
        whole = trainer.weights_sha256, trainer.ema_weights()["0.weight"].tobytes()
    with lockstep.Trainer.load(path, model=net(), devices=k) as resumed:
        for batch in every[resumed.num_steps :]:
            resumed.step(batch)
        assert (resumed.weights_sha256, resumed.ema_weights()["0.weight"].tobytes()) == whole


def test_the_process_keeps_its_own_settings_between_steps():
    module = net()
    torch.manual_seed(7)
    expected, threads = torch.rand(3), torch.get_num_threads()
    torch.manual_seed(7)
    with lockstep.Trainer(module, devices=2) as trainer:
        trainer.step((X, Y))
        assert torch.get_num_threads() == threads
        assert not torch.are_deterministic_algorithms_enabled()
        assert torch.equal(torch.rand(3), expected)


WRONG = {
    "epochs": (lambda: lockstep.Trainer(net(), epochs=3), ConfigError, "A Trainer has no epochs"),
    "processes": (lambda: lockstep.Trainer(net(), engine="processes"), ConfigError, "Start your program with torchrun"),
    "name": (lambda: lockstep.Trainer(net(), rate=3), TypeError, "unexpected keyword argument 'rate'"),
    "file": (lambda: lockstep.Trainer.load("nowhere", model=net()), ConfigError, "nowhere cannot be read"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_a_trainer_cannot_do_is_said(case):
    make, kind, sentence = WRONG[case]
    with pytest.raises(kind, match=sentence):
        make()


def test_what_a_trainer_cannot_do_now_is_said(tmp_path):
    (tmp_path / "noise").write_bytes(b"noise" * 100)
    with pytest.raises(ConfigError, match=r"is damaged, or was not written by Trainer\.save"):
        lockstep.Trainer.load(tmp_path / "noise", model=net())
    trainer = lockstep.Trainer(net(), devices=2)
    with pytest.raises(ConfigError, match="There are no gradients to update by"):
        trainer.update()
    for batch, sentence in (
        (X, "The batch is a Tensor"),
        ((X, Y[:5]), "tensors of 5 and of 128 samples"),
        ((X[:0], Y[:0]), "The batch is empty"),
        (("a", "b"), "no tensor with samples"),
    ):
        with pytest.raises(DataError, match=sentence):
            trainer.step(batch)
    trainer.gradients((X, Y))
    with pytest.raises(ConfigError, match="There are gradients that no update has used"):
        trainer.step((X, Y))
    with pytest.raises(ConfigError, match="they are not saved"):
        trainer.save(tmp_path / "saved")
    trainer.close()
    trainer.close()
    with pytest.raises(ConfigError, match="The trainer is closed"):
        trainer.step((X, Y))


def test_a_step_that_fails_has_not_happened():
    calls = [0]

    def loss(output, y):
        calls[0] += 1
        if calls[0] == 12:
            raise ValueError("lost")
        return F.cross_entropy(output, y, reduction="none")

    def loop(fails):
        calls[0] = 0 if fails else -1000
        with lockstep.Trainer(net(), loss=loss, lr=0.1, devices=2, verify_every=0) as trainer:
            for batch in batches(1):
                try:
                    trainer.step(batch)
                except LockstepError:
                    trainer.step(batch)
            return trainer.weights_sha256

    assert loop(True) == loop(False)


PROGRAM = """
import os, signal, sys, torch, lockstep
from torch import nn
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 3))
draw = torch.Generator().manual_seed(1)
batches = [(torch.randn(32, 6, generator=draw), torch.randint(3, (32,), generator=draw)) for _ in range(12)]
path, devices, dies = sys.argv[1], sys.argv[2], int(sys.argv[3])
devices = None if devices == "torchrun" else int(devices)
how = {"optimizer": "adam", "lr": 0.01}
if os.path.exists(path):
    trainer = lockstep.Trainer.load(path, model=net, devices=devices)
else:
    trainer = lockstep.Trainer(net, devices=devices, **how)
for number, batch in enumerate(batches):
    if number < trainer.num_steps:
        continue
    trainer.step(batch)
    trainer.save(path)
    if number == dies:
        os.kill(os.getpid(), signal.SIGKILL)
found = trainer.evaluate(batches)
sha256 = trainer.weights_sha256
if os.environ.get("RANK", "0") == "0":
    print(sha256, found)
"""


@pytest.fixture
def program(tmp_path):
    """Runs the program above; its last line."""
    file = tmp_path / "own_loop.py"
    file.write_text(PROGRAM)

    def run(name, devices, dies=-1, torchrun=0):
        start = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={torchrun}"]
        command = [*(start if torchrun else [sys.executable]), str(file), str(tmp_path / name), str(devices), str(dies)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=tmp_path)
        return done.returncode, (done.stdout.splitlines() or [done.stderr])[-1]

    return run


def test_a_loop_that_is_killed_continues_on_other_devices_with_the_same_bits(program):
    status, whole = program("whole", 1)
    assert status == 0, whole
    assert program("killed", 2, dies=4)[0] == -signal.SIGKILL
    assert program("killed", 3, dies=8)[0] == -signal.SIGKILL
    assert program("killed", 1) == (0, whole)


def test_the_same_loop_under_torchrun(program):
    _, whole = program("whole", 2)
    assert program("torchrun", "torchrun", torchrun=2) == (0, whole)
    assert program("killed", 1, dies=5)[0] == -signal.SIGKILL
    assert program("killed", "torchrun", torchrun=3) == (0, whole)


def test_random_numbers_in_apply_are_the_same_for_all_replicas():
    def add_noise(module):
        for param in module.parameters():
            param.grad.add_(torch.randn_like(param), alpha=0.1)

    def loop(k):
        with lockstep.Trainer(net(), lr=0.1, devices=k, check_every=1) as trainer:
            for batch in batches(1):
                trainer.gradients(batch)
                trainer.apply(add_noise)
                trainer.update()
            return trainer.weights_sha256

    assert same_for_all(loop)


def test_a_loss_that_uses_a_module_with_dropout_has_the_same_bits():
    def loop(k):
        torch.manual_seed(0)
        critic = nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.5), nn.Linear(16, 1))
        how = {"lr": 0.1, "devices": k}
        with (
            lockstep.Trainer(critic, loss=lambda o, y: o.square().sum(1), **how) as judge,
            lockstep.Trainer(nn.Linear(6, 6), loss=lambda o, y: judge.module(o).square().sum(1), **how) as artist,
        ):
            for X, y in batches(1):
                judge.step((X, y))
                artist.step((X, y))
            return artist.weights_sha256

    assert same_for_all(loop)


def test_a_list_of_two_tensors_is_one_batch_to_evaluate():
    with lockstep.Trainer(net(), lr=0.1, devices=2) as trainer:
        assert trainer.evaluate([X, Y]) == trainer.evaluate((X, Y))


def test_checkpointing_of_batch_norm_over_the_whole_batch_is_refused():
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.inner, self.last = nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)

        def forward(self, X):
            return self.last(checkpoint(self.inner, self.first(X), use_reentrant=False))

    with (
        lockstep.Trainer(Checkpointed(), lr=0.1, devices=2, batch_norm="sync") as trainer,
        pytest.raises(LockstepError, match="Leave batch norm out of checkpointed parts"),
    ):
        trainer.step((X, Y))


def test_a_shard_of_one_sample_is_too_small_for_batch_norm():
    with (
        lockstep.Trainer(net(), lr=0.1, devices=1) as trainer,
        pytest.raises(LockstepError, match=r"has one sample only, too few for batch norm .*batch_norm='sync'"),
    ):
        trainer.step((X[:8], Y[:8]))


@pytest.mark.parametrize("devices", [1, 2])
def test_the_learning_rate_is_that_of_the_updates_and_not_of_the_passes(devices):
    batch = torch.rand(16, 4), torch.arange(16) % 3

    def after(num_dropped, how):
        torch.manual_seed(0)
        with lockstep.Trainer(nn.Linear(4, 3), lr=0.1, warmup=10, devices=devices, shards=2) as trainer:
            for _ in range(num_dropped):
                trainer.gradients(batch)
                trainer.drop_gradients()
            for _ in range(2):
                if how == "step":
                    trainer.step(batch)
                else:
                    trainer.gradients(batch)
                    trainer.update()
            return trainer.weights_sha256

    assert len({after(dropped, how) for dropped in (0, 5) for how in ("step", "update")}) == 1
