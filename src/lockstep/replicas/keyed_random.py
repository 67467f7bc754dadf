"""Random numbers inside a model, keyed by (seed, step, shard): dropout is the same on any device, in any order of work.

PyTorch has one stream of random numbers for the whole process, drawn from in arrival order. While a shard is computed,
every operation that would draw from it gets a generator of the shard's own instead. Watching every operation costs
about ten microseconds each (a quarter of a step of ResNet-18 on a GPU). So a module that does not draw in its first
steps is computed without; should it draw later, the process's stream has moved, and the shard is computed again.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from lockstep.data.order import keyed_random
from lockstep.core.errors import RunError

SEEDED = torch.Tag.nondeterministic_seeded  # the mark of an operation that draws
DROPOUT, AUGMENTATION, OPTIMIZER = 1, 2, 3  # the last part of a key says what the random numbers are for


def shard_seed(seed: int, step: int, shard: int) -> int:
    """The seed of a shard's random numbers. `torch.manual_seed` with it gives a plain loop the same dropout on a CPU.

    >>> shard_seed(seed=0, step=1, shard=0)
    922679666224363917
    """
    return seed_of(seed, step, shard, DROPOUT)


def seed_of(*key: int) -> int:
    """A seed that depends on every part of the key."""
    high, low = keyed_random(*key).randint(0, 2**31, 2).tolist()
    return int(high << 31 | low)


def drawn_so_far(place: torch.device) -> bytes:
    """Something that is another after anybody in this process has drawn random numbers for this device, or the CPU."""
    state: bytes = torch.default_generator.get_state().numpy().tobytes()
    if place.type == "cuda":
        state += torch.cuda.default_generators[place.index].get_state().numpy().tobytes()
    return state


@contextmanager
def random_numbers_of(*key: int) -> Iterator[None]:
    """Python's, numpy's and PyTorch's random numbers depend on the key; afterwards they are as they were."""
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    keyed = keyed_random(*key)
    random.seed(int(keyed.randint(0, 2**31)))
    np.random.seed(keyed.randint(0, 2**31))
    torch.default_generator.manual_seed(int(keyed.randint(0, 2**31)))
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
        torch.set_rng_state(before[2])


@contextmanager
def no_draws_outside_of_pytorch() -> Iterator[None]:
    """Refuses a model that draws from Python's or numpy's random numbers, which all ranks share and nobody can key."""
    before = random.getstate(), _of_numpy()
    yield
    drawn = [] if random.getstate() == before[0] else ["Python's random"]
    drawn += [] if _of_numpy() == before[1] else ["numpy.random"]
    if drawn:
        raise RunError(
            f"While the model was computed, somebody drew from {' and '.join(drawn)}: all devices share these, so the "
            f"weights would depend on their number. Draw from PyTorch in the model: torch.rand(()) is keyed by the "
            f"shard."
        )


def _of_numpy() -> tuple[bytes, int]:
    _, numbers, place, *_ = np.random.get_state(legacy=True)
    return np.asarray(numbers).tobytes(), int(place)


class KeyedRandom(TorchDispatchMode):
    """While it is entered, the calling thread's random numbers depend on the seed and on nothing else."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._generator = torch.Generator(device)
        self._on_cpu = self._generator if device.type == "cpu" else torch.Generator()
        self._own: list[torch.Generator] = []  # made and seeded by the model itself since the start
        self.has_drawn = False  # ever
        self.has_drawn_on_host = False  # for a GPU's model: what it decides with that is decided once in a recording

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # PyTorch would wrap the next function, at twice its cost

    def start(self, seed: int) -> "KeyedRandom":
        """Begins the stream of `seed`."""
        self._generator.manual_seed(seed)
        if self._on_cpu is not self._generator:
            self._on_cpu.manual_seed(seed)
        self._own = []
        return self

    @property
    def generator(self) -> torch.Generator:
        """What a device's random numbers come from."""
        return self._generator

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if SEEDED not in func.tags:
            return func(*args, **(kwargs or {}))
        self.has_drawn = True
        return self._draw(func, args, dict(kwargs or {}))

    def _draw(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func is torch.ops.aten.native_dropout.default:  # the fused kernel takes no generator
            X, p, train = args
            if train is False:
                return X, torch.ones_like(X, dtype=torch.bool)
            kept = torch.empty_like(X, dtype=torch.bool).bernoulli_(1 - p, generator=self._for(X))
            return X * kept * (1 / (1 - p) if p < 1 else 0.0), kept
        given = {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)} | kwargs
        if given.get("generator") is not None:
            self._check(given["generator"])
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

    def _check(self, generator: torch.Generator) -> None:
        """Refuses a generator that goes on from shard to shard; one that was just seeded is as good as a key."""
        if any(generator is known for known in self._own):
            return
        fresh = torch.Generator(generator.device).manual_seed(generator.initial_seed())
        if not torch.equal(fresh.get_state(), generator.get_state()):
            raise RuntimeError(
                "The model draws from a generator of its own, which goes on from shard to shard: every device has a "
                "copy, so the weights would depend on their number. Leave generator= out, and numbers are keyed by the "
                "shard"
            )
        self._own.append(generator)

    def _for(self, where: Any) -> torch.Generator:
        """The generator for a tensor's device, or for a device; operations without either make CPU tensors."""
        device = where.device if isinstance(where, torch.Tensor) else torch.device(where or "cpu")
        if device.type != "cpu":
            return self._generator
        self.has_drawn_on_host = self._on_cpu is not self._generator
        return self._on_cpu


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
    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if SEEDED in func.tags:
            raise RuntimeError(
                f"{func} draws random numbers in the backward pass, which cannot be keyed. If this is activation "
                f"checkpointing, which computes a part again: they would be others than in the forward pass. Leave "
                f"dropout out of checkpointed parts"
            )
        return func(*args, **(kwargs or {}))
