"""Batch norm over the whole batch (`--batch-norm sync`), with shards still computed one by one.

All shards of a rank go through the model together, layer by layer: each has a thread, and only one of them works at a
time. At a norm layer they wait for each other; the ranks exchange sums, merged in shard order, and go on. Backward goes
the same way: the graph is cut at every norm layer, and its parts are gone through from the last to the first, so that
nobody has to wait inside PyTorch's own backward threads.
"""

import copy
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from lockstep.core.errors import RunError
from lockstep.replicas.keyed_random import KeyedRandom, NoDraws
from lockstep.replicas.replica import AllGatherTensors, Leaf, Shard

BatchNorm = nn.modules.batchnorm._BatchNorm


@dataclass
class Cut:
    """Where one shard's graph is cut: `x` goes into a norm layer, `normed` comes out of it with a graph of its own."""

    name: str
    norm: Any
    x: Tensor
    edge: Any  # where x was in the graph when it came: it may be written to later
    normed: Tensor = field(init=False)
    scale: Tensor = field(init=False)  # 1 / standard deviation, of each channel
    count: float = field(init=False)  # numbers that each channel's statistics are made of


class ShardForward:
    """A shard's forward pass, on a thread of its own that works only while `resume` waits for it."""

    def __init__(self, forward: Callable[[], Tensor], start_thread: Callable[[], None]) -> None:
        self.cuts: list[Cut] = []
        self.at_norm = False
        self.loss: Tensor | None = None
        self._error: BaseException | None = None
        self._turn, self._parked = threading.Semaphore(0), threading.Semaphore(0)
        self._is_over = False
        self._thread = threading.Thread(target=self._run, args=(forward, start_thread), daemon=True)
        self._thread.start()

    def _run(self, forward: Callable[[], Tensor], start_thread: Callable[[], None]) -> None:
        self._turn.acquire()
        try:
            if not self._is_over:
                start_thread()
                LOCAL.shard = self
                self.loss = forward()
        except BaseException as problem:
            self._error = problem
        self._parked.release()

    def resume(self) -> None:
        """Lets the shard work until it is at a norm layer, or through the model."""
        self.at_norm = False
        self._turn.release()
        self._parked.acquire()
        if self._error is not None:
            raise self._error

    def wait_at(self, cut: Cut) -> Tensor:
        """Called on the shard's thread: parks it at a norm layer, and gives what came out of it."""
        if not self._is_over:
            self.cuts.append(cut)
            self.at_norm = True
            self._parked.release()
            self._turn.acquire()
        if self._is_over:
            raise SystemExit  # another shard failed
        return cut.normed

    def end(self) -> None:
        """Ends the thread, wherever it is."""
        self._is_over = True
        self._turn.release()
        self._thread.join()


LOCAL = threading.local()  # .shard: the `ShardForward` that the calling thread works for


class ModuleForward(Protocol):
    """What is needed of a replica."""

    module: nn.Module

    def forward(self, module: nn.Module, random: KeyedRandom, shard: Shard) -> Tensor: ...
    def leaf(self, loss: Tensor, gradients: list[Tensor | None]) -> Leaf: ...


class SyncBatchNorm:
    """Computes the leaves of a replica whose norm layers use the whole batch."""

    def __init__(self, replica: ModuleForward, params: list[nn.Parameter], start_thread: Callable[[], None]) -> None:
        self._replica, self._device, self._start_thread = replica, params[0].device, start_thread
        self._params = [get_gradient_edge(param) for param in params]
        self._twins: list[nn.Module] = []

    def forward_backward(self, shards: list[Shard], all_gather: AllGatherTensors) -> list[Leaf]:
        """The leaves of the rank's own shards, in their order."""
        while len(self._twins) < len(shards):
            self._twins.append(_twin_of(self._replica.module))
        forwards: list[ShardForward] = []
        try:
            for twin, shard in zip(self._twins, shards, strict=False):
                _set_modes(twin, self._replica.module)
                compute = partial(self._replica.forward, twin, KeyedRandom(self._device), shard)
                forwards.append(ShardForward(compute, self._start_thread))
            self._forward(forwards, all_gather)
        finally:
            for forward in forwards:
                forward.end()
        for twin in self._twins:
            _check_buffers(twin, self._replica.module)
        gradients = self._backward(forwards, all_gather)
        return [
            self._replica.leaf(forward.loss, own)
            for forward, own in zip(forwards, gradients, strict=True)
            if forward.loss is not None
        ]

    def _forward(self, forwards: list[ShardForward], all_gather: AllGatherTensors) -> None:
        while True:
            for forward in forwards:
                forward.resume()
            layers = {forward.cuts[-1].name if forward.at_norm else "the end" for forward in forwards}
            if len(layers) > 1:
                raise RunError(
                    f"Shards of one batch take different paths through the model: one is at "
                    f"{', another at '.join(sorted(layers))}. Batch norm over the whole batch needs all of them at the "
                    f"same layer: use --batch-norm shard."
                )
            (layer,) = layers
            if not forwards[0].at_norm:
                all_gather(layer, [])
                return
            cuts = [forward.cuts[-1] for forward in forwards]
            with torch.no_grad():
                _normalize(cuts, all_gather(layer, [_sums(cut.x) for cut in cuts]))

    def _backward(self, forwards: list[ShardForward], all_gather: AllGatherTensors) -> list[list[Tensor | None]]:
        backwards = [ShardBackward(forward.cuts, self._params) for forward in forwards]
        for forward, backward in zip(forwards, backwards, strict=True):
            assert forward.loss is not None
            backward.through(get_gradient_edge(forward.loss), torch.ones_like(forward.loss), len(forward.cuts))
        for number in reversed(range(len(forwards[0].cuts))):
            cuts = [forward.cuts[number] for forward in forwards]
            name = f"the backward pass of {cuts[0].name}"
            arrived = [backward.arrived(number) for backward in backwards]
            sums = [
                torch.stack([_over(g), _over(g * cut.normed)]).double() for g, cut in zip(arrived, cuts, strict=True)
            ]
            total = _in_order(all_gather(name, [s.detach() for s in sums]))
            for backward, cut, g in zip(backwards, cuts, arrived, strict=True):
                with torch.no_grad():
                    mean, slope = (_like(row.float(), g) / cut.count for row in total)
                    dx = _like(cut.scale, g) * (g.float() - mean - cut.normed.float() * slope)
                if cut.edge is not None:
                    backward.through(cut.edge, dx.to(cut.x.dtype), number)
        return [backward.of_params for backward in backwards]


