"""`lockstep.train`: the text's experiment, and a model and data of the user's own."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lockstep.backends import DEFAULT_BACKEND
from lockstep.config import RunConfig
from lockstep.core.errors import ConfigError
from lockstep.core.torchrun_env import says_the_result
from lockstep.core.entry_points import name_of
from lockstep.report.events import Result
from lockstep.training.run import run
from lockstep.training.task import Given


def train(
    num_gpus: int | None = None,
    batch_size: int = 256,
    lr: float | None = None,
    num_epochs: int = 10,
    *,
    model: Any = "lenet",
    data: Any = "fashion-mnist",
    loss: str | Callable[..., Any] = "cross_entropy",
    optimizer: str | Callable[..., Any] = "sgd",
    momentum: float = 0.0,
    weight_decay: float = 0.0,
    schedule: str = "constant",
    warmup: int = 0,
    scheduler: Callable[..., Any] | None = None,
    clip_norm: float | None = None,
    metrics: Any = None,
    batch_norm: str = "shard",
    precision: str = "fp32",
    compile: bool = False,
    capture: bool = True,
    trace: bool = False,
    devices: int | str | Sequence[str] | None = None,
    epochs: int | None = None,
    shards: int | None = None,
    num_shards: int = 8,
    seed: int = 0,
    backend: str = DEFAULT_BACKEND,
    engine: str = "inprocess",
    exchange: str = "sharded",
    bucket_mb: float = 8.0,
    balance: str = "equal",
    workers: int | None = None,
    data_dir: str | Path | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    checkpoint_every: int | None = None,
    keep_checkpoints: int = 3,
    check_every: int = 100,
    heal: bool = False,
    timeout: float = 60.0,
    on_hang: str = "stop",
    max_restarts: int = 3,
    quiet: bool = False,
) -> Result:
    """Trains a model on k devices: the same weights, bit for bit, whatever k is.

    The first four arguments are the text's. `epochs` and `shards` are other names for `num_epochs` and `num_shards`.

    - `model`: a name, a module (left as it was; the trained one is `result.module`), or a function that makes one.
    - `data`: a name, `(X, y)`, `((X, y), (X_test, y_test))`, a map-style data set, or a pair of such. Bytes reach the
      model as 0 to 1. X may be a tuple (the model's arguments) or a dict (its arguments by name).
    - `loss`: cross_entropy, mse, l1, bce, or a function of (output, y) that gives one number for each sample.
    - `optimizer`: sgd, adam, adamw, or a function that gets a list of parameters and gives an optimizer.
    - `schedule`: constant, cosine or linear, after `warmup` steps; or `scheduler`, a function of the optimizer, whose
      result is stepped after every update.
    - `metrics`: names or functions like those of `loss`, as a list or by name; means over the test samples come out.
    - `out`: the run's folder. With `resume=True` a run in it goes on from its last checkpoint, on any devices.

    >>> result = train(2, batch_size=256, lr=0.2, num_epochs=1, data="fashion-mnist-mini", quiet=True)
    >>> result.devices, result.steps
    (['cpu:0', 'cpu:1'], 8)
    """
    if num_gpus is not None and devices is not None:
        raise ConfigError("train got both num_gpus and devices. Give it one of them.")
    if epochs is not None and num_epochs != 10:
        raise ConfigError("train got both epochs and num_epochs. Give it one of them.")
    if shards is not None and num_shards != 8:
        raise ConfigError("train got both shards and num_shards. Give it one of them.")
    is_function = not isinstance(optimizer, str) and not hasattr(optimizer, "param_groups")
    if is_function and (lr is not None or momentum or weight_decay):
        raise ConfigError(
            "The optimizer is made by a function: give it the learning rate, momentum and weight decay there."
        )
    if data is None:
        raise ConfigError("The data is None. Give a name, (X, y), ((X, y), (X_test, y_test)), or a map-style data set.")
    if isinstance(devices, (list, tuple)):
        devices = ",".join(map(str, devices))
    elif devices is not None and not isinstance(devices, int):
        devices = str(devices)  # also a device of the framework
    config = RunConfig(
        model=model if isinstance(model, str) else name_of(model),
        data=data if isinstance(data, str) else str(data) if isinstance(data, Path) else "data given in Python",
        loss=loss if isinstance(loss, str) else name_of(loss),
        optimizer=optimizer if isinstance(optimizer, str) else name_of(optimizer),
        batch_size=batch_size,
        learning_rate=lr,
        momentum=momentum,
        weight_decay=weight_decay,
        schedule=schedule,
        warmup=warmup,
        clip_norm=clip_norm,
        batch_norm=batch_norm,
        precision=precision,
        compile=compile,
        capture=capture,
        trace=trace,
        num_epochs=num_epochs if epochs is None else epochs,
        num_shards=num_shards if shards is None else shards,
        seed=seed,
        backend=backend,
        devices=num_gpus if devices is None else devices,
        engine=engine,
        exchange=exchange,
        bucket_mb=bucket_mb,
        balance=balance,
        workers=workers,
        data_dir=None if data_dir is None else Path(data_dir),
        out=None if out is None else Path(out),
        checkpoint_every=checkpoint_every,
        keep_checkpoints=keep_checkpoints,
        check_every=check_every,
        heal=heal,
        timeout=timeout,
        on_hang=on_hang,
        max_restarts=max_restarts,
    )
    given = Given(
        model=None if isinstance(model, str) else model,
        data=None if isinstance(data, (str, Path)) else data,
        loss=None if isinstance(loss, str) else loss,
        optimizer=None if isinstance(optimizer, str) else optimizer,
        scheduler=scheduler,
        metrics=metrics,
    )
    result = run(config, given, quiet=quiet, resume=resume)
    if not quiet and says_the_result():
        print(result.lines())
    return result
