"""What is trained, and on what: everything that the training loop needs to know."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lockstep.config import RunConfig
from lockstep.core.device import Device
from lockstep.core.errors import RunError
from lockstep.core.layout import Array
from lockstep.data.batch import Batch, BatchSource, DeviceMemory
from lockstep.partition.chain import NO_CHAIN, NamedChain
from lockstep.partition.grid import Grid, grid_for, num_devices_of
from lockstep.partition.placement import Part, Placement
from lockstep.replicas.replica import Replica, ReplicaState
from lockstep.training.evaluate import EvalSpec

# on a device, with weights, with a state or None; the part of the model that a rank holds
MakeReplica = Callable[[Device, dict[str, Array], ReplicaState | None, Part], Replica]
Weights = dict[str, Array]


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
    logger: Any = None


@dataclass(frozen=True)
class Task:
    """One model to train on one dataset."""

    model: str  # its name on the terminal
    initial: Weights  # parameters and buffers by name, in model order; those of sliced layers in slices
    parameters: list[str]  # the names of those that are parameters, as a whole
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
    whole: Callable[[Weights], Weights] = dict  # puts slices together
    sliced: Callable[[Weights], Weights] = dict  # and takes them apart
    stages: tuple[int, ...] = (0,)  # for each stage of the network, its place in a pipeline
    # for so many devices: the layers that stages may begin with, in the order in which they are called
    chain: Callable[[int], NamedChain] = lambda num_places: NO_CHAIN
    state_units: tuple[str, ...] = ()  # what a state has to have: an entry for each trained parameter

    def placement(self, config: RunConfig, num_ranks: int) -> Placement:
        """Which rank holds what. Devices may have been lost since the model was cut."""
        if (num_devices_of(config.split) or num_ranks) == num_ranks:
            grid = grid_of(config, num_ranks)
            if grid.network == max(self.stages) + 1:
                return Placement(grid, self.stages, config.update == "sharded")
        left = f"{num_ranks} device{'s are' if num_ranks > 1 else ' is'} left"
        raise RunError(
            f"{left}, and --split {config.split} was made for more: a part of the model was lost with each of them. "
            f"Resume with --resume on those that are left, with a --split for them."
        )


def grid_of(config: RunConfig, num_ranks: int) -> Grid:
    """How the ranks share the work."""
    return grid_for(config.split, num_ranks)


def weight_decay_of(config: RunConfig) -> float:
    """The weight decay that is set, or the usual one of the optimizer."""
    if config.weight_decay is not None:
        return config.weight_decay
    return 0.01 if config.optimizer == "adamw" else 0.0


def num_steps(config: RunConfig, num_train: int) -> int:
    """Steps of the whole run."""
    return config.num_epochs * -(-num_train // config.batch_size)
