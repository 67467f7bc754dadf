"""`lockstep.Trainer`: training one step at a time, for a loop of the user's own."""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Self, cast

from torch import nn

from lockstep.backends.torch.session import use_tf32
from lockstep.config import RunConfig, settings_in
from lockstep.core.errors import ConfigError, PeerFailure, RunError
from lockstep.core.layout import Array, sha256_of
from lockstep.core.settings import IDENTITY
from lockstep.core.this_thread import THIS_THREAD
from lockstep.data.given_batch import GivenBatches
from lockstep.optim.lr_schedule import LRSchedule
from lockstep.replicas.trainer_replica import AccumulatedGradients, TrainerReplica
from lockstep.runtime.engine import has_all_ranks
from lockstep.runtime.step import EagerSteps
from lockstep.runtime.verification import Unverified
from lockstep.training.callbacks import batches_in
from lockstep.training.checkpoint import Checkpoint, check_same_run
from lockstep.training.evaluate import evaluate_batches
from lockstep.training.module_task import eval_spec_of, train_spec, with_weights
from lockstep.training.setup import step_options
from lockstep.training.split_checks import check_split
from lockstep.training.state import TrainingState
from lockstep.training.task import UserObjects, grid_of
from lockstep.training.trainer_engine import trainer_engine
from lockstep.training.trainer_model import read_saved, trainer_model, write_saved
from lockstep.training.trainer_settings import NOT_HERE, EverySize, StepResult, is_object, trainer_settings
from lockstep.training.validation import made_module
from lockstep.training.weights import checked_weights

EVAL_BATCH_SIZE = 64  # samples that are evaluated together, on any devices


