"""A replica of a PyTorch module: a shard's gradient, an update, and the metrics of a few samples."""

import copy
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.backends.torch import BACKEND, plain_errors, torch_device
from lockstep.backends.torch_session import start_thread, use_tf32
from lockstep.core.device import Device
from lockstep.core.errors import RunError
from lockstep.core.layout import Array, Layout, sha256_of
from lockstep.core.random import OPTIMIZER, seed_of, shard_seed
from lockstep.core.tracing import span
from lockstep.data.dataset import leaves_of, map_leaves
from lockstep.models.losses import summed
from lockstep.replicas.gradients import Gradients
from lockstep.replicas.keyed_random import KeyedRandom, no_draws_outside_of_pytorch, rng_state
from lockstep.replicas.memory_format import channels_last, shaped_like
from lockstep.replicas.module_state import (
    arrays_of,
    call,
    checksum,
    copy_of,
    load,
    modules_in_eval_mode,
    names_of,
    put_in_eval_mode,
    to_numpy,
)
from lockstep.replicas.optimizer_state import (
    optimizer_state,
    restore_optimizer,
    restore_scheduler,
    scheduler_state,
)
from lockstep.replicas.replica import AllGatherTensors, BatchSummary, Leaf, Shard
from lockstep.replicas.shard_module import ShardModule
from lockstep.replicas.sync_batch_norm import SyncBatchNorm
from lockstep.replicas.train_spec import TrainSpec

NUM_WATCHED_STEPS = 2  # in which every operation is watched: does it draw random numbers?


