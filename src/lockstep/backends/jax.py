"""JAX: the only file that imports it."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache, partial, wraps
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array as Tensor
from jax import lax

from lockstep.backends.hardware import cpu
from lockstep.backends.protocol import Capabilities, Function, LossSum, OnReady, Ops
from lockstep.core.device import Device, Hardware
from lockstep.core.errors import BackendError
from lockstep.core.layout import Array, Layout

# JAX takes the number of CPU devices before it is first used, and only then. One for each core, unless the user has
# said how many; logical devices beyond that share them, which changes no bit. If JAX was used before, there is one.
if jax.config.jax_num_cpu_devices < 0 and "host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    with suppress(RuntimeError):
        jax.config.update("jax_num_cpu_devices", cpu().num_cores)

# What the compiler may not choose for itself: threads inside an operation on the CPU, and on a GPU an algorithm that is
# picked by timing or adds in the order of arrival.
_FIXED = {
    "xla_cpu_multi_thread_eigen": False,
    "xla_gpu_deterministic_ops": True,
    "xla_gpu_autotune_level": 0,
}


class JaxOps(Ops):
    """The operations that models are written in."""

    def conv2d(self, X: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return lax.conv(X, weight, window_strides=(1, 1), padding="VALID") + bias[:, None, None]

    def relu(self, X: Tensor) -> Tensor:
        return jax.nn.relu(X)

    def avg_pool2d(self, X: Tensor, size: int) -> Tensor:
        samples, channels, rows, columns = X.shape[0], X.shape[1], X.shape[2] // size, X.shape[3] // size
        used = X[:, :, : rows * size, : columns * size]
        return used.reshape(samples, channels, rows, size, columns, size).mean((3, 5))

    def flatten(self, X: Tensor) -> Tensor:
        return X.reshape(X.shape[0], -1)

    def linear(self, X: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return X @ weight + bias

    def cross_entropy_sum(self, logits: Tensor, y: Tensor) -> Tensor:
        log_p = jax.nn.log_softmax(logits)
        return -jnp.take_along_axis(log_p, y[:, None], axis=1).sum()

    def num_correct(self, logits: Tensor, y: Tensor) -> Tensor:
        return (logits.argmax(1) == y).sum()


class JaxBackend:
    """JAX on CPUs and GPUs. Its arrays cannot be changed, and it keeps track of pending work by itself."""

    name = "jax"
    oldest = (0, 5)
    capabilities = Capabilities(gpus=True, compiles="always", sees_random_draws=False, writes_in_place=False)
    ops = JaxOps()

    # --- the machine ---

    def version(self) -> str:
        return jax.__version__

    def num_gpus(self) -> int:
        return len(_places("cuda"))

    def hardware(self) -> list[Hardware]:
        gpus = []
        for number, gpu in enumerate(_places("cuda")):
            num_bytes = (gpu.memory_stats() or {}).get("bytes_limit", 0)  # what JAX lets itself use of it
            gpus.append(Hardware(Device(f"cuda:{number}"), gpu.device_kind, num_bytes, getattr(gpu, "core_count", 0)))
        return gpus + [cpu()]

    # --- who runs, and how ---

    @contextmanager
    def session(self, devices: list[Device]) -> Iterator[None]:
        yield  # what has to be fixed is fixed function by function, in `compile`

    def start_worker(self, device: Device) -> None:
        pass

    def random_state(self) -> bytes:
        return b""  # there is none to see: random numbers in JAX are drawn from a key that the model is given

    def synchronize(self, device: Device) -> None:
        pass  # who reads an array waits for it

    def peak_gpu_memory(self, device: Device, reset: bool = False) -> int | None:
        return (_place(device).memory_stats() or {}).get("peak_bytes_in_use")  # of the process: it cannot be reset

    def graph_capture(self, devices: list[Device]) -> None:
        return None

    def compile(self, function: Function) -> Function:
        compiled = jax.jit(function, compiler_options=_FIXED)

        @wraps(function)
        def call(*args: Any) -> Any:
            with jax.default_matmul_precision("highest"):  # float32 means float32
                return compiled(*args)

        return call  # type: ignore[return-value]

    # --- tensors ---

    def from_numpy(self, array: Array, device: Device) -> Tensor:
        return jax.device_put(array, _place(device))

    def to_numpy(self, tensor: Tensor) -> Array:
        return np.asarray(tensor)

    def copy_to(self, tensor: Tensor, device: Device) -> Tensor:
        return jax.device_put(tensor, _place(device), may_alias=False)

    def device_of(self, tensor: Tensor) -> Device:
        for kind in ("cpu", "cuda"):
            for number, place in enumerate(_places(kind)):
                if tensor.devices() == {place}:
                    return Device(f"{kind}:{number}")
        raise BackendError(
            f"An array lies on {', '.join(map(str, tensor.devices()))}. Give one that lies on a single CPU device or "
            f"GPU of this machine: jax.device_put(array, jax.devices()[0])."
        )

    def assign(self, target: Tensor, source: Tensor) -> Tensor:
        return self.copy_to(source, self.device_of(target))

    def with_gradient(self, tensor: Tensor) -> Tensor:
        return tensor  # any array can be differentiated with respect to

    def zeros(self, num_entries: int, device: Device, like: Tensor | None = None) -> Tensor:
        dtype = np.float32 if like is None else self.to_numpy(like).dtype
        return self.from_numpy(np.zeros(num_entries, dtype), device)

    def flat_view(self, tensor: Tensor) -> None:
        return None

    def add(self, left: Tensor, right: Tensor, out: Tensor | None = None) -> Tensor:
        return left + right

    def chunk(self, tensor: Tensor, start: int, stop: int) -> Tensor:
        return lax.dynamic_slice_in_dim(tensor, start, stop - start)  # compiled for each size, not for each place

    def concat(self, vectors: list[Tensor]) -> Tensor:
        return jnp.concatenate(vectors)

    def take(self, data: Tensor, order: Tensor, start: int, stop: int) -> Tensor:
        return _take(data, order, start, num_samples=stop - start)

    # --- parameters as one flat vector ---

    def flatten(self, layout: Layout, params: list[Tensor], device: Device) -> Tensor:
        return self.from_numpy(layout.flatten([self.to_numpy(param) for param in params]), device)

    def unflatten(self, layout: Layout, flat: Tensor) -> list[Tensor]:
        pieces = jnp.split(flat, np.cumsum(layout.pieces)[:-1])[::2]
        return [piece.reshape(shape) for piece, shape in zip(pieces, layout.shapes, strict=True)]

    def value_and_grad(
        self, loss_sum: LossSum, layout: Layout, flat: Tensor, X: Tensor, y: Tensor, on_ready: OnReady | None = None
    ) -> tuple[Tensor, Tensor]:
        loss, gradient = _gradient_of(loss_sum, layout)(flat, X, y)
        return loss, gradient


@lru_cache(maxsize=16)  # compiled once for a model; every shape and every device is a compilation of its own
def _gradient_of(loss_sum: LossSum, layout: Layout) -> Any:
    def loss_of_flat(flat: Tensor, X: Tensor, y: Tensor) -> Tensor:
        return loss_sum(BACKEND.unflatten(layout, flat), X, y)

    return BACKEND.compile(jax.value_and_grad(loss_of_flat))


@partial(jax.jit, static_argnames="num_samples")
def _take(data: Tensor, order: Tensor, start: int, num_samples: int) -> Tensor:
    samples = data[lax.dynamic_slice_in_dim(order, start, num_samples)]
    return samples / jnp.float32(255) if samples.dtype == jnp.uint8 else samples


def _places(kind: str) -> list[Any]:
    """JAX's own devices of one kind, on this machine."""
    try:
        return list(jax.local_devices(backend="cpu" if kind == "cpu" else "gpu"))
    except RuntimeError:  # JAX's way of saying that there is none
        return []


def _place(device: Device) -> Any:
    places = _places(device.kind)
    return places[device.number % len(places)]


BACKEND = JaxBackend()
