"""The epochs: from what a run was prepared with to its result, as a sequence of events."""

import math
import time
from collections.abc import Generator
from contextlib import ExitStack
from dataclasses import asdict

import numpy as np

from lockstep.backends import peak_memory, reset_peak_memory
from lockstep.config import RunConfig
from lockstep.data.order import sample_order
from lockstep.errors import Interrupted, RunError
from lockstep.evaluate import measure_all
from lockstep.exchange import KEEPS_THE_TREE
from lockstep.layout import Array, sha256_of
from lockstep.prepare import Prepared
from lockstep.report.events import EpochDone, Event, Result, RunDone, RunStarted, RunStopped, StepDone
from lockstep.split.batch import split_into_shards
from lockstep.steps import train_step


class Stopped(RunError):
    """The run ended itself, and has said so in an event."""


def train(config: RunConfig, prepared: Prepared) -> Generator[Event, None, None]:
    """The events of a run: RunStarted, then StepDone and EpochDone, and RunDone with the result at last."""
    backend, engine_type, devices, task = prepared
    history: list[EpochDone] = []
    weights: dict[str, Array] = {}  # parameters and buffers after the last finished epoch
    first_loss = math.nan
    step = 0

    with ExitStack() as closing:
        engine = closing.enter_context(engine_type(backend, devices, config.exchange))
        reset_peak_memory(backend, devices)
        replicas = engine.replicate(lambda device: task.replica(device, task.initial))
        train_set = task.train_set(engine)
        closing.callback(train_set.close)
        test_set = None if task.test_set is None else task.test_set(engine)
        if test_set is not None:
            closing.callback(test_set.close)
        try:
            yield RunStarted(
                config=asdict(config),
                model=task.model,
                data_sha256=task.data_sha256,
                backend_version=backend.version(),
                devices=[str(device) for device in devices],
                num_train_samples=task.num_train,
                num_test_samples=task.num_test,
                num_parameters=task.num_parameters,
                steps_per_epoch=math.ceil(task.num_train / config.batch_size),
                keeps_bits=config.exchange in KEEPS_THE_TREE,
                notes=list(task.notes),
            )
            for epoch in range(1, config.num_epochs + 1):
                began = time.perf_counter()
                losses: list[float] = []
                order = sample_order(config.seed, epoch - 1, task.num_train)
                for batch in train_set.batches(
                    order, config.batch_size, lambda size: split_into_shards(size, config.num_shards), epoch
                ):
                    step += 1
                    own_losses = train_step(engine, replicas, step, batch, config.num_shards)
                    losses += [loss for of_rank in engine.gather(own_losses) for loss in of_rank]
                    if step == 1:
                        first_loss = math.fsum(losses) / batch.num_samples
                    if not all(map(math.isfinite, losses[-config.num_shards :])):
                        yield from _stop(config, epoch, step, "the loss is no longer a number", history, weights)
                    yield StepDone(epoch, step, batch.num_samples)
                seconds = time.perf_counter() - began
                now = replicas[0].arrays()
                if not all(np.isfinite(now[name]).all() for name in task.parameters):
                    yield from _stop(config, epoch, step, "a weight is no longer a number", history, weights)
                metrics = {}
                if test_set is not None:
                    metrics = measure_all(engine, replicas, test_set, task.piece, config.batch_size)
                weights = now
                history.append(
                    EpochDone(
                        epoch=epoch,
                        seconds=seconds,
                        train_loss=math.fsum(losses)
                        / task.num_train,  # rounded once, at the end: order does not matter
                        test_accuracy=metrics.get("accuracy"),
                        metrics=metrics,
                    )
                )
                yield history[-1]
            peak = peak_memory(backend, devices)
        except RunError as problem:
            if not isinstance(problem, Stopped):
                yield RunStopped(len(history) + 1, step, str(problem), history, weights)
            raise
        except KeyboardInterrupt:
            yield RunStopped(len(history) + 1, step, "interrupted", history, weights)
            raise Interrupted(f"interrupted after step {step}.{_kept(config, history)}") from None

    seconds_per_epoch = sum(done.seconds for done in history) / len(history)
    buffers = [name for name in weights if name not in set(task.parameters)]
    yield RunDone(
        Result(
            test_accuracy=history[-1].test_accuracy,
            metrics=history[-1].metrics,
            seconds_per_epoch=seconds_per_epoch,
            samples_per_second=task.num_train / seconds_per_epoch,
            backend=backend.name,
            backend_version=backend.version(),
            devices=[str(device) for device in devices],
            peak_memory=peak,
            steps=step,
            first_loss=first_loss,
            weights_sha256=sha256_of([weights[name] for name in task.parameters]),
            buffers_sha256=sha256_of([weights[name] for name in buffers]) if buffers else None,
            history=history,
            run=config.out,
            params={name: weights[name] for name in task.parameters},
            buffers={name: weights[name] for name in buffers},
            module=task.trained(weights),
        )
    )


def _stop(
    config: RunConfig, epoch: int, step: int, what: str, history: list[EpochDone], weights: dict[str, Array]
) -> Generator[Event, None, None]:
    """Hands out what there is, then ends the run with a sentence."""
    rate = "" if config.learning_rate is None else f" {config.learning_rate:g}"
    why = f"The learning rate{rate} is likely too large; try a smaller one"
    if step == 1:
        why = "No update has happened yet: look at the data, the model and the loss"
    reason = f"epoch {epoch}, step {step}: {what}. {why}"
    yield RunStopped(epoch, step, reason, history, weights)
    raise Stopped(f"{reason}.{_kept(config, history)}")


def _kept(config: RunConfig, history: list[EpochDone]) -> str:
    """Where to find what there is of a run that stopped."""
    if config.out is None:
        return ""
    has = f" and the weights after epoch {len(history)}" if history else ""
    return f" The metrics{has} are in {config.out}. To begin anew, remove it or choose another --out."
