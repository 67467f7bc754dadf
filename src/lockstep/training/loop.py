"""The training loop: from what a run was prepared with to its result, as a sequence of events."""

import math
import time
from collections import deque
from collections.abc import Callable, Generator
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import asdict, dataclass, field

import numpy as np

from lockstep.backends import LossFuture, reset_peak_memory
from lockstep.config import RunConfig
from lockstep.core.errors import Interrupted, PeerFailure, RunError
from lockstep.core.layout import Array
from lockstep.core.tracing import Trace
from lockstep.data.batch import BatchSource
from lockstep.data.order import sample_order
from lockstep.partition.balance import balance_for
from lockstep.partition.batch import split_into_shards
from lockstep.report.events import EpochDone, Event, Incident, RunDone, RunStarted, RunStopped, StepDone
from lockstep.runtime.engine import Engine
from lockstep.runtime.step import Steps
from lockstep.schedules.exchanges import KEEPS_THE_TREE
from lockstep.training.checkpoint import Checkpoint, Checkpoints, Progress, how_to_resume, identity_of, made_with
from lockstep.training.drift import Healing, Rollback
from lockstep.training.evaluate import evaluate
from lockstep.training.replica_set import ReplicaSet
from lockstep.training.result import peaks_of, result_of, traced_by, what_is_left
from lockstep.training.setup import Prepared, make_steps
from lockstep.training.step_times import StepTimes

Events = Generator[Event, None, None]
NEWS_SECONDS = 0.5  # that are worth a line


class Stopped(RunError):
    """The run ended itself, and has said so in an event."""


@dataclass(frozen=True)
class ResumePoint:
    """Where a run begins, and what goes with it."""

    checkpoint: Checkpoint | None = None  # None: at the beginning
    notes: list[str] = field(default_factory=list)  # what the user should know
    num_restarts: int = 0  # how often it continued with other workers in this process or another
    checkpoints: Checkpoints | None = None  # where to save; None on ranks that do not
    is_stopping: Callable[[], bool] = lambda: False


