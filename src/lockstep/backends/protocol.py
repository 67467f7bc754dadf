"""What Lockstep needs from a framework: a backend is one module with a subclass of `Backend` and one of `Ops`.

Abstract methods are what every framework has to implement. The others have a default that is right for a framework
without the feature: no GPUs, no compiler, no CUDA graphs, immutable tensors. A backend overrides only what differs.
"""

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

from lockstep.backends.hardware import cpu
from lockstep.core.device import Device, Hardware
from lockstep.core.errors import BackendError
from lockstep.core.tracing import Timed

if TYPE_CHECKING:  # numpy is slow to import, and `lockstep --help` lists the backends
    from lockstep.core.layout import Array, Layout

Tensor = Any  # the framework's own
LossSum = Callable[[list[Tensor], Tensor, Tensor], Tensor]  # (params, X, y) -> loss summed over the samples
LayerFunction = Callable[..., Tensor]  # (ops, X, params, ...) -> the output of a layer
VJP = tuple[Tensor, Callable[[Tensor], tuple[Tensor | None, list[Tensor]]]]
Function = TypeVar("Function", bound=Callable[..., Any])
RecordEvent = Callable[[], Callable[[], None]]  # records an event on the device; the function it returns waits for it
OnReady = Callable[[Tensor, int, RecordEvent], None]  # (gradient, start, ...): complete from `start` on after the event


class Pieces(ABC):
    """A flat vector that is still in pieces: a gradient as the framework leaves it."""

    @abstractmethod
    def flat(self) -> Tensor:
        """The vector."""

    @abstractmethod
    def can_add(self, num_addends: int) -> bool:
        """Whether `added` takes so many."""

    @abstractmethod
    def added(self, brackets: str, others: Sequence["Pieces"]) -> Tensor:
        """The sum of this one (x0) and others (x1, ...) in these brackets, as a vector."""


def flat(vector: Tensor | Pieces) -> Tensor:
    """A vector in one piece."""
    return vector.flat() if isinstance(vector, Pieces) else vector


class Capabilities(NamedTuple):
    """What differs between frameworks, as `lockstep devices` shows it."""

    gpus: bool  # computes on GPUs too
    compiles: str  # models: "always", "on request" (--compile) or "no"
    sees_random_draws: bool  # `random_state` changes when a model draws from the framework's own generator
    writes_in_place: bool  # `add` and `assign` write into existing memory
    engines: tuple[str, ...] = ("inprocess",)


class Ops(ABC):
    """The operations that models are written in. Images are (samples, channels, height, width)."""

    @abstractmethod
    def conv2d(self, X: Tensor, weight: Tensor, bias: Tensor) -> Tensor: ...
    @abstractmethod
    def relu(self, X: Tensor) -> Tensor: ...
    @abstractmethod
    def avg_pool2d(self, X: Tensor, size: int) -> Tensor: ...
    @abstractmethod
    def linear(self, X: Tensor, weight: Tensor, bias: Tensor) -> Tensor: ...
    @abstractmethod
    def cross_entropy_sum(self, logits: Tensor, y: Tensor) -> Tensor: ...

    def conv_relu_pool2d(self, X: Tensor, weight: Tensor, bias: Tensor, size: int) -> Tensor:
        """Convolution, ReLU and average pooling; a framework may fuse them."""
        return self.avg_pool2d(self.relu(self.conv2d(X, weight, bias)), size)

    def flatten(self, X: Tensor) -> Tensor:
        """(samples, everything else)."""
        return X.reshape((X.shape[0], -1))

    def num_correct(self, logits: Tensor, y: Tensor) -> Tensor:
        """How many samples have their largest score at their label."""
        return (logits.argmax(1) == y).sum()


def cross_entropy(ops: Ops, X: Tensor, params: list[Tensor], y: Tensor) -> Tensor:
    """The summed loss of class scores, as a layer."""
    return ops.cross_entropy_sum(X, y)


class LossFuture(Protocol):
    """The losses of a step that may not be finished."""

    @property
    def weights(self) -> list[float] | None:
        """What they are to be divided by, of each shard; None where that is its number of samples."""

    def result(self) -> list[float]:
        """The summed loss of each shard, in shard order; waits for them."""


