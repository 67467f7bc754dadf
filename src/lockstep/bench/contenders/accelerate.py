"""Hugging Face's Accelerate, with its best settings."""

import importlib
from functools import partial

import torch

from lockstep.bench.contenders import Place
from lockstep.bench.contenders.ddp import BEST
from lockstep.bench.contenders.peer import Library, Peer
from lockstep.bench.work import Work


def accelerate(work: Work, place: Place) -> Peer:
    """It finds the process group that there is."""
    return Peer(work, place, partial(_library, work), best=True)


def _library(work: Work, where: torch.device) -> Library:
    package = importlib.import_module("accelerate")
    accelerator = package.Accelerator(
        cpu=where.type == "cpu",
        mixed_precision="bf16" if work.precision == "bf16" else "no",
        kwargs_handlers=[package.DistributedDataParallelKwargs(**BEST)],
    )
    return Library(wrap=accelerator.prepare, backward=accelerator.backward)
