"""Libraries with a process for each device: DistributedDataParallel, Lightning Fabric and Accelerate, on one loop."""

import contextlib
import importlib
import importlib.util
import os
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from itertools import chain, product
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lockstep.backends.hardware import cpu
from lockstep.backends.torch import torch_device
from lockstep.bench.contenders import ContenderRank
from lockstep.bench.contenders.batches import from_loader, from_memory, resident_bytes
from lockstep.bench.contenders.models import WithLoss, module_for, peak_gpu_bytes, reset_gpu_peaks, set_precision
from lockstep.bench.workload import Workload, load_samples
from lockstep.core.device import Device
from lockstep.partition.batch import even_ranges
from lockstep.runtime.store import LOOPBACK, join_store, prefix_store

TIMEOUT_SECONDS = 600.0  # of the process group
NUM_WORKERS = 2  # of each rank's DataLoader
OPTIMIZERS = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}
BEST = {"gradient_as_bucket_view": True, "static_graph": True, "broadcast_buffers": False}


class Library(NamedTuple):
    """What a library does its own way."""

    wrap: Callable[[nn.Module, Any], tuple[Any, Any]]  # (module, optimizer) -> those to use in the loop
    backward: Callable[[Tensor], Any] = Tensor.backward
    autocast: Callable[[], Any] = contextlib.nullcontext  # around the forward pass, if the library has none itself


class Tuning(NamedTuple):
    """Settings that are faster on some machines and slower on others: all are tried, the fastest is used."""

    num_threads: int | None = None  # None: PyTorch's default
    channels_last: bool = False

    def __str__(self) -> str:
        threads = f"{self.num_threads} thread{'s' * (self.num_threads != 1)} a process" if self.num_threads else ""
        return ", ".join(filter(None, [threads, "channels-last" if self.channels_last else ""]))


