"""What Lockstep needs from a framework: some twenty small functions, and no more.

A backend is one file. Functions give back new tensors where they can, because not every framework can change one in
place. What a framework cannot do raises a `BackendError` that names the alternative; nothing is skipped silently.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

from lockstep.core.device import Device, Hardware

if TYPE_CHECKING:  # numpy is slow to import, and `lockstep --help` lists the backends
    from lockstep.core.layout import Array, Layout

Tensor = Any  # the framework's own
LossSum = Callable[[list[Tensor], Tensor, Tensor], Tensor]  # (params, X, y) -> loss summed over the samples
Function = TypeVar("Function", bound=Callable[..., Any])
RecordEvent = Callable[[], Callable[[], None]]  # records an event on the device; the function it gives waits for it
OnReady = Callable[
    [Tensor, int, RecordEvent], None
]  # (gradient, start, ...): complete from `start` on, after the event


class Capabilities(NamedTuple):
    """What differs between frameworks, as `lockstep devices` shows it."""

    gpus: bool  # computes on GPUs too
    compiles: str  # a function into one of its own: "always", "on request" (--compile), or "no"
    sees_random_draws: bool  # can tell that a model drew from the framework's own random numbers
    writes_in_place: bool  # `add` and `assign` can write into memory that is there
    engines: tuple[str, ...] = ("inprocess",)


class Ops(Protocol):
    """The operations that models are written in. Images are (samples, channels, height, width)."""

    def conv2d(self, X: Tensor, weight: Tensor, bias: Tensor) -> Tensor: ...
    def relu(self, X: Tensor) -> Tensor: ...
    def avg_pool2d(self, X: Tensor, size: int) -> Tensor: ...
    def conv_relu_pool2d(self, X: Tensor, weight: Tensor, bias: Tensor, size: int) -> Tensor:
        """Convolution, ReLU and average pooling: a framework may have a faster way than one after the other."""
        return self.avg_pool2d(self.relu(self.conv2d(X, weight, bias)), size)

    def flatten(self, X: Tensor) -> Tensor: ...
    def linear(self, X: Tensor, weight: Tensor, bias: Tensor) -> Tensor: ...
    def cross_entropy_sum(self, logits: Tensor, y: Tensor) -> Tensor: ...
    def num_correct(self, logits: Tensor, y: Tensor) -> Tensor: ...


class LossFuture(Protocol):
    """The losses of a step that may still be under way."""

    def result(self) -> list[float]:
        """The summed loss of each shard, in shard order; waits for them."""
        ...


class GraphCapture(Protocol):
    """Captures what is launched on a GPU as a CUDA graph, which is then replayed at once."""

    max_addends: int  # of `fused_add`

    def stream(self) -> AbstractContextManager[None]:
        """What this thread launches meanwhile goes to the stream that is captured."""
        ...

    def fork(self) -> AbstractContextManager[None]:
        """Within it, `side_stream` may be used; afterwards the main stream waits for all of them."""
        ...

    def side_stream(self, number: int) -> AbstractContextManager[None]:
        """What is launched meanwhile does not wait for other numbers."""
        ...

    def serialize_streams(self) -> bool:
        """One side stream for all from now on, which takes less memory; False where that is so already."""
        ...

    def fused_add(self, brackets: str, vectors: list[Tensor]) -> Tensor:
        """The sum of x0, x1, ..., which are these vectors, in these brackets, by one kernel."""
        ...

    def capture(self, run: Callable[[], Tensor], generators: Callable[[], list[Any]]) -> tuple[Callable[[], None], Any]:
        """What replays `run`, and its result, which each replay fills. `run` is called twice: the first warms up."""
        ...

    def stack(self, numbers: list[Tensor]) -> Tensor:
        """Single numbers as one vector."""
        ...

    def copy_to_host(self, numbers: Tensor) -> LossFuture:
        """An asynchronous copy: whoever asked for it need not wait."""
        ...


class Backend(Protocol):
    """One framework."""

    name: str
    oldest: tuple[int, ...]  # the first version that is not refused
    capabilities: Capabilities
    ops: Ops

    # --- the machine ---
    def version(self) -> str: ...
    def num_gpus(self) -> int:
        """The GPUs that there are, found without beginning to use one."""
        ...

    def hardware(self) -> list[Hardware]:
        """The GPUs, in order, and then the CPU."""
        ...

    # --- who runs, and how ---
    def session(self, devices: list[Device]) -> AbstractContextManager[None]:
        """While it lasts, kernels are deterministic; afterwards every setting is as it was."""
        ...

    def start_worker(self, device: Device) -> None:
        """Makes the calling thread the one that works for `device`: one intra-op thread, a stream of its own."""
        ...

    def random_state(self) -> bytes:
        """Something that changes when anybody draws from the framework's own random numbers, if it can tell."""
        ...

    def synchronize(self, device: Device) -> None:
        """Returns when all that the calling thread launched on `device` is done; at once while it is captured."""
        ...

    def peak_gpu_memory(self, device: Device, reset: bool = False) -> int | None:
        """Bytes that were in use at most on a GPU since the last `reset`; None where the framework cannot tell."""
        ...

    def graph_capture(self, devices: list[Device]) -> GraphCapture | None:
        """What can capture steps on these devices as CUDA graphs; None where they have to be run eagerly."""
        ...

    def compile(self, function: Function) -> Function:
        """`function`, compiled when it is first called with arguments of some shape."""
        ...

    # --- tensors ---
    def from_numpy(self, array: "Array", device: Device) -> Tensor: ...
    def to_numpy(self, tensor: Tensor) -> "Array": ...
    def copy_to(self, tensor: Tensor, device: Device) -> Tensor:
        """A new tensor on `device`, also where `tensor` is there already."""
        ...

    def device_of(self, tensor: Tensor) -> Device: ...
    def assign(self, target: Tensor, source: Tensor) -> Tensor:
        """`target` with the values of `source`: the same tensor where the framework can, else a new one."""
        ...

    def with_gradient(self, tensor: Tensor) -> Tensor:
        """`tensor`, ready to get a gradient."""
        ...

    def zeros(self, num_entries: int, device: Device, like: Tensor | None = None) -> Tensor:
        """A flat vector: of float32, or of the type of `like`."""
        ...

    def flat_view(self, tensor: Tensor) -> Tensor | None:
        """The tensor as a flat vector in the same memory, to be written to; None where that cannot be."""
        ...

    def add(self, left: Tensor, right: Tensor, out: Tensor | None = None) -> Tensor:
        """The sum; in the memory of `out`, where the framework writes in place."""
        ...

    def chunk(self, tensor: Tensor, start: int, stop: int) -> Tensor:
        """The entries `start` to `stop` along the first axis; there may be none."""
        ...

    def concat(self, vectors: list[Tensor]) -> Tensor: ...
    def take(self, data: Tensor, order: Tensor, start: int, stop: int) -> Tensor:
        """The samples `order[start:stop]` of `data`, freshly allocated; bytes become floats from 0 to 1."""
        ...

    # --- parameters as one flat vector ---
    def flatten(self, layout: "Layout", params: list[Tensor], device: Device) -> Tensor: ...
    def unflatten(self, layout: "Layout", flat: Tensor) -> list[Tensor]: ...
    def value_and_grad(
        self, loss_sum: LossSum, layout: "Layout", flat: Tensor, X: Tensor, y: Tensor, on_ready: OnReady | None = None
    ) -> tuple[Tensor, Tensor]:
        """The summed loss, and its gradient as one flat vector. `on_ready` may be told of entries that come early."""
        ...
