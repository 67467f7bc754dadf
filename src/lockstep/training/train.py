"""`lockstep.train`: the text's experiment, or a model and data of the user's own."""

import inspect
from pathlib import Path
from typing import Any

from lockstep.config import TYPES, RunConfig, field_of, settings_in
from lockstep.core.entry_points import GIVEN, describe
from lockstep.core.errors import ConfigError, Interrupted
from lockstep.core.notebook_kernel import in_notebook
from lockstep.core.registry import nearest
from lockstep.core.settings import option_of
from lockstep.core.torchrun_env import prints_result
from lockstep.report.events import Result
from lockstep.training.run import run
from lockstep.training.task import UserObjects

OBJECTS = {  # settings that may be an object instead of a name
    "model": "a name, a module, or a function that makes one",
    "data": "a name, (X, y), ((X, y), (X_test, y_test)), or a map-style dataset",
    "loss": "a name, or a function of (output, y)",
    "optimizer": "a name, or a function of the parameters",
}
ONLY_OBJECTS = ("scheduler", "metrics", "collate_fn", "sampler", "on_step", "on_epoch")


OTHERS_NAMES = {  # what a setting is called elsewhere -> here
    "shuffle": "sampler", "num_workers": "workers", "criterion": "loss", "loss_fn": "loss", "net": "model",
    "module": "model", "dataset": "data", "max_epochs": "num_epochs", "gpus": "devices", "num_devices": "devices",
    "grad_clip": "clip_norm", "max_grad_norm": "clip_norm", "gradient_clip_val": "clip_norm", "max_norm": "clip_norm",
    "amp": "precision", "mixed_precision": "precision", "dtype": "precision", "lr_scheduler": "scheduler",
    "callbacks": "on_epoch", "patience": "on_epoch", "early_stopping": "on_epoch", "strategy": "split",
}  # fmt: skip


class UnknownSetting(TypeError):
    """A keyword argument that is no setting; the message has the nearest name, or all that Python takes."""

    def __init__(self, option: str) -> None:
        options = [*inspect.signature(train).parameters]
        hint = nearest(option, [*options, *(each.name for each in settings_in())])
        if option in OTHERS_NAMES:
            hint = f" Did you mean {OTHERS_NAMES[option]!r}?"
        every = "See help(lockstep.train)." if hint else f"There are: {', '.join(options)}."
        super().__init__(f"unexpected keyword argument {option!r}.{hint} {every}")


def train(
    num_gpus: int | None = None,
    batch_size: int = 256,
    lr: float | None = None,
    num_epochs: int | None = None,
    *,
    resume: bool = False,
    quiet: bool = False,
    **settings: Any,
) -> Result:
    """The result of training a model on k devices: the same weights, bit for bit, whatever k is.

    The first four arguments are the text's. All others are the settings of `lockstep train` (see `RunConfig`), by the
    names of its options; `num_epochs` and `num_shards` are other names for `epochs` and `shards`.

    - `model`: a name, a module (left as it was; the trained one is `result.module`), or a function that makes one.
    - `data`: a name, `(X, y)`, `((X, y), (X_test, y_test))`, a map-style dataset, or a pair of such. Bytes reach the
      model as 0 to 1. X may be a tuple (the model's arguments) or a dict (its arguments by name).
      A sample may be a dict: the model gets it by name, and the loss sees it as y.
    - `loss`: cross_entropy, mse, l1, bce, or a function of (output, y) that returns one number for each sample, or a
      pair (sum, weight): the sum over the batch is divided by its weight once. "model": the model's own `.loss`. With
      `over="batch"` it gets the outputs and targets of the whole batch, and returns one number.
    - `optimizer`: sgd, adam, adamw, or a function of a list of parameters that returns an optimizer.
    - `schedule`: constant, cosine or linear, after `warmup` steps; or `scheduler`, a function of the optimizer, whose
      result is stepped after every update.
    - `metrics`: names or functions like those of `loss`, as a list or by name; reported as means over the test samples.
      Objects of torchmetrics and `lockstep.WholeSetMetric` are computed once, from the outputs for all test samples.
    - `collate_fn`: puts the samples of a shard together, like that of a DataLoader. `sampler`: which samples an epoch
      has, like that of a DataLoader, or a function of the epoch; random numbers are keyed by (seed, epoch).
    - `on_step`, `on_epoch`: functions that are called after every update and every epoch with the state of the run:
      epoch, step, loss, metrics, `evaluate()`, `weights()`, `stop()`.
    - `logger`: "tensorboard", or an object with the methods of Lightning's loggers, or a list of such; it gets a point
      every `log_every` steps, and one after every epoch.
    - `out`: the run's folder. With `resume=True` a run in it continues from its last checkpoint, on any devices.

    >>> result = train(2, batch_size=256, lr=0.2, num_epochs=1, data="fashion-mnist-mini", quiet=True)
    >>> result.devices, result.steps
    (['cpu:0', 'cpu:1'], 8)
    """
    texts = {"num_gpus": num_gpus, "batch_size": batch_size, "lr": lr, "num_epochs": num_epochs}
    try:
        result = run(*settings_of({**texts, **settings}), quiet=quiet, resume=resume)
    except (ConfigError, UnknownSetting) as problem:  # about what was asked for: lines of ours would not help
        raise problem.with_traceback(None) from problem.__cause__
    except Interrupted as stopped:
        if stopped.result is not None:
            stopped.args = (f"{stopped} {_where_the_result_is()}",)
        raise stopped.with_traceback(None) from stopped.__cause__
    if not quiet and prints_result():
        print(result.lines())
    return result


