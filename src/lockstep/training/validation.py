"""Validation of user objects: a module, or a function that makes one, an optimizer; before anything starts."""

import contextlib
import copy
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.utils.data import default_collate

from lockstep.config import RunConfig
from lockstep.core.entry_points import call_user_function
from lockstep.core.errors import ConfigError
from lockstep.core.random import AUGMENTATION
from lockstep.data import Dataset
from lockstep.data.dataset import map_leaves
from lockstep.data.seeded import seeded
from lockstep.models import BuiltIn
from lockstep.replicas.keyed_random import KeyedRandom
from lockstep.replicas.module_state import call, copy_of, modules_in_eval_mode, put_in_eval_mode
from lockstep.replicas.train_spec import TrainSpec


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
        with seeded(seed), torch.random.fork_rng(devices=gpus):
            torch.manual_seed(seed)
            module = call_user_function(make, "model")
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


def check_optimizer(spec: TrainSpec) -> None:
    """What the functions for optimizer and scheduler refuse, they refuse now, on copies."""
    named = spec.module.named_parameters()
    copies = [(name, nn.Parameter(param.detach().clone())) for name, param in named if param.requires_grad]
    optimizer = call_user_function(spec.optimizer, "optimizer", copies)
    if spec.scheduler is not None:
        scheduler = call_user_function(spec.scheduler, "scheduler", optimizer)
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
    try:
        with torch.no_grad(), seeded(config.seed, 0, 0, AUGMENTATION):
            one = copy_of(module, torch.device("cpu")).train()
            put_in_eval_mode(one, modules_in_eval_mode(module))
            call(one, _first_sample(train))
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


def check_compilable(config: RunConfig, module: nn.Module, train: Any) -> None:
    """Refuses to compile a model that draws random numbers; found by trying, before anything is started."""
    if config.batch_norm == "sync":
        raise ConfigError("A compiled model cannot wait for statistics of the whole batch. Leave --compile out.")
    random = KeyedRandom(torch.device("cpu"))
    one = copy_of(module, torch.device("cpu")).train()
    put_in_eval_mode(one, modules_in_eval_mode(module))
    with contextlib.suppress(Exception), torch.no_grad(), random.start(config.seed):
        call(one, map_leaves(_first_sample(train), lambda tensor: torch.cat([tensor, tensor])))
    if random.has_drawn:
        raise ConfigError(
            "The model draws random numbers (dropout?), which a compiled model takes from the order of its work: the "
            "weights would depend on the number of devices. Leave --compile out, or the dropout."
        )


def _first_sample(train: Any) -> Any:
    """A shard of one sample, as the model would get it."""
    if not isinstance(train, tuple):
        return default_collate([tuple(train[0])])[0]
    sample = map_leaves(train[0], lambda array: torch.from_numpy(array[:1]))
    return map_leaves(sample, lambda tensor: tensor.float() / 255 if tensor.dtype == torch.uint8 else tensor)
