"""What is trained, and on what: everything that the loop over epochs needs, however it was given."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lockstep.backends import Backend
from lockstep.config import RunConfig, check_batch
from lockstep.data import Dataset
from lockstep.core.device import Device
from lockstep.runtime import Engine, Replica
from lockstep.core.errors import ConfigError
from lockstep.core.layout import Array, layout_of
from lockstep.models import Model
from lockstep.optim.lr_schedule import Rates
from lockstep.core.registry import pick
from lockstep.replicas.flat import FlatRecipe, FlatReplica
from lockstep.data.resident import Feed, Samples
from lockstep.optim.optimizers import RULES

PIECE = 256  # samples that LeNet is tested on together; part of the answer's definition, like the number of shards


@dataclass(frozen=True)
class Given:
    """What was given in Python instead of by name. Whatever is None is found by its name in the settings."""

    model: Any = None
    data: Any = None
    loss: Any = None
    optimizer: Any = None
    scheduler: Any = None
    metrics: Any = None


@dataclass(frozen=True)
class Task:
    """One model to train on one data set."""

    model: str  # what it is called on the terminal
    initial: dict[str, Array]  # parameters and buffers by name, in model order
    parameters: list[str]  # those of them that are parameters
    replica: Callable[[Device, dict[str, Array], Any], Replica]  # a new one: on a device, with numbers, with a memory
    train_set: Callable[[Engine], Feed]
    test_set: Callable[[Engine], Feed] | None
    num_train: int
    num_test: int
    data_sha256: str | None  # None where the samples are not in memory
    piece: int  # samples that are tested together
    trained: Callable[[dict[str, Array]], Any]  # parameters and buffers -> what the user gets back
    notes: tuple[str, ...] = ()  # what the user should know before it starts

    @property
    def num_parameters(self) -> int:
        """Entries of all parameters together."""
        return sum(self.initial[name].size for name in self.parameters)


def num_steps(config: RunConfig, num_train: int) -> int:
    """Steps of the whole run."""
    return config.num_epochs * -(-num_train // config.batch_size)


def flat_task(config: RunConfig, backend: Backend, model: Model, data: Dataset, given: Given) -> Task:
    """A model that is a function of one flat vector, in any framework."""
    for setting, only, value in (
        ("--batch-norm", "shard", config.batch_norm),
        ("--precision", "fp32", config.precision),
        ("--loss", "cross_entropy", config.loss),
    ):
        if value != only:
            raise ConfigError(
                f"{model.name} is written for every framework, and knows no {setting} {value}. Leave it out."
            )
    if config.compile and backend.capabilities.capture == "no":
        raise ConfigError(
            f"{backend.name} does not compile a model. Leave --compile out, or use a backend "
            f"that does (lockstep devices)."
        )
    if given.scheduler is not None or given.metrics is not None or config.optimizer not in RULES:
        pick(RULES, config.optimizer, f"optimizer for {model.name}")
        raise ConfigError(
            f"{model.name} is written for every framework: a scheduler or metrics of your own need a module."
        )
    model.check(data)
    check_batch(config.batch_size, data.num_train, data.name)
    assert config.learning_rate is not None, "a named optimizer has one"
    initial = model.init(config.seed)
    layout = layout_of(initial)
    recipe = FlatRecipe(
        backend=backend,
        forward=model.forward,
        layout=layout,
        rule=RULES[config.optimizer](config.learning_rate, config.momentum, config.weight_decay),
        rates=Rates(config.schedule, config.warmup, num_steps(config, data.num_train)),
        clip_norm=config.clip_norm,
        compiles=config.compile,
    )
    compiles = config.compile and backend.capabilities.capture == "on request"

    def replica(device: Device, weights: dict[str, Array], memory: Any) -> FlatReplica:
        flat = backend.from_numpy(layout.flatten([weights[name] for name in layout.names]), device)
        return FlatReplica(recipe, backend.copy_to(flat, device), memory)

    return Task(
        model=model.name,
        initial=initial,
        parameters=list(initial),
        replica=replica,
        train_set=lambda engine: Samples(engine, data.X_train, data.y_train, compiles),
        test_set=(lambda engine: Samples(engine, data.X_test, data.y_test, compiles)) if data.num_test else None,
        num_train=data.num_train,
        num_test=data.num_test,
        data_sha256=data.sha256,
        piece=PIECE,
        trained=lambda weights: None,
    )
