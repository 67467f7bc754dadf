"""The training loop: a prepared run as a sequence of events, the last of which holds its result."""

import math
import time
from collections import deque
from collections.abc import Callable, Generator
from contextlib import ExitStack, closing
from copy import deepcopy
from dataclasses import asdict, dataclass, field, replace
from functools import partial

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
from lockstep.runtime.verification import Unverified
from lockstep.schedules.exchanges import KEEPS_THE_TREE
from lockstep.training.checkpoint import Checkpoint, Checkpoints, Progress, how_to_resume, identity_of, made_with
from lockstep.training.drift import Healing, Rollback
from lockstep.training.evaluate import evaluate
from lockstep.training.replica_set import ReplicaSet
from lockstep.training.result import peaks_of, result_of, traced_by, what_is_left
from lockstep.training.setup import Prepared, make_steps
from lockstep.training.step_times import StepTimes

Events = Generator[Event, None, None]
REPORTED_SECONDS = 0.5  # of capture or compilation; less is not worth a line


class Stopped(RunError):
    """The run ended itself; a `RunStopped` event says why."""


@dataclass(frozen=True)
class ResumePoint:
    """Where a run starts, where it saves, and how it is stopped."""

    checkpoint: Checkpoint | None = None  # None: at step 1
    notes: list[str] = field(default_factory=list)  # shown to the user when it starts
    num_restarts: int = 0  # times that it continued with other workers
    checkpoints: Checkpoints | None = None  # where to save; None on ranks that do not
    is_stopping: Callable[[], bool] = lambda: False  # whether the user has asked it to stop


