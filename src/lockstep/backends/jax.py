"""JAX: the only file that imports it."""

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import lru_cache, partial, wraps
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array as Tensor
from jax import lax

from lockstep.backends.hardware import cpu
from lockstep.backends.protocol import (
    VJP,
    Backend,
    Capabilities,
    Function,
    LayerFunction,
    LossSum,
    OnReady,
    Ops,
    cross_entropy,
)
from lockstep.core.device import Device, Hardware
from lockstep.core.errors import BackendError
from lockstep.core.layout import Array, Layout

# The number of CPU devices can be set only before JAX is first used: one a core here, unless the user has set it.
# Logical devices beyond that share them, with the same bits. If JAX was used before, there is one CPU device.
if jax.config.jax_num_cpu_devices < 0 and "host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    with suppress(RuntimeError):
        jax.config.update("jax_num_cpu_devices", cpu().num_cores)

# One intra-op thread on the CPU; on a GPU no autotuning, and no kernel that adds in the order of arrival.
_FIXED = {"xla_cpu_multi_thread_eigen": False, "xla_gpu_deterministic_ops": True, "xla_gpu_autotune_level": 0}


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

    def linear(self, X: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return X @ weight + bias

    def cross_entropy_sum(self, logits: Tensor, y: Tensor) -> Tensor:
        log_p = jax.nn.log_softmax(logits)
        return -jnp.take_along_axis(log_p, y[:, None], axis=1).sum()


class JaxBackend(Backend):
    """JAX on CPUs and GPUs. Arrays are immutable; random numbers come from explicit keys; reading an array waits."""

    name = "jax"
    min_version = (0, 5)
    capabilities = Capabilities(gpus=True, compiles="always", sees_random_draws=False, writes_in_place=False)
    ops = JaxOps()

    # --- the machine ---

    def num_gpus(self) -> int:
        return len(_jax_devices("cuda"))

    def gpu(self, number: int) -> Hardware:
        found = _jax_devices("cuda")[number]
        num_bytes = (found.memory_stats() or {}).get("bytes_limit", 0)  # the part of its memory that JAX may use
        return Hardware(Device(f"cuda:{number}"), found.device_kind, num_bytes, getattr(found, "core_count", 0))

    # --- a run ---

    def session(self, devices: list[Device]) -> AbstractContextManager[None]:
        return nullcontext()  # settings belong to each compiled function: see `compile`

    def peak_gpu_memory(self, device: Device, reset: bool = False) -> int | None:
        return (_jax_device(device).memory_stats() or {}).get("peak_bytes_in_use")  # since the start: no reset in JAX

    def compile(self, function: Function) -> Function:
        compiled = jax.jit(function, compiler_options=_FIXED)

        @wraps(function)
        def call(*args: Any) -> Any:
            with jax.default_matmul_precision("highest"):  # no TF32
                return compiled(*args)

        return call  # type: ignore[return-value]

    # --- tensors ---

    def from_numpy(self, array: Array, device: Device) -> Tensor:
        return jax.device_put(array, _jax_device(device))

    def to_numpy(self, tensor: Tensor) -> Array:
        return np.asarray(tensor)

    def copy_to(self, tensor: Tensor, device: Device) -> Tensor:
        return jax.device_put(tensor, _jax_device(device), may_alias=False)

    def device_of(self, tensor: Tensor) -> Device:
        for kind in ("cpu", "cuda"):
            for number, device in enumerate(_jax_devices(kind)):
                if tensor.devices() == {device}:
                    return Device(f"{kind}:{number}")
        raise BackendError(
            f"An array is on {', '.join(map(str, tensor.devices()))}. Give one that is on a single CPU device or GPU "
            f"of this machine: jax.device_put(array, jax.devices()[0])."
        )

    def concat(self, vectors: list[Tensor]) -> Tensor:
        return jnp.concatenate(vectors)

    def take(self, data: Tensor, order: Tensor, start: int, stop: int) -> Tensor:
        return _take(data, order, start, num_samples=stop - start)

    def chunk(self, tensor: Tensor, start: int, stop: int) -> Tensor:
        return lax.dynamic_slice_in_dim(tensor, start, stop - start)  # compiled for each size, not for each start

    def concat_units(self, tensors: list[Tensor]) -> Tensor:
        return jnp.concatenate(tensors, axis=1)

    # --- parameters as one flat vector ---

    def vjp(self, function: LayerFunction, params: list[Tensor], X: Tensor, needs_X: bool, *others: Tensor) -> VJP:
        out, pull_all = _compiled_vjp(function)(X, params, *others)

        def pull(gradient: Tensor) -> tuple[Tensor | None, list[Tensor]]:
            in_X, in_params = _COMPILED_PULL(pull_all, gradient)
            return in_X if needs_X else None, in_params

        return out, pull

    def unflatten(self, layout: Layout, flat: Tensor) -> list[Tensor]:
        pieces = jnp.split(flat, np.cumsum(layout.pieces)[:-1])[::2]
        return [piece.reshape(shape) for piece, shape in zip(pieces, layout.shapes, strict=True)]

    def value_and_grad(
        self, loss_sum: LossSum, layout: Layout, flat: Tensor, X: Tensor, y: Tensor, on_ready: OnReady | None = None
    ) -> tuple[Tensor, Tensor]:
        if layers := getattr(loss_sum, "layers", ()):  # compiled one by one: a stage of the model has the same bits
            return self._layer_by_layer(layers, layout, flat, X, y)
        return _compiled_gradient(loss_sum, layout)(flat, X, y)

    def _layer_by_layer(
        self, layers: Sequence[Any], layout: Layout, flat: Tensor, X: Tensor, y: Tensor
    ) -> tuple[Tensor, Tensor]:
        params, pulls = iter(self.unflatten(layout, flat)), []
        for number, layer in enumerate(layers):
            X, pull = self.vjp(layer.function, [next(params) for _ in layer.params], X, number > 0)
            pulls.append(pull)
        loss, pull = self.vjp(cross_entropy, [], X, True, y)
        (gradient, _), found = pull(loss * 0 + 1), []
        for pull in reversed(pulls):
            gradient, in_params = pull(gradient)
            found.append(in_params)
        gradients = [one for of_layer in reversed(found) for one in of_layer]
        pieces = [
            piece
            for one, gap in zip(gradients, layout.pieces[1::2], strict=True)
            for piece in (one.reshape(-1), jnp.zeros(gap, one.dtype, device=one.sharding))
        ]
        return loss, jnp.concatenate(pieces)


@lru_cache(maxsize=64)  # by layer
def _compiled_vjp(function: LayerFunction) -> Any:
    def forward(X: Tensor, params: list[Tensor], *others: Tensor) -> Any:
        return jax.vjp(lambda X, params: function(BACKEND.ops, X, params, *others), X, params)

    return BACKEND.compile(forward)


@lru_cache(maxsize=16)  # by model; JAX compiles it once for each shape and device
def _compiled_gradient(loss_sum: LossSum, layout: Layout) -> Any:
    def loss_of_flat(flat: Tensor, X: Tensor, y: Tensor) -> Tensor:
        return loss_sum(BACKEND.unflatten(layout, flat), X, y)

    return BACKEND.compile(jax.value_and_grad(loss_of_flat))


@partial(jax.jit, static_argnames="num_samples")
def _take(data: Tensor, order: Tensor, start: int, num_samples: int) -> Tensor:
    samples = data[lax.dynamic_slice_in_dim(order, start, num_samples)]
    return samples / jnp.float32(255) if samples.dtype == jnp.uint8 else samples


def _jax_devices(kind: str) -> list[Any]:
    try:
        return list(jax.local_devices(backend="cpu" if kind == "cpu" else "gpu"))
    except RuntimeError:  # raised where there is none
        return []


def _jax_device(device: Device) -> Any:
    found = _jax_devices(device.kind)
    return found[device.number % len(found)]


BACKEND = JaxBackend()


def _pulled(pull: Any, gradient: Tensor) -> Any:
    return pull(gradient)


_COMPILED_PULL = BACKEND.compile(_pulled)