class Trainer:
    """Trains a module on k devices, a step at a time: the same weights, bit for bit, whatever k is.

    A plain loop in one process; under torchrun, every process runs the same loop and passes the same batches. Between
    calls, PyTorch's settings are the user's own, and several trainers can be open.

    `model`, `optimizer` and `loss` are as in `train`, and so are the other settings: lr, momentum, weight_decay,
    scheduler, warmup, clip_norm, ema, over, metrics, batch_norm, precision, compile, exchange, check_every,
    verify_every, timeout; not what belongs to the loop: data, epochs, batch_size, out.

    split, stages, pipeline, slices and update are as in `train`, too. To split the network or its layers, give an
    `example`: a batch like those of the loop. Then there is `step`, and no `gradients`, `apply` or `module`.
    """

    def __init__(
        self,
        model: Any,
        *,
        optimizer: Any = "sgd",
        loss: Any = "cross_entropy",
        devices: Any = None,
        shards: int = 8,
        seed: int = 0,
        engine: str = "auto",
        example: Any = None,
        **settings: Any,
    ) -> None:
        given = {"model": model, "optimizer": optimizer, "loss": loss, "devices": devices, "shards": shards}
        config, objects = trainer_settings({**given, "seed": seed, "engine": engine, **settings})
        self._start(config, objects, example, None)

    @classmethod
    def load(cls, path: str | Path, *, model: Any, devices: Any = None, **settings: Any) -> Self:
        """A trainer that continues from what `save` wrote, on any devices.

        Settings are those of the saved one, unless they were objects: give these again.
        """
        path, example = Path(path), settings.pop("example", None)
        checkpoint = read_saved(path)
        names = {each.name: each.metadata["option"] or each.name for each in settings_in(IDENTITY)}
        saved = {names[name]: value for name, value in checkpoint.run.items() if name in names}
        plain = {n: v for n, v in saved.items() if n not in NOT_HERE and n != "model" and not is_object(v)}
        config, objects = trainer_settings({**plain, "model": model, "devices": devices, **settings})
        found = cls.__new__(cls)
        found._start(config, objects, example, (path, checkpoint))
        return found

    def _start(
        self, config: RunConfig, objects: UserObjects, example: Any, saved: tuple[Path, Checkpoint] | None
    ) -> None:
        self._config, self._undo, self._is_closed, self._why_closed = config, ExitStack(), False, ""
        try:
            if objects.model is None:
                hint = "models that have names are made for the data of a run"
                raise ConfigError(f"A Trainer takes a module, or a function that makes one, and no name: {hint}.")
            self._source = made_module(objects.model, None, config.seed)
            self._engine = self._undo.enter_context(trainer_engine(config))
            lr_schedule = LRSchedule("constant", config.warmup)
            self._spec = spec = train_spec(
                config, self._engine.devices, self._source, objects, lr_schedule, EverySize()
            )
            self._batches = GivenBatches(self._engine)
            self._eval_spec = eval_spec_of(EVAL_BATCH_SIZE, objects.metrics)
            grid = grid_of(config, self._engine.num_ranks)
            check_split(config, grid, objects)
            self._model = trainer_model(config, grid, spec, example)
            trained, start = self._model.trained, None
            if saved is not None:
                path, start = saved
                check_same_run(start.run, trained.identity, config)
                checked_weights(trained.initial, start.weights, path, config.model)
            with self._working():
                self._state = TrainingState(config, self._engine, trained, start)
            self._accumulated: list[AccumulatedGradients] = []  # gradients that no update has used
            self._unread: deque[StepResult] = deque()  # of steps that may be under way
        except BaseException:
            self._undo.close()
            raise

    def step(self, batch: Any) -> StepResult:
        """One update of the model on all devices, by the gradient of the whole batch.

        A batch is (inputs, target), (input, ..., target), or a dict. Its samples are cut into shards in their order.
        """
        if self._accumulated:
            raise ConfigError("There are gradients that no update has used. Call update() or drop_gradients() first.")
        with self._working("step"):
            found, progress = self._batches.batch(batch), self._state.progress
            self._count_updates(progress.passes - progress.step)
            try:
                future = self._state.steps.run(progress.passes + 1, found)
            except Unverified:
                self._state.compare()  # a replica that has drifted computes something else: it is named
                raise
            progress.step, progress.passes = progress.step + 1, progress.passes + 1
            result = StepResult(progress.step, found, future)
            self._unread.append(result)
            max_unread = self._state.steps.max_in_flight  # where losses come later, their memory is used again
            while len(self._unread) > max_unread:
                _ = self._unread.popleft().loss
            self._compare_if_due()
        return result

    def gradients(self, batch: Any) -> StepResult:
        """The gradient of a batch, without an update: it is the `.grad` of the parameters, see `apply`.

        Called again before `update`, batches are accumulated: the gradient is the mean over the samples of all.
        """
        self._check_whole("gradients")
        with self._working("gradients"):
            found, progress = replace(self._batches.batch(batch), static=None), self._state.progress  # not captured
            replicas: list[Any] = self._state.replicas.local
            if not self._accumulated:
                self._accumulated = [AccumulatedGradients(replica) for replica in replicas]
            options = step_options(self._config, self._engine)
            steps = EagerSteps(self._engine, self._accumulated, options, self._state.balance)
            future = steps.run(progress.passes + 1, found)
            progress.passes += 1
            return StepResult(progress.step + 1, found, future)

    def apply(self, function: Callable[[nn.Module], Any]) -> None:
        """Calls `function(module)` for the replica on each device; its parameters have their `.grad` after `gradients`.

        For gradient clipping of one's own, perturbed weights (SAM), or a change of weights in mid-run. It must do the
        same to all replicas; they are compared at the next `save`, and every `check_every` steps. What it draws from
        PyTorch is the same for all.
        """
        self._check_whole("apply")
        with self._working("apply"):
            passes, replicas = self._state.progress.passes, self._state.replicas.local
            self._engine.each("apply", lambda rank, device, replica: replica.apply(function, passes), replicas)

    def update(self) -> int:
        """The update by the gradients that `gradients` has left; the number of the step."""
        if not self._accumulated:
            raise ConfigError("There are no gradients to update by. Call gradients(batch) first, or step(batch).")
        with self._working("update"):
            number = self._state.progress.step + 1
            self._count_updates(0)
            replicas = [own.replica for own in self._accumulated]
            self._engine.each("update", lambda rank, device, own: own.update_from_accumulated(number), replicas)
            self._accumulated, self._state.progress.step = [], number
            self._compare_if_due()
        return number

    def drop_gradients(self) -> None:
        """Forgets the gradients that `gradients` has left."""
        with self._working("drop_gradients"):
            self._engine.each("update", lambda rank, device, own: own.replica.drop_accumulated(), self._accumulated)
            self._accumulated = []

    def evaluate(self, data: Any) -> dict[str, float]:
        """The loss and metrics over `data`: batches (a DataLoader, a list), or one batch as a pair or dict."""
        batches = batches_in(data)
        with self._working("evaluate"):
            found = evaluate_batches(self._state.replicas, map(self._batches.batch, batches), self._eval_spec)
        if not found:
            hint = " With over='batch', the loss is none of some samples: give metrics=." * self._spec.loss_over_batch
            raise ConfigError(f"There is nothing to evaluate: no batch, or no metric.{hint}")
        return found

    @property
    def num_steps(self) -> int:
        """Updates so far."""
        return self._state.progress.step

    @property
    def module(self) -> nn.Module:
        """The replica of the device that asks: in a loss or another trainer's step its own, else that of the first."""
        self._check_whole("module")
        replicas: list[TrainerReplica] = self._state.replicas.local  # type: ignore[assignment]
        rank = THIS_THREAD.rank
        return replicas[rank if rank < len(replicas) else 0].lent()

    def trained_module(self) -> nn.Module:
        """A copy of the trained module, on the CPU."""
        return with_weights(self._source, self.weights())

    def weights(self) -> dict[str, Array]:
        """All parameters and buffers by name."""
        with self._working("weights"):
            return self._model.whole(self._state.replicas.weights())

    def ema_weights(self) -> dict[str, Array]:
        """Their moving average, with `ema=`."""
        if self._config.ema is None:
            raise ConfigError("There is no moving average. Ask for one when you make the trainer: ema=0.999.")
        with self._working("ema_weights"):
            return self._model.whole(self._state.replicas.averaged())

    @property
    def weights_sha256(self) -> str:
        """The hash of all parameters: the same for any devices."""
        weights = self.weights()
        return sha256_of([weights[name] for name, _ in self._source.named_parameters()])

    def save(self, path: str | Path) -> Path:
        """Writes all that `load` needs to continue to one file, once the replicas were found equal."""
        if self._accumulated:
            raise ConfigError(
                "There are gradients that no update has used, and they are not saved. Call update() first."
            )
        path = Path(path)
        with self._working("save"):
            self._state.compare()
            checkpoint = self._state.checkpoint()
            if 0 in self._engine.local_ranks:
                write_saved(path, checkpoint)
            self._engine.all_gather([0 for _ in self._engine.local_ranks])  # it is there when anybody goes on
        return path

    def close(self) -> None:
        """Ends the devices' threads. Twice does no harm."""
        self._is_closed, self._accumulated = True, []
        self._undo.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @contextmanager
    def _working(self, call: str = "start") -> Iterator[None]:
        """PyTorch's settings for a call: outside, they are the user's."""
        if self._is_closed:
            raise ConfigError(f"The trainer is closed{self._why_closed}. Make another one.")
        engine = self._engine
        engine.set_call(call)
        with engine.backend.session([engine.devices[rank] for rank in engine.local_ranks]):
            if self._config.precision == "tf32":
                use_tf32()
            try:
                yield
            except BaseException as problem:
                if has_all_ranks(engine):
                    raise
                self._why_closed = f", because {call} failed on this rank"  # others wait, or will be in another call
                self.close()
                if not isinstance(problem, PeerFailure):
                    raise
                how = f"did not arrive in {self._config.timeout:g} s" if problem.timed_out else "failed, or has ended"
                raise RunError(f"{call}: another rank {how}. Look at what it says, if it does.") from problem

    def _check_whole(self, what: str) -> None:
        if self._model.is_split:
            raise ConfigError(
                f"Trainer.{what} needs the whole model, and its update, on every device. Here they are split: use "
                f"step, or split the data only (split='data', update='replicated', no slices)."
            )

    def _count_updates(self, num_passes_without: int) -> None:
        for replica in cast(list[Any], self._state.replicas.local):
            replica.set_passes_without_update(num_passes_without)

    def _compare_if_due(self) -> None:
        every = self._config.check_every
        if every and self._state.progress.step % every == 0:
            self._state.compare()
