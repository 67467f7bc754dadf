"""Ranks that are processes: values go over Gloo or NCCL, and what is not a gradient goes as packed bytes."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lockstep.core.errors import PeerFailure, RunError
from lockstep.core.serialization import pack, unpack
from lockstep.core.tracing import WAIT, span
from lockstep.data.dataset import map_leaves
from lockstep.runtime.engine import Position, RankResult
from lockstep.runtime.process_group import ProcessGroup
from lockstep.runtime.transport import TransferGroup, check_same_layer


class ProcessTransport:
    """This process's connections to the other ranks. `busy` are the ranks that have shards."""

    def __init__(self, group: ProcessGroup, busy: Sequence[int], position: Position) -> None:
        self._group, self._busy, self._position = group, busy, position
        self._receives: dict[tuple[int, int], list[tuple[int, Tensor]]] = {}
        self._is_cancelled = False

    def shares_memory_with(self, rank: int) -> bool:
        return False

    def start(self, group: TransferGroup) -> None:
        receives = [(source, memory) for source, memory in group.receives if memory is not None]
        assert len(receives) == len(group.receives), "PyTorch writes in place"
        self._receives[group.bucket, group.round] = receives
        self._group.start(group.bucket, group.sends, receives)

    def finish(self, bucket: int, round_: int) -> list[Tensor]:
        receives = self._receives.pop((bucket, round_))
        self._group.finish(bucket, receives)
        return [memory for _, memory in receives]

    def all_reduce(self, own: Tensor) -> Tensor:
        return self._group.all_reduce(own)

    def all_gather(self, own: RankResult) -> Callable[[], list[RankResult]]:
        plain = own._replace(
            losses=[float(loss) for loss in own.losses],
            weights=[float(weight) for weight in own.weights],
            buffers=[map_leaves(buffers, tensor_to_plain) for buffers in own.buffers],
        )
        self._position.phase = "exchange"
        with span(WAIT):  # for the last rank to arrive
            packed = self._group.all_gather(pack({"call": self._position.call, "result": plain._asdict()}))
        unpacked = [unpack(one, is_strict=False) for one in packed]
        check_same_call(self._position.call, unpacked)
        found = [RankResult(**one["result"]) for one in unpacked]
        ranks = [one._replace(buffers=[self._tensors(buffers) for buffers in one.buffers]) for one in found]
        return lambda: ranks

    def all_gather_tensors(self, layer: str, own: list[Tensor]) -> list[Tensor]:
        if self._is_cancelled:
            raise PeerFailure("The other ranks take no part any more.")
        packed = pack(
            {"call": self._position.call, "layer": layer, "tensors": [tensor_to_plain(tensor) for tensor in own]}
        )
        phase, self._position.phase = self._position.phase, "exchange"
        found = [unpack(other, is_strict=False) for other in self._group.all_gather(packed, self._busy)]
        self._position.phase = phase
        check_same_call(self._position.call, found)
        check_same_layer(layer, [other["layer"] for other in found])
        return [tensor_from_plain(tensor, self._group.device) for other in found for tensor in other["tensors"]]

    def cancel(self) -> None:
        self._is_cancelled = True

    def _tensors(self, plain: dict[str, Any]) -> dict[str, Tensor]:
        return {name: tensor_from_plain(tensor, self._group.device) for name, tensor in plain.items()}


def check_same_call(own: str, found: list[Any]) -> None:
    """Refuses ranks whose programs have called something else: what they sent means something else."""
    for rank, other in enumerate(found):
        call = other.get("call") if isinstance(other, dict) else None
        if call != own:
            raise RunError(
                f"Another rank (number {rank} of those that take part) is in {call or 'another call'}, and this one in "
                f"{own}. All processes must make the same calls in the same order: step, evaluate, save, weights."
            )


def tensor_to_plain(tensor: Tensor) -> dict[str, Any]:
    """A tensor of any dtype as plain values and bytes."""
    octets = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape), "bytes": octets}


def tensor_from_plain(plain: dict[str, Any], device: torch.device) -> Tensor:
    """The tensor again, on `device`."""
    flat = torch.from_numpy(plain["bytes"].copy()).view(getattr(torch, plain["dtype"]))
    return flat.reshape(plain["shape"]).to(device)
