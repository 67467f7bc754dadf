"""Lightning Fabric, with its best settings."""

import importlib
import importlib.util
from functools import partial

import torch

from lockstep.bench.contenders import Place
from lockstep.bench.contenders.ddp import BEST
from lockstep.bench.contenders.peer import Library, Peer
from lockstep.bench.work import Work

PRECISIONS = {"bf16": "bf16-mixed"}


def fabric(work: Work, place: Place) -> Peer:
    """Its strategy `ddp`; it finds the process group that there is, and starts no processes."""
    return Peer(work, place, partial(_library, work, place), best=True)


def _library(work: Work, place: Place, where: torch.device) -> Library:
    package = "lightning_fabric" if importlib.util.find_spec("lightning_fabric") else "lightning.fabric"
    strategies = importlib.import_module(f"{package}.strategies")
    made = importlib.import_module(package).Fabric(
        accelerator=where.type,
        devices=place.num_ranks,
        strategy=strategies.DDPStrategy(**BEST),
        precision=PRECISIONS.get(work.precision, "32-true"),
    )
    made.launch()
    return Library(wrap=made.setup, backward=made.backward)
