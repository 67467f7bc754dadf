"""Replicas that differ are found by hash and named; with `heal` the run goes back to where they were equal."""

import os
import re
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch
from torch import nn

import lockstep
from lockstep.core.errors import LockstepError
from lockstep.replicas.module_state import checksum
from lockstep.training.state import check_same_model

HOW = {"batch_size": 10, "shards": 5, "epochs": 3, "quiet": True, "verify_every": 0}


@pytest.fixture
def vectors():
    generator = torch.Generator().manual_seed(0)
    return torch.rand(40, 6, generator=generator), torch.randint(3, (40,), generator=generator)


def model():
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


def failing_device(folder, in_step=5, flips=1):
    """An optimizer that flips a bit of the last layer in one step, on the first `flips` devices to get there."""

    class Flips(torch.optim.SGD):
        def __init__(self, params):
            super().__init__(params, lr=0.1, momentum=0.9)
            self.num_steps = 0

        def step(self):
            super().step()
            self.num_steps += 1
            if self.num_steps == in_step:
                for number in range(flips):
                    try:
                        os.close(os.open(folder / f"flipped-{number}", os.O_CREAT | os.O_EXCL))
                    except FileExistsError:
                        continue
                    weight = self.param_groups[0]["params"][-2]
                    weight.data.view(torch.int32)[0, number] ^= 1 << 16  # the next update must not round it away
                    return

    return Flips


@pytest.mark.parametrize("engine", ["inprocess", "processes"])
def test_a_replica_that_differs_is_named_with_the_first_parameter(vectors, tmp_path, engine):
    with pytest.raises(LockstepError) as found:
        lockstep.train(
            model=model(),
            data=vectors,
            devices=3,
            engine=engine,
            optimizer=failing_device(tmp_path),
            check_every=2,
            **HOW,
        )
    assert re.match(
        r"step 6: a replica is not equal to the others any more: rank (\d) \(cpu:\1\), first in 3\.weight\. Look for",
        str(found.value),
    )
    assert found.value.exit_status == 1


@pytest.mark.parametrize("engine", ["inprocess", "processes"])
def test_healing_goes_back_to_where_all_were_equal(vectors, tmp_path, engine, capfd):
    torch.manual_seed(0)
    module = model()
    healthy = lockstep.train(
        model=module,
        data=vectors,
        devices=1,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
        **HOW,
    )
    settings = {**HOW, "quiet": False}
    result = lockstep.train(
        model=module,
        data=vectors,
        devices=3,
        engine=engine,
        optimizer=failing_device(tmp_path),
        check_every=3,
        checkpoint_every=0,
        heal=True,
        out=tmp_path / "run",
        **settings,
    )
    assert (tmp_path / "flipped-0").exists()
    assert (result.weights_sha256, result.buffers_sha256) == (healthy.weights_sha256, healthy.buffers_sha256)
    err = capfd.readouterr().err
    assert re.search(r"step 6: a replica is not equal to the others any more: rank \d \(cpu:\d\), first in 3", err)
    assert "Going back to step 3, where all were equal" in err
    assert '"event": "healed"' in (tmp_path / "run" / "metrics.jsonl").read_text()


def test_two_replicas_have_no_majority_but_can_go_back(vectors, tmp_path):
    with pytest.raises(LockstepError, match=r"step 5: the replicas are not equal any more: rank 1 \(cpu:1\), first in"):
        lockstep.train(model=model(), data=vectors, devices=2, optimizer=failing_device(tmp_path), check_every=1, **HOW)
    module = model()
    (tmp_path / "again").mkdir()
    flips = failing_device(tmp_path / "again")
    healed = lockstep.train(model=module, data=vectors, devices=2, optimizer=flips, check_every=4, heal=True, **HOW)
    healthy = lockstep.train(model=module, data=vectors, devices=2, optimizer=flips, **HOW)  # it flips once only
    assert (tmp_path / "again" / "flipped-0").exists()
    assert healed.weights_sha256 == healthy.weights_sha256


def test_a_device_that_fails_again_and_again_ends_the_run(vectors):
    class Fails(torch.optim.SGD):
        def __init__(self, params):
            super().__init__(params, lr=0.1)

        def step(self):
            super().step()
            if threading.current_thread().name.endswith("rank-1"):
                self.param_groups[0]["params"][0].data.view(torch.int32)[0, 0] ^= 1

    with pytest.raises(LockstepError, match="this has been healed 10 times"):
        lockstep.train(model=model(), data=vectors, devices=3, optimizer=Fails, check_every=1, heal=True, **HOW)


