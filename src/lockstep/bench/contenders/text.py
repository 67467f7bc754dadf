"""The text's program: a replica for each device in one process, gradients added on the first and copied back."""

import copy
import time
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from lockstep.backends.torch import torch_device
from lockstep.bench.contenders import ContenderRank
from lockstep.bench.contenders.batches import Batches, from_loader, from_memory
from lockstep.bench.contenders.models import loss_sum, module_for, set_precision
from lockstep.bench.workload import Workload, load_samples
from lockstep.core.device import Device
from lockstep.data import Dataset

NUM_WORKERS = 4  # the text's


class Text:
    """Replicas of a module, and the text's step on them."""

    def __init__(self, workload: Workload, data: Dataset, batches: Batches) -> None:
        set_precision(workload.precision)
        self._workload, self._batches = workload, batches
        self._devices = [torch_device(Device(name)) for name in workload.devices]
        self._steps_per_epoch = data.num_train // workload.batch_size
        module = module_for(workload, data)
        self._replicas = [copy.deepcopy(module).to(device) for device in self._devices]

    def prepare(self) -> dict[str, Any]:
        """Nothing takes long."""
        return {}

    def warm_up(self, num_steps: int) -> dict[str, Any]:
        if num_steps:
            self.run(num_steps)
        return {"chosen": ""}

    def run(self, num_steps: int) -> dict[str, Any]:
        batches = self._batches(num_steps)
        started = time.perf_counter()
        first = next(batches)  # starts the DataLoader, which happens once per epoch: each step gets its share of that
        began = time.perf_counter()
        for X, y in chain([first], batches):
            losses = self._train_batch(X, y)
            if self._workload.is_on_gpu:
                torch.cuda.synchronize()
        seconds = time.perf_counter() - began + (began - started) * num_steps / self._steps_per_epoch
        return {"seconds": seconds, "loss": sum(map(float, losses)) / self._workload.batch_size}

    def _train_batch(self, X: Tensor, y: Tensor) -> list[Tensor]:
        parts = zip(X.chunk(len(self._devices)), y.chunk(len(self._devices)), self._devices, strict=True)
        losses = []
        for replica, (X_part, y_part, device) in zip(self._replicas, parts, strict=True):
            with torch.autocast(device.type, torch.bfloat16, enabled=self._workload.precision == "bf16"):
                scores = replica(X_part.to(device))
            losses.append(loss_sum(scores, y_part.to(device)))
        for loss in losses:
            loss.backward()
        params_of_each = [list(replica.parameters()) for replica in self._replicas]
        with torch.no_grad():
            for same in zip(*params_of_each, strict=True):
                allreduce([param.grad for param in same])
            for params in params_of_each:
                for param in params:
                    param -= self._workload.learning_rate * param.grad / self._workload.batch_size
                    param.grad.zero_()
        return losses

    def close(self) -> None:
        """The DataLoader's workers end with this process."""


def allreduce(gradients: list[Any]) -> None:
    """The first becomes the sum, and all others copies of it."""
    for other in gradients[1:]:
        gradients[0] += other.to(gradients[0].device)
    for other in gradients[1:]:
        other.copy_(gradients[0])


def text(workload: Workload, rank: ContenderRank) -> Text:
    """As published: its DataLoader starts new workers in every epoch."""
    data = load_samples(workload)
    return Text(workload, data, from_loader(workload, data, range(workload.batch_size), num_workers=NUM_WORKERS))


def text_in_memory(workload: Workload, rank: ContenderRank) -> Text:
    """With all samples on the first device."""
    data, device = load_samples(workload), torch_device(Device(workload.devices[0]))
    return Text(workload, data, from_memory(workload, data, range(workload.batch_size), device))
