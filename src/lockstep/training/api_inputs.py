"""The arguments of the text's functions, checked and put into the form that a step takes."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

import numpy as np

from lockstep.backends import Backend, Tensor, backend_of_all, named_devices
from lockstep.core.device import Device
from lockstep.core.errors import ConfigError
from lockstep.core.layout import Layout, sha256_of
from lockstep.data.batch import Batch
from lockstep.models.lenet import check_one_framework
from lockstep.runtime.inprocess import InProcess
from lockstep.schedules.exchanges import NATIVE

EVALUATIONS = (
    "Call evaluate_accuracy(X, y, device_params, devices), or evaluate_accuracy(test_iter, device_params, devices)."
)
COPIES = "[get_params(params, device) for device in devices]"


def check_exchange(exchange: str) -> None:
    """Refuses the framework's own all-reduce, which is one between processes."""
    if exchange == NATIVE:
        how = "lockstep.train(..., engine='processes', exchange='native')"
        raise ConfigError(f"The exchange {NATIVE!r} is the framework's own, between processes: {how}. Use another one.")


def backend_of_batch(X: Tensor, y: Tensor) -> Backend:
    """The framework of samples and their labels."""
    backend = backend_of_all([X, y])
    if len(X) != len(y):
        raise ConfigError(f"There are {len(X)} samples and {len(y)} labels. Give one label for each sample.")
    if not len(X):
        raise ConfigError("The batch is empty. Give it one sample or more.")
    return backend


def labelled_batches(X: Any, y: Any) -> tuple[Tensor, Iterator[tuple[Tensor, Tensor]]]:
    """The first samples, and all batches (X, y): of samples and labels, or of an iterator that yields such pairs."""
    if y is None and (hasattr(X, "dtype") or not isinstance(X, Iterable)):
        raise ConfigError(f"There are samples without labels. {EVALUATIONS}")
    pairs = iter(X if y is None else [(X, y)])
    first = next(pairs, None)
    if first is None:
        raise ConfigError("The iterator yields no batches. Give it one sample or more.")

    def checked(batch: Any) -> tuple[Tensor, Tensor]:
        if not isinstance(batch, (tuple, list)) or len(batch) != 2:
            raise ConfigError(f"The iterator yields {type(batch).__name__}, not pairs (X, y). {EVALUATIONS}")
        backend_of_batch(*batch)
        return batch[0], batch[1]

    return checked(first)[0], map(checked, chain([first], pairs))


def as_labels(backend: Backend, y: Tensor) -> Tensor:
    """`y` as 64-bit integers; refuses what are no labels, which not every framework does."""
    labels = backend.to_numpy(y)
    if labels.ndim != 1:
        raise ConfigError(f"Labels have the shape {labels.shape}. Give one number for each sample: y.reshape(-1).")
    for wrong in labels[(labels < 0) | (labels != np.floor(labels))][:1]:
        raise ConfigError(f"A label is {wrong}. Labels are integers from 0 on, one for each class.")
    return backend.from_numpy(labels.astype(np.int64), backend.device_of(y))


def check_replicas(X: Tensor, device_params: list[list[Tensor]], devices: Sequence[str]) -> list[Device]:
    """The devices; each must have a list of float32 parameters in the framework of `X`."""
    if isinstance(devices, str):  # the text's evaluate_accuracy_gpu has one device
        what = f"{str(devices)!r} is one device, and a list is needed, with a list of parameters for each"
        raise ConfigError(f"{what}: [params], [{str(devices)!r}].")
    if not isinstance(devices, Sequence) or not isinstance(device_params, Sequence):
        raise ConfigError(f"The parameters and the devices must be lists, one entry for each device: {COPIES}.")
    if len(device_params) != len(devices) or not all(isinstance(params, list) for params in device_params):
        raise ConfigError(f"The parameters must be one list for each of the {len(devices)} devices: {COPIES}.")
    all_params = [param for params in device_params for param in params]
    check_one_framework(X, all_params)
    backend = backend_of_all([X, *all_params])
    for number, param in enumerate(all_params):
        if "float32" not in str(param.dtype):
            raise ConfigError(f"Parameter {number} is {param.dtype}. Lockstep trains float32 parameters: convert it.")
    return named_devices(backend, devices)


def flat_replicas(engine: InProcess, layout: Layout, device_params: list[list[Tensor]]) -> list[Tensor]:
    """Every device's parameters as one flat vector; they must be the same on all devices."""

    def flatten(rank: int, device: Device, params: list[Tensor]) -> Tensor:
        if [tuple(param.shape) for param in params] != list(layout.shapes):
            raise ConfigError(f"The parameters for device {rank} have other shapes than those for device 0.")
        return engine.backend.flatten(layout, params, device)

    replicas = engine.each("replicate", flatten, device_params)
    hashes = engine.each("replicate", lambda rank, device, flat: sha256_of([engine.backend.to_numpy(flat)]), replicas)
    for rank in range(1, len(hashes)):
        if hashes[rank] != hashes[0]:
            what = f"The parameters for device {rank} are not those for device 0: they would be trained as two models"
            raise ConfigError(f"{what}. Copy one set to every device: {COPIES}.")
    return replicas


def layout_of_params(params: list[Tensor]) -> Layout:
    """The layout of one device's parameters in the flat vector."""
    return Layout(tuple(f"p{i}" for i in range(len(params))), tuple(tuple(param.shape) for param in params))


def batch_of(backend: Backend, X: Tensor, y: Tensor, devices: list[Device]) -> Batch:
    """The batch, whose shards are copied to their devices; bytes become floats from 0 to 1."""
    is_bytes = "uint8" in str(X.dtype)

    def fetch(rank: int, start: int, stop: int) -> tuple[Tensor, Tensor]:
        device = devices[rank]
        X_shard, y_shard = (backend.copy_to(backend.chunk(tensor, start, stop), device) for tensor in (X, y))
        if is_bytes:
            X_shard = backend.take(X_shard, backend.from_numpy(np.arange(stop - start), device), 0, stop - start)
        return X_shard, y_shard

    return Batch(len(X), fetch)