class ModuleReplica:
    """One rank's copy of a module, with an optimizer of its own."""

    def __init__(self, spec: TrainSpec, device: Device, weights: dict[str, Array], state_dict: Any = None) -> None:
        self._spec, self._device = spec, torch_device(device)
        self.module = copy_of(spec.module, self._device)
        if spec.channels_last:
            self.module = self.module.to(memory_format=torch.channels_last)
        if spec.precision == "tf32":
            use_tf32()
        load(self.module, weights)
        if state_dict is not None:
            load(self.module, state_dict["buffers"])
        loss = spec.loss
        self._loss = copy.deepcopy(loss).to(self._device) if isinstance(loss, nn.Module) else loss
        self._trained = [(name, param) for name, param in self.module.named_parameters() if param.requires_grad]
        self._params = [param for _, param in self._trained]
        names, shapes = tuple(name for name, _ in self._trained), tuple(tuple(param.shape) for param in self._params)
        self._layout = Layout(names, shapes)
        self._make_optimizer(state_dict)
        self._own = ShardModule(self.module, list(names), self._device, spec.sync_batch_norm)
        self._buffers, self._random = self._own.buffers, self._own.random
        originals = [param for param in spec.module.parameters() if param.requires_grad]
        self._gradients = Gradients(self._trained, self._layout, originals, self._device)
        self._call = BACKEND.compile(call) if spec.compiles else call
        self._has_computed = False
        self._in_eval_mode = modules_in_eval_mode(spec.module)
        self._step = 0  # that the buffers are prepared for
        self._first_step: int | None = None  # of this replica: a run may continue with a new one
        self._is_under_way = False  # a step that has begun and is not done: shards have left their buffers behind
        self._sync = None
        if spec.sync_batch_norm:
            stream = torch.cuda.current_stream() if self._device.type == "cuda" else None
            self._sync = SyncBatchNorm(self, self._params, start_thread=lambda: start_thread(self._device, stream))

    def _make_optimizer(self, state_dict: Any) -> None:
        self._optimizer = self._spec.optimizer(self._trained)
        self._learning_rates = [group.get("lr") for group in self._optimizer.param_groups]
        self._scheduler = self._spec.scheduler(self._optimizer) if self._spec.scheduler else None
        if state_dict is not None:
            restore_optimizer(self._optimizer, state_dict["optimizer"], self._device)
            restore_scheduler(self._scheduler, state_dict["scheduler"], self._device)

    @property
    def entries(self) -> range:
        return range(self._layout.size)

    def begin_step(self, step: int) -> None:
        self.module.train()
        put_in_eval_mode(self.module, self._in_eval_mode)
        trained = [id(param) for param in self.module.parameters() if param.requires_grad]
        if trained != [id(param) for param in self._params]:
            raise RunError("The module changed which parameters are trained (requires_grad) in mid-run. Do it before.")
        if self._step != step:
            self._step = step
            self._first_step = self._first_step or step
            self._is_under_way = True
            self._buffers.restore()
            self._buffers.start_step()

    def forward_backward(self, shards: list[Shard], all_gather: AllGatherTensors) -> list[Leaf]:
        if self._sync is not None:
            with plain_errors(self._device.type):
                return self._sync.forward_backward(shards, all_gather)
        return [self._leaf_of(shard) for shard in shards]

    def _leaf_of(self, shard: Shard) -> Leaf:
        with plain_errors(self._device.type):
            self._buffers.start_shard()
            with span("forward"):
                loss = self._forward(shard)
            with span("backward"):
                gradients, vector = self._gradients.of(loss, shard.on_ready)
        return self._leaf(loss, gradients, vector, self._own)

    def _forward(self, shard: Shard) -> Tensor:
        if self._spec.compiles:  # such a model was found not to draw random numbers
            return self._loss_of(self.module, shard)
        is_watched = self._random.has_drawn or self._step < (self._first_step or self._step) + NUM_WATCHED_STEPS
        loss = None if is_watched else self._unwatched_forward(shard)
        return self.forward(self.module, self._random, shard) if loss is None else loss

    def _unwatched_forward(self, shard: Shard) -> Tensor | None:
        """The summed loss of a shard, if nobody has drawn random numbers meanwhile."""
        before = rng_state(self._device)
        loss = self._loss_of(self.module, shard)
        if rng_state(self._device) == before:
            return loss
        self._random.has_drawn = True  # or another rank has: then it is watched for nothing, and gives the same bits
        self._buffers.start_shard()
        return None

    def forward(self, module: nn.Module, random: KeyedRandom, shard: Shard) -> Tensor:
        """The summed loss of a shard, from `module`, which is the replica's own or a twin of it."""
        with random.start(shard_seed(self._spec.seed, self._step, shard.number)):
            return self._loss_of(module, shard)

    def _loss_of(self, module: nn.Module, shard: Shard) -> Tensor:
        versions = [param._version for param in self._params]
        # not for the first: PyTorch loads parts of itself when they are needed, and draws a name for a file in between
        watch = no_draws_outside_of_pytorch() if self._has_computed else nullcontext()
        with watch, self._autocast():
            output = self._call(module, self._in_memory_format(shard.X))
            loss = summed(self._loss, "loss", output, shard.y, shard.num_samples)
        self._has_computed = True
        if not loss.requires_grad:
            raise RunError(
                "The loss does not depend on any parameter that is trained. Is everything frozen, or detached?"
            )
        if versions != [param._version for param in self._params]:
            changed = next(n for (n, p), before in zip(self._trained, versions, strict=True) if p._version != before)
            raise RunError(
                f"The model changes its parameter {changed} in the forward pass (Embedding with max_norm?), by what is "
                f"in the shard: devices would end with different parameters. Leave that out."
            )
        return loss

    def leaf(self, loss: Tensor, gradients: list[Tensor | None]) -> Leaf:
        """What a shard leaves behind, with statistics of the whole batch."""
        return self._leaf(loss, gradients, self._gradients.flat(gradients), self._own)

    def _leaf(self, loss: Tensor, gradients: list[Tensor | None], vector: Tensor, computed: ShardModule) -> Leaf:
        updates = computed.buffers.updates()
        if self._step == self._first_step:
            computed.attributes.check()
        used = frozenset(number for number, gradient in enumerate(gradients) if gradient is not None)
        return Leaf(vector, loss.detach(), updates, used)

    def update(self, step: int, total: Tensor, batch: BatchSummary) -> None:
        gradient = total / batch.num_samples  # the only division, by the samples of the whole batch
        if self._spec.clip_norm is not None:
            norm = torch.linalg.vector_norm(gradient)
            gradient = gradient * (self._spec.clip_norm / (norm + 1e-6)).clamp(max=1.0)
        pieces = gradient.split(self._layout.pieces)[::2]
        for number, (param, piece) in enumerate(zip(self._params, pieces, strict=True)):
            # PyTorch skips what has none
            param.grad = shaped_like(param, piece) if number in batch.used else None
        if self._scheduler is None:
            for group, rate in zip(self._optimizer.param_groups, self._learning_rates, strict=True):
                if rate is not None:
                    group["lr"] = rate * self._spec.lr_schedule.factor(step)
        with self._random.start(seed_of(self._spec.seed, step, 0, OPTIMIZER)):
            self._optimizer.step()
        self._gradients.clear()
        if self._scheduler is not None:
            self._scheduler.step()
        self._buffers.merge(batch.buffers, batch.shard_sizes)
        self._is_under_way = False

    def measure(self, X: Any, y: Any) -> dict[str, float]:
        self.module.eval()
        num_samples = len(leaves_of(y)[0])
        metrics = {"loss": self._loss, **self._spec.metrics}
        with (
            torch.no_grad(),
            plain_errors(self._device.type),
            self._random.start(shard_seed(self._spec.seed, 0, 0)),
            self._autocast(),
        ):
            output = self._call(self.module, self._in_memory_format(X))
            sums = {
                name: float(summed(metric, f"metric {name}" if name != "loss" else name, output, y, num_samples))
                for name, metric in metrics.items()
            }
        self._buffers.restore()  # what these samples made of them belongs to nobody
        return sums

    def arrays(self) -> dict[str, Array]:
        self._undo_unfinished_step()
        return arrays_of(self.module)

    def fingerprints(self) -> dict[str, str]:
        if self._device.type == "cpu":
            return {name: sha256_of([array]) for name, array in self.arrays().items()}
        named = {**dict(self.module.named_parameters()), **dict(self.module.named_buffers())}
        names = names_of(self.module)
        sums = torch.stack([checksum(named[name]) for name in names])  # computed where the numbers are
        return dict(zip(names, map(str, sums.tolist()), strict=True))

    def state_dict(self) -> Any:
        self._undo_unfinished_step()
        saved = set(names_of(self.module))
        others = {name: to_numpy(buffer) for name, buffer in self.module.named_buffers() if name not in saved}
        return {
            "buffers": others,
            "optimizer": optimizer_state(self._optimizer),
            "scheduler": scheduler_state(self._scheduler),
        }

    def _undo_unfinished_step(self) -> None:
        """Undoes what shards did to the buffers in a step that came to nothing."""
        if self._is_under_way:
            self._buffers.rewind()

    def _in_memory_format(self, X: Any) -> Any:
        """Samples in the memory format that the module's kernels are fastest with."""
        return map_leaves(X, channels_last) if self._spec.channels_last else X

    def _autocast(self) -> torch.autocast:
        # no cache: it belongs to the whole process, so what is in it would depend on the other ranks
        return torch.autocast(
            self._device.type, torch.bfloat16, enabled=self._spec.precision == "bf16", cache_enabled=False
        )
