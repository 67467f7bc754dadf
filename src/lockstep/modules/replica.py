"""A replica of a PyTorch module: a shard's gradient, an update, and the metrics of a few samples."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from lockstep.backends.torch import place_of, plain_errors, start_thread
from lockstep.data.dataset import leaves_of
from lockstep.device import Device
from lockstep.engines import Gathered, Leaf, Meet, Shard
from lockstep.errors import RunError
from lockstep.layout import Array, Layout
from lockstep.modules.buffers import Buffers
from lockstep.modules.losses import PerSample, summed
from lockstep.modules.optimizers import MakeOptimizer
from lockstep.modules.random import KeyedRandom, NoDraws, drawn_so_far, shard_seed, surely_draws
from lockstep.modules.sync import SyncNorms
from lockstep.rates import Rates

T = TypeVar("T")


@dataclass(frozen=True)
class Recipe:
    """How a module is trained: the same for all ranks."""

    copy: Callable[[torch.device], nn.Module]  # a new copy of the module, with the starting weights, on a device
    loss: Callable[[torch.device], PerSample]
    metrics: dict[str, PerSample]
    optimizer: MakeOptimizer
    scheduler: Callable[[torch.optim.Optimizer], Any] | None
    seed: int
    rates: Rates = field(default_factory=Rates)
    clip_norm: float | None = None
    is_sync: bool = False  # batch norm over the whole batch
    is_bf16: bool = False


class ModuleReplica:
    """One rank's copy of a module, with an optimizer of its own."""

    def __init__(self, recipe: Recipe, device: Device) -> None:
        self._recipe, self._place = recipe, place_of(device)
        self.module = recipe.copy(self._place)
        self._loss = recipe.loss(self._place)
        self._trained = [(name, param) for name, param in self.module.named_parameters() if param.requires_grad]
        self._params = [param for _, param in self._trained]
        self._ids = [id(param) for param in self._params]
        shapes = tuple(tuple(param.shape) for param in self._params)
        self._layout = Layout(tuple(name for name, _ in self._trained), shapes)
        self._gaps = [torch.zeros(size, device=self._place) for size in self._layout.pieces[1::2]] + [None]
        self._optimizer = recipe.optimizer(self._params)
        self._rates = [group["lr"] for group in self._optimizer.param_groups]
        self._scheduler = recipe.scheduler(self._optimizer) if recipe.scheduler else None
        self._buffers = Buffers(self.module, recipe.is_sync)
        self._random = KeyedRandom(self._place)
        self._draws = surely_draws(self.module)
        self._sync = None
        if recipe.is_sync:
            worker_stream = torch.cuda.current_stream() if self._place.type == "cuda" else None
            self._sync = SyncNorms(
                self.module,
                self._params,
                forward=self._forward_alone,
                leaf=self.leaf,
                start_thread=lambda: start_thread(self._place, worker_stream),
            )

    def leaves(self, step: int, shards: Iterator[Shard], meet: Meet) -> Iterator[Leaf]:
        self.module.train()
        if [id(param) for param in self.module.parameters() if param.requires_grad] != self._ids:
            raise RunError("The module changed which parameters are trained (requires_grad) in mid-run. Do it before.")
        self._buffers.start_step()
        if self._sync is not None:
            with plain_errors(self._place.type):
                own = list(self._sync.leaves(step, list(shards), meet))
            yield from own
            return
        for shard in shards:
            with plain_errors(self._place.type):
                self._buffers.start_shard()
                loss = self._keyed(shard_seed(self._recipe.seed, step, shard.number), partial(self._forward, shard))
                with NoDraws():
                    # from its edge: a call with a tensor would be one of those to watch, with all that it calls
                    torch.autograd.backward(get_gradient_edge(loss), torch.ones_like(loss))
            leaf = self.leaf(loss, [param.grad for param in self._params])
            self._optimizer.zero_grad(set_to_none=True)
            yield leaf

    def _keyed(self, seed: int, compute: Callable[[], T]) -> T:
        """What `compute` gives, its random numbers being those of `seed`."""
        if not self._draws:
            before = drawn_so_far(self._place)
            result = compute()
            if drawn_so_far(self._place) == before:
                return result
            self._draws = True  # here, or on another rank; then this is done again for nothing, and gives the same bits
            self._buffers.start_shard()
        with self._random.start(seed):
            return compute()

    def _forward(self, shard: Shard) -> Tensor:
        """The summed loss of a shard."""
        with self._autocast():
            loss = summed(self._loss, "loss", call(self.module, shard.X), shard.y, shard.num_samples)
        if not loss.requires_grad:
            raise RunError(
                "The loss does not depend on any parameter that is trained. Is everything frozen, or detached?"
            )
        return loss

    def _forward_alone(self, step: int, shard: Shard) -> Tensor:
        """The summed loss of a shard that has a thread of its own."""
        with (
            plain_errors(self._place.type),
            KeyedRandom(self._place).start(shard_seed(self._recipe.seed, step, shard.number)),
        ):
            return self._forward(shard)

    def leaf(self, loss: Tensor, gradients: list[Tensor | None]) -> Leaf:
        used = frozenset(number for number, gradient in enumerate(gradients) if gradient is not None)
        pieces: list[Tensor] = []
        for (name, param), gradient, gap in zip(self._trained, gradients, self._gaps, strict=True):
            if gradient is None:
                gradient = torch.zeros_like(param)
            elif gradient.is_sparse:
                raise RunError(
                    f"The gradient of {name} is sparse, which cannot be added up in the tree. Use sparse=False."
                )
            pieces.append(gradient.reshape(-1))
            if gap is not None:
                pieces.append(gap)
        return Leaf(torch.cat(pieces), loss.detach(), self._buffers.row(), used)

    def update(self, step: int, total: Tensor, batch: Gathered) -> None:
        gradient = total / batch.num_samples  # the only division, by the samples of the whole batch
        if self._recipe.clip_norm is not None:
            norm = torch.linalg.vector_norm(gradient)
            gradient = gradient * (self._recipe.clip_norm / (norm + 1e-6)).clamp(max=1.0)
        pieces = gradient.split(self._layout.pieces)[::2]
        for number, (param, piece) in enumerate(zip(self._params, pieces, strict=True)):
            param.grad = piece.view(param.shape) if number in batch.used else None  # PyTorch skips what has none
        if self._scheduler is None:
            for group, rate in zip(self._optimizer.param_groups, self._rates, strict=True):
                group["lr"] = rate * self._recipe.rates.factor(step)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        if self._scheduler is not None:
            self._scheduler.step()
        self._buffers.merge(batch.rows, batch.shard_sizes)

    def measure(self, X: Any, y: Any) -> dict[str, float]:
        self.module.eval()
        num_samples = len(leaves_of(y)[0])
        metrics = {"loss": self._loss, **self._recipe.metrics}

        def compute() -> dict[str, float]:
            with torch.no_grad(), self._autocast():
                output = call(self.module, X)
                return {name: float(summed(metric, name, output, y, num_samples)) for name, metric in metrics.items()}

        with plain_errors(self._place.type):
            return self._keyed(shard_seed(self._recipe.seed, 0, 0), compute)

    def arrays(self) -> dict[str, Array]:
        return arrays_of(self.module)

    def _autocast(self) -> torch.autocast:
        # no cache: it belongs to the whole process, so what is in it would depend on the other ranks
        return torch.autocast(self._place.type, torch.bfloat16, enabled=self._recipe.is_bf16, cache_enabled=False)


def call(module: nn.Module, X: Any) -> Any:
    """What the module gives for X: a tuple is its arguments, a dict its arguments by name."""
    if isinstance(X, dict):
        return module(**X)
    return module(*X) if isinstance(X, (tuple, list)) else module(X)


def arrays_of(module: nn.Module) -> dict[str, Array]:
    """Copies of all parameters and of the buffers that are kept, by name; what is tied has the first of its names."""
    kept = set(module.state_dict(keep_vars=True))
    named = [*module.named_parameters(), *((name, b) for name, b in module.named_buffers() if name in kept)]
    return {name: _to_numpy(tensor.detach().cpu()) for name, tensor in named}


def _to_numpy(tensor: Tensor) -> Array:
    array: Array = (
        (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy().copy()
    )  # numpy has no bfloat16
    return array
