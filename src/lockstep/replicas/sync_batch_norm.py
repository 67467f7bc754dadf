"""Batch norm over the whole batch (`--batch-norm sync`), with shards still computed one by one.

All shards of a rank go through the model together, layer by layer: each has a thread, and only one of them runs at a
time. At a norm layer they wait for each other; the ranks all-gather the shards' sums, add them in shard order, and
continue. The backward pass is the same: the graph is cut at every norm layer, and its parts are run from the last to
the first, so that nothing waits inside PyTorch's own backward threads.
"""

import copy
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from lockstep.core.errors import RunError
from lockstep.core.this_thread import THIS_THREAD
from lockstep.models.losses import LossSum
from lockstep.replicas.keyed_random import KeyedRandom, NoDraws
from lockstep.replicas.replica import AllGatherTensors, Shard
from lockstep.replicas.running_stats import BATCH_NORM

Forward = Callable[[nn.Module, KeyedRandom, Shard], LossSum]
LOCAL = threading.local()  # .shard: the `ShardForward` of the calling thread


@dataclass
class NormCall:
    """Where one shard's graph is cut: `x` is a norm layer's input, `normed` its output, which starts a new graph."""

    name: str
    norm: Any
    x: Tensor
    edge: Any  # of x when the layer was called: x may be written to later
    normed: Tensor = field(init=False)
    scale: Tensor = field(init=False)  # 1 / standard deviation, of each channel
    count: float = field(init=False)  # values that each channel's statistics are made of


class ShardForward:
    """A shard's forward pass, on a thread of its own that runs only while `resume` waits for it."""

    def __init__(self, forward: Callable[[], LossSum], start_thread: Callable[[], None]) -> None:
        self.cuts: list[NormCall] = []
        self.loss: LossSum | None = None  # until it is through the model
        self._error: BaseException | None = None
        self._resumed, self._paused = threading.Semaphore(0), threading.Semaphore(0)
        self._is_cancelled, self._rank = False, THIS_THREAD.rank
        self._thread = threading.Thread(target=self._run, args=(forward, start_thread), daemon=True)
        self._thread.start()

    def _run(self, forward: Callable[[], LossSum], start_thread: Callable[[], None]) -> None:
        self._resumed.acquire()
        try:
            if not self._is_cancelled:
                start_thread()
                LOCAL.shard, THIS_THREAD.rank = self, self._rank
                self.loss = forward()
        except BaseException as problem:
            self._error = problem
        self._paused.release()

    def resume(self) -> None:
        """Runs the shard until it is at a norm layer, or through the model."""
        self._resumed.release()
        self._paused.acquire()
        if self._error is not None:
            raise self._error

    def pause_at(self, cut: NormCall) -> Tensor:
        """Called on the shard's thread: pauses it at a norm layer, and returns the layer's output."""
        if not self._is_cancelled:
            self.cuts.append(cut)
            self._paused.release()
            self._resumed.acquire()
        if self._is_cancelled:
            raise SystemExit  # another shard failed
        return cut.normed

    def end(self) -> None:
        """Ends the thread, wherever it is."""
        self._is_cancelled = True
        self._resumed.release()
        self._thread.join()


class SyncBatchNorm:
    """Forward and backward pass of a module whose norm layers use the whole batch; `forward` runs a clone of it."""

    def __init__(self, module: nn.Module, forward: Forward, start_thread: Callable[[], None]) -> None:
        self._module, self._forward, self._start_thread = module, forward, start_thread
        self._device = next(module.parameters()).device
        self._clones: list[nn.Module] = []

    def forward_backward(
        self, shards: list[Shard], all_gather: AllGatherTensors
    ) -> list[tuple[LossSum, list[Tensor | None]]]:
        """The summed loss, and its gradient for each trained parameter, of each of the rank's shards."""
        while len(self._clones) < len(shards):
            self._clones.append(_clone_of(self._module))
        clones = self._clones[: len(shards)]
        forwards: list[ShardForward] = []
        try:
            for clone, shard in zip(clones, shards, strict=True):
                _take_gradients(clone)  # of a step that failed
                for ours, theirs in zip(clone.modules(), self._module.modules(), strict=True):
                    ours.training = theirs.training
                compute = partial(self._forward, clone, KeyedRandom(self._device), shard)
                forwards.append(ShardForward(compute, self._start_thread))
            losses = _run_forward(forwards, all_gather)
        finally:
            for forward in forwards:
                forward.end()
        for clone in clones:
            for (name, ours), (_, theirs) in zip(clone.named_buffers(), self._module.named_buffers(), strict=False):
                if ours is not theirs:
                    raise RunError(f"The model changes its buffer {name}, which needs --batch-norm shard.")
        _run_backward([forward.cuts for forward in forwards], losses, all_gather)
        return [(loss, _take_gradients(clone)) for loss, clone in zip(losses, clones, strict=True)]


def _run_forward(forwards: list[ShardForward], all_gather: AllGatherTensors) -> list[LossSum]:
    """The losses of all shards."""
    while True:
        for forward in forwards:
            forward.resume()
        losses = [forward.loss for forward in forwards if forward.loss is not None]
        layers = sorted({forward.cuts[-1].name if forward.loss is None else "the end" for forward in forwards})
        if len(layers) > 1:
            raise RunError(
                f"Shards of one batch take different paths through the model: one is at {', another at '.join(layers)}"
                f". Batch norm over the whole batch needs all at the same layer: use --batch-norm shard."
            )
        if losses:
            all_gather("the end", [])
            return losses
        cuts = [forward.cuts[-1] for forward in forwards]
        with torch.no_grad():
            _normalize(cuts, all_gather(layers[0], [_statistics(cut.x) for cut in cuts]))


