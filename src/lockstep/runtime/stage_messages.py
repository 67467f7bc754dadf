"""What goes from stage to stage, as a message: plain values, and tensors with the strides that they had.

Kernels may give other bits for other strides, so a tensor arrives with those of the tensor that left: channels-last
images as such, an expanded tensor as expanded.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lockstep.backends.torch.strides import dense, with_strides
from lockstep.core.errors import PeerFailure
from lockstep.core.serialization import CorruptData, unpack
from lockstep.replicas.replica import StageTensors


def tensors_to_plain(cut: StageTensors) -> tuple[dict[str, Any], list[Tensor]]:
    """What describes a cut, and its tensors, each without gaps in memory."""
    values, metas, tensors = list[Any](), list[dict[str, Any]](), list[Tensor]()
    for value in cut.values:
        if isinstance(value, Tensor):
            metas.append(_meta(value))
            tensors.append(dense(value.detach()))
            values.append({"$tensor": len(metas) - 1})
        else:
            values.append({"$plain": value})
    plain = {"values": values, "tensors": metas, "random": cut.random, "form": cut.form, "sharing": cut.sharing}
    return plain, tensors


def tensors_from_plain(plain: dict[str, Any], tensors: list[Tensor]) -> StageTensors:
    """The cut again, from the tensors that have arrived."""
    values = []
    for value in plain["values"]:
        if "$tensor" in value:
            number = value["$tensor"]
            values.append(_with_meta(plain["tensors"][number], tensors[number]))
        else:
            values.append(value["$plain"])
    return StageTensors(values, plain["random"], plain["form"], plain["sharing"])


def empty_for(meta: dict[str, Any], device: torch.device) -> Tensor:
    """Memory for a tensor that will arrive."""
    num_entries = 1
    for size, stride in zip(meta["shape"], meta["strides"], strict=True):
        num_entries *= size if stride else 1
    return torch.empty(num_entries, dtype=getattr(torch, meta["dtype"]), device=device)


def tensor_to_plain(tensor: Tensor) -> dict[str, Any]:
    """A tensor of any dtype as plain values and bytes."""
    octets = dense(tensor.detach()).cpu().view(torch.uint8).numpy()
    return {**_meta(tensor), "bytes": octets}


def tensor_from_plain(plain: dict[str, Any], device: torch.device) -> Tensor:
    """The tensor again, on `device`."""
    octets = torch.from_numpy(plain["bytes"].copy()).view(getattr(torch, plain["dtype"]))
    return _with_meta(plain, octets.to(device))


def _meta(tensor: Tensor) -> dict[str, Any]:
    kind = str(tensor.dtype).removeprefix("torch.")  # strides of dimensions of size 1 count: they say channels-last
    return {
        "dtype": kind,
        "shape": list(tensor.shape),
        "strides": list(tensor.stride()),
        "grad": tensor.requires_grad,
    }


def _with_meta(meta: dict[str, Any], found: Tensor) -> Tensor:
    return with_strides(found, meta["shape"], meta["strides"]).requires_grad_(meta["grad"])


def unpacked_messages(packed: Sequence[bytes]) -> list[Any]:
    """What ranks have packed and sent; a failure of theirs where it was damaged on the way."""
    try:
        return [unpack(one, is_strict=False) for one in packed]
    except CorruptData as problem:
        raise PeerFailure(f"What a rank has sent is damaged: {problem}.") from problem
