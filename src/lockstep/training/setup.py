"""From a run's settings to what they stand for; everything is found before anything is started or written."""

from typing import Any, NamedTuple

from lockstep.backends import Backend, devices_for, load_backend
from lockstep.config import RunConfig, check_ranks
from lockstep.data import Dataset, load_dataset
from lockstep.data.arrays import dataset_of_arrays
from lockstep.data.sources import Progress, no_progress
from lockstep.core.device import Device
from lockstep.runtime import ENGINES
from lockstep.core.errors import ConfigError
from lockstep.schedules.exchanges import EXCHANGES, NATIVE
from lockstep.models import MODELS, Model
from lockstep.core.entry_points import OWN, called, is_place, load_named
from lockstep.core.registry import pick
from lockstep.training.task import Given, Task, flat_task


class Prepared(NamedTuple):
    """What the names in a run's settings stand for, once all of them were found."""

    backend: Backend
    devices: list[Device]
    task: Task


def prepare(
    config: RunConfig,
    given: Given | None = None,
    progress: Progress = no_progress,
    trains: bool = True,
    devices: list[Device] | None = None,
) -> Prepared:
    """Finds everything the run needs, cheapest first. One that `trains` has no more devices than shards.

    `devices` are those of all ranks, where they are on several machines.
    """
    given = given or Given()
    model = find_model(config, given)
    pick({**EXCHANGES, NATIVE: None}, config.exchange, "exchange")
    if config.exchange == NATIVE and config.engine != "processes":
        raise ConfigError("native is the framework's own all-reduce, between processes: use --engine processes.")
    if config.on_hang == "drop" and config.engine != "processes":
        raise ConfigError("A thread that hangs cannot be dropped: --on-hang drop needs --engine processes.")
    backend = load_backend(config.backend)
    pick({name: ENGINES[name] for name in backend.capabilities.engines}, config.engine, f"engine for {backend.name}")
    if devices is None:
        devices = devices_for(backend, config.devices, at_most=config.num_shards)
    if trains:
        check_ranks(len(devices), config.num_shards)
    data = find_data(config, given, progress)
    if isinstance(model, Model):
        if not isinstance(data, Dataset):
            raise ConfigError(f"{model.name} needs its samples in memory: give arrays (X, y), or a model of your own.")
        return Prepared(backend, devices, flat_task(config, backend, model, data, given))
    from lockstep.replicas import FRAMEWORK
    from lockstep.training.module_task import module_task

    if backend.name != FRAMEWORK:
        raise ConfigError(
            f"{config.model} is a module of {FRAMEWORK}, and the backend is {backend.name}. Use lenet, or {FRAMEWORK}."
        )
    return Prepared(backend, devices, module_task(config, devices, model, data, given))


def find_model(config: RunConfig, given: Given) -> Any:
    """A model for every framework, a module, or a function that makes one (of a `Dataset`, where it is built in)."""
    if given.model is not None:
        return given.model
    if is_place(config.model):
        return load_named(config.model, "model")
    return pick(MODELS, config.model, "model", more=OWN)


def find_data(config: RunConfig, given: Given, progress: Progress) -> Any:
    """A `Dataset` in memory, or what was given, to be loaded sample by sample."""
    data, name = given.data, config.data
    if data is None and is_place(name):
        function = load_named(name, "data")
        if not callable(function):
            raise ConfigError(f"The data {name} is a {type(function).__name__}. Name a function that gives the data.")
        data = called(function, "data")
    if data is None:
        return load_dataset(name, config.data_dir, progress)
    if isinstance(data, str):
        return load_dataset(data, config.data_dir, progress)
    if is_loaded_one_by_one(data):
        return data
    return dataset_of_arrays(data, name)


def is_loaded_one_by_one(data: Any) -> bool:
    """Whether `data` is something with `__getitem__` of its own, or a pair of such, and not arrays."""
    parts = data if isinstance(data, (tuple, list)) else [data]
    return any(
        part is not None and not isinstance(part, (tuple, list, dict, str)) and not hasattr(part, "__array__")
        for part in parts
    )
