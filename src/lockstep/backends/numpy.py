"""numpy: the oracle. Forward and backward of every operation by hand, slow and plain, to check the frameworks against.

An operation on a traced value stores, for each input, the function that turns the gradient of its output into the
gradient of that input; `value_and_grad` goes back over the tape, from the loss to the parameters. Only the operations
below can be differentiated, so a model of your own is written with them. Copy this file to add a framework.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from threadpoolctl import threadpool_limits

from lockstep.backends.process_settings import one_at_a_time
from lockstep.backends.protocol import VJP, Backend, Capabilities, LayerFunction, LossSum, OnReady, Ops
from lockstep.core.device import Device
from lockstep.core.layout import Array, Layout

Pull = Callable[[Array], Array]  # gradient of the output -> gradient of one input


class Traced:
    """A value that depends on the parameters: the inputs it was computed from, and its gradient once it is known."""

    def __init__(self, value: Array, tape: "list[Traced]", inputs: "tuple[tuple[Traced, Pull], ...]" = ()) -> None:
        self.value, self.tape, self.inputs = value, tape, inputs
        self.gradient: Array = np.zeros_like(value)
        tape.append(self)

    def _refuse(self, *_: Any, **__: Any) -> Any:
        """For numpy's own operators and methods, which have no backward here."""
        raise TypeError(
            "numpy cannot differentiate its own operators and methods. Write the model with the operations in "
            "lockstep.backends.backend_of(X).ops (conv2d, linear, relu, ...), or use another framework."
        )

    __array_ufunc__ = __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __matmul__ = __rmatmul__ = _refuse
    __truediv__ = __rtruediv__ = __pow__ = __neg__ = __getitem__ = __len__ = __getattr__ = _refuse


def _value(x: Any) -> Array:
    array: Array = x.value if isinstance(x, Traced) else x
    return array


def _result(value: Array, *inputs: tuple[Any, Pull]) -> Any:
    """Traced if an input is; a value that depends on no parameter needs no gradient."""
    traced = tuple((x, pull) for x, pull in inputs if isinstance(x, Traced))
    return Traced(value, traced[0][0].tape, traced) if traced else value


class NumpyOps(Ops):
    """The operations that models are written in, each with its derivative."""

    def conv2d(self, X: Any, weight: Any, bias: Any) -> Any:
        x, w = _value(X), _value(weight)
        rows, columns = w.shape[2:]
        windows = sliding_window_view(x, (rows, columns), axis=(2, 3))  # sample, channel, position (2), window (2)
        out = np.tensordot(windows, w, axes=([1, 4, 5], [1, 2, 3])).transpose(0, 3, 1, 2)

        def pull_x(g: Array) -> Array:
            """A full convolution: the kernel rotated by 180 degrees, over the padded gradient."""
            padded = np.pad(g, ((0, 0), (0, 0), (rows - 1, rows - 1), (columns - 1, columns - 1)))
            around = sliding_window_view(padded, (rows, columns), axis=(2, 3))
            return np.tensordot(around, w[:, :, ::-1, ::-1], axes=([1, 4, 5], [0, 2, 3])).transpose(0, 3, 1, 2)

        return _result(
            out + _value(bias)[:, None, None],
            (X, pull_x),
            (weight, lambda g: np.tensordot(g, windows, axes=([0, 2, 3], [0, 2, 3]))),
            (bias, lambda g: g.sum((0, 2, 3))),
        )

    def relu(self, X: Any) -> Any:
        x = _value(X)
        return _result(np.maximum(x, 0), (X, lambda g: g * (x > 0)))

    def avg_pool2d(self, X: Any, size: int) -> Any:
        x = _value(X)
        samples, channels, rows, columns = x.shape[0], x.shape[1], x.shape[2] // size, x.shape[3] // size
        used = x[:, :, : rows * size, : columns * size]  # the edge that fills no window is dropped

        def pull(g: Array) -> Array:
            gradient = np.zeros_like(x)
            gradient[:, :, : rows * size, : columns * size] = g.repeat(size, axis=2).repeat(size, axis=3) / size**2
            return gradient

        return _result(used.reshape(samples, channels, rows, size, columns, size).mean((3, 5)), (X, pull))

    def flatten(self, X: Any) -> Any:
        x = _value(X)
        return _result(x.reshape(len(x), -1), (X, lambda g: g.reshape(x.shape)))

    def linear(self, X: Any, weight: Any, bias: Any) -> Any:
        x, w = _value(X), _value(weight)
        out = x @ w + _value(bias)
        return _result(out, (X, lambda g: g @ w.T), (weight, lambda g: x.T @ g), (bias, lambda g: g.sum(0)))

    def cross_entropy_sum(self, logits: Any, y: Array) -> Any:
        shifted = _value(logits) - _value(logits).max(1, keepdims=True)
        log_p = shifted - np.log(np.exp(shifted).sum(1, keepdims=True))
        right = np.arange(len(y)), y

        def pull(g: Array) -> Array:
            gradient: Array = np.exp(log_p)
            gradient[right] -= 1
            return np.multiply(g, gradient)

        return _result(-log_p[right].sum(), (logits, pull))

    def num_correct(self, logits: Any, y: Array) -> Any:
        return (_value(logits).argmax(1) == y).sum()