def test_two_of_four_are_no_majority(vectors, tmp_path):
    """Of four, two differ, each in another bit: the other two are not more than half."""
    with pytest.raises(LockstepError, match="the replicas are not equal any more"):
        lockstep.train(
            model=model(), data=vectors, devices=4, optimizer=failing_device(tmp_path, flips=2), check_every=1, **HOW
        )


def test_a_replica_that_has_drifted_is_never_saved(vectors, tmp_path):
    """Also with check_every=0: the last checkpoint is one of equal replicas."""
    with pytest.raises(LockstepError, match="step 6"):
        lockstep.train(
            model=model(),
            data=vectors,
            devices=3,
            optimizer=failing_device(tmp_path),
            check_every=0,
            checkpoint_every=2,
            out=tmp_path / "run",
            **HOW,
        )
    assert sorted(os.listdir(tmp_path / "run" / "checkpoints"))[-1] == "step-000004.safetensors"


def test_check_every_0_compares_nothing(vectors, tmp_path):
    lockstep.train(
        model=model(), data=vectors, devices=3, optimizer=failing_device(tmp_path), check_every=0, **HOW
    )  # fmt: skip
    assert (tmp_path / "flipped-0").exists()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.uint8])
def test_a_checksum_sees_every_bit(dtype):
    tensor = torch.rand(7, 3).mul(5).to(dtype)
    assert checksum(tensor) == checksum(tensor.clone())
    octets = tensor.view(torch.uint8)
    for number in range(octets.numel()):
        for bit in (1, 128):
            octets.view(-1)[number] ^= bit
            changed = checksum(tensor)
            octets.view(-1)[number] ^= bit
            assert changed != checksum(tensor)
    assert checksum(tensor[::2]) == checksum(tensor[::2].clone())
    assert checksum(torch.zeros(())) == 0


def test_a_drifted_replica_that_verification_finds_first_is_healed(vectors, tmp_path):
    how = {"model": model(), "data": vectors, "devices": 3, "check_every": 1000, "heal": True, **HOW}
    healed = lockstep.train(optimizer=failing_device(tmp_path), **how | {"verify_every": 6})
    healthy = lockstep.train(optimizer=failing_device(tmp_path), **how)  # it flips once only
    assert healed.weights_sha256 == healthy.weights_sha256


PROGRAM = """
import os, signal, sys, torch, lockstep
from torch import nn

class Flips(torch.optim.SGD):
    num_steps = 0

    def __init__(self, params):
        super().__init__(params, lr=0.1)

    def step(self):
        super().step()
        self.num_steps += 1
        try:
            os.close(os.open(f"step-{self.num_steps}", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return  # one of the processes does what follows
        if self.num_steps == 5 and sys.argv[1] == "drifts":
            self.param_groups[0]["params"][0].data.view(torch.int32)[0, 0] ^= 1 << 16
        if self.num_steps == 7:
            os.kill(os.getppid(), signal.SIGTERM)  # SIGINT is ignored in what runs in the background

if __name__ == "__main__":
    torch.manual_seed(0)
    draw = torch.Generator().manual_seed(0)
    data = torch.rand(400, 6, generator=draw), torch.randint(3, (400,), generator=draw)
    lockstep.train(model=nn.Linear(6, 3), data=data, devices=2, engine="processes", optimizer=Flips, out="run",
                   batch_size=4, epochs=20, verify_every=0, quiet=True)
"""


@pytest.mark.parametrize("what", ["drifts", "is equal"])
def test_an_interrupted_run_of_processes_saves_no_replica_that_has_drifted(tmp_path, what):
    (tmp_path / "program.py").write_text(PROGRAM)
    command = [sys.executable, "program.py", what]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=tmp_path)
    saved = list((tmp_path / "run").glob("checkpoints/*"))
    if what == "drifts":
        assert "the replicas are not equal any more: rank" in done.stderr
        assert saved == []
    else:
        assert "Interrupted: interrupted after step" in done.stderr
        assert saved


def test_a_rank_whose_parameters_have_another_order_is_told_so(on_ranks):
    """Their bytes may be equal; layers that are made of a set have another order in every process."""

    def check(engine):
        names = "ab" if engine.local_ranks[0] == 0 else "ba"
        with pytest.raises(LockstepError, match=r"The model of rank 1 has other parameters .* in another order"):
            check_same_model(engine, {name: np.zeros(2, np.float32) for name in names})

    on_ranks(2, check)