class GraphCapture(Protocol):
    """Captures kernel launches on one GPU as a CUDA graph."""

    max_addends: int  # of `fused_add`

    def stream(self) -> AbstractContextManager[None]:
        """Within it, the calling thread launches on the stream that is captured (the main stream)."""

    def fork(self) -> AbstractContextManager[None]:
        """Within it, `side_stream` may be used; on exit the main stream waits for all side streams."""

    def side_stream(self, number: int, num_shards: int = 1) -> AbstractContextManager[None]:
        """Within it, kernels for so many shards are launched, and run in parallel with those of other numbers."""

    def serialize_streams(self) -> bool:
        """Use one side stream for everything from now on, which takes less memory; False if that is so already."""

    def fused_add(self, brackets: str, vectors: list[Tensor]) -> Tensor:
        """The sum of `vectors` (x0, x1, ...), in the order that `brackets` gives, by one kernel."""

    def capture(
        self, run: Callable[[], Any], generators: Callable[[], list[Any]], warms_up: bool = True
    ) -> tuple[Callable[[], None], Any]:
        """(replay, result): each replay overwrites the result. If it `warms_up`, `run` is called twice."""

    def stack(self, numbers: list[Tensor]) -> Tensor:
        """Scalars as one vector."""

    def copy_to_host(self, numbers: Tensor) -> LossFuture:
        """Starts an asynchronous copy."""