def _where_the_result_is() -> str:
    """How a program gets what an interrupted run has trained."""
    after = "in the next cell: import sys; result = sys.last_value.result; or with " if in_notebook() else "with "
    return f"Get the result so far {after}`except lockstep.Interrupted as stopped: result = stopped.result`."


def settings_of(given: dict[str, Any]) -> tuple[RunConfig, UserObjects]:
    """The settings of a run and the user's objects, from what is given by the names of options."""
    only_objects = {name: given[name] for name in ONLY_OBJECTS if name in given}
    settings = {name: value for name, value in given.items() if name not in ONLY_OBJECTS}
    objects = {name: settings[name] for name in OBJECTS if not isinstance(settings.get(name, ""), (str, Path))}
    if settings.get("logger") is not None and not isinstance(settings["logger"], str):
        objects["logger"] = settings["logger"]
    named = _config_settings(settings)
    is_function = "optimizer" in objects and not hasattr(objects["optimizer"], "param_groups")
    if is_function and any(named.get(name) for name in ("learning_rate", "momentum", "weight_decay")):
        raise ConfigError("The optimizer is made by a function: set learning rate, momentum and weight decay there.")
    return RunConfig(**named), UserObjects(**objects, **only_objects)


def _config_settings(named: dict[str, Any]) -> dict[str, Any]:
    """The fields of `RunConfig` by name; user objects as config.json describes them."""
    found: dict[str, Any] = {}
    options: dict[str, str] = {}  # field -> the option that it was set by
    for option, value in named.items():
        try:
            each = field_of({"num_gpus": "devices"}.get(option, option))
        except StopIteration:
            raise UnknownSetting(option) from None
        name = each.name
        if value is None and name in OBJECTS:
            raise ConfigError(f"The {name} is None. Leave it out for the default, or give {OBJECTS[name]}.")
        if value is None and (name == "devices" or option_of(each) != name):
            continue  # it has two names, and may be set by the other
        if name in found:
            raise ConfigError(f"train got both {options[name]} and {option}. Give it one of them.")
        if name in (*OBJECTS, "logger") and value is not None and not isinstance(value, (str, Path)):
            value = f"data{GIVEN}" if name == "data" else describe(value)
        elif name == "devices" and not isinstance(value, int):
            value = ",".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
        elif name == "stages" and isinstance(value, (list, tuple)):
            value = ",".join(map(str, value))
        found[name], options[name] = value, option
    return found


def _full_signature() -> inspect.Signature:
    """The signature with every setting, as `help(lockstep.train)` shows it."""
    own = list(inspect.signature(train).parameters.values())[:-1]
    options = [(option_of(each), each.default, TYPES[each.name]) for each in settings_in()]
    added = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
        for name, default, annotation in [*options, *((name, None, Any) for name in ONLY_OBJECTS)]
        if name not in {parameter.name for parameter in own}
    ]
    return inspect.Signature([*own, *added], return_annotation=Result)


train.__signature__ = _full_signature()  # type: ignore[attr-defined]
