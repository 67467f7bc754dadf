"""Names of devices: `cpu:0` is a logical CPU device, `cuda:1` a GPU."""

import operator
import re
from typing import NamedTuple

from lockstep.core.errors import DeviceError

MAX_DEVICES = 4096


class Device(str):
    """The name of a device: a plain string for every framework, shown without quotes, as in the text.

    >>> [Device("cpu:0"), Device("cuda")]
    [cpu:0, cuda:0]
    >>> Device("cuda:1").number
    1
    >>> Device("tpu:1")
    Traceback (most recent call last):
    lockstep.core.errors.DeviceError: 'tpu:1' is not the name of a device. Write cpu:0, cpu:1, cuda:0, ...
    """

    __slots__ = ()

    def __new__(cls, name: str) -> "Device":
        match = re.fullmatch(r"(cpu|cuda)(?::(\d{1,4}))?", str(name).strip())
        if match is None:
            gpu = re.fullmatch(r"gpu(:\d{1,4})?", str(name).strip())
            hint = f" Did you mean cuda{gpu[1] or ''}?" if gpu else ""
            raise DeviceError(f"{name!r} is not the name of a device.{hint} Write cpu:0, cpu:1, cuda:0, ...")
        return super().__new__(cls, f"{match[1]}:{int(match[2] or 0)}")

    @property
    def kind(self) -> str:
        """`cpu` or `cuda`."""
        return self.partition(":")[0]

    @property
    def number(self) -> int:
        """The number after the colon."""
        return int(self.partition(":")[2])

    def __repr__(self) -> str:
        return str(self)


class Hardware(NamedTuple):
    """One GPU, or all of the CPU, as `lockstep devices` lists it."""

    device: Device  # for the CPU, its first logical device
    name: str  # of the product
    num_bytes: int  # of memory
    num_cores: int  # CPU: cores that this process may use; GPU: multiprocessors


def choose_devices(wanted: int | str | list[str], gpus: list[Device]) -> list[Device]:
    """The devices that `wanted` means on a machine with these `gpus`.

    A number: that many GPUs; where there are fewer, each is listed more than once (logical devices, as on a CPU).
    Without a GPU, that many logical CPU devices. A list names them one by one; the same GPU may be listed twice.

    >>> choose_devices(2, gpus=[])
    [cpu:0, cpu:1]
    >>> choose_devices(3, gpus=[Device("cuda:0"), Device("cuda:1")])
    [cuda:0, cuda:1, cuda:0]
    >>> choose_devices("cuda:0,cuda:0", gpus=[Device("cuda:0")])
    [cuda:0, cuda:0]
    """
    if isinstance(wanted, str):
        wanted = int(wanted) if re.fullmatch(r"\s*[+-]?\d{1,9}\s*", wanted) else wanted.split(",")
    if hasattr(wanted, "__index__"):  # numpy's integers too
        wanted = operator.index(wanted)
    if isinstance(wanted, int):
        if not 1 <= wanted <= MAX_DEVICES:
            raise DeviceError(f"{wanted} devices: give a number from 1 to {MAX_DEVICES}, or a list like cpu:0,cpu:1.")
        return [gpus[i % len(gpus)] if gpus else Device(f"cpu:{i}") for i in range(wanted)]
    if not isinstance(wanted, list):
        raise DeviceError(f"{wanted!r} is neither a number of devices nor a list like cpu:0,cpu:1.")
    devices = [Device(name) for name in wanted]
    check_devices(devices, gpus)
    for device in devices:
        if device.kind == "cpu" and (times := devices.count(device)) > 1:
            distinct = ",".join(f"cpu:{i}" for i in range(len(devices)))
            raise DeviceError(f"{device} is listed {times} times. Number logical CPU devices apart: {distinct}.")
    return devices


def check_devices(devices: list[Device], gpus: list[Device]) -> None:
    """Refuses devices that this machine does not have, and devices of two kinds in one list."""
    if not devices:
        raise DeviceError("The list of devices is empty. Give a number, or a list like cpu:0,cpu:1.")
    if len({device.kind for device in devices}) > 1:
        raise DeviceError(
            f"{', '.join(devices)} mixes CPU and GPU: their kernels round differently, so the weights would depend on "
            f"which device computes a shard. List devices of one kind."
        )
    for device in devices:
        if device.kind == "cuda" and device not in gpus:
            has = f"this machine has {', '.join(gpus)}" if gpus else "no GPU is visible on this machine"
            other = f"what there is, also twice: {gpus[0]},{gpus[0]}" if gpus else "logical CPU devices: cpu:0,cpu:1"
            raise DeviceError(f"There is no {device}: {has}. Use {other}.")
