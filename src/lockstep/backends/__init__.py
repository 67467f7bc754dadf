"""The table of backends, each imported when it is first used, and the devices that each one sees."""

import importlib
import importlib.util
import re
import warnings
from collections.abc import Sequence
from functools import cache
from typing import Any

from lockstep.backends.hardware import cpu, peak_of_process
from lockstep.backends.protocol import (
    Backend,
    Capabilities,
    GraphCapture,
    LayerFunction,
    LossFuture,
    LossSum,
    OnReady,
    Ops,
    Pieces,
    RecordEvent,
    Tensor,
    cross_entropy,
    flat,
)
from lockstep.core.device import MAX_DEVICES, Device, check_devices, choose_devices
from lockstep.core.errors import BackendError, ConfigError, first_line
from lockstep.core.registry import pick

__all__ = [
    "BACKENDS",
    "DEFAULT_BACKEND",
    "Backend",
    "Capabilities",
    "GraphCapture",
    "LayerFunction",
    "LossFuture",
    "LossSum",
    "OnReady",
    "Ops",
    "Pieces",
    "RecordEvent",
    "Tensor",
    "backend_of",
    "backend_of_all",
    "cross_entropy",
    "devices_for",
    "flat",
    "is_installed",
    "load_backend",
    "named_devices",
    "peak_memory",
    "reset_peak_memory",
]

# The framework's package, which is also the name of its module beside this one -> how to install it.
BACKENDS = {
    "torch": "pip install torch",
    "paddle": "pip install paddlepaddle setuptools",
    "mxnet": "python3.11 -m pip install mxnet==1.9.1 numpy==1.23.5",
    "jax": "pip install jax",
    "numpy": "pip install numpy",
}
DEFAULT_BACKEND = "torch"
_LOADED: dict[str, Backend] = {}  # results of `load_backend`, for `backend_of` in compiled code


@cache
def load_backend(name: str) -> Backend:
    """The backend called `name`; the error says how to install a framework that is missing, broken or too old."""
    command = pick(BACKENDS, name, "backend")
    try:
        with warnings.catch_warnings(action="ignore"):  # a framework's own warnings are not about the run
            backend: Backend = importlib.import_module(f"lockstep.backends.{name}").BACKEND
    except Exception as problem:  # a framework may fail in any way when it is imported
        what = f"needs the package {name}, which is not installed"
        if is_installed(name):
            what = f"cannot be used: importing {name} fails with {type(problem).__name__}: {first_line(problem)}"
        others = ", ".join(other for other in BACKENDS if other != name and is_installed(other))
        raise BackendError(
            f"The backend {name!r} {what}. Install it: {command}; or use what is here (--backend, backend=...): "
            f"{others}."
        ) from problem
    if tuple(map(int, re.findall(r"\d+", backend.version())[: len(backend.min_version)])) < backend.min_version:
        needed = ".".join(map(str, backend.min_version))
        raise BackendError(f"{name} {backend.version()} is too old for Lockstep. Install {needed} or newer.")
    _LOADED[name] = backend
    return backend


def is_installed(name: str) -> bool:
    """Whether the framework's package is installed; it is not imported."""
    return importlib.util.find_spec(name) is not None


def backend_of(tensor: Any) -> Backend:
    """The backend whose framework `tensor` belongs to; no other framework is imported.

    >>> import numpy
    >>> backend_of(numpy.ones(2)).name
    'numpy'
    >>> backend_of([1.0, 2.0])
    Traceback (most recent call last):
    lockstep.core.errors.BackendError: A list is not a tensor of a known framework. There are: torch, paddle, mxnet, ...
    """
    for parent in type(tensor).__mro__:
        name = parent.__module__.partition(".")[0]
        if name in BACKENDS and hasattr(tensor, "shape") and hasattr(tensor, "dtype"):
            return _LOADED.get(name) or load_backend(name)
    raise BackendError(
        f"A {type(tensor).__name__} is not a tensor of a known framework. There are: {', '.join(BACKENDS)}."
    )


def backend_of_all(tensors: Sequence[Any]) -> Backend:
    """The backend of tensors that must all belong to one framework."""
    backends = [backend_of(tensor) for tensor in tensors]
    for backend in backends:
        if backend is not backends[0]:
            raise BackendError(
                f"Tensors of {backends[0].name} and of {backend.name} do not go together. Convert one to the other."
            )
    return backends[0]


def devices_for(backend: Backend, wanted: int | str | list[str] | None, at_most: int = MAX_DEVICES) -> list[Device]:
    """The devices that `wanted` means on this machine (see `choose_devices`).

    None means all GPUs, or else a logical CPU device for each core, but no more than `at_most`.
    """
    gpus = _gpus(backend)
    if wanted is None:
        wanted = min(len(gpus) or cpu().num_cores, at_most)
    return choose_devices(wanted, gpus)


def reset_peak_memory(backend: Backend, devices: Sequence[Device]) -> None:
    """Starts a new measurement of `peak_memory`."""
    peak_of_process(reset=True)
    for gpu in {device for device in devices if device.kind == "cuda"}:
        backend.peak_gpu_memory(gpu, reset=True)


def peak_memory(backend: Backend, devices: Sequence[Device]) -> dict[str, int]:
    """Peak bytes in use on each GPU; of the whole process where the devices are logical CPU devices."""
    gpus = dict.fromkeys(device for device in devices if device.kind == "cuda")
    if not gpus:
        return {"cpu": peak_of_process()}
    peaks = {str(gpu): backend.peak_gpu_memory(gpu) for gpu in gpus}
    return {gpu: num_bytes for gpu, num_bytes in peaks.items() if num_bytes is not None}


def named_devices(backend: Backend, names: Sequence[str]) -> list[Device]:
    """The devices called `names`, which must exist on this machine; `cpu` may be listed twice, as in the text."""
    if isinstance(names, str) or not isinstance(names, Sequence):
        raise ConfigError(f"{names!r} is not a list of devices. Give one like ['cpu:0', 'cpu:1'], or devices(2).")
    found = [Device(name) for name in names]
    check_devices(found, _gpus(backend))
    return found


def _gpus(backend: Backend) -> list[Device]:
    return [Device(f"cuda:{number}") for number in range(backend.num_gpus())]
