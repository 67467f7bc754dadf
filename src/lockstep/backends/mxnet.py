"""MXNet: the only file that imports it."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress

from lockstep.backends.process_settings import environment_variable, one_at_a_time

with environment_variable("OMP_NUM_THREADS", "1"):  # the threads of an operation: read at import, and never again
    import mxnet

import numpy
from mxnet import autograd, np, npx
from mxnet.numpy import ndarray as Tensor
from threadpoolctl import threadpool_info

from lockstep.backends.hardware import cpu
from lockstep.backends.protocol import Capabilities, Function, LossSum, OnReady, Ops
from lockstep.core.device import Device, Hardware
from lockstep.core.errors import BackendError
from lockstep.core.layout import Array, Layout

# Arrays as in numpy, as in the text's programs. Without it an empty array is one of unknown shape, and fails. It is set
# for a thread: here for the one that loads this file, in `start_worker` for the others.
npx.set_np()

# On GPUs no algorithm that is picked by timing, none that adds in the order of arrival, and float32 means float32.
_FIXED = {"MXNET_CUDNN_AUTOTUNE_DEFAULT": "0", "MXNET_ENFORCE_DETERMINISM": "1", "NVIDIA_TF32_OVERRIDE": "0"}


class MxnetOps(Ops):
    """The operations that models are written in."""

    def conv2d(self, X: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return npx.convolution(X, weight, bias, kernel=weight.shape[2:], num_filter=weight.shape[0])

    def relu(self, X: Tensor) -> Tensor:
        return npx.relu(X)

    def avg_pool2d(self, X: Tensor, size: int) -> Tensor:
        return npx.pooling(X, pool_type="avg", kernel=(size, size), stride=(size, size))

    def flatten(self, X: Tensor) -> Tensor:
        return X.reshape(X.shape[0], -1)

    def linear(self, X: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return np.dot(X, weight) + bias

    def cross_entropy_sum(self, logits: Tensor, y: Tensor) -> Tensor:
        picked = npx.pick(npx.log_softmax(logits), y)
        with autograd.pause():  # `pick` takes a label that is too large for the last one: let the loss tell
            wrong = np.where(y < logits.shape[1], np.zeros_like(picked), np.full_like(picked, np.nan))
        return (wrong - picked).sum()

    def num_correct(self, logits: Tensor, y: Tensor) -> Tensor:
        return (logits.argmax(1).astype(y.dtype) == y).sum()


class MxnetBackend:
    """MXNet on CPUs and NVIDIA GPUs. A logical CPU device is a context of its own, and so has a worker of its own."""

    name = "mxnet"
    oldest = (1, 9)
    capabilities = Capabilities(gpus=True, compiles="no", sees_random_draws=False, writes_in_place=False)
    ops = MxnetOps()
    _lock = threading.Lock()

    def __init__(self) -> None:
        with ThreadPoolExecutor() as fresh:  # what MXNet's own threads get is what any new thread gets
            libraries = fresh.submit(threadpool_info).result()
        own = (library["num_threads"] for library in libraries if "libgomp.so" in library["filepath"])
        self._num_threads = max(own, default=1)

    # --- the machine ---

    def version(self) -> str:
        return str(mxnet.__version__)

    def num_gpus(self) -> int:
        return int(mxnet.context.num_gpus())

    def hardware(self) -> list[Hardware]:
        gpus = []
        for number in range(self.num_gpus()):
            _, num_bytes = mxnet.context.gpu_memory_info(number)
            gpus.append(Hardware(Device(f"cuda:{number}"), "GPU", num_bytes, 0))  # its name is not told
        return gpus + [cpu()]

    # --- who runs, and how ---

    @contextmanager
    def session(self, devices: list[Device]) -> Iterator[None]:
        if self._num_threads > 1:  # two devices would wait for each other in a matrix product, and never come back
            raise BackendError(
                f"MXNet, or another library with OpenMP, was loaded before Lockstep's backend, with "
                f"{self._num_threads} threads for an operation: several devices at once would hang like that. Set "
                f"OMP_NUM_THREADS=1 before Python starts, or call lockstep.devices(2, backend='mxnet') before mxnet "
                f"is imported."
            )
        with ExitStack() as undo:
            undo.enter_context(one_at_a_time(self._lock, "MXNet"))
            for name, value in _FIXED.items():
                undo.enter_context(environment_variable(name, value))
            try:
                yield
            finally:
                with suppress(mxnet.MXNetError):  # an error is kept, and would be raised again in the next run
                    npx.waitall()

    def start_worker(self, device: Device) -> None:
        npx.set_np()

    def random_state(self) -> bytes:
        return b""  # MXNet does not let anybody look

    def synchronize(self, device: Device) -> None:
        npx.waitall()

    def peak_gpu_memory(self, device: Device, reset: bool = False) -> int | None:
        return None  # MXNet does not keep count

    def graph_capture(self, devices: list[Device]) -> None:
        return None

    def compile(self, function: Function) -> Function:
        raise BackendError("Lockstep does not capture with MXNet. Call the function as it is, or use jax.")

    # --- tensors ---

    def from_numpy(self, array: Array, device: Device) -> Tensor:
        return np.array(array, dtype=array.dtype, ctx=_place(device))

    def to_numpy(self, tensor: Tensor) -> Array:
        array: Array = tensor.asnumpy()
        return array

    def copy_to(self, tensor: Tensor, device: Device) -> Tensor:
        return tensor.as_np_ndarray().copyto(_place(device))

    def device_of(self, tensor: Tensor) -> Device:
        return Device(f"{'cuda' if tensor.ctx.device_type == 'gpu' else 'cpu'}:{tensor.ctx.device_id}")

    def assign(self, target: Tensor, source: Tensor) -> Tensor:
        target[...] = source
        return target

    def with_gradient(self, tensor: Tensor) -> Tensor:
        tensor.attach_grad()
        return tensor

    def zeros(self, num_entries: int, device: Device, like: Tensor | None = None) -> Tensor:
        dtype = numpy.float32 if like is None else self.to_numpy(like).dtype
        return self.from_numpy(numpy.zeros(num_entries, dtype), device)

    def flat_view(self, tensor: Tensor) -> None:
        return None

    def add(self, left: Tensor, right: Tensor, out: Tensor | None = None) -> Tensor:
        return left + right

    def chunk(self, tensor: Tensor, start: int, stop: int) -> Tensor:
        return tensor[start:stop]

    def concat(self, vectors: list[Tensor]) -> Tensor:
        return np.concatenate(vectors)

    def take(self, data: Tensor, order: Tensor, start: int, stop: int) -> Tensor:
        samples = np.take(data, order[start:stop], axis=0)
        return samples.astype("float32") / 255 if samples.dtype == numpy.uint8 else samples

    # --- parameters as one flat vector ---

    def flatten(self, layout: Layout, params: list[Tensor], device: Device) -> Tensor:
        return self.from_numpy(layout.flatten([self.to_numpy(param) for param in params]), device)

    def unflatten(self, layout: Layout, flat: Tensor) -> list[Tensor]:
        starts = numpy.cumsum((0, *layout.pieces))[::2]
        sizes = layout.pieces[::2]
        places = zip(starts, sizes, layout.shapes, strict=True)
        return [flat[int(start) : int(start) + size].reshape(shape) for start, size, shape in places]

    def value_and_grad(
        self, loss_sum: LossSum, layout: Layout, flat: Tensor, X: Tensor, y: Tensor, on_ready: OnReady | None = None
    ) -> tuple[Tensor, Tensor]:
        params = [self.with_gradient(param) for param in self.unflatten(layout, flat)]
        with autograd.record():
            loss = loss_sum(params, X, y)
        loss.backward()
        pieces = []
        for param, gap in zip(params, (*layout.pieces[1::2], 0), strict=True):
            pieces += [param.grad.reshape(-1), np.zeros(gap, ctx=flat.ctx)]
        return loss.detach(), self.concat(pieces)


def _place(device: Device) -> mxnet.Context:
    return mxnet.cpu(device.number) if device.kind == "cpu" else mxnet.gpu(device.number)


BACKEND = MxnetBackend()
