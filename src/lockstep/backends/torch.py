"""PyTorch: the only file that names it."""

import os
import platform
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor
from torch.nn import functional as F

from lockstep.backends.protocol import LossSum
from lockstep.device import Device, Hardware
from lockstep.errors import BackendError
from lockstep.layout import Array, Layout


class TorchOps:
    """The operations that models are written in."""

    def conv2d(self, X: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.conv2d(X, weight, bias)

    def relu(self, X: Tensor) -> Tensor:
        return F.relu(X)

    def avg_pool2d(self, X: Tensor, size: int) -> Tensor:
        return F.avg_pool2d(X, size)

    def flatten(self, X: Tensor) -> Tensor:
        return X.reshape(X.shape[0], -1)

    def linear(self, X: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return torch.addmm(bias, X, weight)

    def cross_entropy_sum(self, logits: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(logits, y, reduction="sum")

    def num_correct(self, logits: Tensor, y: Tensor) -> Tensor:
        return (logits.argmax(dim=1) == y).sum()


class TorchBackend:
    """PyTorch on CPUs and NVIDIA GPUs."""

    name = "torch"
    ops = TorchOps()

    # --- the machine ---

    def version(self) -> str:
        return str(torch.__version__)

    def hardware(self) -> list[Hardware]:
        gpus = []
        for number in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(number)
            gpus.append(
                Hardware(
                    Device(f"cuda:{number}"),
                    properties.name,
                    properties.total_memory,
                    properties.multi_processor_count,
                )
            )
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return gpus + [Hardware(Device("cpu:0"), _cpu_name(), memory, len(os.sched_getaffinity(0)))]

    # --- who runs, and how ---

    @contextmanager
    def session(self, devices: list[Device]) -> Iterator[None]:
        with ExitStack() as undo:
            undo.callback(torch.set_num_threads, torch.get_num_threads())
            undo.callback(
                torch.use_deterministic_algorithms,
                torch.are_deterministic_algorithms_enabled(),
                warn_only=torch.is_deterministic_algorithms_warn_only_enabled(),
            )
            undo.callback(_fill_new_memory, torch.utils.deterministic.fill_uninitialized_memory)
            torch.use_deterministic_algorithms(True)
            _fill_new_memory(False)  # a debugging aid that costs a pass over every new tensor
            if any(device.kind == "cuda" for device in devices):
                # cuBLAS reads this when it starts. Without it, deterministic mode refuses every matrix product,
                # and nobody but the process itself can set it for a notebook; a value already there stays.
                os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
                undo.enter_context(
                    torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True, allow_tf32=False)
                )
            yield

    def start_worker(self, device: Device) -> None:
        torch.set_num_threads(1)  # for this thread; `session` puts the process-wide default back
        if device.kind == "cuda":
            torch.cuda.set_device(device.number)
            torch.cuda.set_stream(torch.cuda.Stream(device.number))

    def synchronize(self, device: Device) -> None:
        if device.kind == "cuda":
            torch.cuda.current_stream(device.number).synchronize()

    # --- tensors ---

    def from_numpy(self, array: Array, device: Device) -> Tensor:
        return torch.from_numpy(array).to(_place(device))

    def to_numpy(self, tensor: Tensor) -> Array:
        array: Array = tensor.detach().cpu().numpy()
        return array

    def copy_to(self, tensor: Tensor, device: Device) -> Tensor:
        # `.to(device)` on the same device is the tensor itself: two replicas would be one
        return tensor.detach().to(_place(device), copy=True)

    def device_of(self, tensor: Tensor) -> Device:
        return Device(f"{tensor.device.type}:{tensor.device.index or 0}")

    def assign(self, target: Tensor, source: Tensor) -> Tensor:
        with torch.no_grad():
            return target.copy_(source)

    def with_gradient(self, tensor: Tensor) -> Tensor:
        return tensor.requires_grad_()

    def add(self, left: Tensor, right: Tensor) -> Tensor:
        return left + right

    def chunk(self, vector: Tensor, start: int, stop: int) -> Tensor:
        return vector[start:stop]

    def concat(self, vectors: list[Tensor]) -> Tensor:
        return torch.cat(vectors)

    def take(self, data: Tensor, order: Tensor, start: int, stop: int) -> Tensor:
        samples = data.index_select(0, order[start:stop])
        return samples.float().div_(255) if samples.dtype == torch.uint8 else samples

    # --- parameters as one flat vector ---

    def flatten(self, layout: Layout, params: list[Tensor], device: Device) -> Tensor:
        flat = torch.zeros(layout.size, device=_place(device))
        for piece, param in zip(flat.split(layout.pieces)[::2], params, strict=True):
            piece.copy_(param.detach().reshape(-1))
        return flat

    def unflatten(self, layout: Layout, flat: Tensor) -> list[Tensor]:
        pieces = flat.split(layout.pieces)[::2]
        return [piece.view(shape) for piece, shape in zip(pieces, layout.shapes, strict=True)]

    def value_and_grad(
        self, loss_sum: LossSum, layout: Layout, flat: Tensor, X: Tensor, y: Tensor
    ) -> tuple[Tensor, Tensor]:
        flat = flat.detach().requires_grad_()  # same memory, a graph of its own
        loss = loss_sum(self.unflatten(layout, flat), X, y)
        (gradient,) = torch.autograd.grad(loss, flat)  # backward of `split` is one concatenation
        return loss.detach(), gradient


def _place(device: Device) -> torch.device:
    return torch.device("cpu") if device.kind == "cpu" else torch.device("cuda", device.number)


def _fill_new_memory(on: bool) -> None:
    torch.utils.deterministic.fill_uninitialized_memory = on


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


if not hasattr(torch.utils.deterministic, "fill_uninitialized_memory"):
    raise BackendError(f"PyTorch {torch.__version__} is too old for Lockstep. Install 2.9 or newer.")

BACKEND = TorchBackend()
