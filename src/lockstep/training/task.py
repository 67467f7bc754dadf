"""What is trained, and on what: everything that the training loop needs to know."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lockstep.config import RunConfig
from lockstep.core.device import Device
from lockstep.core.layout import Array
from lockstep.data.batch import Batch, BatchSource, DeviceMemory
from lockstep.replicas.replica import Replica
from lockstep.training.evaluate import EvalSpec

MakeReplica = Callable[[Device, dict[str, Array], Any], Replica]  # on a device, with weights, with a state dict or None


@dataclass(frozen=True)
class UserObjects:
    """Objects that were passed in Python. What is None here is found by its name in the settings."""

    model: Any = None
    data: Any = None
    loss: Any = None
    optimizer: Any = None
    scheduler: Any = None
    metrics: Any = None
    collate_fn: Any = None
    sampler: Any = None
    on_step: Any = None
    on_epoch: Any = None


@dataclass(frozen=True)
class Task:
    """One model to train on one dataset."""

    model: str  # its name on the terminal
    initial: dict[str, Array]  # parameters and buffers by name, in model order
    parameters: list[str]  # the names of those that are parameters
    replica: MakeReplica
    train_set: Callable[[DeviceMemory], BatchSource]
    test_set: Callable[[DeviceMemory], BatchSource] | None
    num_train: int  # samples of an epoch
    num_test: int
    data_sha256: str | None  # None where the samples are not in memory
    order: Callable[[int], Array]  # the sample numbers of an epoch, which counts from 0
    eval_spec: EvalSpec
    trained: Callable[[dict[str, Array]], Any]  # parameters and buffers -> the trained module, if there is one
    # what a program gives as a batch -> the batch, where the framework can
    given_batch: Callable[[DeviceMemory], Callable[[Any], Batch]] | None = None
    notes: tuple[str, ...] = ()  # shown to the user when it starts


def weight_decay_of(config: RunConfig) -> float:
    """The weight decay that is set, or the usual one of the optimizer."""
    if config.weight_decay is not None:
        return config.weight_decay
    return 0.01 if config.optimizer == "adamw" else 0.0


def num_steps(config: RunConfig, num_train: int) -> int:
    """Steps of the whole run."""
    return config.num_epochs * -(-num_train // config.batch_size)
