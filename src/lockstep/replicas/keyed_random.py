"""Random numbers inside a model, keyed by (seed, step, shard): dropout is the same on any device, in any order of work.

PyTorch has one random number generator per device for the whole process, drawn from in arrival order. While a shard is
computed, every operation that would draw from it gets a generator of the shard's own instead; one that takes no
generator (fused dropout and attention on a GPU, compiled code) finds the shard's in the place of the process's.
Intercepting every operation costs about ten microseconds each (a quarter of a step of ResNet-18 on a GPU). So a module
that does not draw in its first steps is computed without; should it draw later, the process's generator has moved, and
the shard is computed again.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from lockstep.backends.torch.session import DEFAULT_GENERATORS
from lockstep.core.errors import RunError
from lockstep.core.this_thread import THIS_THREAD

SEEDED = torch.Tag.nondeterministic_seeded  # the tag of an operation that draws
NATIVE_DROPOUT = torch.ops.aten.native_dropout.default


def rng_state(device: torch.device) -> bytes:
    """The state of the process's random number generators for this device, and for the CPU."""
    with DEFAULT_GENERATORS:
        state: bytes = torch.default_generator.get_state().numpy().tobytes()
        if device.type == "cuda":
            state += torch.cuda.default_generators[device.index].get_state().numpy().tobytes()
    return state


@contextmanager
def no_draws_outside_of_pytorch() -> Iterator[None]:
    """Refuses a model that draws from Python or numpy: all ranks share their generators, which cannot be keyed."""
    before = _host_states()
    yield
    drawn = [name for name, state in _host_states().items() if state != before[name]]
    if drawn:
        raise RunError(
            f"Random numbers were drawn from {' and '.join(drawn)} while model or loss were computed: the weights "
            f"would depend on the number of devices. Draw from PyTorch there: torch.rand(()) is keyed by the shard."
        )


def _host_states() -> dict[str, Any]:
    _, numbers, position, *_ = np.random.get_state(legacy=True)
    return {"Python's random": random.getstate(), "numpy.random": (np.asarray(numbers).tobytes(), position)}


class KeyedRandom(TorchDispatchMode):
    """While it is entered, the calling thread's random numbers depend on the seed and on nothing else."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.generator = torch.Generator(device)
        self.on_host = self.generator if device.type == "cpu" else torch.Generator()
        self._own: list[torch.Generator] = []  # made and seeded by the model itself since the start
        self._outer: KeyedRandom | None = None  # the one that this one replaces while it is entered
        self.is_restored = False  # activation checkpointing has put it back to where it was in the forward pass
        self.has_drawn = False  # ever
        self.has_drawn_on_host = False  # for a model on a GPU: a captured step would replay what the host decided

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # PyTorch would wrap the next function, at twice its cost

    def start(self, seed: int, state: Any = None) -> "KeyedRandom":
        """Seeds the random numbers; with a `state`, continues where an earlier stage of the shard has stopped."""
        self.generator.manual_seed(seed)
        if self.on_host is not self.generator:
            self.on_host.manual_seed(seed)
        if state is not None:
            for generator, numbers in zip((self.generator, self.on_host), state, strict=True):
                generator.set_state(torch.from_numpy(numbers.copy()))
        self._own, self.is_restored = [], False
        return self

    def state(self) -> Any:
        """How far the random numbers have got, as arrays."""
        return [generator.get_state().numpy().copy() for generator in (self.generator, self.on_host)]

    def __enter__(self) -> Any:
        THIS_THREAD.keyed, self._outer = self, THIS_THREAD.keyed
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        THIS_THREAD.keyed = self._outer
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if SEEDED not in func.tags:
            return func(*args, **kwargs)
        named = _by_name(func, args, kwargs)
        if _draws(func, named):
            self.has_drawn = True
            return self._draw(func, args, kwargs, named)
        if func is NATIVE_DROPOUT:  # it would count as if it drew
            return named["input"].clone(), torch.ones_like(named["input"], dtype=torch.bool)
        return func(*args, **kwargs)

    def _draw(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], named: dict[str, Any]) -> Any:
        if named.get("generator") is not None:
            self._check(named["generator"])
            return func(*args, **kwargs)
        keyed = _with_generator(func)
        tensors = [value for value in named.values() if isinstance(value, torch.Tensor)]
        if keyed is None and tensors and tensors[0].is_cuda and "dropout_state" not in named:
            with self._as_gpu_default():
                return func(*args, **kwargs)
        if func is NATIVE_DROPOUT:
            X, p = named["input"], named["p"]
            kept = torch.empty_like(X, dtype=torch.bool).bernoulli_(1 - p, generator=self._for(X))
            return X * kept * (1 / (1 - p) if p < 1 else 0.0), kept
        if keyed is None:
            raise RuntimeError(
                f"{func} draws random numbers that cannot be keyed by the shard. Use another operation (for dropout in "
                f"a recurrent layer: one layer at a time, nn.Dropout between them)"
            )
        kwargs["generator"] = self._for(tensors[0] if tensors else kwargs.get("device"))
        if "generator" in (names := _arguments(keyed)):
            args = args[: names.index("generator")]  # the rest is generator=None
        return keyed(*args, **kwargs)

    def get_host_state(self) -> torch.Tensor:
        """The state of the numbers on the host, for activation checkpointing."""
        return self.on_host.get_state()

    def set_host_state(self, state: torch.Tensor) -> None:
        """Puts them back."""
        self.on_host.set_state(state)
        self.is_restored = True

    @contextmanager
    def as_default(self, seed: int | None = None) -> Iterator[None]:
        """The same for compiled code, which draws from the process's generators only; without a seed, they continue."""
        if seed is not None:
            self.start(seed)
        with DEFAULT_GENERATORS, nullcontext() if self.on_host is self.generator else self._as_gpu_default():
            theirs, default = torch.default_generator.get_state(), torch.default_generator
            before = default.set_state(self.on_host.get_state()).get_state()
            try:
                yield
            finally:
                after = default.get_state()
                self.on_host.set_state(after)
                default.set_state(theirs)
            if not torch.equal(before, after):
                self.has_drawn, self.has_drawn_on_host = True, self.on_host is not self.generator

    @contextmanager
    def _as_gpu_default(self) -> Iterator[None]:
        """The GPU's default generator is the shard's meanwhile: a kernel gets its numbers when it is launched."""
        default = torch.cuda.default_generators[self.generator.device.index]
        with DEFAULT_GENERATORS:
            theirs, before = default.graphsafe_get_state(), self._offset()
            default.graphsafe_set_state(self.generator.graphsafe_get_state())
            try:
                yield
            finally:
                default.graphsafe_set_state(theirs)
            self.has_drawn |= self._offset() != before

    def _offset(self) -> int | None:
        """How many numbers were drawn on the GPU; while a step is captured, none are, and PyTorch refuses to say."""
        return None if torch.cuda.is_current_stream_capturing() else self.generator.get_offset()

    def _check(self, generator: torch.Generator) -> None:
        """Refuses a generator that continues from shard to shard; one that was just seeded is as good as a key."""
        if any(generator is known for known in self._own):
            return
        fresh = torch.Generator(generator.device).manual_seed(generator.initial_seed())
        if not torch.equal(fresh.get_state(), generator.get_state()):
            raise RuntimeError(
                "The model draws from a generator of its own, which continues from shard to shard: the weights would "
                "depend on the number of devices. Leave generator= out: then numbers are keyed by the shard"
            )
        self._own.append(generator)

    def _for(self, where: Any) -> torch.Generator:
        """The generator for a tensor's device, or for a device; operations without either make CPU tensors."""
        device = where.device if isinstance(where, torch.Tensor) else torch.device(where or "cpu")
        if device.type != "cpu":
            return self.generator
        self.has_drawn_on_host = self.on_host is not self.generator
        return self.on_host


