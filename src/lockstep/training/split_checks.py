"""What does not go together with a model, or an update, that is split; each said in a sentence."""

from lockstep.config import RunConfig
from lockstep.core.errors import ConfigError
from lockstep.partition.grid import Grid
from lockstep.schedules.exchanges import KEEPS_THE_TREE
from lockstep.schedules.pipeline_orders import idle_share
from lockstep.training.task import UserObjects, num_steps


def check_split(config: RunConfig, grid: Grid, objects: UserObjects) -> None:
    """Refuses settings that need every device to hold the whole model."""
    if config.stages is not None and grid.network == 1:
        raise ConfigError(f"--stages {config.stages} names stages, and the network is not split. Use --split network.")
    shards_update = config.update == "sharded" and grid.data > 1
    if grid.layers > (config.num_slices or 1):
        raise ConfigError(
            f"{grid.layers} devices cannot share {config.num_slices} slices of a layer: some would never have work. "
            f"Use at most {config.num_slices} devices for the layers, or more slices (--slices; other weights)."
        )
    if not grid.splits_model and not shards_update and not config.num_slices:
        return
    what = f"--split {config.split}" if grid.splits_model else "--update sharded"
    if config.num_slices and not grid.splits_model and not shards_update:
        what = f"--slices {config.num_slices}"
    for is_wanted, setting, instead in (
        (config.exchange not in KEEPS_THE_TREE, f"--exchange {config.exchange}", "sharded, gather or tree"),
        (config.balance != "equal" and grid.splits_model, f"--balance {config.balance}", "equal shares"),
        (config.balance != "equal" and shards_update, f"--balance {config.balance}", "equal shares"),
        (config.batch_norm == "sync" and (grid.splits_model or config.num_slices), "--batch-norm sync", "shard"),
        (config.loss_over == "batch" and (grid.splits_model or config.num_slices), "--over batch", "a loss of samples"),
        (config.compile and (grid.splits_model or bool(config.num_slices)), "--compile", "no compilation"),
        (
            config.heal and config.engine == "processes",
            "--heal with --engine processes",
            "--engine inprocess, --no-heal",
        ),
    ):
        if is_wanted:
            raise ConfigError(f"{what} does not go together with {setting}. Use {instead}, or --split data.")
    if grid.network > 1 and isinstance(config.loss, str) and config.loss == "model" and objects.loss is None:
        raise ConfigError("A loss of the model itself (--loss model) needs the whole model. Use --split data.")


def notes_on_stages(config: RunConfig, grid: Grid, starts: list[str], places: tuple[int, ...]) -> tuple[str, ...]:
    """Where the network is cut, and what that costs; shown when the run starts."""
    notes = [f"The network is cut before {', '.join(starts)}."]
    if len(places) > grid.network:
        notes.append("Devices have an early and a late stage of it, which shares out its parameters better.")
    num_shards = -(-config.num_shards // grid.data)
    shards, idle = f"{num_shards} shard{'s' * (num_shards > 1)}", idle_share(config.pipeline, places, num_shards)
    if num_shards < grid.network:
        notes.append(
            f"{shards} cannot keep {grid.network} stages busy: they are idle for {100 * idle:.0f} % of the time. More "
            f"shards (--shards, which changes the weights) keep them busier."
        )
    else:
        notes.append(
            f"With {shards}, a device is idle for {100 * idle:.0f} % of a step if all have equal work, and longer if "
            f"not (--trace measures it)."
        )
    return tuple(notes)


def notes_on_split(config: RunConfig, grid: Grid, num_train: int) -> tuple[str, ...]:
    """What is different where a model, or its update, is split; shown when the run starts."""
    is_split = grid.splits_model or (config.update == "sharded" and grid.data > 1)
    if not is_split or not 0 < config.verify_every <= num_steps(config, num_train):
        return ()
    return ("Steps are not verified (--verify-every) where the model or its update is split.",)
