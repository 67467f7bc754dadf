"""A replica of a PyTorch module: a shard's gradient, an update, and the metrics of a few samples."""

import copy
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.backends.torch import BACKEND, is_recording, place_of, plain_errors, start_thread, use_tf32
from lockstep.data.dataset import leaves_of, map_leaves
from lockstep.core.device import Device
from lockstep.runtime import Gathered, Leaf, Meet, Shard
from lockstep.core.errors import NotRecorded, RunError
from lockstep.core.layout import Array, Layout, sha256_of
from lockstep.replicas.gradients import Gradients
from lockstep.replicas.module_state import (
    arrays_of,
    call,
    checksum,
    copy_of,
    load,
    modes_of,
    names_of,
    set_modes,
)
from lockstep.models.losses import summed
from lockstep.replicas.optimizer_state import (
    memory_of_optimizer,
    memory_of_scheduler,
    restore_optimizer,
    restore_scheduler,
    to_numpy,
)
from lockstep.replicas.shard_module import Part
from lockstep.replicas.keyed_random import (
    OPTIMIZER,
    KeyedRandom,
    drawn_so_far,
    no_draws_outside_of_pytorch,
    seed_of,
    shard_seed,
)
from lockstep.replicas.train_spec import ModuleRecipe
from lockstep.replicas.memory_format import channels_last, shaped_like
from lockstep.replicas.sync_batch_norm import SyncNorms
from lockstep.core.tracing import span

LOOK_STEPS = 2  # in which every operation is watched: does it draw?


