"""A replica of a PyTorch module: the gradient of a shard, the update, and the metrics of a few samples."""

import copy
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.backends import Pieces
from lockstep.backends.torch import BACKEND, plain_errors, torch_device
from lockstep.backends.torch_session import start_thread, use_tf32
from lockstep.core.device import Device
from lockstep.core.errors import RunError
from lockstep.core.layout import Array, Layout, sha256_of
from lockstep.core.random import OPTIMIZER, seed_of, shard_seed
from lockstep.core.tracing import span
from lockstep.data.dataset import leaves_of, map_leaves
from lockstep.models.losses import PerSample, summed
from lockstep.optim.lr_schedule import LRSchedule
from lockstep.optim.torch_on_gpu import GpuOptimizer
from lockstep.optim.torch_optimizers import MakeOptimizer
from lockstep.replicas import module_state
from lockstep.replicas.compiled_blocks import compile_blocks, with_compiled_blocks
from lockstep.replicas.gradients import Gradients
from lockstep.replicas.keyed_random import KeyedRandom, no_draws_outside_of_pytorch, rng_state
from lockstep.replicas.memory_format import channels_last, shaped_like
from lockstep.replicas.optimizer_state import optimizer_state, restore_optimizer
from lockstep.replicas.replica import AllGatherTensors, BatchSummary, Leaf, Shard
from lockstep.replicas.shard_module import ShardModule
from lockstep.replicas.sync_batch_norm import SyncBatchNorm

NUM_WATCHED_STEPS = 2  # steps in which every operation is intercepted, to see whether the model draws random numbers


@dataclass
class Drawing:
    """Whether a compiled model draws random numbers: what one rank finds out is known to all of its process."""

    has_drawn: bool = False


