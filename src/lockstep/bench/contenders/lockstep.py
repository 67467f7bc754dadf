"""Our own step, as `lockstep train` runs it: from settings to events."""

import math
import time
from dataclasses import replace
from typing import Any

import torch

from lockstep.bench.contenders import ContenderRank
from lockstep.bench.contenders.batches import resident_bytes
from lockstep.bench.contenders.models import peak_gpu_bytes, reset_gpu_peaks
from lockstep.bench.workload import Workload, load_samples
from lockstep.core.device import Device
from lockstep.core.layout import sha256_of
from lockstep.report.events import EpochDone, Incident, StepDone
from lockstep.training.loop import Training
from lockstep.training.resume_point import ResumePoint
from lockstep.training.setup import inprocess_engine, prepare
from lockstep.training.task import UserObjects


class LockstepRun:
    """A run that is advanced by the steps of one trial after the other."""

    def __init__(self, workload: Workload, rank: ContenderRank) -> None:
        data = load_samples(workload)
        self._config = workload.config()
        devices = workload.devices[: self._config.num_shards]
        self._config = replace(self._config, devices=",".join(devices))
        self._prepared = prepare(self._config, UserObjects(data=(data.X_train, data.y_train)))
        self._num_sample_bytes = resident_bytes(data)
        self._gpus = {Device(name).number for name in devices} if workload.is_on_gpu else set()
        self._engine = inprocess_engine(self._config, self._prepared)
        self._engine.__enter__()
        self._training = Training(self._config, self._prepared, self._engine, ResumePoint())
        self._events = self._training.events()
        self._incidents: list[str] = []

    def prepare(self) -> dict[str, Any]:
        """Compiles and captures."""
        if self._gpus:
            self._advance(1)
        return {}

    def warm_up(self, num_steps: int) -> dict[str, Any]:
        self._advance(num_steps)
        self._finish_epoch()
        reset_gpu_peaks(self._gpus)
        return {"chosen": "; ".join(self._incidents)}

    def run(self, num_steps: int) -> dict[str, Any]:
        """A trial: `num_steps`, or on GPUs an epoch, at whose end no step is in flight."""
        self._synchronize()
        began = time.perf_counter()
        if self._gpus:
            num_steps = self._finish_epoch()
        else:
            self._advance(num_steps)
        self._synchronize()
        seconds = time.perf_counter() - began
        progress = self._training.progress
        if progress.losses:
            loss = math.fsum(progress.losses[-self._config.num_shards :]) / self._config.batch_size  # of the last step
        else:
            loss = progress.history[-1].train_loss  # of the epoch
        num_bytes = peak_gpu_bytes(self._gpus, self._num_sample_bytes)
        return {"seconds": seconds, "num_steps": num_steps, "loss": loss, "peak_bytes": num_bytes}

    def finish(self) -> dict[str, Any]:
        """The hash of the weights."""
        weights = self._training.state.replicas.weights()
        return {"weights_sha256": sha256_of([weights[name] for name in self._prepared.task.parameters])}

    def _advance(self, num_steps: int) -> None:
        while num_steps:
            num_steps -= isinstance(self._next_event(), StepDone)

    def _finish_epoch(self) -> int:
        """Goes on to the end of the epoch on GPUs, where steps are in flight until then; the number of steps."""
        num_steps = 0
        while self._gpus and not isinstance(event := self._next_event(), EpochDone):
            num_steps += isinstance(event, StepDone)
        return num_steps

    def _next_event(self) -> Any:
        event = next(self._events)
        if isinstance(event, Incident) and event.kind != "prepared":  # that comes before every trial
            self._incidents.append(event.sentence)
        return event

    def _synchronize(self) -> None:
        for number in self._gpus:
            torch.cuda.synchronize(number)

    def close(self) -> None:
        self._events.close()
        self._engine.close()


def one_device(workload: Workload, rank: ContenderRank) -> LockstepRun:
    """The same run on the first device alone: with the same bits."""
    return LockstepRun(replace(workload, devices=workload.devices[:1]), rank)
