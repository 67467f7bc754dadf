"""A replica of a PyTorch module: the gradient of a shard, the update, and the metrics of a few samples."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lockstep.backends import Pieces, flat
from lockstep.backends.torch import plain_errors, torch_device
from lockstep.backends.torch.session import start_thread, use_tf32
from lockstep.core.device import Device
from lockstep.core.errors import RunError
from lockstep.core.layout import Array, Layout, sha256_of
from lockstep.core.random import shard_seed
from lockstep.core.tracing import SpanName, span
from lockstep.models.losses import LossSum
from lockstep.partition.placement import Part
from lockstep.replicas import module_state
from lockstep.replicas.batch_loss import BatchLoss
from lockstep.replicas.buffers import BufferUpdates
from lockstep.replicas.gradients import Gradients
from lockstep.replicas.hidden_state import changed, counted, counters_of, state_of
from lockstep.replicas.lent_module import LentModule
from lockstep.replicas.module_update import ModuleUpdate, bytes_of
from lockstep.replicas.part_module import part_of_module
from lockstep.replicas.replica import AllGatherTensors, BatchSummary, Evaluated, Leaf, ReplicaState, Shard
from lockstep.replicas.shard_loss import ShardLoss
from lockstep.replicas.shard_module import ShardModule
from lockstep.replicas.sync_batch_norm import SyncBatchNorm
from lockstep.replicas.train_spec import TrainSpec
from lockstep.replicas.weight_average import WeightAverage

WHOLE = Part()
BUFFER, AVERAGE = "buffer/", "ema/"  # units of a state: buffers that are not saved with the weights, moving averages


class ModuleReplica:
    """One rank's copy of a module, with an optimizer of its own."""

    def __init__(
        self,
        spec: TrainSpec,
        device: Device,
        weights: dict[str, Array],
        state: ReplicaState | None = None,
        part: Part = WHOLE,
    ) -> None:
        self._spec, self._device, self._part = spec, torch_device(device), part
        self.module = part_of_module(spec, part).to(self._device)
        if spec.channels_last:
            self.module = self.module.to(memory_format=torch.channels_last)
        if spec.precision == "tf32":
            use_tf32()
        module_state.load(self.module, weights)
        if state is not None:
            module_state.load(self.module, units_of(state, BUFFER))
        self._trained = [(name, param) for name, param in self.module.named_parameters() if param.requires_grad]
        self._params = [param for _, param in self._trained]
        names = [name for name, _ in self._trained]
        self._layout = Layout(tuple(names), tuple(tuple(param.shape) for param in self._params))
        self._own = ShardModule(self.module, names, self._device, spec.sync_batch_norm)
        self._buffers, self._random = self._own.buffers, self._own.random
        self._update = ModuleUpdate(spec, self._trained, self._layout, part, self._random)
        self._update.use_device(self._device, state)
        originals = [param for param in spec.module.parameters() if param.requires_grad]
        self._gradients = Gradients(self._trained, self._layout, originals, self._device, self._random)
        self._losses = ShardLoss(spec, self._device, self.module)
        self._batch_loss = BatchLoss(self._losses, spec.seed, self._params) if spec.loss_over_batch else None
        self._pinned = module_state.PinnedCopies(self._device)
        held = dict(self.module.named_modules())
        self._in_eval_mode = [name for name in module_state.modules_in_eval_mode(spec.module) if name in held]
        self._step = 0  # the step that the buffers are prepared for
        self._lent = LentModule(self.module)
        self._average = WeightAverage(self.module, spec.ema) if spec.ema is not None else None
        if self._average is not None and state is not None:
            self._average.load(units_of(state, AVERAGE))
        self._is_computing = False  # a shard
        self._is_unfinished = False  # a step has begun and is not done: the buffers are those of its last shard
        self._sync = None
        if spec.sync_batch_norm:
            stream = torch.cuda.current_stream() if self._device.type == "cuda" else None
            self._sync = SyncBatchNorm(self.module, self._losses.keyed, partial(start_thread, self._device, stream))

    @property
    def entries(self) -> range:
        return range(self._layout.size)

    @property
    def owned(self) -> list[range]:
        """The entries that each of the ranks updates that share the update of this part."""
        return self._update.owned_entries

    @property
    def updated(self) -> range:
        """Those that this one does."""
        return self.owned[self._part.owner]

    @property
    def num_parameters(self) -> int:
        """How many are trained."""
        return len(self._params)

    def begin_step(self, step: int) -> None:
        module_state.put_in_mode(self.module, True, self._in_eval_mode)
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
            self._is_computing = True
            try:
                with span(SpanName.FORWARD):
                    loss = self._losses.of(self._own, shard)
                updates = self._buffers.updates()  # before a checkpointed forward pass is computed again
            finally:
                self._is_computing = False
                self._lent.take_back()  # its own loss may have asked for it
            with span(SpanName.BACKWARD):
                gradients, vector = self._gradients.of(loss.total, shard.on_ready)
        return self._leaf(loss, gradients, vector, self._own, updates)

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
        self._update.begin(step)

    def apply_update(self, total: Tensor | None, batch: BatchSummary) -> None:
        """The device's part."""
        self._update.put(self._gradients, total, batch)
        self._buffers.merge(batch.buffers, batch.shard_sizes)
        self._step_optimizer(batch.norms)

    def _step_optimizer(self, norms: dict[str, float] | None = None) -> None:
        """By the gradients that are in the parameters, with the buffers that the batch has left."""
        self._update.step(norms)
        self._gradients.clear()
        if self._average is not None and self._part.num_owners == 1:
            self._average.add(self.module)

    def end_update(self) -> None:
        """The host's part after it."""
        self._update.end()
        self._is_unfinished = False

    def set_passes_without_update(self, number: int) -> None:
        """How many of the steps so far were no updates: a learning rate is that of the updates."""
        self._update.passes_without_update = number

    def learning_rate(self, step: int) -> float | None:
        """That of one of the last steps, where it has one."""
        return self._update.learning_rate(step)

    def gradient_norms(self, total: Tensor | None, batch: BatchSummary) -> dict[str, float]:
        self._update.put(self._gradients, total, batch)
        norms = self._update.norms()
        self._gradients.clear()
        return norms

    def parameters(self, entries: range) -> Tensor:
        return self._update.values(entries, self._device)

    def set_parameters(self, entries: range, values: Tensor) -> None:
        self._update.set_values(entries, values)

    def finish_update(self) -> None:
        if self._average is not None and self._part.num_owners > 1:  # now all parameters have their new values
            self._average.add(self.module)

    def num_bytes(self) -> dict[str, int]:
        held = bytes_of([*self.module.parameters(), *self.module.buffers()])
        return {"parameters": held, "gradient": 4 * self._layout.size, "optimizer": self._update.num_bytes()}

    def evaluate(self, X: Any, y: Any) -> Evaluated:
        self._lent.take_back()
        self.module.eval()
        random = self._random.start(shard_seed(self._spec.seed, 0, 0))
        kept, autocast = self._losses.parameters_kept(), self._losses.autocast()
        with torch.no_grad(), plain_errors(self._device.type), kept, random, autocast:
            self._losses.prepare(self.module, X)
            output = module_state.call(self.module, self._losses.in_memory_format(X))
            found = self._losses.evaluated(output, X, y)
        self._buffers.restore()  # evaluation does not change them
        return found

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

    def state_dict(self) -> ReplicaState:
        self.undo_step()
        saved, state = module_state.saved_tensors(self.module), self._update.state()
        others = {n: module_state.to_numpy(b) for n, b in self.module.named_buffers() if n not in saved}
        averages = {} if self._average is None else self._average.arrays()
        units = {f"{BUFFER}{name}": array for name, array in others.items()}
        units |= {f"{AVERAGE}{name}": array for name, array in averages.items()}
        return state._replace(units={**state.units, **units})

    def averaged(self) -> dict[str, Array]:
        """The moving average of parameters and buffers, where there is one."""
        return {} if self._average is None else self._average.arrays()

    def undo_step(self) -> None:
        self._lent.take_back()
        if self._is_unfinished:
            self._buffers.rewind()


def units_of(state: ReplicaState, kind: str) -> dict[str, Any]:
    """The units of one kind in a state, by name."""
    return {name.removeprefix(kind): value for name, value in state.units.items() if name.startswith(kind)}
