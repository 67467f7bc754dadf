"""PyTorch on CPUs and NVIDIA GPUs; the files beside it have its session, graph capture, gradients and kernels."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lockstep.backends.protocol import (
    VJP,
    Backend,
    Capabilities,
    Function,
    GraphCapture,
    LayerFunction,
    LossSum,
    OnReady,
    Ops,
    Pieces,
)
from lockstep.backends.torch.capture import TorchGraphCapture
from lockstep.backends.torch.compile import compiled
from lockstep.backends.torch.events import CudaEvents
from lockstep.backends.torch.gradient_pieces import GradientPieces
from lockstep.backends.torch.gradient_vector import GradientVector, gaps_of, one
from lockstep.backends.torch.kernel_choice import VARIABLES, kernel_choice, pin_kernels
from lockstep.backends.torch.kernels.lenet_gpu import ConvReluPool2dOnGPU, has_kernels
from lockstep.backends.torch.kernels.nvrtc import can_compile_kernels
from lockstep.backends.torch.large_vectors import memory_for_result
from lockstep.backends.torch.lenet_cpu import ConvReluPool2d
from lockstep.backends.torch.session import CUDA_IN_USE, cuda_survives_fork, deterministic_session, start_thread
from lockstep.backends.torch.strides import copy_with_strides
from lockstep.core.device import Device, Hardware
from lockstep.core.layout import Array, Layout
from lockstep.core.tracing import SpanName, Timed, span


class TorchOps(Ops):
    """The operations that models are written in."""

    def conv2d(self, X: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.conv2d(X.contiguous(), weight, bias)  # else the backward pass copies it again

    def relu(self, X: Tensor) -> Tensor:
        return F.relu(X)

    def avg_pool2d(self, X: Tensor, size: int) -> Tensor:
        return F.avg_pool2d(X, size)

    def conv_relu_pool2d(self, X: Tensor, weight: Tensor, bias: Tensor, size: int) -> Tensor:
        if torch.compiler.is_compiling():
            return super().conv_relu_pool2d(X, weight, bias, size)
        if X.device.type == "cpu":
            return ConvReluPool2d.apply(X, weight, bias, size)
        if X.is_cuda and has_kernels(X, weight, size):
            return ConvReluPool2dOnGPU.apply(X, weight, bias)
        return super().conv_relu_pool2d(X, weight, bias, size)

    def linear(self, X: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return torch.addmm(bias, X, weight)

    def cross_entropy_sum(self, logits: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(logits, y, reduction="sum")


class TorchBackend(Backend):
    """PyTorch on CPUs and NVIDIA GPUs."""

    name = "torch"
    min_version = (2, 9)
    capabilities = Capabilities(
        gpus=True,
        compiles="on request",
        sees_random_draws=True,
        writes_in_place=True,
        engines=("inprocess", "processes"),
    )
    ops = TorchOps()

    # --- the machine ---

    def num_gpus(self) -> int:
        return int(torch.cuda.device_count())

    def gpu(self, number: int) -> Hardware:
        found = torch.cuda.get_device_properties(number)
        return Hardware(Device(f"cuda:{number}"), found.name, found.total_memory, found.multi_processor_count)

    # --- a run ---

    lenet_kernels = ("cuda",)
    portable_variables = VARIABLES

    def session(self, devices: list[Device]) -> AbstractContextManager[None]:
        return deterministic_session(devices)

    def start_worker(self, device: Device) -> None:
        start_thread(torch_device(device), torch.cuda.Stream(device.number) if device.kind == "cuda" else None)

    def why_not_fork(self) -> str:
        return "" if cuda_survives_fork() else CUDA_IN_USE

    def pin_kernels(self) -> None:
        pin_kernels()

    def kernel_choice(self, device: Device) -> dict[str, str]:
        return kernel_choice(device)

    def random_state(self) -> bytes:
        states = [torch.get_rng_state()]
        if torch.cuda.is_initialized():
            states += torch.cuda.get_rng_state_all()
        return b"".join(state.numpy().tobytes() for state in states)

    def synchronize(self, device: Device) -> None:
        if device.kind == "cuda" and not is_capturing(torch_device(device)):
            torch.cuda.current_stream(device.number).synchronize()

    def peak_gpu_memory(self, device: Device, reset: bool = False) -> int | None:
        if reset:
            torch.cuda.reset_peak_memory_stats(device.number)
        # in use at the same time; CUDA graphs have memory reserved, which does not count as in use between replays
        return max(torch.cuda.max_memory_allocated(device.number), torch.cuda.memory_reserved(device.number))

    def graph_capture(self, devices: list[Device], rank: int = 0) -> GraphCapture | None:
        if devices[0].kind != "cuda" or len(set(devices)) > 1:  # a CUDA graph belongs to one GPU
            return None
        return TorchGraphCapture(torch_device(devices[0]), rank)

    def timed(self, device: Device) -> Timed | None:
        return CudaEvents(torch_device(device)) if device.kind == "cuda" else None

    def compile(self, function: Function) -> Function:
        return compiled(function)

    # --- tensors ---

    def from_numpy(self, array: Array, device: Device) -> Tensor:
        return torch.from_numpy(array).to(torch_device(device))

    def to_numpy(self, tensor: Tensor) -> Array:
        return tensor.detach().cpu().numpy()

    def copy_to(self, tensor: Tensor, device: Device) -> Tensor:
        # `.to(device)` on the same device is the tensor itself: two replicas would be one
        return tensor.detach().to(torch_device(device), copy=True)

    def device_of(self, tensor: Tensor) -> Device:
        return Device(f"{tensor.device.type}:{tensor.device.index or 0}")

    def concat(self, vectors: list[Tensor]) -> Tensor:
        return torch.cat(vectors)

    def take(self, data: Tensor, order: Tensor, start: int, stop: int) -> Tensor:
        samples = data.index_select(0, order[start:stop])
        return samples.float().div_(255) if samples.dtype == torch.uint8 else samples

    def assign(self, target: Tensor, source: Tensor) -> Tensor:
        with torch.no_grad():
            return target.copy_(source)

    def with_gradient(self, tensor: Tensor) -> Tensor:
        return tensor.requires_grad_()

    def zeros(self, num_entries: int, device: Device, like: Tensor | None = None) -> Tensor:
        dtype = torch.float32 if like is None else like.dtype
        return torch.zeros(num_entries, dtype=dtype, device=torch_device(device))

    def flat_view(self, tensor: Tensor) -> Tensor | None:
        return tensor.detach().view(-1) if tensor.is_contiguous() else None

    def add(self, left: Tensor, right: Tensor, out: Tensor | None = None) -> Tensor:
        return torch.add(left, right, out=memory_for_result(left) if out is None else out)

    def record_stream(self, value: Any) -> None:
        if isinstance(value, Tensor) and value.is_cuda and not is_capturing(value.device):  # a graph keeps its memory
            value.record_stream(torch.cuda.current_stream(value.device))

    def copy_activation(self, value: Any, device: Device) -> Any:
        if not isinstance(value, Tensor):
            return value
        return copy_with_strides(value, torch_device(device)).requires_grad_(value.requires_grad)

    def concat_units(self, tensors: list[Tensor]) -> Tensor:
        return torch.cat(tensors, 1)

    # --- parameters as one flat vector ---

    def vjp(self, function: LayerFunction, params: list[Tensor], X: Tensor, needs_X: bool, *others: Tensor) -> VJP:
        leaves = [param.detach().requires_grad_() for param in params]
        inputs = X.detach().requires_grad_() if needs_X else X
        with plain_errors(X.device.type):
            out = function(self.ops, inputs, leaves, *others)

        def pull(gradient: Tensor) -> tuple[Tensor | None, list[Tensor]]:
            with plain_errors(X.device.type):
                found = list(torch.autograd.grad(out, [inputs, *leaves] if needs_X else leaves, gradient))
            return (found[0], found[1:]) if needs_X else (None, found)

        return out.detach(), pull

    def flatten(self, layout: Layout, params: list[Tensor], device: Device) -> Tensor:
        flat = torch.zeros(layout.size, dtype=torch.float32, device=torch_device(device))
        for piece, param in zip(flat.split(layout.pieces)[::2], params, strict=True):
            piece.copy_(param.detach().reshape(-1))
        return flat

    def unflatten(self, layout: Layout, flat: Tensor) -> list[Tensor]:
        pieces = flat.split(layout.pieces)[::2]
        return [piece.view(shape) for piece, shape in zip(pieces, layout.shapes, strict=True)]

    def value_and_grad(
        self, loss_sum: LossSum, layout: Layout, flat: Tensor, X: Tensor, y: Tensor, on_ready: OnReady | None = None
    ) -> tuple[Tensor, Tensor | Pieces]:
        params = [param.requires_grad_() for param in self.unflatten(layout, flat.detach())]  # same memory
        with plain_errors(flat.device.type):
            with span(SpanName.FORWARD):
                loss = loss_sum(params, X, y)
            vector = GradientVector(layout, flat.device, on_ready) if on_ready else None
            if vector:
                for number, param in enumerate(params):
                    param.register_hook(partial(_put, vector, number))
            with span(SpanName.BACKWARD):
                seed = one(loss.dtype, loss.device) if loss.ndim == 0 else None
                gradients = torch.autograd.grad(loss, params, seed, allow_unused=True, materialize_grads=True)
        if vector:
            return loss.detach(), vector.complete()
        if flat.is_cuda and can_compile_kernels():  # those of all shards are added by one kernel each
            return loss.detach(), GradientPieces(layout, [own.reshape(-1) for own in gradients], flat.device)
        gaps = gaps_of(layout, flat.device)
        with_gaps = [piece for own, gap in zip(gradients, gaps, strict=True) for piece in (own.reshape(-1), gap)]
        return loss.detach(), torch.cat(with_gaps)


def _put(vector: GradientVector, number: int, gradient: Tensor) -> None:
    vector.put(number, gradient.reshape(-1))


@contextmanager
def plain_errors(kind: str) -> Iterator[None]:
    """Rewords the error of an operation without a deterministic mode; the user's line stays in the traceback."""
    try:
        yield
    except RuntimeError as problem:
        operation, found, _ = str(problem).partition(" does not have a deterministic implementation")
        if not found:
            raise
        raise RuntimeError(
            f"{operation} has no deterministic mode in PyTorch on {kind}, so the weights would differ from run to run. "
            "Use another operation instead."
        ).with_traceback(problem.__traceback__) from None


def is_capturing(device: torch.device) -> bool:
    """Whether kernel launches on this device are being captured as a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def torch_device(device: Device) -> torch.device:
    """PyTorch's device; all logical CPU devices are the same one."""
    return torch.device("cpu") if device.kind == "cpu" else torch.device("cuda", device.number)


BACKEND = TorchBackend()