class Training:
    """A run on one engine. Another can continue from its `local_checkpoint()`, also after an error."""

    def __init__(self, config: RunConfig, prepared: Prepared, engine: Engine, start: ResumePoint) -> None:
        self._config, self._task, self._engine, self._start = config, prepared.task, engine, start
        self._steps_per_epoch = -(-self._task.num_train // config.batch_size)
        self._weights: Callable[[], dict[str, Array]] | None = None  # those after the last epoch that ended here
        self.progress = deepcopy(start.checkpoint.progress) if start.checkpoint else Progress()
        self.replicas: ReplicaSet | None = None
        self._healing = Healing(config)
        self._balance = balance_for(config.balance)
        self._times = StepTimes()
        self._steps: Steps
        self._eager_is_reported = False

    def local_checkpoint(self) -> Checkpoint | None:
        """The part of the run after its last step that this process holds; before the first, where it started."""
        if self.replicas is None:
            return self._start.checkpoint
        return self._checkpoint(self.replicas.local_weights(), self.replicas.local_states())

    def _checkpoint(self, weights: dict[str, Array], states: dict[str, object]) -> Checkpoint:
        software = made_with(self._engine.backend.version(), self._engine.devices)
        return Checkpoint(identity_of(self._config, self._task), software, deepcopy(self.progress), weights, states)

    @property
    def _set(self) -> ReplicaSet:
        assert self.replicas is not None, "they are made first"
        return self.replicas

    def events(self) -> Events:
        """RunStarted, then StepDone and EpochDone, and in the end RunDone with the result."""
        task, engine, config = self._task, self._engine, self._config
        own_devices = [engine.devices[rank] for rank in engine.local_ranks]
        with ExitStack() as undo:
            reset_peak_memory(engine.backend, own_devices)
            self._make_replicas(self._start.checkpoint)
            self._healing.remember(self.local_checkpoint)
            train_set = undo.enter_context(closing(task.train_set(engine)))
            test_set = undo.enter_context(closing(task.test_set(engine))) if task.test_set else None
            self._make_steps()
            undo.callback(delattr, self, "_steps")  # CUDA graphs hold memory of the GPU
            engine.traces[:] = [Trace() for _ in own_devices] if config.trace else []
            try:
                yield self._started()
                while self.progress.epoch <= config.num_epochs:
                    try:
                        yield from self._epoch(train_set, test_set)
                    except Rollback as back:
                        self.progress = deepcopy(back.checkpoint.progress)
                        self._make_replicas(back.checkpoint)
                        self._make_steps()
                        yield Incident("healed", str(back))
                peaks = peaks_of(engine)
                if config.trace:
                    yield traced_by(engine)
            except RunError as problem:
                if not isinstance(problem, (Stopped, PeerFailure, Interrupted)):
                    yield self._stopped(str(problem))
                raise
            except KeyboardInterrupt:
                yield from self._interrupt(saves=False)
            weights = self._weights() if self._weights else self._set.weights()
            average = self._set.local[0].averaged()
        result = result_of(config, task, engine, self.progress, weights, peaks)
        yield RunDone(replace(result, ema=average))

    def _make_replicas(self, checkpoint: Checkpoint | None) -> None:
        """The replicas of this process, from a checkpoint, or with the initial weights."""
        task = self._task
        weights = task.initial if checkpoint is None else checkpoint.weights
        # every rank holds the whole model: its state is the only one
        state = None if checkpoint is None else next(iter(checkpoint.states.values()))
        local = self._engine.each("replicate", lambda rank, device: task.replica(device, weights, state))
        self.replicas = ReplicaSet(self._engine, local)

    def _make_steps(self) -> None:
        self._steps = make_steps(self._config, self._engine, self._set.local, self._balance)
        self._reported_capture = 0.0  # seconds

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
            num_parameters=sum(task.initial[name].size for name in task.parameters),
            steps_per_epoch=self._steps_per_epoch,
            keeps_bits=config.exchange in KEEPS_THE_TREE,
            notes=[*([] if self._start.num_restarts else task.notes), *self._start.notes],
            step=self.progress.step,
            num_restarts=self._start.num_restarts,
        )

    def _epoch(self, train_set: BatchSource, test_set: BatchSource | None) -> Events:
        """The steps that are left of this epoch, and its end."""
        config, progress, epoch = self._config, self.progress, self.progress.epoch
        began = time.perf_counter() - progress.seconds
        order = sample_order(config.seed, epoch - 1, self._task.num_train)
        order = order[(progress.step - (epoch - 1) * self._steps_per_epoch) * config.batch_size :]
        in_flight: deque[tuple[int, LossFuture]] = deque()  # the number of samples of each step that was started
        split = partial(split_into_shards, num_shards=config.num_shards)
        for batch in train_set.batches(order, config.batch_size, split, epoch):
            number = progress.step + len(in_flight) + 1
            step_began = time.perf_counter()
            try:
                in_flight.append((batch.num_samples, self._steps.run(number, batch)))
            except Unverified:
                while in_flight:
                    yield from self._finish_step(*in_flight.popleft(), began)
                self._compare()  # a replica that has drifted computes something else: it is named, or healed
                raise
            self._times.add(batch.num_samples, time.perf_counter() - step_began)
            compares, saves = (every and number % every == 0 for every in (config.check_every, config.checkpoint_every))
            is_stopping = self._start.is_stopping()
            while in_flight and (len(in_flight) > self._steps.max_in_flight or compares or saves or is_stopping):
                yield from self._finish_step(*in_flight.popleft(), began)
            yield from self._incidents()
            if compares:
                self._compare()
            if saves:
                self._save()
            if is_stopping:
                if len(self._engine.local_ranks) == self._engine.num_ranks:  # other processes were not asked to stop
                    self._compare()
                yield from self._interrupt(saves=True)
        while in_flight:
            yield from self._finish_step(*in_flight.popleft(), began)
        yield from self._finish_epoch(test_set)

    def _finish_step(self, num_samples: int, future: LossFuture, began: float) -> Events:
        """Waits for a step that was started, and counts it."""
        progress, losses = self.progress, future.result()
        progress.step += 1
        progress.losses += losses
        progress.weights += future.weights or []
        progress.seconds = time.perf_counter() - began
        if progress.step == 1:
            progress.first_loss = math.fsum(losses) / (math.fsum(future.weights) if future.weights else num_samples)
        if not all(map(math.isfinite, losses)):
            yield from self._stop("the loss is NaN or infinite")
        yield StepDone(progress.epoch, progress.step, num_samples)

    def _incidents(self) -> Events:
        if self._steps.why_eager and not self._eager_is_reported:
            self._eager_is_reported = True
            yield Incident("eager", f"CUDA graph capture is off, running eagerly: {self._steps.why_eager}")
        if moved := self._balance.pop_message():
            yield Incident("balance", f"step {self.progress.step}: {moved}")

    def _finish_epoch(self, test_set: BatchSource | None) -> Events:
        """Evaluates the model, and saves a checkpoint."""
        config, task, progress = self._config, self._task, self.progress
        # an epoch's time is that of its steps: capture and compilation are reported separately
        captured = self._steps.capture_seconds
        preparation, self._reported_capture = captured - self._reported_capture, captured
        first_steps = self._times.first_steps_extra()
        if config.compile and not preparation:  # the time of capture contains that of compilation
            preparation = first_steps
        progress.seconds = max(0.0, progress.seconds - preparation)
        if preparation > REPORTED_SECONDS:
            what = "compiling the model" if config.compile else "CUDA graph capture"
            yield Incident(
                "prepared", f"epoch {progress.epoch}: {what} took {preparation:.1f} s, not counted in its time"
            )
        if not self._set.is_finite():
            yield from self._stop("a weight is NaN or infinite")
        metrics = {} if test_set is None else evaluate(self._set, test_set, task.eval_batch_size, config.batch_size)
        self._weights = self._set.snapshot()
        weight = math.fsum(progress.weights) if progress.weights else task.num_train
        train_loss = math.fsum(progress.losses) / weight  # rounded once: independent of the order
        finished = EpochDone(progress.epoch, progress.seconds, train_loss, metrics.get("accuracy"), metrics)
        progress.history.append(finished)
        progress.epoch, progress.losses, progress.weights, progress.seconds = progress.epoch + 1, [], [], 0.0
        yield finished
        if config.checkpoint_every != 0:
            self._save()

    def _compare(self) -> None:
        """Ends the run where replicas differ, or with `--heal` goes back to where they were equal."""
        self._healing.compare(self._set, self.progress.step, self.local_checkpoint)

    def _save(self) -> None:
        """Saves a checkpoint once the replicas were found equal: one that has drifted is never saved."""
        if self._config.out is not None:
            self._compare()
            self._save_now()

    def _save_now(self) -> str:
        """Saves a checkpoint, if this process does that, and returns its path. A collective where ranks hold parts."""
        checkpoints = self._start.checkpoints
        if self._config.checkpoint_every == 0 or (checkpoints is None and self._set.placement.is_replicated):
            return ""
        weights, states = self._set.weights(), self._set.states()
        if checkpoints is None:
            return ""
        self._engine.set_phase("checkpoint")
        return str(checkpoints.save(self._checkpoint(weights, states)))

    def _stopped(self, reason: str) -> RunStopped:
        progress = self.progress
        weights = self._weights() if self._weights else {}
        return RunStopped(progress.epoch, progress.step, reason, progress.history, weights)

    def _interrupt(self, saves: bool) -> Events:
        error = self.interrupted(saves)
        yield self._stopped("interrupted")
        raise error

    def interrupted(self, saves: bool) -> Interrupted:
        """The error that ends an interrupted run, after a checkpoint where it `saves` one."""
        saved = self._save_now() if saves else ""
        where = f" A checkpoint is in {saved}." if saved else ""
        how = how_to_resume(self._config) or what_is_left(self._config, self.progress.history)
        return Interrupted(f"interrupted after step {self.progress.step}.{where}{how}")

    def _stop(self, what: str) -> Events:
        """Ends the run because its numbers are no longer finite."""
        progress, rate = self.progress, self._config.learning_rate
        why = f"The learning rate{'' if rate is None else f' {rate:g}'} is likely too large; try a smaller one"
        if progress.step == 1:
            why = "No update has happened yet: look at the data, the model and the loss"
        reason = f"epoch {progress.epoch}, step {progress.step}: {what}. {why}"
        yield self._stopped(reason)
        raise Stopped(f"{reason}.{what_is_left(self._config, progress.history)}")
