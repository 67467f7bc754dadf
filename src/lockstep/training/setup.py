"""Assembles a run: backend, devices and task from its settings, then the engine and the steps."""

import sys
from dataclasses import replace
from typing import Any, NamedTuple

from lockstep.backends import Backend, devices_for, load_backend
from lockstep.config import ENGINES, RunConfig, check_ranks
from lockstep.core.device import Device
from lockstep.core.entry_points import OWN, call_user_function, is_entry_point, load_entry_point
from lockstep.core.errors import ConfigError
from lockstep.core.registry import pick
from lockstep.data import Dataset, load_dataset
from lockstep.data.arrays import dataset_of_arrays
from lockstep.data.sources import Progress, no_progress
from lockstep.models import MODELS, Model
from lockstep.parallel.combined import ModelSplit
from lockstep.partition.balance import Balance
from lockstep.partition.buckets import BUCKET_MB
from lockstep.partition.grid import num_devices_of
from lockstep.runtime.cuda_graph import captured_or_eager_steps
from lockstep.runtime.engine import Engine, has_all_ranks
from lockstep.runtime.inprocess import InProcess
from lockstep.runtime.step import EagerSteps, StepOptions, Steps
from lockstep.runtime.verification import VerifiedSteps
from lockstep.schedules.exchanges import NATIVE
from lockstep.training.callbacks import Callbacks
from lockstep.training.flat_task import flat_task
from lockstep.training.replica_set import ReplicaSet
from lockstep.training.split_checks import check_split, notes_on_split
from lockstep.training.task import Task, UserObjects, grid_of

MODULES = "torch"  # the framework whose modules can be trained


class Prepared(NamedTuple):
    """What a run's settings name, found and checked."""

    backend: Backend
    devices: list[Device]
    task: Task
    callbacks: Callbacks = Callbacks()


def prepare(
    config: RunConfig,
    objects: UserObjects | None = None,
    progress: Progress = no_progress,
    trains: bool = True,
    devices: list[Device] | None = None,  # of all ranks, where they are on several machines
) -> Prepared:
    """What the run needs, the cheapest checked first. A run that `trains` needs a shard for each device."""
    objects = objects or UserObjects()
    callbacks = Callbacks(objects.on_step, objects.on_epoch).checked()
    model = find_model(config, objects)
    if config.exchange == NATIVE and config.engine != "processes":
        raise ConfigError(
            "--exchange native needs --engine processes: it is the framework's own all-reduce between them."
        )
    if config.on_hang == "drop" and config.engine != "processes":
        raise ConfigError("--on-hang drop needs --engine processes: a thread that hangs cannot be dropped.")
    backend = load_backend(config.backend)
    check_portable(config, backend)
    engines = {name: ENGINES[name] for name in ("auto", *backend.capabilities.engines)}
    pick(engines, config.engine, f"engine for {backend.name}")
    if devices is None:
        wanted = config.devices if config.devices is not None else num_devices_of(config.split)
        devices = devices_for(backend, wanted, at_most=config.num_shards)
    grid = grid_of(config, len(devices))
    if trains:
        check_ranks(grid.data, config.num_shards)
        check_split(config, grid, objects)
    data = find_data(config, objects, progress)
    if isinstance(model, Model):
        if not isinstance(data, Dataset):
            raise ConfigError(f"{model.name} needs its samples in memory: give arrays (X, y), or a module as model.")
        has_kernels = devices[0].kind in backend.lenet_kernels
        compiled = config.compile and not has_kernels
        task = flat_task(replace(config, compile=compiled), backend, model, data, objects, grid)
        notes = notes_on_split(config, grid, task.num_train)
        if compiled != config.compile:
            notes = ("LeNet's layers are fused kernels on GPUs: there is nothing to compile (--compile).", *notes)
        return Prepared(backend, devices, with_notes(task, notes), callbacks)
    if backend.name != MODULES:
        raise ConfigError(f"{config.model} needs --backend {MODULES}. In {backend.name}, use --model lenet.")
    from lockstep.training.module_task import module_task  # loads its framework

    task = module_task(config, devices, model, data, objects)
    return Prepared(backend, devices, with_notes(task, notes_on_split(config, grid, task.num_train)), callbacks)


def with_notes(task: Task, notes: tuple[str, ...]) -> Task:
    """The task with more notes for the user."""
    return replace(task, notes=(*task.notes, *notes))


def check_portable(config: RunConfig, backend: Backend) -> None:
    """With --portable, chooses the kernels; before anything is computed."""
    if config.portable:
        backend.pin_kernels()