def _run_backward(cuts: list[list[NormCall]], losses: list[LossSum], all_gather: AllGatherTensors) -> None:
    """Accumulates the gradients in the parameters of each shard's clone, from the losses and from each norm layer."""
    _accumulate([(get_gradient_edge(loss.total), torch.ones_like(loss.total)) for loss in losses])
    for layer in reversed(list(zip(*cuts, strict=True))):
        # complete: all that depends on the layer's output is done
        arrived = [torch.zeros_like(cut.normed) if cut.normed.grad is None else cut.normed.grad for cut in layer]
        with torch.no_grad():
            sums = [
                torch.stack([_channel_sums(g), _channel_sums(g * cut.normed)]).double()
                for g, cut in zip(arrived, layer, strict=True)
            ]
            total = reduce(torch.add, all_gather(f"the backward pass of {layer[0].name}", sums))
            starts = []
            for g, cut in zip(arrived, layer, strict=True):
                mean, slope = (_like(row.float(), g) / cut.count for row in total)
                dx = _like(cut.scale, g) * (g.float() - mean - cut.normed.float() * slope)
                starts.append((cut.edge, dx.to(cut.x.dtype)))
        _accumulate(starts)


def _accumulate(starts: list[tuple[Any, Tensor]]) -> None:
    with NoDraws():  # which would intercept a call with a tensor instead of its edge, and all that it calls
        for edge, gradient in starts:
            if edge is not None:
                torch.autograd.backward(edge, gradient, retain_graph=True)


def _take_gradients(clone: nn.Module) -> list[Tensor | None]:
    params = [param for param in clone.parameters() if param.requires_grad]
    gradients = [param.grad for param in params]
    for param in params:
        param.grad = None
    return gradients


def _clone_of(module: nn.Module) -> nn.Module:
    """A module on the same parameters and buffers, with its own gradients, whose norm layers wait for each other."""
    shared = {id(p): nn.Parameter(p.detach(), requires_grad=p.requires_grad) for p in module.parameters()}
    clone = copy.deepcopy(module, {**shared, **{id(buffer): buffer for buffer in module.buffers()}})
    for name, norm in clone.named_modules():
        if isinstance(norm, BATCH_NORM):
            if type(norm).forward is not BATCH_NORM.forward:
                raise RunError(
                    f"{name} is a {type(norm).__name__}, a batch norm with a forward pass of its own, which cannot be "
                    f"made to use the whole batch: use --batch-norm shard."
                )
            norm.forward = partial(_norm_forward, norm, name, norm.forward)
    return clone


def _norm_forward(norm: Any, name: str, original: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Replaces a norm layer's forward: waits for the other shards in training mode."""
    if not norm.training:
        return original(x)
    norm._check_input_dim(x)
    edge = get_gradient_edge(x) if x.requires_grad else None
    if not hasattr(LOCAL, "shard"):
        raise RunError(
            f"{name} is computed again in the backward pass (activation checkpointing), where it cannot wait for the "
            f"whole batch. Leave batch norm out of checkpointed parts, or use --batch-norm shard."
        )
    normed = LOCAL.shard.pause_at(NormCall(name, norm, x, edge))
    if norm.weight is None:
        return normed.clone()  # which may be written to: `normed` itself is a leaf of the graph
    return (normed * _like(norm.weight, normed) + _like(norm.bias, normed)).to(x.dtype)


def _statistics(x: Tensor) -> Tensor:
    """Count, mean and sum of squared differences from it, for each channel of one shard."""
    x = x.detach().float()
    dims = [dim for dim in range(x.ndim) if dim != 1]
    mean = x.mean(dims)
    count = torch.full_like(mean, x.numel() / x.shape[1])
    return torch.stack([count, mean, _channel_sums((x - _like(mean, x)).square())]).double()


def _normalize(cuts: list[NormCall], statistics: list[Tensor]) -> None:
    """Sets a norm layer's output for each of the rank's shards, from the statistics of all shards in shard order."""
    count, mean, squares = statistics[0]
    for other_count, other_mean, other_squares in statistics[1:]:
        both, difference = count + other_count, other_mean - mean
        mean = mean + difference * other_count / both
        squares = squares + other_squares + difference * difference * count * other_count / both
        count = both
    norm, num_values = cuts[0].norm, float(count[0])
    if num_values < 2:
        raise RunError("A batch of one sample is too small for batch norm. Use another batch size (--batch-size).")
    scale = (squares / count + norm.eps).rsqrt().float()
    for cut in cuts:
        cut.scale, cut.count = scale, num_values
        normed = (cut.x.detach().float() - _like(mean.float(), cut.x)) * _like(scale, cut.x)
        cut.normed = normed.to(cut.x.dtype).requires_grad_()
    if norm.track_running_stats and norm.running_mean is not None:
        norm.num_batches_tracked.add_(1)
        momentum = 1.0 / float(norm.num_batches_tracked) if norm.momentum is None else norm.momentum
        for running, new in ((norm.running_mean, mean), (norm.running_var, squares / (count - 1))):
            running.copy_((1 - momentum) * running.double() + momentum * new)


def _channel_sums(x: Tensor) -> Tensor:
    """The sum over everything but the channels."""
    return x.detach().float().sum([dim for dim in range(x.ndim) if dim != 1])


def _like(per_channel: Tensor, x: Tensor) -> Tensor:
    """A value for each channel, in a shape that broadcasts with `x`."""
    return per_channel.view(1, -1, *[1] * (x.ndim - 2))
