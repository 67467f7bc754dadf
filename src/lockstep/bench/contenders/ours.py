"""Our own step, as `lockstep train` does it: from settings to events."""

import math
import time
from dataclasses import replace
from typing import Any

import torch

from lockstep.bench.contenders import Place
from lockstep.bench.work import Work, samples_of
from lockstep.core.device import Device
from lockstep.core.layout import sha256_of
from lockstep.report.events import EpochDone, Incident, StepDone
from lockstep.training.loop import ResumePoint, Training
from lockstep.training.replica_set import ReplicaSet
from lockstep.training.setup import inprocess_engine, prepare
from lockstep.training.task import UserObjects


class Ours:
    """A run under way; a trial pulls as many of its steps as it is told."""

    def __init__(self, work: Work, place: Place) -> None:
        config, data = work.config(), samples_of(work)
        prepared = prepare(config, UserObjects(data=(data.X_train, data.y_train)))
        self._config, self._parameters = config, prepared.task.parameters
        self._gpus = {Device(name).number for name in work.devices} if work.is_on_gpu else set()
        self._engine = inprocess_engine(config, prepared)
        self._engine.__enter__()
        self._training = Training(config, prepared, self._engine, ResumePoint())
        self._events = self._training.events()
        self._incidents: list[str] = []

    def warm_up(self, num_steps: int) -> dict[str, Any]:
        self._pull(num_steps)
        return {"chosen": "; ".join(self._incidents)}

    def run(self, num_steps: int) -> dict[str, Any]:
        self._wait_for_gpus()  # as many steps are begun as are pulled: those that are ahead were begun before
        began = time.perf_counter()
        self._pull(num_steps)
        self._wait_for_gpus()
        seconds = time.perf_counter() - began
        losses = self._training.progress.losses[-self._config.num_shards :]  # of the last step's shards
        return {"seconds": seconds, "loss": math.fsum(losses) / self._config.batch_size}

    def finish(self) -> dict[str, Any]:
        """The weights; on GPUs, where steps may be ahead of their events, at the end of the epoch."""
        while self._gpus and not isinstance(next(self._events), EpochDone):
            pass
        weights = self._replicas().weights()
        return {"weights_sha256": sha256_of([weights[name] for name in self._parameters])}

    def _replicas(self) -> ReplicaSet:
        assert self._training.replicas is not None, "the run has begun"
        return self._training.replicas

    def _pull(self, num_steps: int) -> None:
        while num_steps:
            event = next(self._events)
            num_steps -= isinstance(event, StepDone)
            if isinstance(event, Incident):
                self._incidents.append(event.sentence)

    def _wait_for_gpus(self) -> None:
        for number in self._gpus:
            torch.cuda.synchronize(number)

    def close(self) -> None:
        self._events.close()
        self._engine.close()


def one_device(work: Work, place: Place) -> Ours:
    """The same run on the first device alone: with the same bits."""
    return Ours(replace(work, devices=work.devices[:1]), place)


def one_shard(work: Work, place: Place) -> Ours:
    """Another run, in which a batch is one piece."""
    settings = {**work.settings, "num_shards": 1}
    return Ours(replace(work, devices=work.devices[:1], num_shards=1, settings=settings), place)
