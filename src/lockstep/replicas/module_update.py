"""The update of a module's parameters, or of those that a rank owns: optimizer, scheduler, clipping."""

from collections import deque
from collections.abc import Iterable
from contextlib import nullcontext
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.backends.torch.large_vectors import memory_for_result
from lockstep.core.errors import ConfigError, first_line
from lockstep.core.layout import Layout
from lockstep.core.random import OPTIMIZER, seed_of
from lockstep.optim.torch_on_gpu import GpuOptimizer
from lockstep.optim.torch_optimizers import is_pytorchs
from lockstep.partition.placement import Part, owned_ranges
from lockstep.replicas.gradients import Gradients
from lockstep.replicas.keyed_random import KeyedRandom
from lockstep.replicas.memory_format import flat_in_memory_order, shaped_like
from lockstep.replicas.optimizer_state import optimizer_state, restore_optimizer
from lockstep.replicas.replica import BatchSummary, ReplicaState
from lockstep.replicas.train_spec import TrainSpec

WHOLE_UPDATE = "every device with the whole model and its update (--split data --update replicated)"
KEPT_RATES = 64  # steps, more than are ever in flight


class ModuleUpdate:
    """Updates the parameters with the numbers `owned` of a replica's."""

    def __init__(
        self, spec: TrainSpec, trained: list[tuple[str, nn.Parameter]], layout: Layout, part: Part, random: KeyedRandom
    ) -> None:
        self._spec, self._random = spec, random
        sizes = [param.numel() for _, param in trained]
        self.owned_by = owned_ranges(sizes, part.num_owners)  # of each rank that shares the update
        self.owned = self.owned_by[part.owner]
        own = trained[self.owned.start : self.owned.stop]
        self._all, self._layout = [param for _, param in trained], layout
        self._params = [param for _, param in own]
        self._names_by_id = {id(param): name for name, param in own}
        # a stage may have no parameters, and a rank may own none
        self.optimizer = _optimizer_of(spec, own) if own else None
        groups = self.optimizer.param_groups if self.optimizer else []
        self._learning_rates = [group.get("lr") for group in groups]
        self.scheduler = spec.scheduler(self.optimizer) if spec.scheduler and self.optimizer else None
        self.on_gpu: GpuOptimizer | None = None
        # of the last steps: a scheduler of the user's has moved on when a step is looked at
        self._used_rates: deque[tuple[int, Any]] = deque(maxlen=KEPT_RATES)
        self.passes_without_update = 0  # among the steps so far: those of a loop of the user's own count passes

    def use_device(self, device: torch.device, state: ReplicaState | None) -> None:
        """Continues from a state, and computes updates as the device does best."""
        if self.optimizer is None:
            return
        if state is not None:
            restore_optimizer(self.optimizer, self.scheduler, state, self._names_by_id, device)
        if device.type == "cuda":
            self.on_gpu = GpuOptimizer(self.optimizer, device)

    def begin(self, step: int) -> None:
        """The host's part before an update."""
        if self.scheduler is None and self.optimizer is not None:
            for group, rate in zip(self.optimizer.param_groups, self._learning_rates, strict=True):
                if rate is not None:
                    group["lr"] = rate * self._spec.lr_schedule.factor(step - self.passes_without_update)
        if self.optimizer is not None:
            self._used_rates.append((step, self.optimizer.param_groups[0].get("lr")))
        if self.on_gpu is not None:
            self.on_gpu.set_rates()
        self._random.start(seed_of(self._spec.seed, step, 0, OPTIMIZER))

    def learning_rate(self, step: int) -> float | None:
        """That of the optimizer's first group in one of the last steps, where it has one."""
        rate = next((rate for number, rate in reversed(self._used_rates) if number == step), None)
        return None if rate is None else float(rate)

    def put(self, gradients: Gradients, total: Tensor | None, batch: BatchSummary) -> None:
        """Makes the mean over the batch the gradient of the parameters; the only division."""
        if total is not None:
            mean = torch.div(total, batch.divisor, out=memory_for_result(total))
            gradients.put(mean, batch.used, self.owned)

    def norms(self) -> dict[str, float]:
        """The norms of the gradients that are in the parameters, by name."""
        found = [(self._names_by_id[id(param)], param.grad) for param in self._params if param.grad is not None]
        values = torch._foreach_norm([gradient for _, gradient in found]) if found else []
        numbers = torch.stack(list(values)).tolist() if found else []
        return dict(zip([name for name, _ in found], numbers, strict=True))

    def step(self, norms: dict[str, float] | None) -> None:
        """By the gradients that are in the parameters; `norms` are those of all ranks, where this one has not all."""
        if self._spec.clip_norm is not None and norms is not None:
            self._clip(norms, self._spec.clip_norm)
        elif self._spec.clip_norm is not None:
            nn.utils.clip_grad_norm_(self._params, self._spec.clip_norm)
        with self._random, self.on_gpu.rates_on_device() if self.on_gpu else nullcontext():
            if self.optimizer is not None:
                self.optimizer.step()

    def _clip(self, norms: dict[str, float], clip_norm: float) -> None:
        """What `clip_grad_norm_` does, from the norms of all parameters in the order of the model."""
        device = self._params[0].device if self._params else torch.device("cpu")
        in_order = [norms[name] for name in self._spec.names if name in norms]
        total = torch.linalg.vector_norm(torch.tensor(in_order, dtype=torch.float32, device=device))
        factor = torch.clamp(clip_norm / (total + 1e-6), max=1.0)
        for param in self._params:
            if param.grad is not None:
                param.grad.mul_(factor)

    @property
    def owned_entries(self) -> list[range]:
        """The entries of the flat vector that each rank updates."""
        bounds = [0, *accumulate(self._layout.pieces)][::2]  # of the parameters
        return [range(bounds[own.start], bounds[own.stop]) if own else range(0) for own in self.owned_by]

    def values(self, entries: range, device: torch.device) -> Tensor:
        """The parameters within these entries, which one rank owns, as one vector."""
        vector = torch.zeros(len(entries), dtype=torch.float32, device=device)
        for param, view in self._views(vector, entries):
            view.copy_(flat_in_memory_order(param.detach(), param))
        return vector

    def set_values(self, entries: range, values: Tensor) -> None:
        """Replaces them."""
        with torch.no_grad():
            for param, view in self._views(values, entries):
                param.copy_(shaped_like(param, view))

    def _views(self, vector: Tensor, entries: range) -> list[tuple[Tensor, Tensor]]:
        numbers = self.owned_by[self.owned_entries.index(entries)]
        pieces = vector.split(self._layout.pieces[2 * numbers.start : 2 * numbers.stop])[::2]
        return list(zip(self._all[numbers.start : numbers.stop], pieces, strict=True))

    def end(self) -> None:
        """The host's part after it."""
        if self.scheduler is not None:
            self.scheduler.step()

    def state(self) -> ReplicaState:
        """The optimizer's state of the parameters that are owned."""
        if self.optimizer is None:
            return ReplicaState({}, {})
        return optimizer_state(self.optimizer, self.scheduler, self._names_by_id)

    def num_bytes(self) -> int:
        """The memory of the optimizer's state."""
        states = self.optimizer.state.values() if self.optimizer else []
        return bytes_of(value for state in states for value in state.values() if isinstance(value, Tensor))