class Training:
    """A run under way on one engine. `local_checkpoint()` is what another can continue from, also after an error."""

    def __init__(self, config: RunConfig, prepared: Prepared, engine: Engine, start: ResumePoint) -> None:
        self._config, self._task, self._engine, self._start = config, prepared.task, engine, start
        self._steps_per_epoch = -(-self._task.num_train // config.batch_size)
        self._weights: dict[str, Array] = {}  # parameters and buffers after the last epoch that was finished here
        self.progress = deepcopy(start.checkpoint.progress) if start.checkpoint else Progress()
        self.replicas: ReplicaSet | None = None
        self._healing = Healing(config)
        self._balance = balance_for(config.balance)
        self._times = StepTimes()
        self._steps: Steps
        self._has_said_why_eager = False

    def local_checkpoint(self) -> Checkpoint | None:
        """What this process has of the run after its last step; None where there are no replicas yet."""
        if self.replicas is None:
            return self._start.checkpoint
        return self._checkpoint(self.replicas.local_weights(), self.replicas.local_states())

    def _whole_checkpoint(self) -> Checkpoint:
        """The run after its last step. A collective, where ranks hold parts of the model."""
        return self._checkpoint(self._set.weights(), self._set.states())

    def _checkpoint(self, weights: dict[str, Array], states: dict[str, object]) -> Checkpoint:
        return Checkpoint(
            run=identity_of(self._config, self._task.data_sha256, self._task.num_train),
            made_with=made_with(self._engine.backend.version(), self._engine.devices),
            progress=deepcopy(self.progress),
            weights=weights,
            states=states,
        )

    @property
    def _set(self) -> ReplicaSet:
        assert self.replicas is not None, "they are made first"
        return self.replicas

    def events(self) -> Events:
        """RunStarted, then StepDone and EpochDone, and RunDone with the result at last."""
        task, engine, config = self._task, self._engine, self._config
        own_devices = [engine.devices[rank] for rank in engine.local_ranks]
        with ExitStack() as closing:
            reset_peak_memory(engine.backend, own_devices)
            self._make_replicas(self._start.checkpoint)
            self._healing.remember(self.local_checkpoint)
            train_set = task.train_set(engine)
            closing.callback(train_set.close)
            self._steps = make_steps(config, engine, self._set.local, self._balance, train_set.in_memory)
            engine.traces[:] = [Trace() for _ in own_devices] if config.trace else []
            closing.callback(self._discard_steps)
            test_set = None if task.test_set is None else task.test_set(engine)
            if test_set is not None:
                closing.callback(test_set.close)
            try:
                yield self._started()
                while self.progress.epoch <= config.num_epochs:
                    try:
                        yield from self._epoch(train_set, test_set)
                    except Rollback as back:
                        self.progress = deepcopy(back.checkpoint.progress)
                        self._make_replicas(back.checkpoint)
                        self._steps = make_steps(config, engine, self._set.local, self._balance, train_set.in_memory)
                        yield Incident("healed", str(back))
                peaks = peaks_of(engine)
                if config.trace:
                    yield traced_by(engine)
            except RunError as problem:
                if not isinstance(problem, (Stopped, PeerFailure, Interrupted)):
                    yield self._stopped(str(problem))
                raise
            except KeyboardInterrupt:
                yield from self._interrupted(saved="")
            weights = self._weights or self._set.weights()
        yield RunDone(result_of(config, task, engine, self.progress, weights, peaks))

    def _make_replicas(self, checkpoint: Checkpoint | None) -> None:
        """The replicas of this process, from a checkpoint, or as they are at the beginning."""
        task = self._task
        weights = task.initial if checkpoint is None else checkpoint.weights
        # every rank holds the whole model, so there is one part of it
        state = None if checkpoint is None else next(iter(checkpoint.states.values()))
        local = self._engine.each("replicate", lambda rank, device: task.replica(device, weights, state))
        self.replicas = ReplicaSet(self._engine, local)

    def _started(self) -> RunStarted:
        config, task, engine = self._config, self._task, self._engine
        return RunStarted(
            config=asdict(config),
            model=task.model,
            data_sha256=task.data_sha256,
            backend_version=engine.backend.version(),
            devices=[str(device) for device in engine.devices],
            num_train_samples=task.num_train,
            num_test_samples=task.num_test,
            num_parameters=task.num_parameters,
            steps_per_epoch=self._steps_per_epoch,
            keeps_bits=config.exchange in KEEPS_THE_TREE,
            notes=[*([] if self._start.num_restarts else task.notes), *self._start.notes],
            step=self.progress.step,
            num_restarts=self._start.num_restarts,
        )

    def _epoch(self, train_set: BatchSource, test_set: BatchSource | None) -> Events:
        """What is left of the epoch under way."""
        config, progress, epoch = self._config, self.progress, self.progress.epoch
        began = time.perf_counter() - progress.seconds
        order = sample_order(config.seed, epoch - 1, self._task.num_train)
        done = (progress.step - (epoch - 1) * self._steps_per_epoch) * config.batch_size
        in_flight: deque[tuple[int, LossFuture]] = deque()  # steps that were started, with their samples
        for batch in train_set.batches(
            order[done:], config.batch_size, lambda size: split_into_shards(size, config.num_shards), epoch
        ):
            number = progress.step + len(in_flight) + 1
            with self._times.of(batch.num_samples):
                in_flight.append((batch.num_samples, self._steps(number, batch)))
            is_due = any(every and number % every == 0 for every in (config.check_every, config.checkpoint_every))
            is_stopping = self._start.is_stopping()
            while in_flight and (len(in_flight) > self._steps.max_in_flight or is_due or is_stopping):
                yield from self._finish_step(*in_flight.popleft(), began)
            yield from self._news()
            if config.check_every and number % config.check_every == 0:
                self._compare()
            if config.checkpoint_every and number % config.checkpoint_every == 0:
                self._save()
            if is_stopping:
                if len(self._engine.local_ranks) == self._engine.num_ranks:  # other processes do not know of it
                    self._compare()
                yield from self._interrupted(self._save_now())
        while in_flight:
            yield from self._finish_step(*in_flight.popleft(), began)
        yield from self._finish_epoch(test_set)

    def _finish_step(self, num_samples: int, losses_later: LossFuture, began: float) -> Events:
        """Waits for a step that was started, and takes note of it."""
        progress, losses = self.progress, losses_later.result()
        progress.step += 1
        progress.losses += losses
        progress.seconds = time.perf_counter() - began
        if progress.step == 1:
            progress.first_loss = math.fsum(losses) / num_samples
        if not all(map(math.isfinite, losses)):
            yield from self._stop("the loss is no longer a number")
        yield StepDone(progress.epoch, progress.step, num_samples)

    def _news(self) -> Events:
        if self._steps.why_eager and not self._has_said_why_eager:
            self._has_said_why_eager = True
            yield Incident("eager", f"CUDA graph capture is off, running eagerly: {self._steps.why_eager}")
        if moved := self._balance.news():
            yield Incident("balance", f"step {self.progress.step}: {moved}")

    def _finish_epoch(self, test_set: BatchSource | None) -> Events:
        """Evaluates what an epoch has come to, and saves it."""
        config, task, progress = self._config, self._task, self.progress
        # an epoch's time is that of its steps: capture and compilation are reported apart
        preparation, self._steps.capture_seconds = self._steps.capture_seconds, 0.0
        first_steps = self._times.first_steps_extra()
        if config.compile and not preparation:  # what is captured was compiled before
            preparation = first_steps
        progress.seconds = max(0.0, progress.seconds - preparation)
        if preparation > NEWS_SECONDS:
            what = "compile the model" if config.compile else "capture steps as CUDA graphs"
            yield Incident("prepared", f"epoch {progress.epoch}: {preparation:.1f} s more, to {what}")
        now = self._set.weights()
        if not all(np.isfinite(now[name]).all() for name in task.parameters):
            yield from self._stop("a weight is no longer a number")
        metrics = {}
        if test_set is not None:
            metrics = evaluate(self._set, test_set, task.piece, config.batch_size)
        self._weights = now
        finished = EpochDone(
            epoch=progress.epoch,
            seconds=progress.seconds,
            train_loss=math.fsum(progress.losses) / task.num_train,  # rounded once, at the end: it has no order
            test_accuracy=metrics.get("accuracy"),
            metrics=metrics,
        )
        progress.history.append(finished)
        progress.epoch, progress.losses, progress.seconds = progress.epoch + 1, [], 0.0
        yield finished
        if config.checkpoint_every != 0:
            self._save()

    def _compare(self) -> None:
        """Ends the run where replicas are not equal any more, or goes back to where they were, as the user chose."""
        self._healing.compare(self._set, self.progress.step, self.local_checkpoint)

    def _save(self) -> None:
        """A checkpoint, once the replicas were found to agree: one that has drifted is never saved."""
        if self._config.out is not None:
            self._compare()
            self._save_now()

    def _save_now(self) -> str:
        """Saves a checkpoint where this process does that, and says where it is."""
        is_here = self._start.checkpoints is not None
        if self._config.checkpoint_every == 0 or (not is_here and self._set.placement.is_replicated):
            return ""
        checkpoint = self._whole_checkpoint()
        if self._start.checkpoints is None:
            return ""
        self._engine.enter("checkpoint")
        return str(self._start.checkpoints.save(checkpoint))

    def _discard_steps(self) -> None:
        del self._steps  # CUDA graphs hold memory of the GPU

    def _stopped(self, reason: str) -> RunStopped:
        progress = self.progress
        return RunStopped(progress.epoch, progress.step, reason, progress.history, self._weights)

    def save_and_stop(self) -> Interrupted:
        """Saves a checkpoint; the error to end with."""
        return self._interruption(self._save_now())

    def _interrupted(self, saved: str) -> Events:
        yield self._stopped("interrupted")
        raise self._interruption(saved)

    def _interruption(self, saved: str) -> Interrupted:
        where = f" A checkpoint is in {saved}." if saved else ""
        how = how_to_resume(self._config) or what_is_left(self._config, self.progress.history)
        return Interrupted(f"interrupted after step {self.progress.step}.{where}{how}")

    def _stop(self, what: str) -> Events:
        """Hands out what there is, then ends the run with a sentence."""
        config, progress = self._config, self.progress
        rate = "" if config.learning_rate is None else f" {config.learning_rate:g}"
        why = f"The learning rate{rate} is likely too large; try a smaller one"
        if progress.step == 1:
            why = "No update has happened yet: look at the data, the model and the loss"
        reason = f"epoch {progress.epoch}, step {progress.step}: {what}. {why}"
        yield self._stopped(reason)
        raise Stopped(f"{reason}.{what_is_left(config, progress.history)}")
