"""The epochs: from what a run was prepared with to its result, as a sequence of events."""

import math
import time
from collections import deque
from collections.abc import Callable, Generator
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import asdict, dataclass, field

import numpy as np

from lockstep.backends import Pending, reset_peak_memory
from lockstep.training.checkpoint import Checkpoint, Checkpoints, Progress, how_to_go_on, identity_of, made_with, unpacked
from lockstep.config import RunConfig
from lockstep.data.order import sample_order
from lockstep.training.drift import find_drift
from lockstep.runtime import Engine, Replica
from lockstep.core.errors import Interrupted, PeersLost, RunError
from lockstep.training.evaluate import measure_all
from lockstep.schedules.exchanges import KEEPS_THE_TREE
from lockstep.core.layout import Array
from lockstep.training.result import kept, peaks_of, result_of, traced_by
from lockstep.training.setup import Prepared
from lockstep.report.events import EpochDone, Event, Incident, RunDone, RunStarted, RunStopped, StepDone
from lockstep.data.resident import Feed
from lockstep.partition.batch import split_into_shards
from lockstep.runtime.cuda_graph import Steps, steps_for
from lockstep.core.tracing import Trace

Events = Generator[Event, None, None]
NEWS_SECONDS = 0.5  # that are worth a line
MAX_HEALED = 10  # times in a run: what fails more often is broken


class GoBack(Exception):
    """The run has to be done again from a step where all replicas were equal."""

    def __init__(self, checkpoint: Checkpoint, sentence: str) -> None:
        super().__init__(sentence)
        self.checkpoint = checkpoint


class Stopped(RunError):
    """The run ended itself, and has said so in an event."""


@dataclass(frozen=True)
class Start:
    """Where a run begins, and what goes with it."""

    checkpoint: Checkpoint | None = None  # None: at the beginning
    notes: list[str] = field(default_factory=list)  # what the user should know
    num_restarts: int = 0  # how often it went on with other workers in this process or another
    checkpoints: Checkpoints | None = None  # where to save; None on ranks that do not
    is_stopping: Callable[[], bool] = lambda: False


