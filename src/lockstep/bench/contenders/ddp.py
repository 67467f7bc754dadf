"""PyTorch's DistributedDataParallel: as people write it, and with its best settings."""

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lockstep.bench.contenders import Place
from lockstep.bench.contenders.peer import Library, Peer
from lockstep.bench.work import Work

BEST = {"gradient_as_bucket_view": True, "static_graph": True, "broadcast_buffers": False}


def ddp(work: Work, place: Place) -> Peer:
    """With a loader, and PyTorch's own settings."""
    return Peer(work, place, partial(_library, work, {}, False), best=False)


def ddp_best(work: Work, place: Place) -> Peer:
    """With the data on the device, and all that makes it faster."""
    return Peer(work, place, partial(_library, work, BEST, False), best=True)


def ddp_compiled(work: Work, place: Place) -> Peer:
    """The same, compiled."""
    return Peer(work, place, partial(_library, work, BEST, True), best=True)


def _library(work: Work, settings: dict[str, bool], is_compiled: bool, where: torch.device) -> Library:
    def wrap(module: nn.Module, optimizer: Any) -> tuple[Any, Any]:
        wrapped = DistributedDataParallel(module, device_ids=[where] if where.type == "cuda" else None, **settings)
        return torch.compile(wrapped) if is_compiled else wrapped, optimizer

    return Library(wrap, autocast=lambda: torch.autocast(where.type, torch.bfloat16, enabled=work.precision == "bf16"))