def _optimizer_of(spec: TrainSpec, own: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    """The user's optimizer for some of the parameters. It is made with all, so that groups are those of the whole."""
    by_name = dict(own)
    if not spec.names or len(own) == len(spec.names):
        return spec.optimizer(own)
    optimizer = spec.optimizer([(name, by_name.get(name, spec.without_values(name))) for name in spec.names])
    ours = {id(param) for _, param in own}
    for param in [param for param in optimizer.state if id(param) not in ours]:  # some have a state from the start
        del optimizer.state[param]
    for group in optimizer.param_groups:
        group["params"] = [param for param in group["params"] if id(param) in ours]
    return optimizer


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """The memory of some tensors."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def check_can_be_shared(spec: TrainSpec) -> None:
    """Refuses an optimizer whose parameters cannot be updated on different ranks."""
    named = [(name, spec.without_values(name)) for name in spec.names]
    try:
        optimizer = spec.optimizer(named)
    except Exception as problem:
        reason = f"The function for the optimizer fails for parameters without values: {first_line(problem)}"
        reason += ", and a device has no values of those that other devices update"
        raise ConfigError(f"{reason}. Let it look at names and shapes only, or {WHOLE_UPDATE}.") from problem
    kind, reason = type(optimizer), ""
    if not is_pytorchs(kind):
        reason = f"{kind.__name__} is an optimizer of your own"
    elif "step" in vars(optimizer) or optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        reason = f"The optimizer {kind.__name__} has hooks, or a step, of your own"
    if reason:
        raise ConfigError(
            f"{reason}, which may look at several parameters at once, so its parameters cannot be on several devices. "
            f"Use one of torch.optim without them, or {WHOLE_UPDATE}."
        )