class ShardBackward:
    """The backward pass of one shard, part by part."""

    def __init__(self, cuts: list[Cut], params: list[Any]) -> None:
        self._cuts, self._num_params = cuts, len(params)
        # by their edges: a call with tensors would be one of those that `NoDraws` watches, with all that it calls
        self._inputs = [*params, *(get_gradient_edge(cut.normed) for cut in cuts)]
        self.of_params: list[Tensor | None] = [None] * len(params)
        self._of_cuts: list[Tensor | None] = [None] * len(cuts)

    def through(self, start: Any, gradient: Tensor, num_cuts: int) -> None:
        """Goes back from an edge of the graph to the parameters, and to the first cuts that come before it."""
        inputs = self._inputs[: self._num_params + num_cuts]
        with NoDraws():
            found = torch.autograd.grad(start, inputs, gradient, retain_graph=True, allow_unused=True)
        for held, new in (
            (self.of_params, found[: self._num_params]),
            (self._of_cuts, found[self._num_params :]),
        ):
            for number, entry in enumerate(new):
                if entry is not None:
                    held[number] = entry if held[number] is None else held[number] + entry

    def arrived(self, number: int) -> Tensor:
        """The gradient of what came out of a norm layer: complete, once all later layers were gone through."""
        gradient = self._of_cuts[number]
        return torch.zeros_like(self._cuts[number].normed) if gradient is None else gradient


def _twin_of(module: nn.Module) -> nn.Module:
    """A module of the same parameters and buffers with attributes of its own. Its norm layers wait for each other."""
    shared = {id(tensor): tensor for tensor in [*module.parameters(), *module.buffers()]}
    twin = copy.deepcopy(module, dict(shared))
    for name, norm in twin.named_modules():
        if isinstance(norm, BatchNorm):
            if type(norm).forward is not BatchNorm.forward:
                raise RunError(
                    f"{name} is a {type(norm).__name__}, a batch norm with a forward pass of its own, which cannot be "
                    f"made to use the whole batch: use --batch-norm shard."
                )
            norm.forward = partial(_forward, norm, name, norm.forward)
    return twin


def _set_modes(twin: nn.Module, module: nn.Module) -> None:
    for ours, theirs in zip(twin.modules(), module.modules(), strict=True):
        ours.training = theirs.training


def _check_buffers(twin: nn.Module, module: nn.Module) -> None:
    for (name, ours), (_, theirs) in zip(twin.named_buffers(), module.named_buffers(), strict=False):
        if ours is not theirs:
            raise RunError(f"The model changes its buffer {name}, which goes with --batch-norm shard only.")


def _forward(norm: Any, name: str, original: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """In place of a norm layer's own: waits for the other shards while training."""
    if not norm.training:
        return original(x)
    norm._check_input_dim(x)
    edge = get_gradient_edge(x) if x.requires_grad else None
    normed = LOCAL.shard.wait_at(Cut(name, norm, x, edge))
    if norm.weight is None:
        return normed.clone()  # which may be written to, as the end of a part of the graph may not
    return (normed * _like(norm.weight, normed) + _like(norm.bias, normed)).to(x.dtype)


def _sums(x: Tensor) -> Tensor:
    """Count, mean and sum of squared differences from it, for each channel of one shard."""
    x = x.detach().float()
    dims = [dim for dim in range(x.ndim) if dim != 1]
    mean = x.mean(dims)
    squares = (x - _like(mean, x)).square().sum(dims)
    count = torch.full_like(mean, x.numel() / x.shape[1])
    return torch.stack([count, mean, squares]).double()


def _normalize(cuts: list[Cut], sums: list[Tensor]) -> None:
    """What comes out of a norm layer for each of the rank's shards, from the sums of all shards in their order."""
    count, mean, squares = sums[0]
    for other_count, other_mean, other_squares in sums[1:]:
        both, apart = count + other_count, other_mean - mean
        mean = mean + apart * other_count / both
        squares = squares + other_squares + apart * apart * count * other_count / both
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


def _over(x: Tensor) -> Tensor:
    """The sum over everything but the channels."""
    return x.detach().float().sum([dim for dim in range(x.ndim) if dim != 1])


def _in_order(tensors: list[Tensor]) -> Tensor:
    total = tensors[0]
    for tensor in tensors[1:]:
        total = total + tensor
    return total


def _like(per_channel: Tensor, x: Tensor) -> Tensor:
    """A number for each channel, in a shape that goes with `x`."""
    return per_channel.view(1, -1, *[1] * (x.ndim - 2))
