"""The task of training a model that is a function of a flat parameter vector, in any framework: LeNet."""

from functools import partial

from lockstep.backends import Backend
from lockstep.config import RunConfig, check_batch
from lockstep.core.device import Device
from lockstep.core.errors import ConfigError
from lockstep.core.layout import Array, layout_of
from lockstep.core.registry import pick
from lockstep.data import Dataset
from lockstep.data.order import sample_order
from lockstep.data.resident import ResidentData
from lockstep.models import Model
from lockstep.optim.lr_schedule import LRSchedule
from lockstep.optim.optimizers import OPTIMIZERS
from lockstep.partition.batch import split_into_shards
from lockstep.partition.chain import Chain, NamedChain
from lockstep.partition.grid import Grid
from lockstep.partition.placement import Part
from lockstep.partition.stages import balanced_stages
from lockstep.replicas.flat import FlatReplica, FlatTrainSpec
from lockstep.replicas.layered import LayeredReplica, sliced_layer
from lockstep.replicas.replica import OF_PARAMETER, Replica, ReplicaState
from lockstep.training.evaluate import EvalSpec
from lockstep.training.sliced_weights import sliced_by, whole_of
from lockstep.training.split_checks import notes_on_stages
from lockstep.training.task import Task, UserObjects, num_steps, weight_decay_of

EVAL_BATCH_SIZE = 256  # of LeNet: like the number of shards, it may change the last bits


def flat_task(
    config: RunConfig, backend: Backend, model: Model, data: Dataset, objects: UserObjects, grid: Grid
) -> Task:
    """The task of training `model` on `data`."""
    _check_settings(config, backend, model, objects)
    data = model.checked(data)
    check_batch(config.batch_size, data.num_train, data.name)
    assert config.learning_rate is not None, "a named optimizer has a default"
    if not model.layers and (grid.splits_model or config.num_slices):
        raise ConfigError(f"{model.name} does not say what its layers are, so it cannot be split. Use --split data.")
    initial = model.init(config.seed)
    layout = layout_of(initial)
    starts, stages = stage_starts(config, model, grid.network), tuple(range(grid.network))
    slices = [sliced_layer(layer, initial, config.num_slices or 0, Part()) for layer in model.layers]
    by_name = {
        name: ([names[at] for names in found.names], found.widths, layer.units[at])
        for layer, found in zip(model.layers, slices, strict=True)
        for at, name in enumerate(layer.params)
        if config.num_slices
    }
    whole, sliced = whole_of(by_name), sliced_by(by_name)
    shards = split_into_shards(config.batch_size, config.num_shards)
    spec = FlatTrainSpec(
        backend=backend,
        forward=model.forward,
        layout=layout,
        optimizer=OPTIMIZERS[config.optimizer](config.learning_rate, config.momentum, weight_decay_of(config)),
        lr_schedule=LRSchedule(config.schedule, config.warmup, num_steps(config, data.num_train)),
        clip_norm=config.clip_norm,
        compiled_sizes=frozenset(map(len, shards)) if config.compile else frozenset(),
    )

    def replica(device: Device, weights: dict[str, Array], state: ReplicaState | None, part: Part) -> Replica:
        if part.is_whole and not config.num_slices:
            flat = backend.from_numpy(layout.flatten([weights[name] for name in layout.names]), device)
            return FlatReplica(spec, backend.copy_to(flat, device), state, part)
        (stage,) = part.stages
        own = model.layers[([0, *starts])[stage] : ([*starts, len(model.layers)])[stage]]
        layers = [sliced_layer(layer, initial, config.num_slices or 0, part) for layer in own]
        return LayeredReplica(spec, layers, weights, device, state, part)

    return Task(
        model=model.name,
        initial=sliced(initial),
        parameters=list(initial),
        replica=replica,
        train_set=lambda memory: ResidentData(memory, data.X_train, data.y_train),
        test_set=(lambda memory: ResidentData(memory, data.X_test, data.y_test)) if data.num_test else None,
        num_train=data.num_train,
        num_test=data.num_test,
        data_sha256=data.sha256,
        order=partial(sample_order, config.seed, num_samples=data.num_train),
        eval_spec=EvalSpec(EVAL_BATCH_SIZE),
        trained=lambda weights: None,
        notes=notes_on_stages(config, grid, [model.layers[at].name for at in starts], stages) if starts else (),
        whole=whole,
        sliced=sliced,
        stages=stages,
        chain=lambda num_places: _chain_of(model, initial),
        state_units=tuple(f"{OF_PARAMETER}{name}" for name in sliced(initial)),
    )


def _chain_of(model: Model, initial: dict[str, Array]) -> NamedChain:
    """The layers of a model, one after the other."""
    sizes = [float(sum(initial[name].size for name in layer.params)) for layer in model.layers]
    return NamedChain([layer.name for layer in model.layers], Chain([layer.cost for layer in model.layers], (), sizes))


def stage_starts(config: RunConfig, model: Model, num_stages: int) -> list[int]:
    """The numbers of the layers that the stages begin with, but for the first: the user's, or stages of equal cost."""
    if num_stages == 1:
        return []
    if config.stages is None:
        return balanced_stages([layer.cost for layer in model.layers], [0.0] * (len(model.layers) - 1), num_stages)
    numbers = {layer.name: number for number, layer in enumerate(model.layers)}
    starts = [pick(numbers, name.strip(), f"layer of {model.name}") for name in config.stages.split(",")]
    if len(starts) != num_stages - 1 or sorted({0, *starts}) != [0, *starts]:
        raise ConfigError(
            f"--stages {config.stages} has to name {num_stages - 1} of the layers {', '.join(numbers)}, in this order: "
            f"those that all stages but the first begin with."
        )
    return starts


def _check_settings(config: RunConfig, backend: Backend, model: Model, objects: UserObjects) -> None:
    for name in ("batch_norm", "precision", "loss", "loss_over", "ema"):
        if (value := getattr(config, name)) != getattr(RunConfig, name):
            flag = f"--{name.replace('_', '-')} {value}"
            raise ConfigError(f"{model.name} is written for every framework and has no {flag}. Leave it out.")
    if config.compile and backend.capabilities.compiles == "no":
        raise ConfigError(f"{backend.name} does not compile a model. Leave --compile out, or use another backend.")
    pick(OPTIMIZERS, config.optimizer, f"optimizer for {model.name}")
    for name in ("scheduler", "metrics", "sampler", "collate_fn"):
        if getattr(objects, name) is not None:
            raise ConfigError(f"{model.name} is written for every framework: {name}= needs a module as model.")
