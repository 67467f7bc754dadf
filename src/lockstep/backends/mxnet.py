"""MXNet: the only file that imports it."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress

from lockstep.backends.process_settings import environment_variable, one_at_a_time

with environment_variable("OMP_NUM_THREADS", "1"):  # intra-op threads: read at import only
    import mxnet

from mxnet import autograd, np, npx
from mxnet.numpy import ndarray as Tensor
from threadpoolctl import threadpool_info

from lockstep.backends.protocol import VJP, Backend, Capabilities, LayerFunction, LossSum, OnReady, Ops
from lockstep.core.device import Device, Hardware
from lockstep.core.errors import BackendError
from lockstep.core.layout import Array, Layout

# numpy semantics, as in the text's programs: without them an empty array has an unknown shape, and fails. They are set
# for one thread: here for the one that loads this file, in `start_worker` for the others.
npx.set_np()

# On GPUs: no autotuning, no kernel that adds in the order of arrival, no TF32.
_FIXED = {"MXNET_CUDNN_AUTOTUNE_DEFAULT": "0", "MXNET_ENFORCE_DETERMINISM": "1", "NVIDIA_TF32_OVERRIDE": "0"}


class MxnetOps(Ops):
    """The operations that models are written in."""

    def conv2d(self, X: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return npx.convolution(X, weight, bias, kernel=weight.shape[2:], num_filter=weight.shape[0])

    def relu(self, X: Tensor) -> Tensor:
        return npx.relu(X)

    def avg_pool2d(self, X: Tensor, size: int) -> Tensor:
        return npx.pooling(X, pool_type="avg", kernel=(size, size), stride=(size, size))

    def linear(self, X: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return np.dot(X, weight) + bias

    def cross_entropy_sum(self, logits: Tensor, y: Tensor) -> Tensor:
        picked = npx.pick(npx.log_softmax(logits), y)
        with autograd.pause():  # `pick` clips a label that is too large to the last class: make the loss nan instead
            wrong = np.where(y < logits.shape[1], np.zeros_like(picked), np.full_like(picked, np.nan))
        return (wrong - picked).sum()

    def num_correct(self, logits: Tensor, y: Tensor) -> Tensor:
        return (logits.argmax(1).astype(y.dtype) == y).sum()


class MxnetBackend(Backend):
    """MXNet on CPUs and NVIDIA GPUs. A logical CPU device is a context, with its own worker thread in MXNet."""

    name = "mxnet"
    min_version = (1, 9)
    capabilities = Capabilities(gpus=True, compiles="no", sees_random_draws=False, writes_in_place=False)
    ops = MxnetOps()

    def __init__(self) -> None:
        with ThreadPoolExecutor() as fresh:  # MXNet's own threads get what any new thread gets
            libraries = fresh.submit(threadpool_info).result()
        own = (library["num_threads"] for library in libraries if "libgomp.so" in library["filepath"])
        self._num_threads = max(own, default=1)

    # --- the machine ---

    def num_gpus(self) -> int:
        return int(mxnet.context.num_gpus())

    def gpu(self, number: int) -> Hardware:
        _, num_bytes = mxnet.context.gpu_memory_info(number)
        return Hardware(Device(f"cuda:{number}"), "GPU", num_bytes, 0)  # MXNet has neither its name nor its cores

    # --- a run ---

    @contextmanager
    def session(self, devices: list[Device]) -> Iterator[None]:
        if self._num_threads > 1:  # two devices would deadlock in a matrix product
            raise BackendError(
                f"MXNet, or another library with OpenMP, was loaded before Lockstep's backend with {self._num_threads} "
                f"intra-op threads: two devices would deadlock. Set OMP_NUM_THREADS=1 before Python starts, or call "
                f"lockstep.devices(2, backend='mxnet') before mxnet is imported."
            )
        with ExitStack() as undo:
            undo.enter_context(one_at_a_time("MXNet"))
            for name, value in _FIXED.items():
                undo.enter_context(environment_variable(name, value))
            try:
                yield
            finally:
                with suppress(mxnet.MXNetError):  # MXNet keeps an error, and would raise it again in the next run
                    npx.waitall()

    def start_worker(self, device: Device) -> None:
        npx.set_np()

    def synchronize(self, device: Device) -> None:
        npx.waitall()

    # --- tensors ---

    def from_numpy(self, array: Array, device: Device) -> Tensor:
        return np.array(array, dtype=array.dtype, ctx=_context(device))

    def to_numpy(self, tensor: Tensor) -> Array:
        return tensor.asnumpy()

    def copy_to(self, tensor: Tensor, device: Device) -> Tensor:
        return tensor.as_np_ndarray().copyto(_context(device))

    def device_of(self, tensor: Tensor) -> Device:
        return Device(f"{'cuda' if tensor.ctx.device_type == 'gpu' else 'cpu'}:{tensor.ctx.device_id}")

    def concat(self, vectors: list[Tensor]) -> Tensor:
        return np.concatenate(vectors)

    def take(self, data: Tensor, order: Tensor, start: int, stop: int) -> Tensor:
        samples = np.take(data, order[start:stop], axis=0)
        return samples.astype("float32") / 255 if samples.dtype == np.uint8 else samples

    def assign(self, target: Tensor, source: Tensor) -> Tensor:
        target[...] = source
        return target

    def with_gradient(self, tensor: Tensor) -> Tensor:
        tensor.attach_grad()
        return tensor

    def concat_units(self, tensors: list[Tensor]) -> Tensor:
        return np.concatenate(tensors, axis=1)

    # --- parameters as one flat vector ---

    def vjp(self, function: LayerFunction, params: list[Tensor], X: Tensor, needs_X: bool, *others: Tensor) -> VJP:
        leaves = [self.with_gradient(param.detach()) for param in params]
        inputs = self.with_gradient(X.detach()) if needs_X else X
        with autograd.record():
            out = function(self.ops, inputs, leaves, *others)

        def pull(gradient: Tensor) -> tuple[Tensor | None, list[Tensor]]:
            out.backward(gradient)
            return inputs.grad if needs_X else None, [leaf.grad for leaf in leaves]

        return out.detach(), pull

    def value_and_grad(
        self, loss_sum: LossSum, layout: Layout, flat: Tensor, X: Tensor, y: Tensor, on_ready: OnReady | None = None
    ) -> tuple[Tensor, Tensor]:
        params = [self.with_gradient(param) for param in self.unflatten(layout, flat)]
        with autograd.record():
            loss = loss_sum(params, X, y)
        loss.backward()
        pieces = []
        for param, gap in zip(params, layout.pieces[1::2], strict=True):
            pieces += [param.grad.reshape(-1), np.zeros(gap, ctx=flat.ctx)]
        return loss.detach(), self.concat(pieces)


def _context(device: Device) -> mxnet.Context:
    return mxnet.cpu(device.number) if device.kind == "cpu" else mxnet.gpu(device.number)


BACKEND = MxnetBackend()