class NumpyBackend(Backend):
    """numpy on the CPU."""

    name = "numpy"
    min_version = (1, 23)
    capabilities = Capabilities(gpus=False, compiles="no", sees_random_draws=True, writes_in_place=True)
    ops = NumpyOps()

    # --- a run ---

    @contextmanager
    def session(self, devices: list[Device]) -> Iterator[None]:
        with one_at_a_time("numpy"), threadpool_limits(1):  # matrix products round by number of threads
            yield

    def start_worker(self, device: Device) -> None:
        np.seterr(all="ignore")  # of this thread; the run itself stops at a loss that is not finite

    def random_state(self) -> bytes:
        _, numbers, *rest = np.random.get_state(legacy=True)
        return np.asarray(numbers).tobytes() + repr(rest).encode()

    # --- tensors ---

    def from_numpy(self, array: Array, device: Device) -> Array:
        return array

    def to_numpy(self, tensor: Array) -> Array:
        return tensor

    def copy_to(self, tensor: Array, device: Device) -> Array:
        return np.array(tensor)

    def device_of(self, tensor: Array) -> Device:
        return Device("cpu:0")

    def concat(self, vectors: list[Array]) -> Array:
        return np.concatenate(vectors)

    def take(self, data: Array, order: Array, start: int, stop: int) -> Array:
        samples: Array = data[order[start:stop]]
        return samples / np.float32(255) if samples.dtype == np.uint8 else samples

    def assign(self, target: Array, source: Array) -> Array:
        target[...] = source
        return target

    def flat_view(self, tensor: Array) -> Array | None:
        return tensor.reshape(-1) if tensor.flags.c_contiguous and tensor.flags.writeable else None

    def add(self, left: Array, right: Array, out: Array | None = None) -> Array:
        return np.add(left, right, out=out)

    def concat_units(self, tensors: list[Array]) -> Array:
        return np.concatenate(tensors, axis=1)

    # --- parameters as one flat vector ---

    def vjp(self, function: LayerFunction, params: list[Array], X: Array, needs_X: bool, *others: Array) -> VJP:
        tape: list[Traced] = []
        traced = [Traced(param, tape) for param in params]
        inputs = Traced(X, tape) if needs_X else X
        out: Traced = function(self.ops, inputs, traced, *others)

        def pull(gradient: Array) -> tuple[Array | None, list[Array]]:
            out.gradient = gradient
            _go_back(tape)
            return inputs.gradient if isinstance(inputs, Traced) else None, [param.gradient for param in traced]

        return out.value, pull

    def value_and_grad(
        self, loss_sum: LossSum, layout: Layout, flat: Array, X: Array, y: Array, on_ready: OnReady | None = None
    ) -> tuple[Array, Array]:
        tape: list[Traced] = []
        params = [Traced(param, tape) for param in layout.unflatten(flat)]
        loss: Traced = loss_sum(params, X, y)
        loss.gradient = np.ones_like(loss.value)
        _go_back(tape)
        return loss.value, layout.flatten([param.gradient for param in params])


def _go_back(tape: list[Traced]) -> None:
    for traced in reversed(tape):
        for source, pull in traced.inputs:
            source.gradient = source.gradient + pull(traced.gradient)


BACKEND = NumpyBackend()
