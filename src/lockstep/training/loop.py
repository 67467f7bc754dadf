"""The training loop: a prepared run as a sequence of events, the last of which holds its result."""

import math
import time
from collections import deque
from collections.abc import Callable, Generator
from contextlib import ExitStack, closing
from dataclasses import asdict, replace
from functools import partial

from lockstep.backends import LossFuture, reset_peak_memory
from lockstep.config import RunConfig
from lockstep.core.errors import Interrupted, PeerFailure, RunError
from lockstep.core.layout import Array
from lockstep.core.tracing import SpanName
from lockstep.data.batch import BatchSource
from lockstep.partition.batch import split_into_shards
from lockstep.report.events import EpochDone, Event, Incident, RunDone, RunStarted, RunStopped, StepDone
from lockstep.runtime.engine import Engine
from lockstep.runtime.verification import Unverified
from lockstep.schedules.exchanges import KEEPS_THE_TREE
from lockstep.training.callbacks import Now, RunState
from lockstep.training.checkpoint import Checkpoint, Progress, how_to_resume, identity_of
from lockstep.training.drift import Rollback
from lockstep.training.evaluate import evaluate
from lockstep.training.learning_rate import learning_rate_at
from lockstep.training.result import peaks_of, result_of, what_is_left
from lockstep.training.resume_point import ResumePoint
from lockstep.training.run_trace import RunTrace
from lockstep.training.setup import Prepared
from lockstep.training.state import Trained, TrainingState
from lockstep.training.step_times import StepTimes
from lockstep.training.stop import StopAgreement

Events = Generator[Event, None, None]
REPORTED_SECONDS = 0.5  # of capture or compilation; less is not worth a line


class Diverged(RunError):
    """The numbers of a run are not finite any more; a `RunStopped` event says which."""

    has_diverged = True


