"""The text's program: a replica for each device in one process, gradients added up on the first, and copied back."""

import copy
import time
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from lockstep.backends.torch import torch_device
from lockstep.bench.contenders import Place
from lockstep.bench.contenders.feeds import Batches, in_memory, loaded
from lockstep.bench.contenders.models import loss_sum, module_for, set_precision
from lockstep.bench.work import Work, samples_of
from lockstep.core.device import Device
from lockstep.data import Dataset

NUM_WORKERS = 4  # the text's


class Text:
    """Replicas of a module, and the text's step on them."""

    def __init__(self, work: Work, data: Dataset, places: list[torch.device], batches: Batches) -> None:
        set_precision(work.precision)
        self._work, self._places, self._batches = work, places, batches
        self._steps_of_epoch = data.num_train // work.batch_size
        module = module_for(work, data)
        self._replicas = [copy.deepcopy(module).to(place) for place in places]

    def warm_up(self, num_steps: int) -> dict[str, Any]:
        if num_steps:
            self.run(num_steps)
        return {"chosen": ""}

    def run(self, num_steps: int) -> dict[str, Any]:
        batches = self._batches(num_steps)
        started = time.perf_counter()
        first = next(batches)  # a loader has started by now, which it does once in an epoch
        began = time.perf_counter()
        for X, y in chain([first], batches):
            losses = self._train_batch(X, y)
            if self._work.is_on_gpu:
                torch.cuda.synchronize()
        seconds = time.perf_counter() - began + (began - started) * num_steps / self._steps_of_epoch
        return {"seconds": seconds, "loss": sum(map(float, losses)) / self._work.batch_size}

    def _train_batch(self, X: Tensor, y: Tensor) -> list[Tensor]:
        parts = zip(X.chunk(len(self._places)), y.chunk(len(self._places)), self._places, strict=True)
        losses = []
        for replica, (X_part, y_part, place) in zip(self._replicas, parts, strict=True):
            with torch.autocast(place.type, torch.bfloat16, enabled=self._work.precision == "bf16"):
                scores = replica(X_part.to(place))
            losses.append(loss_sum(scores, y_part.to(place)))
        for loss in losses:
            loss.backward()
        params_of_each = [list(replica.parameters()) for replica in self._replicas]
        with torch.no_grad():
            for same in zip(*params_of_each, strict=True):
                allreduce([param.grad for param in same])
            for params in params_of_each:
                for param in params:
                    param -= self._work.learning_rate * param.grad / self._work.batch_size
                    param.grad.zero_()
        return losses

    def close(self) -> None:
        """The loader's processes end with this one."""


def allreduce(gradients: list[Any]) -> None:
    """The first becomes the sum, and all others copies of it."""
    for other in gradients[1:]:
        gradients[0] += other.to(gradients[0].device)
    for other in gradients[1:]:
        other.copy_(gradients[0])


def text(work: Work, place: Place) -> Text:
    """As published: its loader starts its processes anew in every epoch."""
    data = samples_of(work)
    batches = loaded(work, data, range(work.batch_size), NUM_WORKERS, stays=False, pin_memory=False)
    return Text(work, data, _places(work), batches)


def text_in_memory(work: Work, place: Place) -> Text:
    """With all samples on the first device."""
    data, places = samples_of(work), _places(work)
    return Text(work, data, places, in_memory(work, data, range(work.batch_size), places[0]))


def _places(work: Work) -> list[torch.device]:
    return [torch_device(Device(name)) for name in work.devices]