class DistributedTraining:
    """A rank that trains on its part of every batch: with the `best` settings, or with the defaults."""

    def __init__(
        self, workload: Workload, rank: ContenderRank, device: torch.device, library: Library, best: bool = True
    ) -> None:
        self._workload, self._device, self._library, self._best = workload, device, library, best
        self._part = even_ranges(workload.batch_size, rank.num_ranks)[rank.rank]
        self._data = load_samples(workload)
        set_precision(workload.precision)
        torch.backends.cudnn.benchmark = best
        threads: list[int | None] = [None]
        if best and not workload.is_on_gpu:
            threads = [*sorted({1, max(cpu().num_cores // rank.num_ranks, 1)})]
        layouts = [True, False] if best and self._data.X_train.ndim == 4 else [False]
        self._tunings = [Tuning(*both) for both in product(threads, layouts)]
        self._num_sample_bytes = resident_bytes(self._data) if best else 0
        self._gpus = [device.index] if device.type == "cuda" else []
        self._build(self._tunings[0])

    def prepare(self) -> dict[str, Any]:
        """Compiles."""
        if self._workload.is_on_gpu:
            self.run(1)
        return {}

    def _build(self, tuning: Tuning) -> None:
        """Starts over, with these settings."""
        workload, device = self._workload, self._device
        module = WithLoss(module_for(workload, self._data)).to(device)
        if tuning.channels_last:
            module = module.to(memory_format=torch.channels_last)
        fused = {"fused": True} if self._best else {}
        optimizer = OPTIMIZERS[workload.optimizer](module.parameters(), lr=workload.learning_rate, **fused)
        self._module, self._optimizer = self._library.wrap(module, optimizer)
        if self._best:
            self._batches = from_memory(workload, self._data, self._part, device, tuning.channels_last)
        else:
            options = {"num_workers": NUM_WORKERS, "persistent_workers": True, "pin_memory": workload.is_on_gpu}
            self._batches = from_loader(workload, self._data, self._part, **options)
        if tuning.num_threads is not None:
            torch.set_num_threads(tuning.num_threads)

    def warm_up(self, num_steps: int) -> dict[str, Any]:
        tuning = self._tunings[0]
        if num_steps and len(self._tunings) > 1:
            seconds = []
            for tuning in self._tunings:
                self._build(tuning)
                self.run(num_steps)
                seconds.append(self.run(num_steps)["seconds"])
            fastest = torch.tensor(seconds.index(min(seconds)), device=self._device)
            dist.broadcast(fastest, 0)  # rank 0 decides for all
            tuning = self._tunings[int(fastest)]
            self._build(tuning)
        if num_steps:
            reset_gpu_peaks(self._gpus)
            self.run(num_steps)
        return {"chosen": str(tuning)}

    def run(self, num_steps: int) -> dict[str, Any]:
        batches = self._batches(num_steps)
        first = next(batches)  # the DataLoader has started by now
        barrier(self._device)
        began = time.perf_counter()
        for X, y in chain([first], batches):
            X, y = X.to(self._device, non_blocking=True), y.to(self._device, non_blocking=True)
            self._optimizer.zero_grad()
            with self._library.autocast():
                loss = self._module(X, y) / len(X)
            self._library.backward(loss)
            self._optimizer.step()
        barrier(self._device)
        seconds = time.perf_counter() - began
        num_bytes = peak_gpu_bytes(self._gpus, self._num_sample_bytes)
        return {"seconds": seconds, "loss": float(loss.detach()), "peak_bytes": num_bytes}

    def close(self) -> None:
        """Exits at once: there is nothing to save, and libraries take seconds to shut down."""
        barrier(self._device)
        os._exit(0)


def ddp(workload: Workload, rank: ContenderRank, best: bool = False, compiled: bool = False) -> DistributedTraining:
    """PyTorch's: with a DataLoader and defaults, or with the data on the device and all that makes it faster."""
    device = init_process_group(rank)

    def wrap(module: nn.Module, optimizer: Any) -> tuple[Any, Any]:
        gpu = [device] if device.type == "cuda" else None
        wrapped = DistributedDataParallel(module, device_ids=gpu, **(BEST if best else {}))
        return torch.compile(wrapped) if compiled else wrapped, optimizer

    autocast = partial(torch.autocast, device.type, torch.bfloat16, enabled=workload.precision == "bf16")
    return DistributedTraining(workload, rank, device, Library(wrap, autocast=autocast), best)


ddp_best, ddp_compiled = partial(ddp, best=True), partial(ddp, best=True, compiled=True)


def fabric(workload: Workload, rank: ContenderRank) -> DistributedTraining:
    """Lightning Fabric with its strategy `ddp`. It uses the process group that exists, and starts no processes."""
    device = init_process_group(rank)
    package = "lightning_fabric" if importlib.util.find_spec("lightning_fabric") else "lightning.fabric"
    fabric = importlib.import_module(package).Fabric(
        accelerator=device.type,
        devices=rank.num_ranks,
        strategy=importlib.import_module(f"{package}.strategies").DDPStrategy(**BEST),
        precision="bf16-mixed" if workload.precision == "bf16" else "32-true",
    )
    fabric.launch()
    return DistributedTraining(workload, rank, device, Library(fabric.setup, fabric.backward))


def accelerate(workload: Workload, rank: ContenderRank) -> DistributedTraining:
    """Hugging Face's. It uses the process group that exists."""
    device, package = init_process_group(rank), importlib.import_module("accelerate")
    accelerator = package.Accelerator(
        cpu=device.type == "cpu",
        mixed_precision="bf16" if workload.precision == "bf16" else "no",
        kwargs_handlers=[package.DistributedDataParallelKwargs(**BEST)],
    )
    return DistributedTraining(workload, rank, device, Library(accelerator.prepare, accelerator.backward))


def init_process_group(rank: ContenderRank) -> torch.device:
    """Connects the ranks, on this machine only; this rank's device."""
    device = torch_device(Device(rank.device))
    is_gpu = device.type == "cuda"
    if is_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if is_gpu else "gloo",
        store=prefix_store(rank.store_prefix, join_store(LOOPBACK, rank.store_port, TIMEOUT_SECONDS)),
        rank=rank.rank,
        world_size=rank.num_ranks,
        timeout=timedelta(seconds=TIMEOUT_SECONDS),
        device_id=device if is_gpu else None,
    )
    return device


def barrier(device: torch.device) -> None:
    """Returns when all ranks have called it and their GPUs are idle."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    dist.barrier()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