def _arguments(func: Any) -> list[str]:
    return [argument.name for argument in func._schema.arguments]


def _by_name(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    return dict(zip(_arguments(func), args, strict=False)) | kwargs


def _draws(func: Any, named: dict[str, Any]) -> bool:
    """Whether an operation that may draw does so with these arguments: dropout with probability 0 does not."""
    if named.get("train") is False or (func is NATIVE_DROPOUT and not named["p"]):
        return False
    rates = [named.get(name, 0.0) for name in ("dropout_p", "dropout") if name in _arguments(func)]
    return all(rates)  # of fused attention, of recurrent layers


def _with_generator(func: Any) -> Any:
    """The overload of an operation that takes a generator; None if there is none."""
    names = _arguments(func)
    if "generator" in names:
        return func
    for overload in func.overloadpacket.overloads():
        candidate = getattr(func.overloadpacket, overload)
        theirs = [argument.name for argument in candidate._schema.arguments]
        if "generator" in theirs and [name for name in theirs if name != "generator"] == names:
            return candidate
    return None


class NoDraws(TorchFunctionMode):
    """While it is entered, drawing is an error: for the backward pass, where recomputation would draw other numbers.

    Activation checkpointing puts random numbers back to where they were in the forward pass: then it draws from
    `random` again, where the shard's are known.
    """

    def __init__(self, random: KeyedRandom | None = None) -> None:
        super().__init__()
        self._random = random

    def __enter__(self) -> Any:
        THIS_THREAD.keyed, self._outer = self._random, THIS_THREAD.keyed
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        THIS_THREAD.keyed = self._outer
        if self._random is not None:
            self._random.is_restored = False
        super().__exit__(*error)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with _Refuse(self._random):
            return func(*args, **(kwargs or {}))


class _Refuse(TorchDispatchMode):
    def __init__(self, random: KeyedRandom | None) -> None:
        super().__init__()
        self._random = random

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if SEEDED in func.tags and _draws(func, _by_name(func, args, kwargs or {})):
            if self._random is not None and self._random.is_restored:
                return self._random.__torch_dispatch__(func, types, args, kwargs)
            raise RuntimeError(
                f"{func} draws random numbers in the backward pass, others than in the forward pass. In activation "
                f"checkpointing, use use_reentrant=False and preserve_rng_state=True; on GPUs and with --batch-norm "
                f"sync, leave dropout out of checkpointed parts"
            )
        return func(*args, **(kwargs or {}))
