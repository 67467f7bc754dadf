"""Random numbers inside a model, keyed by (seed, step, shard): dropout is the same on any device, in any order of work.

PyTorch has one stream of random numbers for the whole process, drawn from in arrival order. While a shard is computed,
every operation that would draw from it gets a generator of the shard's own instead. Watching every operation takes
about ten microseconds each, so it is done only for modules that have dropout, or were seen to draw.
"""

from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from lockstep.data.order import keyed_random

SEEDED = torch.Tag.nondeterministic_seeded  # the mark of an operation that draws


DROPOUT = 1  # the last part of a key says what the random numbers are for


def shard_seed(seed: int, step: int, shard: int) -> int:
    """The seed of a shard's random numbers. `torch.manual_seed` with it gives a plain loop the same dropout on a CPU.

    >>> shard_seed(seed=0, step=1, shard=0)
    922679666224363917
    """
    high, low = keyed_random(seed, step, shard, DROPOUT).randint(0, 2**31, 2).tolist()
    return int(high << 31 | low)


def surely_draws(module: nn.Module) -> bool:
    """Whether one of the module's layers is known to draw random numbers."""
    return any(
        (isinstance(layer, nn.modules.dropout._DropoutNd) and layer.p > 0)
        or (isinstance(layer, (nn.RNNBase, nn.MultiheadAttention)) and layer.dropout > 0)
        for layer in module.modules()
    )


def drawn_so_far(place: torch.device) -> bytes:
    """Something that is another after anybody in this process has drawn random numbers for this device, or the CPU."""
    state = torch.default_generator.get_state().numpy().tobytes()
    if place.type == "cuda":
        state += torch.cuda.default_generators[place.index].get_state().numpy().tobytes()
    return state


class KeyedRandom(TorchDispatchMode):
    """While it is entered, the calling thread's random numbers depend on the key and on nothing else."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._generator = torch.Generator(device)
        self._on_cpu = self._generator if device.type == "cpu" else torch.Generator()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # PyTorch would wrap the next function, at twice its cost

    def start(self, seed: int) -> "KeyedRandom":
        """Begins the stream of `seed`."""
        self._generator.manual_seed(seed)
        if self._on_cpu is not self._generator:
            self._on_cpu.manual_seed(seed)
        return self

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if SEEDED not in func.tags:
            return func(*args, **(kwargs or {}))
        return self._draw(func, args, dict(kwargs or {}))

    def _draw(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func is torch.ops.aten.native_dropout.default:  # the fused kernel takes no generator
            X, p, train = args
            if not train:
                return X, torch.ones_like(X, dtype=torch.bool)
            kept = torch.empty_like(X, dtype=torch.bool).bernoulli_(1 - p, generator=self._for(X))
            return X * kept * (1 / (1 - p) if p < 1 else 0.0), kept
        given = {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)} | kwargs
        if given.get("generator") is not None:  # the user's own: keyed by the user
            return func(*args, **kwargs)
        if "dropout_p" in given or "dropout" in given:  # fused attention, cuDNN's recurrent layers
            if not given.get("dropout_p", given.get("dropout")) or given.get("train") is False:
                return func(*args, **kwargs)
            raise RuntimeError(
                f"{func} draws its dropout from random numbers of its own, which cannot be keyed by the shard. Use "
                f"nn.Dropout beside it (for a recurrent layer: one layer at a time, nn.Dropout between them)"
            )
        keyed = _with_generator(func)
        if keyed is None:
            raise RuntimeError(f"{func} draws random numbers that cannot be keyed by the shard. Use another operation")
        tensors = [value for value in given.values() if isinstance(value, torch.Tensor)]
        kwargs["generator"] = self._for(tensors[0] if tensors else kwargs.get("device"))
        if "generator" in (names := [argument.name for argument in keyed._schema.arguments]):
            args = args[: names.index("generator")]  # nobody gave one: what is there is None
        return keyed(*args, **kwargs)

    def _for(self, where: Any) -> torch.Generator:
        """The generator for a tensor's device, or for a device; operations without either make CPU tensors."""
        device = where.device if isinstance(where, torch.Tensor) else torch.device(where or "cpu")
        return self._on_cpu if device.type == "cpu" else self._generator


def _with_generator(func: Any) -> Any:
    """The form of an operation that takes a generator; None if there is none."""
    names = [argument.name for argument in func._schema.arguments]
    if "generator" in names:
        return func
    packet = func.overloadpacket
    for overload in packet.overloads():
        candidate = getattr(packet, overload)
        theirs = [argument.name for argument in candidate._schema.arguments]
        if "generator" in theirs and [name for name in theirs if name != "generator"] == names:
            return candidate
    return None


class NoDraws(TorchFunctionMode):
    """While it is entered, nothing may draw: for the backward pass, where what is recomputed would draw others."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with _Refuse():
            return func(*args, **(kwargs or {}))


class _Refuse(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if SEEDED in func.tags:
            raise RuntimeError(
                f"{func} draws random numbers in the backward pass, where activation checkpointing computes a part "
                f"again: they would be others than in the forward pass. Leave dropout out of checkpointed parts"
            )
        return func(*args, **(kwargs or {}))
