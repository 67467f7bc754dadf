"""Paddle: the only file that imports it."""

from collections.abc import Iterator
from contextlib import contextmanager

import paddle
from paddle import Tensor
from paddle.nn import functional as F

from lockstep.backends.process_settings import environment_variable, one_at_a_time
from lockstep.backends.protocol import VJP, Backend, Capabilities, LayerFunction, LossSum, OnReady, Ops
from lockstep.core.device import Device, Hardware
from lockstep.core.layout import Array, Layout

# On GPUs: no autotuning, and no kernel that adds in the order of arrival.
_FIXED = {"FLAGS_cudnn_deterministic": True, "FLAGS_cudnn_exhaustive_search": False, "FLAGS_embedding_deterministic": 1}
_NUM_THREADS = "FLAGS_paddle_num_threads"


class PaddleOps(Ops):
    """The operations that models are written in."""

    def conv2d(self, X: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.conv2d(X, weight, bias)

    def relu(self, X: Tensor) -> Tensor:
        return F.relu(X)

    def avg_pool2d(self, X: Tensor, size: int) -> Tensor:
        return F.avg_pool2d(X, size)

    def linear(self, X: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.linear(X, weight, bias)

    def cross_entropy_sum(self, logits: Tensor, y: Tensor) -> Tensor:
        # not F.cross_entropy: on a CPU it clips the loss of a sample to 64
        return (logits.logsumexp(1) - logits.take_along_axis(y.unsqueeze(1), 1).squeeze(1)).sum()


class PaddleBackend(Backend):
    """Paddle on CPUs and NVIDIA GPUs."""

    name = "paddle"
    min_version = (3, 0)
    capabilities = Capabilities(gpus=True, compiles="no", sees_random_draws=True, writes_in_place=False)
    ops = PaddleOps()

    # --- the machine ---

    def num_gpus(self) -> int:
        return int(paddle.device.cuda.device_count())

    def gpu(self, number: int) -> Hardware:
        found = paddle.device.cuda.get_device_properties(number)
        return Hardware(Device(f"cuda:{number}"), found.name, found.total_memory, found.multi_processor_count)

    # --- a run ---

    @contextmanager
    def session(self, devices: list[Device]) -> Iterator[None]:
        fixed = _FIXED if devices[0].kind == "cuda" else {}  # a build without CUDA does not have these flags
        with one_at_a_time("Paddle"):
            flags, device = paddle.get_flags([*fixed, _NUM_THREADS]), paddle.get_device()
            try:
                paddle.set_flags(fixed)
                with environment_variable("NVIDIA_TF32_OVERRIDE", "0"):  # no TF32
                    yield
            finally:
                paddle.base.core.set_num_threads(flags.pop(_NUM_THREADS))
                paddle.set_flags(flags)
                paddle.set_device(device)

    def start_worker(self, device: Device) -> None:
        paddle.base.core.set_num_threads(1)
        paddle.set_device(_place_name(device))

    def random_state(self) -> bytes:
        before = paddle.get_rng_state()  # opaque, but it can be restored: the state is what would be drawn next
        drawn = paddle.randint(0, 2**31 - 1, [4], "int64").numpy().tobytes()
        paddle.set_rng_state(before)
        return bytes(drawn)

    def synchronize(self, device: Device) -> None:
        if device.kind == "cuda":
            paddle.device.synchronize(_place_name(device))

    def peak_gpu_memory(self, device: Device, reset: bool = False) -> int | None:
        if reset:
            paddle.device.cuda.reset_max_memory_allocated(device.number)
        return int(paddle.device.cuda.max_memory_allocated(device.number))

    # --- tensors ---

    def from_numpy(self, array: Array, device: Device) -> Tensor:
        return paddle.to_tensor(array, place=_place(device))

    def to_numpy(self, tensor: Tensor) -> Array:
        return tensor.numpy()

    def copy_to(self, tensor: Tensor, device: Device) -> Tensor:
        return tensor.detach()._copy_to(_place(device), True)  # `to` on the same device is the tensor itself

    def device_of(self, tensor: Tensor) -> Device:
        place = tensor.place
        return Device(f"cuda:{place.gpu_device_id()}" if place.is_gpu_place() else "cpu:0")

    def concat(self, vectors: list[Tensor]) -> Tensor:
        return paddle.concat(vectors)

    def take(self, data: Tensor, order: Tensor, start: int, stop: int) -> Tensor:
        samples = paddle.gather(data, order[start:stop])
        return samples.astype("float32") / 255 if samples.dtype == paddle.uint8 else samples

    def assign(self, target: Tensor, source: Tensor) -> Tensor:
        with paddle.no_grad():
            return paddle.assign(source, target)

    def with_gradient(self, tensor: Tensor) -> Tensor:
        tensor.stop_gradient = False
        return tensor

    def concat_units(self, tensors: list[Tensor]) -> Tensor:
        return paddle.concat(tensors, axis=1)

    # --- parameters as one flat vector ---

    def vjp(self, function: LayerFunction, params: list[Tensor], X: Tensor, needs_X: bool, *others: Tensor) -> VJP:
        leaves = [self.with_gradient(param.detach()) for param in params]
        inputs = self.with_gradient(X.detach()) if needs_X else X.detach()
        out = function(self.ops, inputs, leaves, *others)

        def pull(gradient: Tensor) -> tuple[Tensor | None, list[Tensor]]:
            out.backward(gradient)  # not `paddle.grad`, which crashes in two threads at once
            return inputs.grad if needs_X else None, [leaf.grad for leaf in leaves]

        return out.detach(), pull

    def unflatten(self, layout: Layout, flat: Tensor) -> list[Tensor]:  # one operation to differentiate, not many
        pieces = paddle.split(flat, layout.pieces)[::2]
        return [piece.reshape(shape) for piece, shape in zip(pieces, layout.shapes, strict=True)]

    def value_and_grad(
        self, loss_sum: LossSum, layout: Layout, flat: Tensor, X: Tensor, y: Tensor, on_ready: OnReady | None = None
    ) -> tuple[Tensor, Tensor]:
        flat = self.with_gradient(flat.detach())  # same memory, its own autograd graph
        loss = loss_sum(self.unflatten(layout, flat), X, y)
        loss.backward()  # not `paddle.grad`, which crashes in two threads at once
        if flat.grad is None:
            raise RuntimeError("The loss does not depend on the parameters. Use the ones passed to the model.")
        return loss.detach(), flat.grad


def _place_name(device: Device) -> str:
    return "cpu" if device.kind == "cpu" else f"gpu:{device.number}"


def _place(device: Device) -> paddle.base.core.Place:
    return paddle.CPUPlace() if device.kind == "cpu" else paddle.CUDAPlace(device.number)


BACKEND = PaddleBackend()
