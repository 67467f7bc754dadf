"""PyTorch. Besides this file and its neighbours, only `modules`, `bench` and wires of `engines` import it."""

import os
import random
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lockstep.backends.hardware import cpu
from lockstep.backends.protocol import Capabilities, Function, LossSum, Ops, Ready, Recorder
from lockstep.backends.process_settings import one_at_a_time
from lockstep.backends.torch_lenet_cpu import ConvReluPool2d, keep_freed_memory
from lockstep.backends.torch_gradient import Filling
from lockstep.core.device import Device, Hardware
from lockstep.core.layout import Array, Layout
from lockstep.core.tracing import span

MAX_COMPILED = 1000  # shapes that a function is compiled for


class TorchOps(Ops):
    """The operations that models are written in."""

    def conv2d(self, X: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.conv2d(X.contiguous(), weight, bias)  # else the backward pass would lay it out once more

    def relu(self, X: Tensor) -> Tensor:
        return F.relu(X)

    def avg_pool2d(self, X: Tensor, size: int) -> Tensor:
        return F.avg_pool2d(X, size)

    def conv_relu_pool2d(self, X: Tensor, weight: Tensor, bias: Tensor, size: int) -> Tensor:
        if X.device.type != "cpu" or torch.compiler.is_compiling():
            return super().conv_relu_pool2d(X, weight, bias, size)
        pooled: Tensor = ConvReluPool2d.apply(X, weight, bias, size)
        return pooled

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
    oldest = (2, 9)
    capabilities = Capabilities(
        gpus=True, capture="on request", sees_random_draws=True, engines=("inprocess", "processes")
    )
    ops = TorchOps()
    _lock = threading.Lock()

    # --- the machine ---

    def version(self) -> str:
        return str(torch.__version__)

    def num_gpus(self) -> int:
        return int(torch.cuda.device_count())

    def hardware(self) -> list[Hardware]:
        gpus = []
        for number in range(self.num_gpus()):
            properties = torch.cuda.get_device_properties(number)
            gpus.append(
                Hardware(
                    Device(f"cuda:{number}"),
                    properties.name,
                    properties.total_memory,
                    properties.multi_processor_count,
                )
            )
        return gpus + [cpu()]

    # --- who runs, and how ---

    @contextmanager
    def session(self, devices: list[Device]) -> Iterator[None]:
        with ExitStack() as undo:
            undo.enter_context(one_at_a_time(self._lock, "PyTorch"))
            undo.callback(torch.set_num_threads, torch.get_num_threads())
            undo.callback(torch.set_rng_state, torch.get_rng_state())  # the caller's own random numbers
            undo.callback(random.setstate, random.getstate())  # PyTorch draws from them when it loads parts of itself
            one_intra_op_thread()  # the calling thread too: what it sets, matrix products of all threads go by
            keep_freed_memory()
            if torch.cuda.is_initialized():
                undo.callback(torch.cuda.set_rng_state_all, torch.cuda.get_rng_state_all())
            undo.callback(
                torch.use_deterministic_algorithms,
                torch.are_deterministic_algorithms_enabled(),
                warn_only=torch.is_deterministic_algorithms_warn_only_enabled(),
            )
            torch.use_deterministic_algorithms(True)
            # a debugging aid of that mode, which costs a pass over every new tensor
            _set(undo, torch.utils.deterministic, "fill_uninitialized_memory", False)
            _set(undo, torch.backends.cudnn, "deterministic", True)
            _set(undo, torch.backends.cudnn, "benchmark", False)
            # the fused kernels for attention draw dropout from a counter of their own, or add in arrival order
            for kernel in ("flash", "mem_efficient", "cudnn"):
                enabled = getattr(torch.backends.cuda, f"{kernel}_sdp_enabled")()
                undo.callback(getattr(torch.backends.cuda, f"enable_{kernel}_sdp"), enabled)
                getattr(torch.backends.cuda, f"enable_{kernel}_sdp")(False)
            for operation in _with_precision():
                _set(undo, operation, "fp32_precision", "ieee")  # float32 means float32
            for number in {device.number for device in devices if device.kind == "cuda"}:
                # cuBLAS reads this when it starts. Without it, deterministic mode refuses every matrix product, and
                # nobody but the process itself can set it for a notebook; a value already there stays.
                os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
                torch.cuda.synchronize(number)  # what the caller gave us may still be on its way on another stream
            yield

    def start_worker(self, device: Device) -> None:
        start_thread(place_of(device), torch.cuda.Stream(device.number) if device.kind == "cuda" else None)

    def random_state(self) -> bytes:
        states = [torch.get_rng_state()]
        if torch.cuda.is_initialized():
            states += torch.cuda.get_rng_state_all()
        return b"".join(state.numpy().tobytes() for state in states)

    def synchronize(self, device: Device) -> None:
        if device.kind == "cuda":
            torch.cuda.current_stream(device.number).synchronize()

    def peak_gpu_memory(self, device: Device, reset: bool = False) -> int | None:
        if reset:
            torch.cuda.reset_peak_memory_stats(device.number)
        return torch.cuda.max_memory_allocated(device.number)

    def recorder(self, devices: list[Device]) -> Recorder | None:
        if devices[0].kind != "cuda" or len(set(devices)) > 1:  # a recording is one GPU's
            return None
        from lockstep.backends.torch_capture import TorchRecorder

        return TorchRecorder(place_of(devices[0]))

    def capture(self, function: Function) -> Function:
        return _compiled(function)

    # --- tensors ---

    def from_numpy(self, array: Array, device: Device) -> Tensor:
        return torch.from_numpy(array).to(place_of(device))

    def to_numpy(self, tensor: Tensor) -> Array:
        array: Array = tensor.detach().cpu().numpy()
        return array

    def copy_to(self, tensor: Tensor, device: Device) -> Tensor:
        # `.to(device)` on the same device is the tensor itself: two replicas would be one
        return tensor.detach().to(place_of(device), copy=True)

    def device_of(self, tensor: Tensor) -> Device:
        return Device(f"{tensor.device.type}:{tensor.device.index or 0}")

    def assign(self, target: Tensor, source: Tensor) -> Tensor:
        with torch.no_grad():
            return target.copy_(source)

    def with_gradient(self, tensor: Tensor) -> Tensor:
        return tensor.requires_grad_()

    def add(self, left: Tensor, right: Tensor) -> Tensor:
        return left + right

    def chunk(self, tensor: Tensor, start: int, stop: int) -> Tensor:
        return tensor[start:stop]

    def concat(self, vectors: list[Tensor]) -> Tensor:
        return torch.cat(vectors)

    def take(self, data: Tensor, order: Tensor, start: int, stop: int) -> Tensor:
        samples = data.index_select(0, order[start:stop])
        return samples.float().div_(255) if samples.dtype == torch.uint8 else samples

    # --- parameters as one flat vector ---

    def flatten(self, layout: Layout, params: list[Tensor], device: Device) -> Tensor:
        flat = torch.zeros(layout.size, dtype=torch.float32, device=place_of(device))
        for piece, param in zip(flat.split(layout.pieces)[::2], params, strict=True):
            piece.copy_(param.detach().reshape(-1))
        return flat

    def unflatten(self, layout: Layout, flat: Tensor) -> list[Tensor]:
        pieces = flat.split(layout.pieces)[::2]
        return [piece.view(shape) for piece, shape in zip(pieces, layout.shapes, strict=True)]

    def value_and_grad(
        self, loss_sum: LossSum, layout: Layout, flat: Tensor, X: Tensor, y: Tensor, ready: Ready | None = None
    ) -> tuple[Tensor, Tensor]:
        params = [param.requires_grad_() for param in self.unflatten(layout, flat.detach())]  # same memory
        with plain_errors(flat.device.type):
            with span("forward"):
                loss = loss_sum(params, X, y)
            filling = Filling(layout, flat.device, ready) if ready else None
            if filling:
                for number, param in enumerate(params):
                    param.register_hook(partial(_put, filling, number))
            with span("backward"):
                seed = _one(loss.dtype, loss.device) if loss.ndim == 0 else None
                gradients = torch.autograd.grad(loss, params, seed, allow_unused=True, materialize_grads=True)
        if filling:
            return loss.detach(), filling.complete()
        pieces = [gradient.reshape(-1) for gradient in gradients]
        with_gaps = [piece for pair in zip(pieces, _gaps(layout, flat.device), strict=True) for piece in pair]
        return loss.detach(), torch.cat(with_gaps)


def _put(filling: Filling, number: int, gradient: Tensor) -> None:
    filling.put(number, gradient.reshape(-1))


@cache
def _gaps(layout: Layout, place: torch.device) -> list[Tensor]:
    """The zeros after each parameter; none after the last."""
    return _for_all_streams([torch.zeros(size, device=place) for size in (*layout.pieces[1::2], 0)])


@cache
def _one(dtype: torch.dtype, place: torch.device) -> Tensor:
    """What backward starts with."""
    return _for_all_streams([torch.ones((), dtype=dtype, device=place)])[0]


def _for_all_streams(tensors: list[Tensor]) -> list[Tensor]:
    """The same tensors, filled by now."""
    if tensors[0].is_cuda:
        torch.cuda.current_stream(tensors[0].device).synchronize()
    return tensors


@contextmanager
def plain_errors(kind: str) -> Iterator[None]:
    """Says in a sentence that an operation has no deterministic mode; the user's line stays in the traceback."""
    try:
        yield
    except RuntimeError as problem:
        operation, found, _ = str(problem).partition(" does not have a deterministic implementation")
        if not found:
            raise
        raise RuntimeError(
            f"{operation} has no deterministic mode in PyTorch on {kind}, so the weights would differ from run to run. "
            f"Use another operation in its place."
        ).with_traceback(problem.__traceback__) from None


def one_intra_op_thread() -> None:
    """The calling thread computes alone from now on, whatever others set for themselves."""
    torch.get_num_threads()  # a thread takes over the number that was set last when it is first asked: now, not later
    torch.set_num_threads(1)


def start_thread(place: torch.device, stream: torch.cuda.Stream | None) -> None:
    """Makes the calling thread one that works for a device."""
    one_intra_op_thread()  # `session` puts the process-wide default back
    if stream is not None:
        torch.cuda.set_device(place)
        torch.cuda.set_stream(stream)


@cache  # one for all replicas
def _compiled(function: Any) -> Any:
    import torch._dynamo.config as limits  # takes its time

    # a function that was compiled for too many shapes would be run as it is, with other bits
    limits.recompile_limit = max(limits.recompile_limit, MAX_COMPILED)
    limits.accumulated_recompile_limit = max(limits.accumulated_recompile_limit, MAX_COMPILED)
    # no kernel is chosen by a stopwatch: another process would choose another, and get other bits
    return torch.compile(function, dynamic=False, options={"deterministic": True})


def use_tf32() -> None:
    """Products of float32 numbers on a GPU are rounded to TensorFloat-32 from now on, until the session ends."""
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    torch.backends.cudnn.conv.fp32_precision = "tf32"
    torch.backends.cudnn.rnn.fp32_precision = "tf32"


def is_recording(place: torch.device) -> bool:
    """Whether what is asked of this device now is recorded, and not done."""
    return place.type == "cuda" and torch.cuda.is_current_stream_capturing()


def place_of(device: Device) -> torch.device:
    """Where PyTorch has this device; all logical CPU devices are one to it."""
    return torch.device("cpu") if device.kind == "cpu" else torch.device("cuda", device.number)


def _set(undo: ExitStack, owner: Any, name: str, value: object) -> None:
    """Sets `owner.name` until `undo` closes."""
    undo.callback(setattr, owner, name, getattr(owner, name))
    setattr(owner, name, value)


def _with_precision() -> tuple[Any, ...]:
    """The operations whose precision for float32 can be set."""
    return (
        torch.backends.cuda.matmul,
        torch.backends.cudnn.conv,
        torch.backends.cudnn.rnn,
        torch.backends.mkldnn.matmul,
        torch.backends.mkldnn.conv,
    )


BACKEND = TorchBackend()