class Training:
    """A run under way on one engine. `checkpoint()` is what another can go on from, also after an error."""

    def __init__(self, config: RunConfig, prepared: Prepared, engine: Engine, start: Start) -> None:
        self._config, self._task, self._engine, self._start = config, prepared.task, engine, start
        self._steps_per_epoch = -(-self._task.num_train // config.batch_size)
        self._weights: dict[str, Array] = {}  # parameters and buffers after the last epoch that was finished here
        self.progress = deepcopy(start.checkpoint.progress) if start.checkpoint else Progress()
        self.replicas: list[Replica] = []
        self._equal: Checkpoint | None = None  # where all replicas were last found equal, if drift is to be healed
        self._num_healed = 0
        self._steps: Steps
        self._is_told = False  # that steps are not recorded

    def checkpoint(self) -> Checkpoint | None:
        """The run after its last step; None where not even the replicas are there yet."""
        if not self.replicas:
            return self._start.checkpoint
        task, config = self._task, self._config
        return Checkpoint(
            run=identity_of(config, task.data_sha256, task.num_train),
            made_with=made_with(self._engine.backend.version(), self._engine.devices),
            progress=deepcopy(self.progress),
            weights=self.replicas[0].arrays(),
            memory=self.replicas[0].memory(),
        )

    def events(self) -> Events:
        """RunStarted, then StepDone and EpochDone, and RunDone with the result at last."""
        task, engine, start = self._task, self._engine, self._start
        own_devices = [engine.devices[rank] for rank in engine.local_ranks]
        with ExitStack() as closing:
            reset_peak_memory(engine.backend, own_devices)
            weights, memory = task.initial, None
            if start.checkpoint is not None:
                weights, memory = start.checkpoint.weights, start.checkpoint.memory
            self.replicas = engine.replicate(lambda device: task.replica(device, weights, memory))
            if self._config.heal:
                self._equal = self.checkpoint()
            train_set = task.train_set(engine)
            closing.callback(train_set.close)
            self._steps = steps_for(engine, self.replicas, self._config.num_shards, train_set.in_memory)
            engine.traces[:] = [Trace() for _ in own_devices] if self._config.trace else []
            closing.callback(self._forget_steps)
            test_set = None if task.test_set is None else task.test_set(engine)
            if test_set is not None:
                closing.callback(test_set.close)
            try:
                yield self._started()
                while self.progress.epoch <= self._config.num_epochs:
                    try:
                        yield from self._epoch(train_set, test_set)
                    except GoBack as back:
                        self._go_back(back.checkpoint)
                        self._steps = steps_for(engine, self.replicas, self._config.num_shards, train_set.in_memory)
                        yield Incident("healed", str(back))
                peaks = peaks_of(engine)
                if self._config.trace:
                    yield traced_by(engine)
            except RunError as problem:
                if not isinstance(problem, (Stopped, PeersLost, Interrupted)):
                    yield self._stopped(str(problem))
                raise
            except KeyboardInterrupt:
                yield from self._interrupted(saved="")
            weights = self._weights or self.replicas[0].arrays()
        yield RunDone(result_of(self._config, task, engine, self.progress, weights, peaks))

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

    def _epoch(self, train_set: Feed, test_set: Feed | None) -> Events:
        """What is left of the epoch under way."""
        config, task, engine, progress = self._config, self._task, self._engine, self.progress
        epoch, began = progress.epoch, time.perf_counter() - progress.seconds
        order = sample_order(config.seed, epoch - 1, task.num_train)
        done = (progress.step - (epoch - 1) * self._steps_per_epoch) * config.batch_size
        under_way: deque[tuple[int, Pending]] = deque()  # steps that were begun, with their samples
        for batch in train_set.batches(
            order[done:], config.batch_size, lambda size: split_into_shards(size, config.num_shards), epoch
        ):
            begun = progress.step + len(under_way) + 1
            under_way.append((batch.num_samples, self._steps(begun, batch)))
            is_due = any(every and begun % every == 0 for every in (config.check_every, config.checkpoint_every))
            is_stopping = self._start.is_stopping()
            while under_way and (len(under_way) > self._steps.ahead or is_due or is_stopping):
                yield from self._finish_step(*under_way.popleft(), began)
            if self._steps.problem and not self._is_told:
                self._is_told = True
                yield Incident("not recorded", f"steps are not recorded, but run as they are: {self._steps.problem}")
            if moved := engine.balance.news():
                yield Incident("balance", f"step {progress.step}: {moved}")
            if config.check_every and begun % config.check_every == 0:
                self._compare()
            if config.checkpoint_every and begun % config.checkpoint_every == 0:
                self._save()
            if is_stopping:
                if len(engine.local_ranks) == engine.num_ranks:  # the others of several processes do not know of it
                    self._compare()
                yield from self._interrupted(self._saved_now())
        while under_way:
            yield from self._finish_step(*under_way.popleft(), began)
        first = self._steps.first_seconds()
        if config.compile or self._steps.ahead:  # an epoch's time is that of its steps: this is said apart
            progress.seconds -= first
            if first > NEWS_SECONDS:
                what = "compiled" if config.compile else "recorded"
                yield Incident("prepared", f"epoch {epoch}: {first:.1f} s more, in which steps were {what}")
        now = self.replicas[0].arrays()
        if not all(np.isfinite(now[name]).all() for name in task.parameters):
            yield from self._stop("a weight is no longer a number")
        metrics = {}
        if test_set is not None:
            metrics = measure_all(engine, self.replicas, test_set, task.piece, config.batch_size)
        self._weights = now
        finished = EpochDone(
            epoch=epoch,
            seconds=progress.seconds,
            train_loss=math.fsum(progress.losses) / task.num_train,  # rounded once, at the end: it has no order
            test_accuracy=metrics.get("accuracy"),
            metrics=metrics,
        )
        progress.history.append(finished)
        progress.epoch, progress.losses, progress.seconds = epoch + 1, [], 0.0
        yield finished
        if config.checkpoint_every != 0:
            self._save()

    def _finish_step(self, num_samples: int, pending: Pending, began: float) -> Events:
        """Waits for a step that was begun, and takes note of it."""
        progress, losses = self.progress, pending.read()
        progress.step += 1
        progress.losses += losses
        progress.seconds = time.perf_counter() - began
        if progress.step == 1:
            progress.first_loss = math.fsum(losses) / num_samples
        if not all(map(math.isfinite, losses)):
            yield from self._stop("the loss is no longer a number")
        yield StepDone(progress.epoch, progress.step, num_samples)

    def _save(self) -> None:
        """A checkpoint, once the replicas were found to agree: one that has drifted is never saved."""
        if self._config.out is None:
            return
        self._compare()
        self._saved_now()

    def _compare(self) -> None:
        """Ends the run where replicas are not equal any more, or goes back to where they were, as the user chose."""
        drift, step = find_drift(self._engine, self.replicas, list(self._task.initial)), self.progress.step
        if drift is None:
            if self._config.heal:
                self._equal = self.checkpoint()
            return
        subject = "a replica is not equal to the others" if drift.is_settled else "the replicas are not equal"
        who = f"step {step}: {subject} any more: {drift.named}"
        if not self._config.heal:
            raise RunError(
                f"{who}. Look for a failing device, or for code of your own that treats devices differently; --heal "
                f"goes back by itself to where all were equal.{how_to_go_on(self._config)}"
            )
        self._num_healed += 1
        if self._num_healed > MAX_HEALED:
            raise RunError(f"{who}; this has been healed {MAX_HEALED} times. A device fails, or code of your own does.")
        assert self._equal is not None, "they were equal at the beginning"
        equal = self._equal
        raise GoBack(
            unpacked(self._engine.share(drift.good, equal.packed)),
            f"{who}. Going back to step {equal.progress.step}, where all were equal",
        )

    def _saved_now(self) -> str:
        """Saves a checkpoint where this process does that, and says where it is."""
        checkpoint = self.checkpoint() if self._start.checkpoints is not None else None
        if self._start.checkpoints is None or checkpoint is None or self._config.checkpoint_every == 0:
            return ""
        self._engine.enter("checkpoint")
        return str(self._start.checkpoints.save(checkpoint))

    def _go_back(self, checkpoint: Checkpoint) -> None:
        """Everything as it was in the checkpoint, on every rank."""
        self.progress = deepcopy(checkpoint.progress)
        weights, memory = checkpoint.weights, checkpoint.memory
        self.replicas[:] = self._engine.replicate(lambda device: self._task.replica(device, weights, memory))

    def _forget_steps(self) -> None:
        del self._steps  # recordings hold memory of the GPU

    def _stopped(self, reason: str) -> RunStopped:
        progress = self.progress
        return RunStopped(progress.epoch, progress.step, reason, progress.history, self._weights)

    def save_and_stop(self) -> Interrupted:
        """Saves a checkpoint; the error to end with."""
        return self._interruption(self._saved_now())

    def _interrupted(self, saved: str) -> Events:
        yield self._stopped("interrupted")
        raise self._interruption(saved)

    def _interruption(self, saved: str) -> Interrupted:
        where = f" A checkpoint is in {saved}." if saved else ""
        how = how_to_go_on(self._config) or kept(self._config, self.progress.history)
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
        raise Stopped(f"{reason}.{kept(config, progress.history)}")