class Backend(ABC):
    """One framework."""

    name: str  # of its package
    min_version: tuple[int, ...]
    capabilities: Capabilities
    ops: Ops

    # --- the machine ---

    def version(self) -> str:
        """The framework's version."""
        return str(importlib.import_module(self.name).__version__)

    def num_gpus(self) -> int:
        """How many GPUs are visible, without initializing one."""
        return 0

    def gpu(self, number: int) -> Hardware:
        """What is known of one GPU; called for numbers below `num_gpus`."""
        raise BackendError(
            f"{self.name} does not use GPUs, so there is no cuda:{number}. Use cpu:0, or another backend."
        )

    def hardware(self) -> list[Hardware]:
        """The GPUs, in order, and then the CPU."""
        return [*map(self.gpu, range(self.num_gpus())), cpu()]

    # --- a run ---

    lenet_kernels: tuple[str, ...] = ()  # kinds of devices with kernels of ours for LeNet: nothing is left to compile
    portable_variables = ""  # environment variables that choose the kernels of `pin_kernels`, as a shell takes them

    @abstractmethod
    def session(self, devices: list[Device]) -> AbstractContextManager[None]:
        """Within it, kernels are deterministic; on exit every setting is restored."""

    def start_worker(self, device: Device) -> None:
        """Makes the calling thread a worker of `device`: one intra-op thread, a stream of its own."""
        return  # a framework without settings of a thread

    def why_not_fork(self) -> str:
        """Why processes that are forked now could not use GPUs, and what to do; empty: they could."""
        return ""

    def pin_kernels(self) -> None:
        """Kernels from now on are those that all processors of the last ten years have."""
        raise BackendError(f"Lockstep cannot choose the kernels of {self.name}. Leave --portable out, or use torch.")

    def kernel_choice(self, device: Device) -> dict[str, str]:
        """What decides how a device rounds, by name: the processor, and settings of libraries."""
        return {"processor": cpu().name}

    def random_state(self) -> bytes:
        """The state of the framework's own random generator; always the same where it cannot be read."""
        return b""

    def synchronize(self, device: Device) -> None:
        """Waits for what the calling thread launched on `device`; returns at once during CUDA graph capture."""
        return  # a framework whose operations are complete when they return, or when their result is read

    def peak_gpu_memory(self, device: Device, reset: bool = False) -> int | None:
        """Peak bytes in use on a GPU since the last `reset`; None where the framework does not count them."""
        return None

    def graph_capture(self, devices: list[Device], rank: int = 0) -> GraphCapture | None:
        """CUDA graph capture for steps on these devices; None where they have to run eagerly. A rank has its own."""
        return None

    def timed(self, device: Device) -> Timed | None:
        """The device's own clock, where it works on after the host has launched its kernels; else None."""
        return None

    def compile(self, function: Function) -> Function:
        """`function`, compiled when it is first called with arguments of some shape."""
        raise BackendError(f"Lockstep does not compile with {self.name}. Use the function uncompiled, or torch or jax.")

    # --- tensors ---

    @abstractmethod
    def from_numpy(self, array: "Array", device: Device) -> Tensor: ...
    @abstractmethod
    def to_numpy(self, tensor: Tensor) -> "Array": ...
    @abstractmethod
    def copy_to(self, tensor: Tensor, device: Device) -> Tensor:
        """A new tensor on `device`, also if `tensor` is there already."""

    @abstractmethod
    def device_of(self, tensor: Tensor) -> Device: ...
    @abstractmethod
    def concat(self, vectors: list[Tensor]) -> Tensor: ...
    @abstractmethod
    def take(self, data: Tensor, order: Tensor, start: int, stop: int) -> Tensor:
        """The samples `order[start:stop]` of `data`, in new memory; bytes become floats from 0 to 1."""

    def assign(self, target: Tensor, source: Tensor) -> Tensor:
        """`target` with the values of `source`; a new tensor where the framework cannot write in place."""
        return self.copy_to(source, self.device_of(target))

    def record_stream(self, value: Any) -> None:
        """The calling thread reads a tensor that another one made, and its memory must not be used again before."""
        return  # a framework without streams

    def copy_activation(self, value: Any, device: Device) -> Any:
        """What one stage hands to the next, on another device: a tensor, or a plain value."""
        return self.copy_to(value, device) if hasattr(value, "dtype") else value

    @abstractmethod
    def concat_units(self, tensors: list[Tensor]) -> Tensor:
        """Outputs of slices of a layer, put together along the second axis."""

    def with_gradient(self, tensor: Tensor) -> Tensor:
        """`tensor`, prepared for a backward pass where the framework needs that."""
        return tensor

    def zeros(self, num_entries: int, device: Device, like: Tensor | None = None) -> Tensor:
        """A vector of float32, or of the dtype of `like`."""
        import numpy as np

        dtype = np.float32 if like is None else self.to_numpy(like).dtype
        return self.from_numpy(np.zeros(num_entries, dtype), device)

    def flat_view(self, tensor: Tensor) -> Tensor | None:
        """A writable vector in the same memory; None where there is none."""
        return None

    def add(self, left: Tensor, right: Tensor, out: Tensor | None = None) -> Tensor:
        """The sum; in the memory of `out` where the framework writes in place."""
        return left + right

    def chunk(self, tensor: Tensor, start: int, stop: int) -> Tensor:
        """`tensor[start:stop]` along the first axis; may be empty."""
        return tensor[start:stop]

    # --- parameters as one flat vector ---

    def flatten(self, layout: "Layout", params: list[Tensor], device: Device) -> Tensor:
        """The parameters as one vector on `device`."""
        return self.from_numpy(layout.flatten([self.to_numpy(param) for param in params]), device)

    def unflatten(self, layout: "Layout", flat: Tensor) -> list[Tensor]:
        """The parameters, each in its shape; in the memory of `flat` where the framework has views."""
        bounds = list(accumulate(layout.pieces, initial=0))
        pieces = [self.chunk(flat, *bounds[at : at + 2]) for at in range(0, len(layout.pieces), 2)]
        return [piece.reshape(shape) for piece, shape in zip(pieces, layout.shapes, strict=True)]

    @abstractmethod
    def vjp(self, function: LayerFunction, params: list[Tensor], X: Tensor, needs_X: bool, *others: Tensor) -> VJP:
        """`function(ops, X, params, *others)`, and what gives the gradients of X and `params` from its own.

        The bits are those of `value_and_grad` of the whole model.
        """

    @abstractmethod
    def value_and_grad(
        self, loss_sum: LossSum, layout: "Layout", flat: Tensor, X: Tensor, y: Tensor, on_ready: OnReady | None = None
    ) -> tuple[Tensor, "Tensor | Pieces"]:
        """The summed loss, and its gradient, in pieces or as one vector.

        `on_ready` may be called with the vector before it is complete.
        """
