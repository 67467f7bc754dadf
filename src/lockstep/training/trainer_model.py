"""What a `Trainer` trains: a replica of the module on every device, or parts of it; and the file it is saved in."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from lockstep.config import RunConfig, settings_in
from lockstep.core.errors import ConfigError, RunError
from lockstep.core.files import read_regular, what_to_do, write_whole
from lockstep.core.serialization import CorruptData
from lockstep.core.settings import IDENTITY
from lockstep.data.given_batch import inputs_of
from lockstep.partition.grid import Grid
from lockstep.partition.placement import Placement
from lockstep.replicas.module_state import arrays_of
from lockstep.replicas.train_spec import TrainSpec
from lockstep.replicas.trainer_replica import TrainerReplica
from lockstep.training.checkpoint import Checkpoint, unpacked
from lockstep.training.module_split import make_replica, split_module, unsliced
from lockstep.training.sliced_weights import Arrays
from lockstep.training.state import Trained
from lockstep.training.trainer_settings import NOT_HERE

MAX_SAVED_BYTES = 1 << 38  # of a file that `Trainer.load` reads


class TrainerModel(NamedTuple):
    """A module, and how devices share it."""

    trained: Trained
    whole: Callable[[Arrays], Arrays]  # puts slices together
    is_split: bool  # or its update is


def trainer_model(config: RunConfig, grid: Grid, spec: TrainSpec, example: Any) -> TrainerModel:
    """The module of `spec`. Where it is split, `example` is a batch like those that will come."""
    shards_update = config.update == "sharded" and grid.data > 1
    if not grid.splits_model and not shards_update and not config.num_slices:
        replica = partial(TrainerReplica, spec)
        trained = Trained(replica, arrays_of(spec.module), identity_of(config), Placement(grid), can_heal=False)
        return TrainerModel(trained, unsliced, False)
    if example is None and (grid.splits_model or config.num_slices):
        raise ConfigError(
            "Where to split a model is found with some samples: give the Trainer a batch like those of your loop, "
            "example=(inputs, target)."
        )
    split = split_module(config, grid, spec, lambda: inputs_of(example))
    placement = Placement(grid, split.stages, shards_update)
    initial = split.sliced(arrays_of(spec.module))
    trained = Trained(partial(make_replica, split.spec), initial, identity_of(config), placement, can_heal=False)
    return TrainerModel(trained, split.whole, True)


def identity_of(config: RunConfig) -> dict[str, Any]:
    """What the bits depend on."""
    names = {each.name for each in settings_in(IDENTITY)} - set(NOT_HERE)
    return {name: getattr(config, name) for name in sorted(names)}


def read_saved(path: Path) -> Checkpoint:
    """What `Trainer.save` wrote."""
    try:
        return unpacked(read_regular(path, MAX_SAVED_BYTES))
    except OSError as problem:
        raise ConfigError(f"{path} cannot be read: {problem.strerror}. Give what Trainer.save wrote.") from problem
    except CorruptData as problem:
        raise ConfigError(f"{path} is damaged, or was not written by Trainer.save: {problem}.") from problem


def write_saved(path: Path, checkpoint: Checkpoint) -> None:
    """Writes it, or leaves what was there."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        content = checkpoint.packed()
        write_whole(path, lambda temporary: temporary.write_bytes(content))
    except OSError as problem:
        raise RunError(f"{path} cannot be written: {problem.strerror}. {what_to_do(problem)}.") from problem
