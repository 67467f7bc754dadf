"""The replicas of one engine and their steps: what `lockstep.train` and `lockstep.Trainer` are loops over."""

from copy import deepcopy
from typing import Any, NamedTuple

from lockstep.config import RunConfig
from lockstep.core.errors import ConfigError
from lockstep.core.layout import Array, sha256_of
from lockstep.core.torchrun_env import torchrun_env
from lockstep.partition.balance import balance_for
from lockstep.partition.placement import Placement
from lockstep.replicas.replica import ReplicaState
from lockstep.runtime.engine import Engine
from lockstep.training.checkpoint import Checkpoint, Progress, differences, made_with
from lockstep.training.drift import Healing
from lockstep.training.replica_set import ReplicaSet
from lockstep.training.setup import make_steps
from lockstep.training.task import MakeReplica


class Trained(NamedTuple):
    """What is trained."""

    replica: MakeReplica
    initial: dict[str, Array]  # parameters and buffers by name
    identity: dict[str, Any]  # what the bits depend on
    placement: Placement
    can_heal: bool = True  # whether whoever trains can go back


class TrainingState:
    """A model in training: its replicas on the ranks of this process, after the steps that `progress` counts."""

    def __init__(self, config: RunConfig, engine: Engine, trained: Trained, start: Checkpoint | None) -> None:
        self._config, self._engine, self._trained = config, engine, trained
        self._healing = Healing(config, trained.can_heal)
        self.balance = balance_for(config.balance)
        self.made_with = made_with_by_all(engine)
        if torchrun_env():  # every process has made the model itself
            check_same_model(engine, trained.initial)
        self.restore(start)
        self.differences = [] if start is None else differences(start, self.made_with)
        self.progress.notes += self.differences
        self._healing.remember(self.local_checkpoint)

    def restore(self, start: Checkpoint | None) -> None:
        """Makes the replicas, from a checkpoint or with the initial weights, and their steps."""
        weights = self._trained.initial if start is None else start.weights
        state = None if start is None else ReplicaState(**start.states)
        make, placement = self._trained.replica, self._trained.placement
        local = self._engine.each(
            "replicate", lambda rank, device: make(device, weights, state, placement.part_of(rank))
        )
        self.progress = Progress() if start is None else deepcopy(start.progress)
        self.replicas = ReplicaSet(self._engine, local, placement, self._trained.initial)
        self.steps = make_steps(self._config, self.replicas, self.balance)

    def compare(self) -> None:
        """Raises an error where replicas differ, or with `--heal` a `Rollback` to where they were equal."""
        self._healing.compare(self.replicas, self.progress.step, self.local_checkpoint)

    def checkpoint(self) -> Checkpoint:
        """The whole model after the last step. A collective where ranks hold parts."""
        return self._checkpoint(self.replicas.weights(), self.replicas.state())

    def local_checkpoint(self) -> Checkpoint:
        """The part of it that this process holds."""
        return self._checkpoint(self.replicas.local_weights(), self.replicas.local_state())

    def _checkpoint(self, weights: dict[str, Array], state: ReplicaState) -> Checkpoint:
        return Checkpoint(self._trained.identity, self.made_with, deepcopy(self.progress), weights, state._asdict())

    def close(self) -> None:
        """Lets go of the steps: CUDA graphs hold memory of the GPU."""
        del self.steps


def check_same_model(engine: Engine, initial: dict[str, Array]) -> None:
    """Refuses ranks that have made another model than rank 0."""
    names = engine.all_gather([list(initial) for _ in engine.local_ranks])
    hashes = engine.all_gather([sha256_of(list(initial.values())) for _ in engine.local_ranks])
    for rank, other in enumerate(names):
        if other != names[0]:
            raise ConfigError(
                f"The model of rank {rank} has other parameters than that of rank 0, or the same in another order. "
                "Make it the same in every process: of lists and dicts, not of sets, whose order is another each time."
            )
    for rank, other in enumerate(hashes):
        if other != hashes[0]:
            raise ConfigError(
                f"The model of rank {rank} has other initial weights than that of rank 0. Make it the same in every "
                f"process: torch.manual_seed(0) before it is made, or give a function that makes it."
            )


def made_with_by_all(engine: Engine) -> dict[str, str]:
    """What decides how the ranks round; refuses ranks that differ."""
    own = [made_with(engine.backend, engine.devices[rank]) for rank in engine.local_ranks]
    first, *others = engine.all_gather(own)
    for rank, other in enumerate(others, start=1):
        if names := [name for name in {**first, **other} if first.get(name) != other.get(name)]:
            name = names[0]
            hint = "Use devices of one model, and the same software on all machines"
            if engine.devices[rank].kind == "cpu" and engine.backend.portable_variables:
                hint = f"Use --portable, or set {engine.backend.portable_variables} for all of them"
            raise ConfigError(
                f"Rank {rank} ({engine.devices[rank]}) has another {name} than rank 0: {other.get(name)} and "
                f"{first.get(name)}. They round differently: the weights would depend on who computes which shard. "
                f"{hint}."
            )
    return own[0]