@dataclass(frozen=True)
class TrainSpec:
    """How a module is trained: the same for all ranks."""

    module: nn.Module  # the user's own; never trained itself
    loss: PerSample
    metrics: dict[str, PerSample]
    optimizer: MakeOptimizer
    scheduler: Callable[[torch.optim.Optimizer], Any] | None
    seed: int
    lr_schedule: LRSchedule = field(default_factory=LRSchedule)
    clip_norm: float | None = None
    sync_batch_norm: bool = False  # statistics of the whole batch
    precision: str = "fp32"
    channels_last: bool = False  # memory format of images and of convolution kernels
    compiled_sizes: frozenset[int] = frozenset()  # shards with so many samples are compiled; others are not worth it
    drawing: Drawing = field(default_factory=Drawing)

    @property
    def compiles(self) -> bool:
        return bool(self.compiled_sizes)


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
        loss = spec.loss
        self._loss = copy.deepcopy(loss).to(self._device) if isinstance(loss, nn.Module) else loss
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
        self._gradients = Gradients(self._trained, self._layout, originals, self._device)
        self._uses_compiled = spec.compiles
        if spec.compiles:
            repeats = compile_blocks(self.module)
            self._compiled = (with_compiled_blocks if repeats else BACKEND.compile)(module_state.call)
            self._compiled_loss = BACKEND.compile(self._loss)
        self._gpu_optimizer = GpuOptimizer(self._optimizer, self._device) if self._device.type == "cuda" else None
        self._pinned = module_state.PinnedCopies(self._device)
        self._has_computed = False
        self._in_eval_mode = module_state.modules_in_eval_mode(spec.module)
        self._step = 0  # the step that the buffers are prepared for
        self._first_step: int | None = None  # of this replica: a run may continue with a new one
        self._is_unfinished = False  # a step has begun and is not done: the buffers are those of its last shard
        self._sync = None
        if spec.sync_batch_norm:
            stream = torch.cuda.current_stream() if self._device.type == "cuda" else None
            self._sync = SyncBatchNorm(self.module, self._keyed_forward, partial(start_thread, self._device, stream))

    @property
    def entries(self) -> range:
        return range(self._layout.size)

    def begin_step(self, step: int) -> None:
        self.module.train()
        module_state.put_in_eval_mode(self.module, self._in_eval_mode)
        trained = [id(param) for param in self.module.parameters() if param.requires_grad]
        if trained != [id(param) for param in self._params]:
            raise RunError("The module changed which parameters are trained (requires_grad) in mid-run. Do it before.")
        if self._step != step:
            self._pinned.wait()  # a forward pass writes to buffers
            self._step = step
            self._first_step = self._first_step or step
            self._is_unfinished = True
            self._buffers.start_step()

    def forward_backward(self, shards: list[Shard], all_gather: AllGatherTensors) -> list[Leaf]:
        if self._sync is None:
            return [self._leaf_of(shard) for shard in shards]
        with plain_errors(self._device.type), self._gradients.watch_originals():
            computed = self._sync.forward_backward(shards, all_gather)
        return [self._leaf(loss, grads, self._gradients.flat(grads), self._own) for loss, grads in computed]

    def _leaf_of(self, shard: Shard) -> Leaf:
        with plain_errors(self._device.type):
            self._buffers.start_shard()
            with span("forward"):
                loss = self._forward(shard)
            with span("backward"):
                gradients, vector = self._gradients.of(loss, shard.on_ready)
        return self._leaf(loss, gradients, vector, self._own)

    @property
    def _is_watched(self) -> bool:
        return self._step < (self._first_step or self._step) + NUM_WATCHED_STEPS

    def _forward(self, shard: Shard) -> Tensor:
        """The summed loss of a shard."""
        if self._spec.compiles:
            return self._compiled_forward(shard)
        if not self._random.has_drawn and not self._is_watched:
            before = rng_state(self._device)
            loss = self._loss_of(self.module, shard)
            if rng_state(self._device) == before:
                return loss
            self._random.has_drawn = True  # or another rank has: then watching is only slower, and gives the same bits
            self._buffers.start_shard()
        return self._keyed_forward(self.module, self._random, shard)

    def _compiled_forward(self, shard: Shard) -> Tensor:
        """The same from compiled code: if it draws, then from the process's generators, so one rank at a time."""
        drawing = self._spec.drawing
        if self._is_watched or drawing.has_drawn:
            loss = self._keyed_forward(self.module, self._random, shard)
            drawing.has_drawn |= self._random.has_drawn
            return loss
        before = rng_state(self._device)
        loss = self._loss_of(self.module, shard)
        if rng_state(self._device) != before:
            raise RunError(
                f"The compiled model draws random numbers, and did not in its first {NUM_WATCHED_STEPS} steps: other "
                f"ranks may have drawn at the same time. Draw from the first step on, or leave --compile out."
            )
        return loss

    def _keyed_forward(self, module: nn.Module, random: KeyedRandom, shard: Shard) -> Tensor:
        """The same from `module`, which is the replica's own or a clone of it, with the random numbers of the shard."""
        seed = shard_seed(self._spec.seed, self._step, shard.number)
        with random.as_default(seed) if self._spec.compiles else random.start(seed):
            return self._loss_of(module, shard)

    def _loss_of(self, module: nn.Module, shard: Shard) -> Tensor:
        versions = [param._version for param in self._params]
        # not for the first: PyTorch imports parts of itself lazily, and draws a temporary file's name meanwhile
        watch = no_draws_outside_of_pytorch() if self._has_computed else nullcontext()
        with watch, self._autocast():
            call, loss_of = module_state.call, self._loss
            if self._uses_compiled and shard.num_samples in self._spec.compiled_sizes:
                call, loss_of = self._compiled, self._compiled_loss
            output = call(module, self._in_memory_format(shard.X))
            loss = summed(loss_of, "loss", output, shard.y, shard.num_samples)
        self._has_computed = True
        if not loss.requires_grad:
            raise RunError("The loss does not depend on any parameter that is trained. Are all frozen or detached?")
        if versions != [param._version for param in self._params]:
            changed = next(n for (n, p), before in zip(self._trained, versions, strict=True) if p._version != before)
            raise RunError(
                f"The model changes its parameter {changed} in the forward pass (Embedding with max_norm?), depending "
                f"on the shard: devices would end with different parameters. Leave that out."
            )
        return loss

    def _leaf(
        self, loss: Tensor, gradients: list[Tensor | None], vector: Tensor | Pieces, computed: ShardModule
    ) -> Leaf:
        updates = computed.buffers.updates()
        if self._step == self._first_step:
            computed.check_attributes()
        used = frozenset(number for number, gradient in enumerate(gradients) if gradient is not None)
        return Leaf(vector, loss.detach(), updates, used)

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
        gradient = total / batch.num_samples  # the only division, by the samples of the whole batch
        if self._spec.clip_norm is not None:
            norm = torch.linalg.vector_norm(gradient)
            gradient = gradient * (self._spec.clip_norm / (norm + 1e-6)).clamp(max=1.0)
        pieces = gradient.split(self._layout.pieces)[::2]
        for number, (param, piece) in enumerate(zip(self._params, pieces, strict=True)):
            # PyTorch skips a parameter whose gradient is None
            param.grad = shaped_like(param, piece) if number in batch.used else None
        with self._random, self._gpu_optimizer.rates_on_device() if self._gpu_optimizer else nullcontext():
            self._optimizer.step()
        self._gradients.clear()
        self._buffers.merge(batch.buffers, batch.shard_sizes)

    def end_update(self) -> None:
        """The host's part after it."""
        if self._scheduler is not None:
            self._scheduler.step()
        self._is_unfinished = False

    def measure(self, X: Any, y: Any) -> dict[str, float]:
        self.module.eval()
        num_samples = len(leaves_of(y)[0])
        metrics = {"loss": ("loss", self._loss), **{n: (f"metric {n}", m) for n, m in self._spec.metrics.items()}}
        random = self._random.start(shard_seed(self._spec.seed, 0, 0))
        with torch.no_grad(), plain_errors(self._device.type), random, self._autocast():
            output = module_state.call(self.module, self._in_memory_format(X))
            sums = {n: float(summed(metric, what, output, y, num_samples)) for n, (what, metric) in metrics.items()}
        self._buffers.restore()  # evaluation does not change them
        return sums

    def arrays(self) -> dict[str, Array]:
        self._undo_unfinished_step()
        return module_state.arrays_of(self.module)

    def snapshot(self) -> Callable[[], dict[str, Array]]:
        if self._device.type == "cuda":
            self._undo_unfinished_step()
            return self._pinned.take(module_state.saved_tensors(self.module))
        return partial(dict, self.arrays())

    def is_finite(self) -> bool:
        return module_state.are_finite(self.module.parameters())

    def fingerprints(self) -> dict[str, str]:
        if self._device.type == "cpu":
            return {name: sha256_of([array]) for name, array in self.arrays().items()}
        tensors = module_state.saved_tensors(self.module)
        sums = torch.stack([module_state.checksum(tensor) for tensor in tensors.values()])  # on the device
        return dict(zip(tensors, map(str, sums.tolist()), strict=True))

    def state_dict(self) -> Any:
        self._undo_unfinished_step()
        saved = module_state.saved_tensors(self.module)
        others = {n: module_state.to_numpy(b) for n, b in self.module.named_buffers() if n not in saved}
        return {"buffers": others, **optimizer_state(self._optimizer, self._scheduler)}

    def _undo_unfinished_step(self) -> None:
        if self._is_unfinished:
            self._buffers.rewind()

    def _in_memory_format(self, X: Any) -> Any:
        return map_leaves(X, channels_last) if self._spec.channels_last else X

    def _autocast(self) -> torch.autocast:
        # no cache: it belongs to the whole process, so its content would depend on the other ranks
        is_bf16 = self._spec.precision == "bf16"
        return torch.autocast(self._device.type, torch.bfloat16, enabled=is_bf16, cache_enabled=False)
