"""A PyTorch module to train: what was given is checked, and put into the form that the loop over epochs takes."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.utils.data import default_collate

from lockstep.backends.hardware import cpu
from lockstep.backends.torch import place_of
from lockstep.config import RunConfig, check_batch
from lockstep.data import Dataset
from lockstep.data.arrays import dataset_of_arrays
from lockstep.data.dataset import map_leaves
from lockstep.device import Device
from lockstep.engines import Engine
from lockstep.errors import ConfigError
from lockstep.layout import Array
from lockstep.models import BuiltIn
from lockstep.modules.loading import Loader, as_arrays, check_keyed, check_map_style
from lockstep.modules.losses import LOSSES, METRICS, PerSample
from lockstep.modules.optimizers import optimizer_maker
from lockstep.modules.random import AUGMENTATION, random_numbers_of
from lockstep.modules.replica import (
    ModuleRecipe,
    ModuleReplica,
    arrays_of,
    call,
    copy_of,
    gradients_of,
    load,
    modes_of,
    set_modes,
)
from lockstep.named import OWN, called, is_place, load_named
from lockstep.rates import Rates
from lockstep.registry import pick
from lockstep.samples import Feed, Samples
from lockstep.task import Given, Task, num_steps


def module_task(config: RunConfig, devices: list[Device], model: Any, data: Any, given: Given) -> Task:
    """The task of training `model`, a module or a function that makes one, on `data`."""
    train, test = parts_of(data, config.data)
    num_train, num_test = length_of(train), 0 if test is None else length_of(test)
    check_batch(config.batch_size, num_train, config.data)
    in_memory = Dataset(config.data, *train, *(test or ())) if _in_memory(train, test) else None
    module = made_module(model, in_memory, config.seed)
    loss = _callable(given.loss, config.loss, LOSSES, "loss")
    optimizer = given.optimizer
    if optimizer is None and is_place(config.optimizer):
        optimizer = load_named(config.optimizer, "optimizer")
    if given.scheduler is not None and (config.schedule != "constant" or config.warmup):
        raise ConfigError("There is a scheduler, and a schedule or a warm-up too. Give one of them.")
    if isinstance(loss, type):
        raise ConfigError(f"The loss is the class {loss.__name__}. Make one: {loss.__name__}(reduction='none').")
    if given.metrics is not None and test is None:
        raise ConfigError("There are metrics and no test samples to measure. Give both parts: data=(training, test).")
    if given.scheduler is not None and not callable(given.scheduler):
        raise ConfigError(
            f"The scheduler is a {type(given.scheduler).__name__}. Every device has an optimizer of its own: give a "
            f"function that makes one, scheduler=lambda optimizer: ..., or a name as schedule=."
        )
    if isinstance(loss, nn.Module) and any(param.requires_grad for param in loss.parameters()):
        raise ConfigError("The loss has parameters of its own, which nobody would train. Make them part of the model.")
    recipe = ModuleRecipe(
        module=module,
        gradients=gradients_of(module),
        loss=loss,
        metrics=metrics_of(given.metrics, loss),
        optimizer=optimizer_maker(config, optimizer),
        scheduler=given.scheduler,
        seed=config.seed,
        rates=Rates(config.schedule, config.warmup, num_steps(config, num_train)),
        clip_norm=config.clip_norm,
        is_sync=config.batch_norm == "sync",
        is_bf16=config.precision == "bf16",
    )
    check_smallest_shard(config, module, train, num_train)
    check_optimizer(recipe)
    for what, part in (("training", train), ("test", test)):
        if part is not None and not isinstance(part, tuple):
            check_keyed(part, what, config.seed)

    def finished(weights: dict[str, Array]) -> nn.Module:
        trained = copy_of(module, torch.device("cpu"))
        load(trained, weights)
        return trained

    return Task(
        model=config.model if given.model is None and not is_place(config.model) else type(module).__name__,
        initial=arrays_of(module),
        parameters=[name for name, _ in module.named_parameters()],
        replica=lambda device, weights: ModuleReplica(recipe, device, weights),
        train_set=lambda engine: feed(engine, train, "training", config, devices),
        test_set=None if test is None else lambda engine: feed(engine, test, "test", config, devices),
        num_train=num_train,
        num_test=num_test,
        data_sha256=None if in_memory is None else in_memory.sha256,
        piece=-(-config.batch_size // config.num_shards),  # as large as a shard, which fits into memory
        trained=finished,
        notes=notes(config, devices, num_train),
    )


def parts_of(data: Any, name: str) -> tuple[Any, Any]:
    """Training and test data, each a pair of arrays or a map-style data set; there may be no test data."""
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
    """Samples of a part."""
    if not isinstance(part, tuple):
        return len(part)
    return Dataset("", *part).num_train


def feed(engine: Engine, part: Any, what: str, config: RunConfig, devices: list[Device]) -> Feed:
    """Where the batches of a part come from."""
    if isinstance(part, tuple):
        return Samples(engine, *part)
    workers = min(4, cpu().num_cores) if config.workers is None else config.workers
    return Loader(part, what, devices, config.seed, workers)


def made_module(model: Any, data: Dataset | None, seed: int) -> nn.Module:
    """The module, once it was found to be one that can be trained; what a function makes depends on the seed alone."""
    if isinstance(model, nn.Module):
        module = model
    elif isinstance(model, BuiltIn) and data is None:
        raise ConfigError(
            "A model that comes with Lockstep looks at the data to find its shape, and these are loaded one by one. "
            "Give a function that makes it: model=lambda: ResNet18(in_channels=1, num_classes=10)."
        )
    elif isinstance(model, BuiltIn) or callable(model):
        make = partial(model.load(), cast(Dataset, data)) if isinstance(model, BuiltIn) else model
        gpus = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else []
        with random_numbers_of(seed), torch.random.fork_rng(devices=gpus):
            torch.manual_seed(seed)
            module = called(make, "model")
    else:
        raise ConfigError(
            f"The model is a {type(model).__name__}. Give a torch.nn.Module, or a function that makes one."
        )
    if not isinstance(module, nn.Module):
        raise ConfigError(f"The function for the model gave a {type(module).__name__}. It must give a torch.nn.Module.")
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if isinstance(tensor, (UninitializedParameter, UninitializedBuffer)):
            raise ConfigError(f"{name} has no shape yet (a lazy layer). Run one sample through the module first.")
        if tensor.is_meta:
            raise ConfigError(f"{name} is on the device meta, and has no numbers. Make the module on the CPU.")
        if isinstance(tensor, nn.Parameter) and tensor.requires_grad and tensor.dtype != torch.float32:
            raise ConfigError(
                f"The parameter {name} is {tensor.dtype}. Lockstep trains float32 parameters: use module.float(); for "
                f"bfloat16 arithmetic, --precision bf16 (precision='bf16')."
            )
    if not any(param.requires_grad for param in module.parameters()):
        raise ConfigError(f"{type(module).__name__} has no parameter to train: none of them has requires_grad.")
    try:
        copy.deepcopy(module)
    except Exception as problem:
        raise ConfigError(
            f"{type(module).__name__} cannot be copied to each device: {problem}. If this is weight_norm or "
            f"spectral_norm, use those of torch.nn.utils.parametrizations; else leave out what deepcopy cannot copy."
        ) from problem
    return module


def check_optimizer(recipe: ModuleRecipe) -> None:
    """What the functions for optimizer and scheduler refuse, they refuse now, on copies."""
    named = recipe.module.named_parameters()
    copies = [(name, nn.Parameter(param.detach().clone())) for name, param in named if param.requires_grad]
    optimizer = called(recipe.optimizer, "optimizer", copies)
    if recipe.scheduler is not None:
        scheduler = called(recipe.scheduler, "scheduler", optimizer)
        if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau) or not hasattr(scheduler, "step"):
            raise ConfigError(
                f"The scheduler is a {type(scheduler).__name__}. It is stepped after every update, without a metric: "
                f"use one of the others of torch.optim.lr_scheduler."
            )


def check_smallest_shard(config: RunConfig, module: nn.Module, train: Any, num_train: int) -> None:
    """Refuses shards of one sample where batch norm cannot do with one; found by trying, before anything is started."""
    rest = num_train % config.batch_size or config.batch_size
    has_norm = any(isinstance(layer, nn.modules.batchnorm._BatchNorm) for layer in module.modules())
    if not has_norm or config.batch_norm == "sync" or min(rest, config.batch_size) >= 2 * config.num_shards:
        return
    sample = map_leaves(train[0], lambda array: torch.from_numpy(array[:1])) if isinstance(train, tuple) else None
    if sample is None:
        with random_numbers_of(config.seed, 0, 0, AUGMENTATION):
            sample = default_collate([train[0]])[0]
    sample = map_leaves(sample, lambda tensor: tensor.float() / 255 if tensor.dtype == torch.uint8 else tensor)
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            one = copy_of(module, torch.device("cpu")).train()
            set_modes(one, modes_of(module))
            call(one, sample)
    except ValueError as problem:
        if "more than 1 value per channel" not in str(problem):
            return
        fewer = f"fewer shards (--shards {rest // 2}), " if rest > 1 else ""
        raise ConfigError(
            f"Some shards have one sample only, which is too few for batch norm ({problem}): {num_train} samples in "
            f"batches of {config.batch_size} leave a batch of {rest} for {config.num_shards} shards. Use {fewer}"
            f"another batch size, or the whole batch's statistics (--batch-norm sync)."
        ) from problem
    except Exception:  # whatever else is wrong with the model is said when it is trained, with the rank and the line
        return


def metrics_of(given: Any, loss: PerSample) -> dict[str, PerSample]:
    """Metrics by name: those that were asked for, else accuracy where the loss is that of class scores."""
    if given is None:
        return {"accuracy": METRICS["accuracy"]} if loss is LOSSES["cross_entropy"] else {}
    if isinstance(given, str) or callable(given):
        given = [given]
    if not isinstance(given, dict):
        named = [(m if isinstance(m, str) else getattr(m, "__name__", type(m).__name__), m) for m in given]
        given = dict(named)
        if len(given) < len(named) or "<lambda>" in given:
            raise ConfigError("Metrics need names of their own. Give them by name: metrics={'top5': ..., ...}.")
    if "loss" in given:
        raise ConfigError("A metric called 'loss' would hide the loss, which is measured anyway. Give it another name.")
    return {str(name): _callable(None if isinstance(m, str) else m, m, METRICS, "metric") for name, m in given.items()}


def notes(config: RunConfig, devices: list[Device], num_train: int) -> tuple[str, ...]:
    """What the user should know before it starts."""
    said = []
    if config.warmup > num_steps(config, num_train):
        said.append(f"The warm-up of {config.warmup} steps is longer than the run of {num_steps(config, num_train)}.")
    if config.precision == "bf16" and not _is_made_for_bfloat16(devices[0]):
        said.append("This device is not made for bfloat16: it will be slower than float32.")
    return tuple(said)


def _is_made_for_bfloat16(device: Device) -> bool:
    if device.kind == "cuda":
        return bool(torch.cuda.get_device_capability(place_of(device)) >= (8, 0))
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def _callable(given: Any, name: Any, table: dict[str, Callable[..., Any]], what: str) -> Any:
    if given is None:
        return load_named(name, what) if is_place(name) else pick(table, name, what, more=OWN)
    if isinstance(given, str):
        return pick(table, given, what)
    if not callable(given):
        raise ConfigError(f"The {what} is a {type(given).__name__}. Give a name, or a function of (output, y).")
    return given


def _in_memory(train: Any, test: Any) -> bool:
    return isinstance(train, tuple) and (test is None or isinstance(test, tuple))
