"""The epochs: from a run's settings to its result, as a sequence of events."""

import math
import time
from collections.abc import Generator
from dataclasses import asdict
from typing import NamedTuple

import numpy as np

from lockstep.backends import Backend, devices_for, load_backend
from lockstep.config import RunConfig, check_batch, check_ranks
from lockstep.data import Dataset, load_dataset
from lockstep.data.order import sample_order
from lockstep.data.sources import Progress, no_progress
from lockstep.device import Device
from lockstep.engines import ENGINES, Engine
from lockstep.errors import Interrupted, RunError
from lockstep.evaluate import num_correct
from lockstep.exchange import EXCHANGES, KEEPS_THE_TREE
from lockstep.layout import Array, layout_of, sha256_of
from lockstep.models import MODELS, CrossEntropySum, Model
from lockstep.registry import pick
from lockstep.report.events import EpochDone, Event, Result, RunDone, RunStarted, RunStopped, StepDone
from lockstep.samples import Samples
from lockstep.steps import train_step
from lockstep.update import Sgd


class Prepared(NamedTuple):
    """What the names in a run's settings stand for, once all of them were found."""

    backend: Backend
    engine: type[Engine]
    devices: list[Device]
    model: Model
    data: Dataset


def prepare(config: RunConfig, progress: Progress = no_progress) -> Prepared:
    """Finds everything the run needs, cheapest first; raises before anything is started or written."""
    model = pick(MODELS, config.model, "model")
    pick(EXCHANGES, config.exchange, "exchange")
    backend = load_backend(config.backend)
    able = {name: ENGINES[name] for name in backend.capabilities.engines}
    engine = pick(able, config.engine, f"engine for {backend.name}")
    devices = devices_for(backend, config.devices, at_most=config.num_shards)
    check_ranks(len(devices), config.num_shards)
    data = load_dataset(config.data, config.data_dir, progress)
    check_batch(config.batch_size, len(data.X_train), data.name)
    model.check(data)
    return Prepared(backend, engine, devices, model, data)


def train(config: RunConfig, prepared: Prepared) -> Generator[Event, None, None]:
    """The events of a run: RunStarted, then StepDone and EpochDone, and RunDone with the result at last."""
    backend, engine_type, devices, model, data = prepared
    initial = model.init(config.seed)
    layout = layout_of(initial)
    loss_sum, rule = CrossEntropySum(model.forward), Sgd(config.learning_rate)
    num_train, num_test = len(data.X_train), len(data.X_test)
    history: list[EpochDone] = []
    params: dict[str, Array] = {}  # after the last finished epoch
    first_loss = math.nan
    step = 0

    with engine_type(backend, devices, config.exchange) as engine:
        replicas = engine.replicate(layout.flatten(list(initial.values())))
        train_set = Samples(engine, data.X_train, data.y_train)
        test_set = Samples(engine, data.X_test, data.y_test)
        try:
            yield RunStarted(
                config=asdict(config),
                data_sha256=data.sha256,
                backend_version=backend.version(),
                devices=[str(device) for device in devices],
                num_train_samples=num_train,
                num_test_samples=num_test,
                num_parameters=layout.num_parameters,
                steps_per_epoch=math.ceil(num_train / config.batch_size),
                keeps_bits=config.exchange in KEEPS_THE_TREE,
            )
            for epoch in range(1, config.num_epochs + 1):
                began = time.perf_counter()
                losses: list[float] = []
                order = engine.place(sample_order(config.seed, epoch - 1, num_train))
                for start in range(0, num_train, config.batch_size):
                    batch = train_set.batch(order, start, min(start + config.batch_size, num_train))
                    replicas, own_losses = train_step(
                        engine, loss_sum, layout, replicas, batch, config.num_shards, rule
                    )
                    losses += [loss for of_rank in engine.gather(own_losses) for loss in of_rank]
                    step += 1
                    if step == 1:
                        first_loss = math.fsum(losses) / batch.num_samples
                    if not all(map(math.isfinite, losses[-config.num_shards :])):
                        yield from _stop(config, epoch, step, "the loss is no longer a number", history, params)
                    yield StepDone(epoch, step, batch.num_samples)
                seconds = time.perf_counter() - began
                flat = backend.to_numpy(replicas[0]).copy()  # a backend may show its own memory
                if not np.isfinite(flat).all():
                    yield from _stop(config, epoch, step, "a weight is no longer a number", history, params)
                correct = num_correct(engine, model.forward, layout, replicas, test_set.all())
                params = dict(zip(layout.names, layout.unflatten(flat), strict=True))
                history.append(
                    EpochDone(
                        epoch=epoch,
                        seconds=seconds,
                        train_loss=math.fsum(losses) / num_train,  # rounded once, at the end: the order does not matter
                        test_accuracy=correct / num_test,
                    )
                )
                yield history[-1]
        except KeyboardInterrupt:
            yield RunStopped(len(history) + 1, step, "interrupted", history, params)
            raise Interrupted(f"interrupted after step {step}.{_kept(config, history)}") from None

    seconds_per_epoch = sum(done.seconds for done in history) / len(history)
    yield RunDone(
        Result(
            test_accuracy=history[-1].test_accuracy,
            seconds_per_epoch=seconds_per_epoch,
            samples_per_second=num_train / seconds_per_epoch,
            backend=backend.name,
            backend_version=backend.version(),
            devices=[str(device) for device in devices],
            steps=step,
            first_loss=first_loss,
            weights_sha256=sha256_of(list(params.values())),
            history=history,
            run=config.out,
            params=params,
        )
    )


def _stop(
    config: RunConfig, epoch: int, step: int, what: str, history: list[EpochDone], params: dict[str, Array]
) -> Generator[Event, None, None]:
    """Hands out what there is, then ends the run with a sentence."""
    reason = f"epoch {epoch}, step {step}: {what}. The learning rate {config.learning_rate:g} is likely too large"
    yield RunStopped(epoch, step, reason, history, params)
    raise RunError(f"{reason}; try a smaller one.{_kept(config, history)}")


def _kept(config: RunConfig, history: list[EpochDone]) -> str:
    """Where to find what there is of a run that stopped."""
    if config.out is None:
        return ""
    has = f" and the weights after epoch {len(history)}" if history else ""
    return f" The metrics{has} are in {config.out}. To begin anew, remove it or choose another --out."
