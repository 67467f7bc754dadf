"""A replica of a PyTorch module: the gradient of a shard, the update, and the metrics of a few samples."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lockstep.backends import Pieces, flat
from lockstep.backends.torch import plain_errors, torch_device
from lockstep.backends.torch_session import start_thread, use_tf32
from lockstep.core.device import Device
from lockstep.core.errors import RunError
from lockstep.core.layout import Array, Layout, sha256_of
from lockstep.core.random import OPTIMIZER, seed_of, shard_seed
from lockstep.core.tracing import span
from lockstep.data.dataset import leaves_of
from lockstep.models.losses import LossSum, summed
from lockstep.models.whole_set_metrics import arrays_for
from lockstep.optim.torch_on_gpu import GpuOptimizer
from lockstep.replicas import module_state
from lockstep.replicas.batch_loss import BatchLoss
from lockstep.replicas.buffers import BufferUpdates
from lockstep.replicas.gradients import Gradients
from lockstep.replicas.hidden_state import changed, counted, counters_of, state_of
from lockstep.replicas.lent_module import LentModule
from lockstep.replicas.optimizer_state import optimizer_state, restore_optimizer
from lockstep.replicas.replica import AllGatherTensors, BatchSummary, Leaf, Measured, Shard
from lockstep.replicas.shard_loss import ShardLoss
from lockstep.replicas.shard_module import ShardModule
from lockstep.replicas.sync_batch_norm import SyncBatchNorm
from lockstep.replicas.train_spec import TrainSpec
from lockstep.replicas.weight_average import WeightAverage


class HeldSum(NamedTuple):
    """Gradients before an update, summed over one batch or several; parameters with the numbers `used` got some."""

    total: Tensor
    divisor: float
    used: frozenset[int]

    def plus(self, other: "HeldSum") -> "HeldSum":
        """Of the batches of both."""
        return HeldSum(self.total + other.total, self.divisor + other.divisor, self.used | other.used)


class ModuleReplica:
    """One rank's copy of a module, with an optimizer of its own."""

    def __init__(self, spec: TrainSpec, device: Device, weights: dict[str, Array], state_dict: Any = None) -> None:
        self._spec, self._device = spec, torch_device(device)
        self.module = module_state.copy_of(spec.module, self._device)
        if spec.channels_last:
            self.module = self.module.to(memory_format=torch.channels_last)
        if spec.precision == "tf32":
            use_tf32()
        module_state.load(self.module, weights)
        if state_dict is not None:
            module_state.load(self.module, state_dict["buffers"])
        self._trained = [(name, param) for name, param in self.module.named_parameters() if param.requires_grad]
        self._params = [param for _, param in self._trained]
        names = [name for name, _ in self._trained]
        self._layout = Layout(tuple(names), tuple(tuple(param.shape) for param in self._params))
        self._optimizer = spec.optimizer(self._trained)
        self._learning_rates = [group.get("lr") for group in self._optimizer.param_groups]
        self._scheduler = spec.scheduler(self._optimizer) if spec.scheduler else None
        if state_dict is not None:
            restore_optimizer(self._optimizer, self._scheduler, state_dict, self._device)
        self._own = ShardModule(self.module, names, self._device, spec.sync_batch_norm)
        self._buffers, self._random = self._own.buffers, self._own.random
        originals = [param for param in spec.module.parameters() if param.requires_grad]
        self._gradients = Gradients(self._trained, self._layout, originals, self._device, self._random)
        self._losses = ShardLoss(spec, self._device, self.module)
        self._batch_loss = BatchLoss(self._losses, spec.seed, self._params) if spec.loss_over_batch else None
        self._gpu_optimizer = GpuOptimizer(self._optimizer, self._device) if self._device.type == "cuda" else None
        self._pinned = module_state.PinnedCopies(self._device)
        self._in_eval_mode = module_state.modules_in_eval_mode(spec.module)
        self._step = 0  # the step that the buffers are prepared for
        self._held: HeldSum | None = None  # gradients before an update
        self._lent = LentModule(self.module)
        self._average = WeightAverage(self.module, spec.ema) if spec.ema is not None else None
        if self._average is not None and state_dict is not None:
            self._average.load(state_dict["ema"])
        self._is_unfinished = False  # a step has begun and is not done: the buffers are those of its last shard
        self._sync = None
        if spec.sync_batch_norm:
            stream = torch.cuda.current_stream() if self._device.type == "cuda" else None
            self._sync = SyncBatchNorm(self.module, self._losses.keyed, partial(start_thread, self._device, stream))

    @property
    def entries(self) -> range:
        return range(self._layout.size)

    def begin_step(self, step: int) -> None:
        self.module.train()
        module_state.put_in_eval_mode(self.module, self._in_eval_mode)
        self._gradients.clear()  # another model's loss may have gone through this one
        self._lent.take_back()
        trained = [id(param) for param in self.module.parameters() if param.requires_grad]
        if trained != [id(param) for param in self._params]:
            raise RunError("The module changed which parameters are trained (requires_grad) in mid-run. Do it before.")
        if self._step != step:
            self._pinned.wait()  # a forward pass writes to buffers
            self._step = step
            self._is_unfinished = True
            self._buffers.start_step()
            self._losses.begin_step(step)

    def forward_backward(self, shards: list[Shard], all_gather: AllGatherTensors) -> list[Leaf]:
        if self._batch_loss is not None:
            with plain_errors(self._device.type), self._gradients.watch_originals():
                found = self._batch_loss.forward_backward(self._own, shards, all_gather)
            return [
                self._leaf(r.loss, r.gradients, self._gradients.flat(r.gradients), self._own, r.buffers) for r in found
            ]
        if self._sync is None:
            return [self._leaf_of(shard) for shard in shards]
        with plain_errors(self._device.type), self._gradients.watch_originals():
            computed = self._sync.forward_backward(shards, all_gather)
        return [self._leaf(loss, grads, self._gradients.flat(grads), self._own) for loss, grads in computed]

    def _leaf_of(self, shard: Shard) -> Leaf:
        with plain_errors(self._device.type):
            self._buffers.start_shard()
            with span("forward"):
                loss = self._losses.of(self._own, shard)
            with span("backward"):
                gradients, vector = self._gradients.of(loss.total, shard.on_ready)
        return self._leaf(loss, gradients, vector, self._own)

    def _leaf(
        self,
        loss: LossSum,
        gradients: list[Tensor | None],
        vector: Tensor | Pieces,
        computed: ShardModule,
        updates: BufferUpdates | None = None,
    ) -> Leaf:
        if updates is None:
            updates = computed.buffers.updates()
        if self._losses.is_first_step:
            computed.check_attributes()
        used = frozenset(number for number, gradient in enumerate(gradients) if gradient is not None)
        return Leaf(vector, loss.total.detach(), updates, used, loss.weight)

    def update(self, step: int, total: Tensor, batch: BatchSummary) -> None:
        self.begin_update(step)
        self.apply_update(total, batch)
        self.end_update()

    def begin_update(self, step: int) -> None:
        """The host's part before an update."""
        self._pinned.wait()
        if self._scheduler is None:
            for group, rate in zip(self._optimizer.param_groups, self._learning_rates, strict=True):
                if rate is not None:
                    group["lr"] = rate * self._spec.lr_schedule.factor(step)
        if self._gpu_optimizer is not None:
            self._gpu_optimizer.set_rates()
        self._random.start(seed_of(self._spec.seed, step, 0, OPTIMIZER))

    def apply_update(self, total: Tensor, batch: BatchSummary) -> None:
        """The device's part."""
        # the only division, by the samples of the whole batch, or their weights
        self._gradients.put(total / divisor_of(batch), batch.used)
        self._buffers.merge(batch.buffers, batch.shard_sizes)
        self._step_optimizer()

    def _step_optimizer(self) -> None:
        """By the gradients that are in the parameters, with the buffers that the batch has left."""
        if self._spec.clip_norm is not None:
            nn.utils.clip_grad_norm_(self._params, self._spec.clip_norm)
        with self._random, self._gpu_optimizer.rates_on_device() if self._gpu_optimizer else nullcontext():
            self._optimizer.step()
        self._gradients.clear()
        if self._average is not None:
            self._average.add(self.module)

    def end_update(self) -> None:
        """The host's part after it."""
        if self._scheduler is not None:
            self._scheduler.step()
        self._is_unfinished = False

    def hold_gradients(self, total: Tensor, batch: BatchSummary) -> None:
        """Adds a batch to those whose gradients are held; the mean is in the module's parameters, for anybody to see.

        The update comes later, or never.
        """
        held = HeldSum(total.clone(), divisor_of(batch), batch.used)
        self._held = held = held if self._held is None else self._held.plus(held)
        self._gradients.put(held.total / held.divisor, held.used)
        self._buffers.merge(batch.buffers, batch.shard_sizes)
        self._is_unfinished = False

    def update_held(self, step: int) -> None:
        """The update by the gradients that are in the parameters now."""
        self.begin_update(step)
        self._step_optimizer()
        self.end_update()
        self._held = None

    def drop_held(self) -> None:
        """Forgets the gradients that are held."""
        self._held = None
        self._gradients.clear()

    def apply(self, function: Callable[[nn.Module], Any], passes: int) -> None:
        """Calls a function of the user's, with random numbers that are the same for all replicas."""
        with self._random.start(seed_of(self._spec.seed, passes, 1, OPTIMIZER)):
            function(self.module)

    def lent(self) -> nn.Module:
        """The module for a forward pass of somebody else, which does not change its buffers."""
        self.undo_step()
        return self._lent.lend()

    def measure(self, X: Any, y: Any) -> Measured:
        self._lent.take_back()
        self.module.eval()
        num_samples = next(len(leaf) for leaf in leaves_of((y, X)) if isinstance(leaf, Tensor) and leaf.ndim)
        metrics = {n: (f"metric {n}", m) for n, m in self._spec.metrics.items()}
        if not self._spec.loss_over_batch:  # which has no value for a part of the samples
            metrics = {"loss": ("loss", self._losses.function), **metrics}
        random = self._random.start(shard_seed(self._spec.seed, 0, 0))
        with torch.no_grad(), plain_errors(self._device.type), random, self._losses.autocast():
            self._losses.prepare(self.module, X)
            output = module_state.call(self.module, self._losses.in_memory_format(X))
            sums = {n: summed(metric, what, output, y, num_samples) for n, (what, metric) in metrics.items()}
        self._buffers.restore()  # evaluation does not change them
        outputs = arrays_for(output, y) if self._spec.keeps_outputs else None
        found = {n: [float(s.total), num_samples if s.weight is None else float(s.weight)] for n, s in sums.items()}
        return Measured(found, outputs)

    def arrays(self) -> dict[str, Array]:
        self.undo_step()
        return module_state.arrays_of(self.module)

    def snapshot(self) -> Callable[[], dict[str, Array]]:
        if self._device.type == "cuda":
            self.undo_step()
            return self._pinned.take(module_state.saved_tensors(self.module))
        return partial(dict, self.arrays())

    def is_finite(self) -> bool:
        return module_state.are_finite(self.module.parameters())

    def fingerprints(self) -> dict[str, str]:
        if self._device.type == "cpu":
            return {name: sha256_of([array]) for name, array in self.arrays().items()}
        self.undo_step()
        tensors = module_state.saved_tensors(self.module)
        sums = torch.stack([module_state.checksum(tensor) for tensor in tensors.values()])  # on the device
        return dict(zip(tensors, map(str, sums.tolist()), strict=True))

    def digest(self, leaf: Leaf) -> dict[str, Any]:
        pieces = flat(leaf.gradient).split(self._layout.pieces)[::2]
        named = {f"the gradient of {n}": piece for n, piece in zip(self._layout.names, pieces, strict=True)}
        named |= {"the loss": leaf.loss}
        named |= {f"the buffer {n}" if n else "a norm layer's statistics": b for n, b in (leaf.buffers or {}).items()}
        sums = torch.stack([module_state.checksum(tensor) for tensor in named.values()])
        return dict(zip(named, sums.tolist(), strict=True))

    def kept_state(self, only_counters: bool = False) -> dict[str, str]:
        read = counters_of if only_counters else state_of
        found = {f"the model's {path}": text for path, text in read(self.module).items()}
        of_loss = read(self._losses.function, is_model=False)
        return found | {f"the loss's {path}": text for path, text in of_loss.items()}

    def changed_state(self, before: dict[str, str], only_counters: bool = False) -> list[str]:
        return (counted if only_counters else changed)(before, self.kept_state(only_counters))

    def state_dict(self) -> Any:
        self.undo_step()
        saved = module_state.saved_tensors(self.module)
        others = {n: module_state.to_numpy(b) for n, b in self.module.named_buffers() if n not in saved}
        average = {} if self._average is None else {"ema": self._average.arrays()}
        return {"buffers": others, **average, **optimizer_state(self._optimizer, self._scheduler)}

    def averaged(self) -> dict[str, Array]:
        """The moving average of parameters and buffers, where there is one."""
        return {} if self._average is None else self._average.arrays()

    def undo_step(self) -> None:
        self._lent.take_back()
        if self._is_unfinished:
            self._buffers.rewind()


def divisor_of(batch: BatchSummary) -> float:
    """What the summed gradient is divided by."""
    if not batch.divisor:
        raise RunError(
            "The weights of the loss add up to 0 in this batch: nothing in it counts. Leave such batches out."
        )
    return batch.divisor
