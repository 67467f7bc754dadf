"""The task of training a model that is a function of a flat parameter vector, in any framework: LeNet."""

from functools import partial
from typing import Any

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
from lockstep.replicas.flat import FlatReplica, FlatTrainSpec
from lockstep.training.evaluate import EvalSpec
from lockstep.training.task import Task, UserObjects, num_steps, weight_decay_of

EVAL_BATCH_SIZE = 256  # of LeNet: like the number of shards, it may change the last bits


def flat_task(config: RunConfig, backend: Backend, model: Model, data: Dataset, objects: UserObjects) -> Task:
    """The task of training `model` on `data`."""
    _check_settings(config, backend, model, objects)
    data = model.checked(data)
    check_batch(config.batch_size, data.num_train, data.name)
    assert config.learning_rate is not None, "a named optimizer has a default"
    initial = model.init(config.seed)
    layout = layout_of(initial)
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

    def replica(device: Device, weights: dict[str, Array], state_dict: Any) -> FlatReplica:
        flat = backend.from_numpy(layout.flatten([weights[name] for name in layout.names]), device)
        return FlatReplica(spec, backend.copy_to(flat, device), state_dict)

    return Task(
        model=model.name,
        initial=initial,
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
    )


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
