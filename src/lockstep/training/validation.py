"""Validation of user objects before anything starts: module, loss, optimizer, scheduler."""

import copy
from functools import partial
from typing import Any

import torch
from threadpoolctl import threadpool_limits
from torch import nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from lockstep.backends.torch.session import single_threaded
from lockstep.config import RunConfig
from lockstep.core.entry_points import call_user_function
from lockstep.core.errors import ConfigError
from lockstep.data import Dataset
from lockstep.data.dataset import map_leaves
from lockstep.data.loader import ShardDataset, ShardRequest
from lockstep.data.seeded import seeded
from lockstep.models import BuiltIn
from lockstep.optim.torch_optimizers import check_can_step
from lockstep.replicas.module_state import call, copy_of, modules_in_eval_mode, put_in_mode
from lockstep.replicas.train_spec import TrainSpec

OLD_NORMS = {"SpectralNorm": "spectral_norm", "WeightNorm": "weight_norm"}  # hooks of torch.nn.utils


def made_module(model: Any, data: Dataset | None, seed: int) -> nn.Module:
    """A module that can be trained. What a function makes depends on the seed only.

    Not on how many cores there are, or torchrun allows: decompositions, which some weights start from, have other bits
    with several threads.
    """
    if isinstance(model, BuiltIn):
        if data is None:
            example = "model=lambda: ResNet18(in_channels=1, num_classes=10)"
            raise ConfigError(f"{model.entry_point} needs data in memory. Give a function that makes it: {example}.")
        model = partial(model.load(), data)
    if not isinstance(model, nn.Module) and not callable(model):
        kind = type(model).__name__
        raise ConfigError(f"The model is a {kind}. Give a torch.nn.Module, or a function that makes one.")
    module = model
    if not isinstance(model, nn.Module):
        gpus = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else []
        with seeded(seed), torch.random.fork_rng(devices=gpus), single_threaded(), threadpool_limits(1, "blas"):
            torch.manual_seed(seed)
            module = call_user_function(model, "model")
    if not isinstance(module, nn.Module):
        raise ConfigError(f"The function for the model returned a {type(module).__name__}. It must return a module.")
    for name, part in module.named_modules():
        if type(part).__name__ == "OptimizedModule" or getattr(part, "_compiled_call_impl", None) is not None:
            what = f"Its part {name}" if name else "The model"
            hint = (
                "Give the module itself, and compile=True: then shards are compiled, with the same bits on any devices"
            )
            raise ConfigError(f"{what} is compiled already, and a copy of it for each device would not be. {hint}.")
        if isinstance(part, torch.jit.ScriptModule):
            what = f"Its part {name}" if name else "The model"
            hint = "Give the module that it was made of"
            raise ConfigError(f"{what} is TorchScript, which cannot be copied to each device. {hint}.")
        for hook in part._forward_pre_hooks.values():
            if (old := OLD_NORMS.get(type(hook).__name__)) is not None:
                raise ConfigError(
                    f"{name or 'The model'} has the old torch.nn.utils.{old}, which computes its weight anew in every "
                    f"forward pass and keeps it. Use torch.nn.utils.parametrizations.{old}."
                )
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if isinstance(tensor, (UninitializedParameter, UninitializedBuffer)):
            raise ConfigError(f"{name} has no shape yet (a lazy layer). Run one sample through the module first.")
        if tensor.is_meta:
            raise ConfigError(f"{name} is on the device meta, and has no values. Make the module on the CPU.")
        if tensor._backward_hooks or getattr(tensor, "_post_accumulate_grad_hooks", None):
            hint = "Use clip_norm= or the optimizer for what it does, or a Trainer: gradients, apply, update"
            raise ConfigError(f"{name} has a hook (register_hook), which copies on devices would not have. {hint}.")
        if isinstance(tensor, nn.Parameter) and tensor.requires_grad and tensor.dtype != torch.float32:
            hint = "Lockstep trains float32 parameters: use module.float(); for bfloat16 arithmetic, precision='bf16'"
            raise ConfigError(f"The parameter {name} is {tensor.dtype}. {hint}.")
    if not any(param.requires_grad for param in module.parameters()):
        raise ConfigError(f"{type(module).__name__} has no parameter to train: none of them has requires_grad.")
    try:
        copy.deepcopy(module)
    except Exception as problem:
        hint = "Use weight_norm and spectral_norm of torch.nn.utils.parametrizations; remove what deepcopy cannot copy"
        raise ConfigError(f"{type(module).__name__} cannot be copied to each device: {problem}. {hint}.") from problem
    return module