def with_engine(config: RunConfig) -> RunConfig:
    """The settings of a run with an engine that is chosen for its devices, where they leave it open.

    Threads share the GIL, which several GPUs would wait for. Forked processes need a program that has not used a
    GPU itself.
    """
    if config.engine != "auto":
        return config
    backend = load_backend(config.backend)
    devices = devices_for(backend, config.devices, at_most=config.num_shards)
    has_gpus = len(devices) > 1 and len({device for device in devices if device.kind == "cuda"}) == len(devices)
    forks = has_gpus and "processes" in backend.capabilities.engines and not backend.why_not_fork()
    return replace(config, engine="processes" if forks else "inprocess")


def find_model(config: RunConfig, objects: UserObjects) -> Any:
    """A `Model` for every framework, a `BuiltIn` one, a module, or a function that makes one."""
    if objects.model is not None:
        return objects.model
    if is_entry_point(config.model):
        return load_entry_point(config.model, "model")
    return pick(MODELS, config.model, "model", more=OWN)


def find_data(config: RunConfig, objects: UserObjects, progress: Progress) -> Any:
    """A `Dataset` in memory, or map-style datasets."""
    data, name = objects.data, config.data
    if data is None and is_entry_point(name):
        function = load_entry_point(name, "data")
        if not callable(function):
            raise ConfigError(f"The data {name} is a {type(function).__name__}. Name a function that returns the data.")
        data = call_user_function(function, "data")
        if data is None:
            raise ConfigError(f"The function for the data, {name}, returned None. It must return the data.")
    if data is None or isinstance(data, str):
        return load_dataset(data or name, config.data_dir, progress)
    if is_list_of_samples(data):
        return Samples(data)
    if isinstance(data, (tuple, list)) and len(data) == 2 and all(map(is_list_of_samples, data)):
        return Samples(data[0]), Samples(data[1])
    return data if is_map_style(data) else dataset_of_arrays(data, name)


def is_list_of_samples(data: Any) -> bool:
    """Whether it is a list of more than two pairs or dicts; two could be (X, y), or training and test data."""
    return isinstance(data, list) and len(data) > 2 and all(isinstance(sample, (tuple, dict)) for sample in data)


class Samples:
    """A list of samples as a map-style data set."""

    def __init__(self, samples: list[Any]) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, number: int) -> Any:
        return self._samples[number]


def is_map_style(data: Any) -> bool:
    """Whether `data` is a map-style dataset, or a pair of them, and not arrays."""
    parts, no_data_set = data if isinstance(data, (tuple, list)) else [data], (tuple, list, dict, str, type(None))
    return any(not isinstance(part, no_data_set) and not hasattr(part, "__array__") for part in parts)


def inprocess_engine(config: RunConfig, prepared: Prepared, has_session: bool = True) -> InProcess:
    """The engine `inprocess`, with the settings of a run. Without a session of the framework, the caller has one."""
    pins = not config.compile  # else the compiler's processes would all run on one core
    return InProcess(prepared.backend, prepared.devices, config.timeout, pins=pins, has_session=has_session)


def bucket_mb(config: RunConfig, engine: Engine) -> float:
    """The size of buckets: the user's, or what is faster for these devices."""
    if config.bucket_mb is not None:
        return config.bucket_mb
    shares_cores = has_all_ranks(engine) and engine.devices[0].kind == "cpu"
    return 0.0 if shares_cores else BUCKET_MB


def step_options(config: RunConfig, engine: Engine) -> StepOptions:
    """How the work of a step is split."""
    together = config.batch_norm == "sync" or config.loss_over == "batch"
    return StepOptions(config.num_shards, config.exchange, bucket_mb(config, engine), together)


def model_split(config: RunConfig, replicas: ReplicaSet) -> ModelSplit | None:
    """How the model and its update are split; None where only the data is."""
    placement = replicas.placement
    if placement.every_rank_has_all:
        return None
    clips = config.clip_norm is not None
    return ModelSplit(placement.grid, placement.stages, replicas.shapes(), config.pipeline, clips)


def make_steps(config: RunConfig, replica_set: ReplicaSet, balance: Balance) -> Steps:
    """The steps of a run: captured as CUDA graphs where possible, else eager."""
    engine, replicas = replica_set.engine, replica_set.local
    split = model_split(config, replica_set)
    options = step_options(config, engine)._replace(model_split=split)
    eager = EagerSteps(engine, replicas, options, balance)
    if split is not None:
        if engine.devices[0].kind == "cuda" and config.capture:
            eager.why_eager = "the model or its update is split"
        if split.grid.splits_model or options.shards_together or not config.verify_every or config.trace:
            return eager
        return VerifiedSteps(eager, engine, replicas, options, balance, every=sys.maxsize)  # only the first ones
    steps: Steps = eager
    if config.capture:
        steps = captured_or_eager_steps(engine, replicas, options, balance)
    if not config.verify_every or config.trace:
        return steps
    return VerifiedSteps(steps, engine, replicas, options, balance, config.verify_every)
