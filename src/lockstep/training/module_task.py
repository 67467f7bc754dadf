"""The task of training a PyTorch module. User objects are checked here and in `validation.py`."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from lockstep.backends.hardware import cpu
from lockstep.backends.torch import torch_device
from lockstep.config import RunConfig, check_batch
from lockstep.core.device import Device
from lockstep.core.entry_points import OWN, is_entry_point, load_entry_point
from lockstep.core.errors import ConfigError
from lockstep.core.layout import Array
from lockstep.core.registry import pick
from lockstep.data import Dataset
from lockstep.data.arrays import dataset_of_arrays
from lockstep.data.batch import BatchSource, DeviceMemory
from lockstep.data.dataset import map_leaves
from lockstep.data.given_batch import GivenBatches
from lockstep.data.loader import Collate, Loader, ShardDataset, ShardRequest, as_arrays, check_keyed, check_map_style
from lockstep.data.order import sample_order
from lockstep.data.resident import ResidentData, as_floats
from lockstep.data.sampler import SampledOrder
from lockstep.models.losses import LOSSES, METRICS, MODEL, PerSample
from lockstep.models.mean_losses import with_exact_mean
from lockstep.models.model_loss import ModelLoss
from lockstep.models.whole_set_metrics import is_whole_set, values_of
from lockstep.optim.lr_schedule import LRSchedule
from lockstep.optim.torch_optimizers import MakeOptimizer, OptimizerSettings, named_optimizer, user_optimizer
from lockstep.partition.batch import split_into_shards
from lockstep.replicas.memory_format import wants_channels_last
from lockstep.replicas.module_state import arrays_of, copy_of, load
from lockstep.replicas.replica import OF_PARAMETER
from lockstep.replicas.running_stats import BATCH_NORM, has_running_stats
from lockstep.replicas.stages import chain_of
from lockstep.replicas.train_spec import TrainSpec
from lockstep.training.evaluate import EvalSpec
from lockstep.training.module_split import make_replica, split_module
from lockstep.training.task import Task, UserObjects, grid_of, num_steps, weight_decay_of
from lockstep.training.validation import check_objects, check_smallest_shard, made_module


def module_task(config: RunConfig, devices: list[Device], model: Any, data: Any, objects: UserObjects) -> Task:
    """The task of training `model`, a module or a function that makes one, on `data`."""
    train, test = parts_of(data, config.data)
    order: Callable[[int], Array] = partial(sample_order, config.seed, num_samples=length_of(train))
    num_train, num_test = length_of(train), 0 if test is None else length_of(test)
    if objects.sampler is not None:
        order = sampled = SampledOrder(objects.sampler, config.seed, num_train)
        num_train = sampled.length
    check_batch(config.batch_size, num_train, config.data)
    all_arrays = all(isinstance(part, tuple) for part in (train, test) if part is not None)
    in_memory = Dataset(config.data, *train, *(test or ())) if all_arrays else None
    module = made_module(model, in_memory, config.seed)
    if objects.metrics is not None and test is None:
        raise ConfigError("There are metrics and no test samples to measure. Give both parts: data=(training, test).")
    shards = split_into_shards(config.batch_size, config.num_shards)
    lr_schedule = LRSchedule(config.schedule, config.warmup, num_steps(config, num_train))
    spec = train_spec(config, devices, module, objects, lr_schedule, frozenset(map(len, shards)))
    grid = grid_of(config, len(devices))
    first = partial(first_samples, train, config, objects.collate_fn)
    split = split_module(config, grid, spec, first)
    train, test = (_shards_of(part, config, objects.collate_fn) for part in (train, test))
    check_smallest_shard(config, module, train, num_train)
    for what, part in (("training", train), ("test", test)):
        if isinstance(part, ShardDataset):
            check_keyed(part, what)

    return Task(
        model=config.model if objects.model is None and not is_entry_point(config.model) else type(module).__name__,
        initial=split.sliced(arrays_of(module)),
        parameters=[name for name, _ in module.named_parameters()],
        replica=partial(make_replica, split.spec),
        train_set=lambda memory: batch_source(memory, train, "training", config),
        test_set=None if test is None else lambda memory: batch_source(memory, test, "test", config),
        num_train=num_train,
        num_test=num_test,
        data_sha256=None if in_memory is None else in_memory.sha256,
        order=order,
        # batches of the size of a shard, which fits into memory
        eval_spec=eval_spec_of(-(-config.batch_size // config.num_shards), objects.metrics),
        trained=partial(with_weights, module),
        given_batch=lambda memory: GivenBatches(memory).batch,
        notes=(*notes(config, devices, num_train), *split.notes),
        whole=split.whole,
        sliced=split.sliced,
        stages=split.stages,
        chain=partial(chain_of, module, first),
        state_units=tuple(f"{OF_PARAMETER}{name}" for name in split.spec.names),
    )


def train_spec(
    config: RunConfig,
    devices: list[Device],
    module: nn.Module,
    objects: UserObjects,
    lr_schedule: LRSchedule,
    compiled_sizes: frozenset[int],
) -> TrainSpec:
    """How a module is trained, checked. With --compile, shards of `compiled_sizes` are compiled."""
    if config.precision == "tf32" and devices[0].kind != "cuda":
        raise ConfigError("tf32 is an arithmetic of NVIDIA GPUs, and the devices are CPUs. Use fp32.")
    if config.compile and config.batch_norm == "sync":
        raise ConfigError("A compiled model cannot wait for statistics of the whole batch. Leave --compile out.")
    of_instances = [part for part in module.modules() if has_running_stats(part) and not isinstance(part, BATCH_NORM)]
    if config.batch_norm == "sync" and of_instances:
        raise ConfigError(
            f"{type(of_instances[0]).__name__} with running statistics needs --batch-norm shard: they are those of "
            f"single samples, and not of the whole batch."
        )
    if config.loss_over == "batch" and (config.compile or config.batch_norm == "sync"):
        other = "--compile" if config.compile else "--batch-norm sync"
        raise ConfigError(f"A loss over the batch (--over batch) does not go together with {other}. Leave one out.")
    wanted = config.loss if objects.loss is None else objects.loss
    is_model = isinstance(wanted, str) and wanted == MODEL
    loss = ModelLoss() if is_model else with_exact_mean(_callable(wanted, {**LOSSES, MODEL: ModelLoss}, "loss"))
    spec = TrainSpec(
        module=module,
        loss=loss,
        metrics=metrics_of(objects.metrics, loss),
        keeps_outputs=bool(whole_set_metrics(objects.metrics)),
        optimizer=_optimizer(config, objects),
        scheduler=objects.scheduler,
        seed=config.seed,
        lr_schedule=lr_schedule,
        clip_norm=config.clip_norm,
        sync_batch_norm=config.batch_norm == "sync",
        loss_over_batch=config.loss_over == "batch",
        ema=config.ema,
        precision=config.precision,
        device_kind=devices[0].kind,
        channels_last=wants_channels_last(module, devices[0], config.precision),
        names=tuple(name for name, param in module.named_parameters() if param.requires_grad),
        compiled_sizes=compiled_sizes if config.compile else frozenset(),
    )
    check_objects(config, spec)
    return spec


def with_weights(module: nn.Module, weights: dict[str, Array]) -> nn.Module:
    """A copy of a module with these weights, on the CPU."""
    trained = copy_of(module, torch.device("cpu"))
    load(trained, weights)
    return trained


def _optimizer(config: RunConfig, objects: UserObjects) -> MakeOptimizer:
    if objects.optimizer is not None:
        return user_optimizer(objects.optimizer)
    if is_entry_point(config.optimizer):
        return user_optimizer(load_entry_point(config.optimizer, "optimizer"))
    settings = OptimizerSettings(config.learning_rate, config.momentum, weight_decay_of(config))
    return named_optimizer(config.optimizer, settings)


def parts_of(data: Any, name: str) -> tuple[Any, Any]:
    """Training and test data, each a pair of arrays or a map-style dataset; without test data, None."""
    if isinstance(data, Dataset):
        return (data.X_train, data.y_train), (data.X_test, data.y_test) if data.num_test else None
    train, test = data if isinstance(data, (tuple, list)) and len(data) == 2 else (data, None)
    return _part(train, name, "training"), None if test is None else _part(test, name, "test")


def _part(part: Any, name: str, what: str) -> Any:
    if not isinstance(part, (tuple, list)):
        check_map_style(part, what)
    arrays = part if isinstance(part, (tuple, list)) else as_arrays(part)
    if arrays is None:
        return part
    checked = dataset_of_arrays(arrays, name)
    return checked.X_train, checked.y_train


def length_of(part: Any) -> int:
    """The number of samples of a part."""
    return Dataset("", *part).num_train if isinstance(part, tuple) else len(part)


def _shards_of(part: Any, config: RunConfig, collate_fn: Collate | None) -> Any:
    """A part whose samples are loaded, in shards; arrays stay what they are."""
    if part is None or not isinstance(part, tuple):
        return None if part is None else ShardDataset(part, config.seed, collate_fn)
    if collate_fn is not None:
        raise ConfigError("collate_fn puts samples of a data set together, and the data are arrays. Leave it out.")
    return part


def batch_source(memory: DeviceMemory, part: Any, what: str, config: RunConfig) -> BatchSource:
    """The batches of a part."""
    if isinstance(part, tuple):
        return ResidentData(memory, part[0], part[1])
    workers = min(4, cpu().num_cores) if config.workers is None else config.workers
    num_processes = memory.num_ranks // len(memory.local_ranks)
    return Loader(memory, part, what, -(-workers // num_processes), grid_of(config, memory.num_ranks))


def first_samples(part: Any, config: RunConfig, collate_fn: Collate | None) -> Any:
    """The inputs of two samples, as a model gets them, to know their shapes."""
    if isinstance(part, tuple):
        return map_leaves(part[0], lambda array: torch.from_numpy(as_floats(array[:2].copy())))
    loaded = ShardDataset(part, config.seed, collate_fn)[ShardRequest(0, [0, min(1, len(part) - 1)])]
    return loaded if isinstance(loaded, dict) else loaded[0]


def metrics_of(metrics: Any, loss: PerSample) -> dict[str, PerSample]:
    """Metrics of samples by name: the user's, else accuracy where the loss is cross-entropy."""
    if metrics is None:
        return {"accuracy": METRICS["accuracy"]} if loss is LOSSES["cross_entropy"] else {}
    named = {name: metric for name, metric in _by_name(metrics).items() if not is_whole_set(metric)}
    return {name: _callable(metric, METRICS, "metric") for name, metric in named.items()}