class ModuleReplica:
    """One rank's copy of a module, with an optimizer of its own."""

    def __init__(self, recipe: ModuleRecipe, device: Device, weights: dict[str, Array], memory: Any = None) -> None:
        self._recipe, self._place = recipe, place_of(device)
        self.module = copy_of(recipe.module, self._place)
        if recipe.channels_last:
            self.module = self.module.to(memory_format=torch.channels_last)
        if recipe.precision == "tf32":
            use_tf32()
        load(self.module, weights)
        if memory is not None:
            load(self.module, memory["buffers"])
        loss = recipe.loss
        self._loss = copy.deepcopy(loss).to(self._place) if isinstance(loss, nn.Module) else loss
        self._trained = [(name, param) for name, param in self.module.named_parameters() if param.requires_grad]
        self._params = [param for _, param in self._trained]
        shapes = tuple(tuple(param.shape) for param in self._params)
        self._layout = Layout(tuple(name for name, _ in self._trained), shapes)
        self._optimizer = recipe.optimizer(self._trained)
        self._rates = [group.get("lr") for group in self._optimizer.param_groups]
        self._scheduler = recipe.scheduler(self._optimizer) if recipe.scheduler else None
        if memory is not None:
            restore_optimizer(self._optimizer, memory["optimizer"], self._place)
            restore_scheduler(self._scheduler, memory["scheduler"], self._place)
        self._own = Part(self.module, [name for name, _ in self._trained], self._place, recipe.is_sync)
        self._buffers, self._random = self._own.buffers, self._own.random
        strangers = [param for param in recipe.module.parameters() if param.requires_grad]
        self._gradients = Gradients(self._trained, self._layout, strangers, self._place)
        self._beside: dict[int, Part] = {}  # by the number of the shard, in a recording
        self._is_recorded = False
        self._call = BACKEND.capture(call) if recipe.compiles else call
        self._has_computed = False
        self._modes = modes_of(recipe.module)
        self._step = 0  # that the buffers are prepared for
        self._first_step: int | None = None  # of this replica: a run may go on with a new one
        self._is_under_way = False  # a step that has begun and is not done: shards have left their buffers behind
        self._sync = None
        if recipe.is_sync:
            stream = torch.cuda.current_stream() if self._place.type == "cuda" else None
            self._sync = SyncNorms(self, self._params, start_thread=lambda: start_thread(self._place, stream))

    @property
    def size(self) -> int:
        return self._layout.size

    def leaves(self, step: int, shards: Iterator[Shard], meet: Meet) -> Iterator[Leaf]:
        self._start(step)
        if self._sync is not None:
            with plain_errors(self._place.type):
                own = self._sync.leaves(step, list(shards), meet)
            yield from own
            return
        for shard in shards:
            part = self._part_for(shard)
            with plain_errors(self._place.type):
                part.buffers.start_shard()
                with span("forward"):
                    compute = self._recorded if self._is_recorded else self._computed
                    loss = compute(part, step, shard)
                with span("backward"):
                    if self._is_recorded:
                        gradients, vector = self._gradients.recorded(loss, part.edges)
                    else:
                        gradients, vector = self._gradients.of(loss, shard.ready)
            yield self._leaf(loss, gradients, vector, part)

    def _computed(self, part: Part, step: int, shard: Shard) -> Tensor:
        if self._recipe.compiles:  # such a model was found not to draw
            return self._loss_of(part.module, shard)
        is_watched = part.random.has_drawn or step < (self._first_step or step) + LOOK_STEPS
        loss = None if is_watched else self._unwatched(shard)
        return self.forward(part.module, part.random, step, shard) if loss is None else loss

    def _recorded(self, part: Part, step: int, shard: Shard) -> Tensor:
        """The summed loss of a shard, in a recording: computed once to see what it needs, then recorded."""
        if self._recipe.compiles:
            return self._loss_of(part.module, shard)
        if not is_recording(self._place):
            loss = self.forward(part.module, part.random, step, shard)
            if part.random.has_drawn_on_host:
                raise NotRecorded("the model draws random numbers on the host")
            return loss
        if not part.random.has_drawn:
            return self._loss_of(part.module, shard)
        with part.random:  # whose stream was begun before
            return self._loss_of(part.module, shard)

    def _part_for(self, shard: Shard) -> Part:
        if not self._is_recorded:
            return self._own
        if shard.number not in self._beside:
            self._beside[shard.number] = self._own.twin()
        return self._beside[shard.number]

    def _start(self, step: int) -> None:
        """Everything as it has to be before the first shard of a step."""
        self.module.train()
        set_modes(self.module, self._modes)
        trained = [id(param) for param in self.module.parameters() if param.requires_grad]
        if trained != [id(param) for param in self._params]:
            raise RunError("The module changed which parameters are trained (requires_grad) in mid-run. Do it before.")
        if self._step != step:
            self._step = step
            self._first_step = self._first_step or step
            self._is_under_way = True
            self._buffers.restore()
            self._buffers.start_step()

    def _unwatched(self, shard: Shard) -> Tensor | None:
        """The summed loss of a shard, if nobody has drawn random numbers meanwhile."""
        before = drawn_so_far(self._place)
        loss = self._loss_of(self.module, shard)
        if drawn_so_far(self._place) == before:
            return loss
        self._random.has_drawn = True  # or another rank has: then it is watched for nothing, and gives the same bits
        self._buffers.start_shard()
        return None

    def forward(self, module: nn.Module, random: KeyedRandom, step: int, shard: Shard) -> Tensor:
        """The summed loss of a shard, from `module`, which is the replica's own or a twin of it."""
        with random.start(shard_seed(self._recipe.seed, step, shard.number)):
            return self._loss_of(module, shard)

    def _loss_of(self, module: nn.Module, shard: Shard) -> Tensor:
        versions = [param._version for param in self._params]
        # not for the first: PyTorch loads parts of itself when they are needed, and draws a name for a file in between
        watch = no_draws_outside_of_pytorch() if self._has_computed else nullcontext()
        with watch, self._autocast():
            loss = summed(self._loss, "loss", self._call(module, self._laid_out(shard.X)), shard.y, shard.num_samples)
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

    def _leaf(self, loss: Tensor, gradients: list[Tensor | None], vector: Tensor, part: Part) -> Leaf:
        row = part.buffers.row()
        if self._is_recorded and any(row):  # "" are statistics
            raise NotRecorded(f"the model changes its buffer {next(filter(None, row))}")
        if self._step == self._first_step:
            part.attributes.check()
        used = frozenset(number for number, gradient in enumerate(gradients) if gradient is not None)
        return Leaf(vector, loss.detach(), row, used)

    def update(self, step: int, total: Tensor, batch: Gathered) -> None:
        self._start(step)  # a rank without shards has not done it
        gradient = total / batch.num_samples  # the only division, by the samples of the whole batch
        if self._recipe.clip_norm is not None:
            norm = torch.linalg.vector_norm(gradient)
            gradient = gradient * (self._recipe.clip_norm / (norm + 1e-6)).clamp(max=1.0)
        pieces = gradient.split(self._layout.pieces)[::2]
        for number, (param, piece) in enumerate(zip(self._params, pieces, strict=True)):
            # PyTorch skips what has none
            param.grad = shaped_like(param, piece) if number in batch.used else None
        if self._scheduler is None:
            for group, rate in zip(self._optimizer.param_groups, self._rates, strict=True):
                if rate is not None:
                    group["lr"] = rate * self._recipe.rates.factor(step)
        with self._random.start(seed_of(self._recipe.seed, step, 0, OPTIMIZER)):
            self._optimizer.step()
        self._gradients.clear()
        if self._scheduler is not None:
            self._scheduler.step()
        self._buffers.merge(batch.rows, batch.shard_sizes)
        self._is_under_way = False

    def repeats_update(self, step: int) -> bool:
        return False  # an optimizer of PyTorch's keeps count on the host

    def rehearse_update(self, step: int, total: Tensor, batch: Gathered) -> None:
        """Its updates are never recorded."""

    def measure(self, X: Any, y: Any) -> dict[str, float]:
        self.module.eval()
        num_samples = len(leaves_of(y)[0])
        metrics = {"loss": self._loss, **self._recipe.metrics}
        with (
            torch.no_grad(),
            plain_errors(self._place.type),
            self._random.start(shard_seed(self._recipe.seed, 0, 0)),
            self._autocast(),
        ):
            output = self._call(self.module, self._laid_out(X))
            sums = {
                name: float(summed(metric, f"metric {name}" if name != "loss" else name, output, y, num_samples))
                for name, metric in metrics.items()
            }
        self._buffers.restore()  # what these samples made of them belongs to nobody
        return sums

    def arrays(self) -> dict[str, Array]:
        self._settle()
        return arrays_of(self.module)

    def fingerprints(self) -> list[str]:
        if self._place.type == "cpu":
            return [sha256_of([array]) for array in self.arrays().values()]
        named = {**dict(self.module.named_parameters()), **dict(self.module.named_buffers())}
        sums = torch.stack([checksum(named[name]) for name in names_of(self.module)])  # without moving the numbers
        return [str(entry) for entry in sums.tolist()]

    def recordable(self) -> str:
        return "statistics of the whole batch are exchanged in between (--batch-norm sync)" if self._sync else ""

    def record(self, step: int) -> None:
        if is_recording(self._place):  # nothing is computed now
            for part in (self._own, *self._beside.values()):
                part.buffers.stop_looking()
        else:
            self._settle()
        self._is_recorded, self._step = True, 0
        self._start(step)

    def replay(self, step: int) -> None:
        for number, part in self._beside.items():
            part.random.start(shard_seed(self._recipe.seed, step, number))
        self._is_under_way, self._step = True, step

    def forget(self) -> None:
        self._settle()
        self._beside.clear()
        self._is_recorded, self._is_under_way, self._step = False, False, 0

    def generators(self) -> list[Any]:
        return [part.random.generator for part in self._beside.values() if part.random.has_drawn]

    def memory(self) -> Any:
        self._settle()
        kept = set(names_of(self.module))
        others = {name: to_numpy(buffer) for name, buffer in self.module.named_buffers() if name not in kept}
        return {
            "buffers": others,
            "optimizer": memory_of_optimizer(self._optimizer),
            "scheduler": memory_of_scheduler(self._scheduler),
        }

    def _settle(self) -> None:
        """Undoes what shards did to the buffers in a step that came to nothing."""
        if self._is_under_way:
            self._buffers.rewind()

    def _laid_out(self, X: Any) -> Any:
        """Samples as the module's kernels like to read them."""
        return map_leaves(X, channels_last) if self._recipe.channels_last else X

    def _autocast(self) -> torch.autocast:
        # no cache: it belongs to the whole process, so what is in it would depend on the other ranks
        return torch.autocast(
            self._place.type, torch.bfloat16, enabled=self._recipe.precision == "bf16", cache_enabled=False
        )
