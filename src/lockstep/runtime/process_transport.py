"""Ranks that are processes: values go over Gloo or NCCL, and what is not a gradient goes as packed bytes."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from lockstep.core.errors import PeerFailure, RunError
from lockstep.core.serialization import pack
from lockstep.core.tracing import WAIT, SpanName, span
from lockstep.data.dataset import map_leaves
from lockstep.replicas.replica import StageTensors
from lockstep.runtime.engine import Position, RankResult
from lockstep.runtime.process_group import ProcessGroup
from lockstep.runtime.stage_messages import (
    empty_for,
    tensor_from_plain,
    tensor_to_plain,
    tensors_from_plain,
    tensors_to_plain,
    unpacked_messages,
)
from lockstep.runtime.transport import GroupKey, TransferGroup, check_same_layer


class ProcessTransport:
    """This process's connections to the other ranks."""

    def __init__(self, group: ProcessGroup, position: Position, same_part: Sequence[int] | None = None) -> None:
        """`same_part` are the ranks that hold the same part of the model as this one; None: all."""
        self._group, self._position, self._same_part = group, position, same_part
        self._receives: dict[GroupKey, list[tuple[int, Tensor]]] = {}
        self._sources: dict[GroupKey, list[int]] = {}  # of activations, whose shapes only these know
        self._is_cancelled = False

    def shares_memory_with(self, rank: int) -> bool:
        return False

    def start(self, group: TransferGroup) -> None:
        if group.has_stage_tensors:
            self._sources[group.key] = [source for source, _ in group.receives]
            for target, cut in group.sends:
                plain, tensors = tensors_to_plain(cut)
                self._group.start_message(group.key, target, pack(plain), tensors)
            return
        receives = [(source, memory) for source, memory in group.receives if memory is not None]
        assert len(receives) == len(group.receives), "PyTorch writes in place"
        self._receives[group.key] = receives
        self._group.start(group.key, group.sends, receives, self._same_part)

    def finish(self, key: GroupKey) -> list[Tensor | StageTensors]:
        if key not in self._sources:
            receives = self._receives.pop(key)
            self._group.finish(key, receives)
            return [memory for _, memory in receives]
        found = []
        for source in self._sources.pop(key):
            with span(WAIT):
                (plain,) = unpacked_messages([self._group.receive_bytes(key, source)])
                tensors = [empty_for(meta, self._group.device) for meta in plain["tensors"]]
                self._group.receive_tensors(key, source, tensors)
            found.append(tensors_from_plain(plain, tensors))
        self._group.finish_message(key)
        return found

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
        unpacked = unpacked_messages(packed)
        check_same_call(self._position.call, unpacked)
        found = [RankResult(**one["result"]) for one in unpacked]
        ranks = [one._replace(buffers=[self._tensors(buffers) for buffers in one.buffers]) for one in found]
        return lambda: ranks

    def all_gather_tensors(self, ranks: Sequence[int], layer: str, own: list[Tensor]) -> list[Tensor]:
        if self._is_cancelled:
            raise PeerFailure("The other ranks take no part any more.")
        packed = pack(
            {"call": self._position.call, "layer": layer, "tensors": [tensor_to_plain(tensor) for tensor in own]}
        )
        phase, self._position.phase = self._position.phase, "exchange"
        with span(SpanName.EXCHANGE):
            found = unpacked_messages(self._group.all_gather(packed, ranks))
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