def whole_set_metrics(metrics: Any) -> dict[str, Any]:
    """Those of the user's that are no means over samples, by name."""
    return {} if metrics is None else {n: metric for n, metric in _by_name(metrics).items() if is_whole_set(metric)}


def eval_spec_of(batch_size: int, metrics: Any) -> EvalSpec:
    """How samples are evaluated, with the user's metrics."""
    whole_set = whole_set_metrics(metrics)
    return EvalSpec(batch_size, partial(values_of, whole_set) if whole_set else None)


def _by_name(metrics: Any) -> dict[str, Any]:
    if isinstance(metrics, str) or callable(metrics) or is_whole_set(metrics):
        metrics = [metrics]
    if not isinstance(metrics, dict):
        named = [(m if isinstance(m, str) else getattr(m, "__name__", type(m).__name__), m) for m in metrics]
        metrics = {"metric": named[0][1]} if [name for name, _ in named] == ["<lambda>"] else dict(named)
        if len(metrics) < len(named) or "<lambda>" in metrics:
            raise ConfigError("Metrics need different names. Give them by name: metrics={'top5': ..., ...}.")
    if "loss" in metrics:
        raise ConfigError("A metric called 'loss' would hide the loss, which is measured anyway. Give it another name.")
    return {str(name): metric for name, metric in metrics.items()}