def check_objects(config: RunConfig, spec: TrainSpec) -> None:
    """Checks the loss, and makes the optimizer and the scheduler once, of copies of the parameters."""
    loss: Any = spec.loss
    scheduler: Any = spec.scheduler
    if isinstance(loss, type):
        raise ConfigError(f"The loss is the class {loss.__name__}. Make one: {loss.__name__}(reduction='none').")
    if isinstance(loss, nn.Module) and any(param.requires_grad for param in loss.parameters()):
        raise ConfigError("The loss has parameters of its own, which are not trained. Make them part of the model.")
    if scheduler is not None and (config.schedule != "constant" or config.warmup):
        raise ConfigError("There is a scheduler, and a schedule or a warm-up too. Give one of them.")
    if scheduler is not None and not callable(scheduler):
        hint = "Give a function that takes the optimizer and returns one, or a name as schedule="
        raise ConfigError(f"The scheduler is a {type(scheduler).__name__}. {hint}.")
    named = spec.module.named_parameters()
    copies = [(name, nn.Parameter(param.detach().clone())) for name, param in named if param.requires_grad]
    optimizer = call_user_function(spec.optimizer, "optimizer", copies)
    check_can_step(optimizer)
    if scheduler is not None:
        made = call_user_function(scheduler, "scheduler", optimizer)
        if isinstance(made, torch.optim.lr_scheduler.ReduceLROnPlateau) or not hasattr(made, "step"):
            hint = "It is stepped after every update, without a metric: use another one of torch.optim.lr_scheduler"
            raise ConfigError(f"The scheduler is a {type(made).__name__}. {hint}.")


def check_smallest_shard(config: RunConfig, module: nn.Module, train: Any, num_train: int) -> None:
    """Refuses shards of one sample if batch norm needs more; tries it on one sample.

    The training data are a pair of arrays, or a data set of shards.
    """
    rest = num_train % config.batch_size or config.batch_size
    has_norm = any(isinstance(layer, nn.modules.batchnorm._BatchNorm) for layer in module.modules())
    if not has_norm or config.batch_norm == "sync" or min(rest, config.batch_size) >= 2 * config.num_shards:
        return
    try:
        with torch.no_grad(), seeded(config.seed):
            call(_training_copy(module), _first_sample(train))
    except Exception as problem:
        if not isinstance(problem, ValueError) or "more than 1 value per channel" not in str(problem):
            return  # training raises it again, and names the rank and the line
        fewer = f"fewer shards (--shards {rest // 2}), " if rest > 1 else ""
        raise ConfigError(
            f"Some shards have one sample only, which is too few for batch norm ({problem}): {num_train} samples in "
            f"batches of {config.batch_size} leave a batch of {rest} for {config.num_shards} shards. Use {fewer}"
            f"another batch size, or the whole batch's statistics (--batch-norm sync)."
        ) from problem


def _training_copy(module: nn.Module) -> nn.Module:
    """A copy in training mode, except for parts that the user has put into evaluation mode."""
    copied = copy_of(module, torch.device("cpu"))
    put_in_mode(copied, True, modules_in_eval_mode(module))
    return copied


def _first_sample(train: Any) -> Any:
    """A shard of one sample, as the model would get it."""
    if isinstance(train, ShardDataset):
        shard = train[ShardRequest(0, [0])]
        return shard if isinstance(shard, dict) else shard[0]
    sample = map_leaves(train[0], lambda array: torch.from_numpy(array[:1]))
    return map_leaves(sample, lambda tensor: tensor.float() / 255 if tensor.dtype == torch.uint8 else tensor)
