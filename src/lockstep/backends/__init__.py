"""With which framework: a table of names, each loaded when it is first asked for."""

import importlib
from collections.abc import Sequence
from functools import cache
from typing import Any

from lockstep.backends.protocol import Backend, LossSum, Ops, Tensor
from lockstep.device import MAX_DEVICES, Device, check_devices, choose_devices
from lockstep.errors import BackendError, ConfigError
from lockstep.registry import pick

__all__ = ["BACKENDS", "Backend", "LossSum", "Ops", "Tensor", "backend_of", "devices_for", "load_backend", "places_for"]

BACKENDS = {"torch": "lockstep.backends.torch"}  # name -> module; the name is also the framework's package


@cache
def load_backend(name: str) -> Backend:
    """The backend called `name`; the error says how to install a framework that is missing."""
    module = pick(BACKENDS, name, "backend")
    try:
        backend: Backend = importlib.import_module(module).BACKEND
    except ModuleNotFoundError as missing:
        if missing.name != name:
            raise
        raise BackendError(
            f"The backend {name!r} needs the package {name}, which is not installed. Install it: pip install {name}."
        ) from missing
    return backend


def backend_of(tensor: Any) -> Backend:
    """The backend whose framework `tensor` belongs to; no other framework is imported.

    >>> import torch
    >>> backend_of(torch.ones(2)).name
    'torch'
    >>> backend_of([1.0, 2.0])
    Traceback (most recent call last):
    lockstep.errors.BackendError: A list is not a tensor of a known framework. There are: torch.
    """
    for parent in type(tensor).__mro__:
        name = parent.__module__.partition(".")[0]
        if name in BACKENDS:
            return load_backend(name)
    kind = type(tensor).__name__
    hint = " Turn it into one first: torch.from_numpy(array)." if kind == "ndarray" else ""
    raise BackendError(f"A {kind} is not a tensor of a known framework. There are: {', '.join(BACKENDS)}.{hint}")


def devices_for(backend: Backend, wanted: int | str | list[str] | None, at_most: int = MAX_DEVICES) -> list[Device]:
    """The devices that `wanted` means on this machine.

    A number means that many GPUs if there are that many, else that many logical CPU devices; a list names them one by
    one. Nothing means all GPUs, else a logical CPU device for each core, but `at_most` so many.
    """
    *gpus, cpu = backend.hardware()
    names = [gpu.device for gpu in gpus]
    if wanted is None:
        wanted = min(len(names) or cpu.num_cores, at_most)
    return choose_devices(wanted, names)


def places_for(backend: Backend, names: Sequence[str]) -> list[Device]:
    """Named devices, once they were found to be there. Here `cpu` may stand more than once, as in the text."""
    if isinstance(names, str) or not isinstance(names, Sequence):
        raise ConfigError(f"{names!r} is not a list of devices. Give one like ['cpu:0', 'cpu:1'], or devices(2).")
    places = [Device(name) for name in names]
    check_devices(places, [entry.device for entry in backend.hardware()[:-1]])
    return places