def notes(config: RunConfig, devices: list[Device], num_train: int) -> tuple[str, ...]:
    """Warnings that are shown when the run starts."""
    found, steps = [], num_steps(config, num_train)
    if config.warmup > steps:
        found.append(f"The warm-up of {config.warmup} steps is longer than the run of {steps}.")
    can_ask = devices[0].kind == "cpu" or config.engine != "processes"  # to ask a GPU rules out forking afterwards
    if config.precision == "bf16" and can_ask and not _has_bfloat16(devices[0]):
        found.append("This device has no bfloat16 arithmetic: bf16 will be slower than fp32.")
    return tuple(found)


def _has_bfloat16(device: Device) -> bool:
    if device.kind == "cuda":
        return bool(torch.cuda.get_device_capability(torch_device(device)) >= (8, 0))
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def _callable(wanted: Any, table: dict[str, Callable[..., Any]], what: str) -> Any:
    """A loss or metric: a function, an entry point, or a name in `table`."""
    if isinstance(wanted, str):
        return load_entry_point(wanted, what) if is_entry_point(wanted) else pick(table, wanted, what, more=OWN)
    if not callable(wanted):
        raise ConfigError(f"The {what} is a {type(wanted).__name__}. Give a name, or a function of (output, y).")
    return wanted
