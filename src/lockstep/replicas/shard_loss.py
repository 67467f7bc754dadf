"""The loss of a shard: the model's output with the shard's random numbers, in the run's precision, then the loss."""

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.backends.torch import BACKEND
from lockstep.core.errors import RunError
from lockstep.core.random import shard_seed
from lockstep.data.dataset import leaves_of, map_leaves
from lockstep.models.losses import LOSSES, LossSum, PerSample, has_own_kernel, summed
from lockstep.models.model_loss import ModelLoss
from lockstep.models.whole_set_metrics import arrays_for
from lockstep.parallel.tensor import unsliced_name
from lockstep.replicas import module_state
from lockstep.replicas.compiled_blocks import compile_blocks, with_compiled_blocks
from lockstep.replicas.keyed_random import KeyedRandom, no_draws_outside_of_pytorch, rng_state
from lockstep.replicas.loss_check import check_separable
from lockstep.replicas.memory_format import channels_last
from lockstep.replicas.replica import Evaluated, Shard
from lockstep.replicas.shard_module import ShardModule
from lockstep.replicas.train_spec import TrainSpec

NUM_WATCHED_STEPS = 2  # steps in which every operation is intercepted, to see whether the model draws random numbers


class ShardLoss:
    """Computes the output and the loss of shards, with the module of a replica or with clones of it."""

    def __init__(self, spec: TrainSpec, device: torch.device, module: nn.Module) -> None:
        self._spec, self._device = spec, device
        loss = spec.loss
        self.function: PerSample = copy.deepcopy(loss).to(device) if isinstance(loss, nn.Module) else loss
        self._params = list(module.named_parameters())  # frozen ones, too: replicas would differ in them
        self._has_computed = False
        # a loss of the user's own is tried once; what it does with parts of an output is not captured
        self._checks_loss = not spec.loss_over_batch and spec.loss not in LOSSES.values() and device.type == "cpu"
        self.step, self._first_step = 0, 0  # of this replica: a run may continue with a new one
        self.uses_compiled = spec.compiles
        if spec.compiles:
            repeats = compile_blocks(module)
            self._compiled = (with_compiled_blocks if repeats else BACKEND.compile)(module_state.call)
            self._compiled_loss = BACKEND.compile(self.function)

    def begin_step(self, step: int) -> None:
        """The shards of this step come now."""
        self.step, self._first_step = step, self._first_step or step

    @property
    def is_first_step(self) -> bool:
        return self.step == self._first_step

    @property
    def _is_watched(self) -> bool:
        return self.step < self._first_step + NUM_WATCHED_STEPS

    def of(self, own: ShardModule, shard: Shard) -> LossSum:
        """The summed loss of a shard, from the replica's own module."""
        return self._with_random_numbers(own, shard, self.loss_of)

    def output(self, own: ShardModule, shard: Shard) -> Any:
        """The module's output for a shard."""
        return self._with_random_numbers(own, shard, self._output_of)

    def _with_random_numbers(self, own: ShardModule, shard: Shard, compute: Callable[[nn.Module, Shard], Any]) -> Any:
        """What is computed with the shard's random numbers; the module that does not draw is not watched for long."""
        module, random = own.module, own.random
        if self._spec.compiles:
            return self._compiled_with_random_numbers(own, shard, compute)
        if not random.has_drawn and not self._is_watched:
            before = rng_state(self._device)
            found = compute(module, shard)
            if rng_state(self._device) == before:
                return found
            random.has_drawn = True  # or another rank has: then watching is only slower, and gives the same bits
            own.buffers.start_shard()
        return self._keyed(module, random, shard, compute)

    def _compiled_with_random_numbers(
        self, own: ShardModule, shard: Shard, compute: Callable[[nn.Module, Shard], Any]
    ) -> Any:
        """The same from compiled code: if it draws, then from the process's generators, so one rank at a time."""
        drawing = self._spec.drawing
        if self._is_watched or drawing.has_drawn:
            found = self._keyed(own.module, own.random, shard, compute)
            drawing.has_drawn |= own.random.has_drawn
            return found
        before = rng_state(self._device)
        found = compute(own.module, shard)
        if rng_state(self._device) != before:
            raise RunError(
                f"The compiled model draws random numbers, and did not in its first {NUM_WATCHED_STEPS} steps: other "
                f"ranks may have drawn at the same time. Draw from the first step on, or leave --compile out."
            )
        return found

    def keyed(self, module: nn.Module, random: KeyedRandom, shard: Shard) -> LossSum:
        """The same from `module`, which is the replica's own or a clone of it, with the random numbers of the shard."""
        return self._keyed(module, random, shard, self.loss_of)

    def _keyed(
        self, module: nn.Module, random: KeyedRandom, shard: Shard, compute: Callable[[nn.Module, Shard], Any]
    ) -> Any:
        seed = shard_seed(self._spec.seed, self.step, shard.number)
        with random.as_default(seed) if self._spec.compiles else random.start(seed, shard.random):
            return compute(module, shard)

    def loss_of(self, module: nn.Module, shard: Shard) -> LossSum:
        """The summed loss of a shard, with random numbers as they come."""
        self.prepare(module, shard.X)
        output = self._output_of(module, shard)
        if self._checks_loss:
            self._checks_loss = False
            with self.autocast():
                check_separable(self.function, output, shard.y, shard.num_samples)
        is_compiled = self._is_compiled(shard) and not has_own_kernel(self.function, output, shard.y)
        loss_of = self._compiled_loss if is_compiled else self.function
        with self.watched(), self.autocast():
            found = summed(loss_of, "loss", output, shard.y, shard.num_samples)
        self._has_computed = True
        check_depends_on_parameters(found.total)
        return found

    def prepare(self, module: nn.Module, X: Any) -> None:
        """What a loss has to find out before its first use."""
        if isinstance(self.function, ModelLoss):
            self.function.find_weight(module, X)

    def _output_of(self, module: nn.Module, shard: Shard) -> Any:
        with self.parameters_kept(), self.watched(), self.autocast():
            call = self._compiled if self._is_compiled(shard) else module_state.call
            try:
                output = call(module, shard.X if shard.is_cut else self.in_memory_format(shard.X))
            except ValueError as problem:
                if shard.num_samples > 1 or "more than 1 value per channel" not in str(problem):
                    raise
                raise RunError(
                    f"A shard of this batch has one sample only, too few for batch norm ({problem}). Use larger "
                    f"batches, fewer shards, or batch_norm='sync': the statistics of the whole batch."
                ) from problem
        return output

    @contextmanager
    def parameters_kept(self) -> Iterator[None]:
        """Refuses a forward pass, in training or in evaluation, that writes to a parameter."""
        versions = [param._version for _, param in self._params]
        yield
        if versions != [param._version for _, param in self._params]:
            changed = next(n for (n, p), before in zip(self._params, versions, strict=True) if p._version != before)
            raise RunError(
                f"The model changes its parameter {unsliced_name(changed)} in the forward pass, as an average of "
                f"weights or Embedding(max_norm=...) does: once for each shard of a device, so devices would end with "
                f"different parameters. Leave that out; for an average of the weights, use --ema (ema=0.999)."
            )

    def evaluated(self, output: Any, X: Any, y: Any) -> Evaluated:
        """The loss and metrics of some samples, from the model's output for them."""
        num_samples = next(len(leaf) for leaf in leaves_of((y, X)) if isinstance(leaf, Tensor) and leaf.ndim)
        metrics = {n: (f"metric {n}", m) for n, m in self._spec.metrics.items()}
        if not self._spec.loss_over_batch:  # which has no value for a part of the samples
            metrics = {"loss": ("loss", self.function), **metrics}
        sums = {n: summed(metric, what, output, y, num_samples) for n, (what, metric) in metrics.items()}
        outputs = arrays_for(output, y) if self._spec.keeps_outputs else None
        found = {n: [float(s.total), num_samples if s.weight is None else float(s.weight)] for n, s in sums.items()}
        return Evaluated(found, outputs)

    def watched(self) -> AbstractContextManager[None]:
        """Refuses draws from generators that all ranks share."""
        # not for the first shard: PyTorch imports parts of itself lazily, and draws a temporary file's name meanwhile
        return no_draws_outside_of_pytorch() if self._has_computed else nullcontext()

    def _is_compiled(self, shard: Shard) -> bool:
        return self.uses_compiled and shard.num_samples in self._spec.compiled_sizes

    def in_memory_format(self, X: Any) -> Any:
        """Images in the memory format of the run."""
        if not self._spec.channels_last:
            return X
        return map_leaves(X, lambda part: channels_last(part) if isinstance(part, Tensor) else part)

    def autocast(self) -> torch.autocast:
        """The run's precision."""
        return self._spec.autocast()


def check_depends_on_parameters(loss: Tensor) -> None:
    """Refuses a loss without a gradient."""
    if not loss.requires_grad:
        raise RunError("The loss does not depend on any parameter that is trained. Are all frozen or detached?")