class Training:
    """A run on one engine. Another can continue from its `local_checkpoint()`, also after an error."""

    def __init__(self, config: RunConfig, prepared: Prepared, engine: Engine, start: ResumePoint) -> None:
        self._config, self._task, self._engine, self._start = config, prepared.task, engine, start
        self._callbacks = prepared.callbacks
        self._steps_per_epoch = -(-self._task.num_train // config.batch_size)
        self._weights: Callable[[], dict[str, Array]] | None = None  # those after the last epoch that ended here
        self.state: TrainingState
        self._times = StepTimes()
        self._reported_capture = 0.0  # seconds
        self._eager_is_reported, self._is_stopped = False, False

    @property
    def progress(self) -> Progress:
        """How far the run is."""
        return self.state.progress

    def local_checkpoint(self) -> Checkpoint | None:
        """The part of the run after its last step that this process holds; before the first, where it started."""
        return self.state.local_checkpoint() if hasattr(self, "state") else self._start.checkpoint

    def events(self) -> Events:
        """RunStarted, then StepDone and EpochDone, and in the end RunDone with the result."""
        task, engine, config = self._task, self._engine, self._config
        own_devices = [engine.devices[rank] for rank in engine.local_ranks]
        with ExitStack() as undo:
            reset_peak_memory(engine.backend, own_devices)
            placement = task.placement(config, engine.num_ranks)
            trained = Trained(task.replica, task.initial, identity_of(config, task), placement)
            self.state = TrainingState(config, engine, trained, self._start.checkpoint)
            undo.callback(self.state.close)
            train_set = undo.enter_context(closing(task.train_set(engine)))
            test_set = undo.enter_context(closing(task.test_set(engine))) if task.test_set else None
            self._trace = RunTrace(config, self.state)
            try:
                yield self._started()
                while self.progress.epoch <= config.num_epochs and not self._is_stopped:
                    try:
                        yield from self._epoch(train_set, test_set)
                    except Rollback as back:
                        self.state.restore(back.checkpoint)
                        self._reported_capture, self._weights = 0.0, None  # those of the epoch may have drifted
                        yield Incident("healed", str(back))
                peaks, held = peaks_of(engine), self.state.replicas.num_bytes()
                weights = task.whole(self._weights() if self._weights else self.state.replicas.weights())
                average = task.whole(self.state.replicas.averaged())
                result = result_of(config, task, engine, self.progress, weights, peaks)
                for traced in self._trace.measured(self.state):
                    yield traced
                    result = replace(result, explanation=traced.explanation, trace=self._trace.kept(traced))
            except RunError as problem:
                if not isinstance(problem, (Diverged, PeerFailure, Interrupted)):
                    yield self._stopped(str(problem))
                yield from self._trace.of_this_process(self.state)
                raise
            except KeyboardInterrupt:
                yield from self._interrupt(saves=False)
        yield RunDone(replace(result, ema=average, device_memory=held))

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
            num_parameters=sum(array.size for n, array in task.whole(task.initial).items() if n in task.parameters),
            steps_per_epoch=self._steps_per_epoch,
            keeps_bits=config.exchange in KEEPS_THE_TREE,
            made_with=self.state.made_with,
            notes=[*([] if self._start.num_restarts else task.notes), *self.state.differences, *self._start.notes],
            step=self.progress.step,
            num_restarts=self._start.num_restarts,
        )

    def _epoch(self, train_set: BatchSource, test_set: BatchSource | None) -> Events:
        """The steps that are left of this epoch, and its end."""
        config, progress, epoch = self._config, self.progress, self.progress.epoch
        began = time.perf_counter() - progress.seconds
        order = self._task.order(epoch - 1)[self._num_seen() :]
        in_flight: deque[tuple[int, LossFuture]] = deque()  # the number of samples of each step that was started
        steps, max_in_flight = self.state.steps, 0 if self._callbacks.on_step else self.state.steps.max_in_flight
        split, stop = (
            partial(split_into_shards, num_shards=config.num_shards),
            StopAgreement(self._engine, self._start.is_stopping),
        )
        batches = train_set.batches(order, config.batch_size, split, epoch)
        for batch in self._trace.loaded(batches, progress.step + 1):
            number = progress.step + len(in_flight) + 1
            step_began = time.perf_counter()
            try:
                with self._trace.step(number, steps):
                    in_flight.append((batch.num_samples, steps.run(number, batch)))
            except Unverified:
                while in_flight:
                    yield from self._finish_step(*in_flight.popleft(), began)
                self.state.compare()  # a replica that has drifted computes something else: it is named, or healed
                raise
            self._times.add(batch.num_samples, time.perf_counter() - step_began)
            compares, saves = (every and number % every == 0 for every in (config.check_every, config.checkpoint_every))
            while len(in_flight) > max_in_flight:  # counted before a collective can fail: it has happened
                yield from self._finish_step(*in_flight.popleft(), began)
            is_stopping = stop.stops()
            while in_flight and (compares or saves or is_stopping):
                yield from self._finish_step(*in_flight.popleft(), began)
            yield from self._incidents()
            if compares:
                with self._trace.span(SpanName.COMPARISON):
                    self.state.compare()
            if saves:
                self._save()
            if is_stopping:
                self.state.compare()  # a replica that has drifted is never saved
                yield from self._interrupt(saves=True)
            if self._callbacks.on_step and self._call("on_step", self._step_loss, {}, test_set):
                yield from self._stop_early("on_step")
                break
        while in_flight:
            yield from self._finish_step(*in_flight.popleft(), began)
        yield from self._finish_epoch(test_set)

    def _finish_step(self, num_samples: int, future: LossFuture, began: float) -> Events:
        """Waits for a step that was started, and counts it."""
        progress = self.progress
        progress.step += 1
        with self._trace.span(SpanName.STEP, progress.step):
            losses = future.result()
        progress.add_losses(losses, future.weights or [])
        progress.seconds = time.perf_counter() - began
        self._step_loss = math.fsum(losses) / (math.fsum(future.weights) if future.weights else num_samples)
        if progress.step == 1:
            progress.first_loss = self._step_loss
        if not all(map(math.isfinite, losses)):
            yield from self._stop("the loss is NaN or infinite")
        num_steps = self._config.num_epochs * self._steps_per_epoch
        rate = learning_rate_at(self._config, self.state.replicas.local[0], progress.step, num_steps)
        yield StepDone(progress.epoch, progress.step, num_samples, self._step_loss, rate, progress.seconds)

    def _incidents(self) -> Events:
        if (why := self.state.steps.why_eager) and not self._eager_is_reported:
            self._eager_is_reported = True
            yield Incident("eager", f"CUDA graph capture is off, running eagerly: {why}")
        if moved := self.state.balance.pop_message():
            yield Incident("balance", f"step {self.progress.step}: {moved}")

    def _finish_epoch(self, test_set: BatchSource | None) -> Events:
        """Evaluates the model, and saves a checkpoint."""
        config, task, progress = self._config, self._task, self.progress
        # an epoch's time is that of its steps: capture and compilation are reported separately
        captured = self.state.steps.capture_seconds
        preparation, self._reported_capture = captured - self._reported_capture, captured
        first_steps = self._times.first_steps_extra()
        if config.compile and not preparation:  # the time of capture contains that of compilation
            preparation = first_steps
        progress.seconds = max(0.0, progress.seconds - preparation)
        if preparation > REPORTED_SECONDS:
            what = "compiling the model" if config.compile else "CUDA graph capture, with the first use of kernels,"
            yield Incident(
                "prepared", f"epoch {progress.epoch}: {what} took {preparation:.1f} s, not counted in its time"
            )
        replicas = self.state.replicas
        if not replicas.is_finite():
            yield from self._stop("a weight is NaN or infinite")
        with self._trace.span(SpanName.EVALUATION):
            metrics = {} if test_set is None else evaluate(replicas, test_set, task.eval_spec, config.batch_size)
        self._weights = replicas.snapshot()
        weight = math.fsum(progress.weights) if progress.weights else self._num_seen()
        train_loss = math.fsum(progress.losses) / weight  # rounded once: independent of the order
        finished = EpochDone(progress.epoch, progress.seconds, train_loss, metrics.get("accuracy"), metrics)
        progress.history.append(finished)
        progress.epoch, progress.losses, progress.weights, progress.seconds = progress.epoch + 1, [], [], 0.0
        yield finished
        if config.checkpoint_every != 0 and not self._is_stopped:
            self._save()
        if self._callbacks.on_epoch and self._call("on_epoch", train_loss, metrics, test_set) and not self._is_stopped:
            yield from self._stop_early("on_epoch")

    def _num_seen(self) -> int:
        """Samples of this epoch that the model was trained on so far."""
        done = self.progress.step - (self.progress.epoch - 1) * self._steps_per_epoch
        return min(done * self._config.batch_size, self._task.num_train)

    def _call(self, name: str, loss: float, metrics: dict[str, float], test_set: BatchSource | None) -> bool:
        """Calls a function of the user's, in the process of rank 0; whether all ranks are to stop."""
        engine, progress, stops = self._engine, self.progress, False
        if 0 in engine.local_ranks:
            engine.set_phase(name)
            epoch = len(progress.history) if name == "on_epoch" else progress.epoch
            now = Now(self.state.replicas, self._task, test_set, self._config.batch_size)
            with self._trace.span(SpanName.CALLBACK):
                stops = self._callbacks.call(name, RunState(epoch, progress.step, loss, metrics, now))
        return engine.broadcast(0, lambda: b"stop" if stops else b"") == b"stop"

    def _stop_early(self, name: str) -> Events:
        """The run ends because a callback wants it; in mid-epoch, a run that is resumed continues there."""
        progress = self.progress
        if name == "on_step" and self._config.checkpoint_every != 0:
            self._save()
        self._is_stopped = True
        yield Incident("early_stop", f"{name} stopped the run after step {progress.step}")

    def _save(self) -> None:
        """Saves a checkpoint once the replicas were found equal: one that has drifted is never saved."""
        if self._config.out is not None:
            self.state.compare()
            self._save_now()

    def _save_now(self) -> str:
        """Saves a checkpoint, if this process does that, and returns its path. A collective where ranks hold parts."""
        checkpoints = self._start.checkpoints
        has_all = self.state.replicas.placement.every_rank_has_all
        if self._config.checkpoint_every == 0 or (checkpoints is None and has_all):
            return ""
        with self._trace.span(SpanName.CHECKPOINT):
            checkpoint = self.state.checkpoint()
            if checkpoints is None:
                return ""
            self._engine.set_phase("checkpoint")
            return str(checkpoints.save(checkpoint))

    def _stopped(self, reason: str) -> RunStopped:
        progress = self.progress
        weights = self._task.whole(self._weights()) if self._weights else {}
        return RunStopped(progress.epoch, progress.step, reason, progress.history, weights)

    def _interrupt(self, saves: bool) -> Events:
        """Ends a run that the user has stopped, after a checkpoint where it `saves` one; all ranks say the same."""
        saved = self._save_now() if saves else ""
        where = f" A checkpoint is in {saved}." if saved else ""
        how = how_to_resume(self._config) or what_is_left(self._config, self.progress.history)
        sentence = f"interrupted after step {self.progress.step}.{where}{how}"
        if saves:
            sentence = self._engine.broadcast(0, sentence.encode).decode()
        stopped, task = self._stopped("interrupted"), self._task
        error = Interrupted(sentence)
        if weights := task.whole(self.state.replicas.weights()) if saves else stopped.weights:
            error.result = result_of(self._config, task, self._engine, self.progress, weights, {})
        yield stopped
        yield from self._trace.of_all(self.state) if saves else self._trace.of_this_process(self.state)
        raise error

    def _stop(self, what: str) -> Events:
        """Ends the run because its numbers are no longer finite."""
        progress, rate = self.progress, self._config.learning_rate
        why = f"The learning rate{'' if rate is None else f' {rate:g}'} is likely too large; try a smaller one"
        if progress.step == 1:
            why = "No update has happened yet: look at the data, the model and the loss"
        reason = f"epoch {progress.epoch}, step {progress.step}: {what}. {why}"
        yield self._stopped(reason)
        raise Diverged(f"{reason}.{what_is_left(self._config, progress.history)}")
