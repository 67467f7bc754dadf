"""The text's own functions, with its names and arguments, for tensors of any framework.

What is wrong in one or another edition of the text is mended here:
- `get_params` always copies (in most editions a copy on the same device is no copy, so that two replicas are one);
- `allreduce` really changes every entry (one edition rebinds it, so that device 1 never sees the sum);
- `split_batch` keeps every sample for any batch size and any number of devices (one edition drops the remainder, one
  refuses, one leaves devices without a part), and works for logical CPU devices too.
"""

import math
import threading
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lockstep.analysis.explain import explain as explain
from lockstep.analysis.plan import Plan as Plan
from lockstep.analysis.python_api import plan as plan
from lockstep.attribution.waterfall import Explanation as Explanation
from lockstep.backends import (
    DEFAULT_BACKEND,
    Tensor,
    backend_of,
    backend_of_all,
    devices_for,
    load_backend,
    named_devices,
)
from lockstep.config import RunConfig, check_ranks
from lockstep.core.device import Device
from lockstep.core.errors import ConfigError, RunError
from lockstep.data.text_iterators import load_data_fashion_mnist as load_data_fashion_mnist
from lockstep.models import Forward
from lockstep.models.lenet import init_lenet as init_lenet
from lockstep.models.lenet import lenet as lenet
from lockstep.models.lenet_cropped import faster
from lockstep.optim.optimizers import Sgd
from lockstep.partition.balance import Balance
from lockstep.partition.batch import even_ranges
from lockstep.replicas.flat import FlatReplica, FlatTrainSpec
from lockstep.report.events import Result as Result
from lockstep.report.events import TrainedParams
from lockstep.runtime.allreduce import allreduce_in_place
from lockstep.runtime.inprocess import InProcess
from lockstep.runtime.step import StepOptions, train_step
from lockstep.training.api_inputs import (
    as_labels,
    backend_of_batch,
    batch_of,
    check_exchange,
    check_replicas,
    flat_replicas,
    labelled_batches,
    layout_of_params,
)
from lockstep.training.callbacks import RunState as RunState
from lockstep.training.comparison import Comparison as Comparison
from lockstep.training.evaluate import EvalSpec, evaluate_batches
from lockstep.training.flat_task import EVAL_BATCH_SIZE
from lockstep.training.replica_set import ReplicaSet
from lockstep.training.sweep import compare as compare
from lockstep.training.train import train as train


def __getattr__(name: str) -> Any:
    """These load their framework, which the other functions need not."""
    if name == "Trainer":
        from lockstep.training.trainer import Trainer

        return Trainer
    if name == "WholeSetMetric":
        from lockstep.models.whole_set_metrics import WholeSetMetric

        return WholeSetMetric
    raise AttributeError(name)


def try_gpu(i: int = 0, backend: str = DEFAULT_BACKEND) -> Device:
    """GPU number `i`; where there are fewer, one of them again; logical CPU device number `i` where there is none.

    >>> try_gpu(5)
    cpu:5
    """
    return devices_for(load_backend(backend), i + 1)[i]


def devices(wanted: int | str | list[str] | None = None, backend: str = DEFAULT_BACKEND) -> list[Device]:
    """The devices that `--devices` would mean: a number, or a list; nothing means all that there is.

    >>> devices("cpu:0,cpu:1")
    [cpu:0, cpu:1]
    """
    return devices_for(load_backend(backend), wanted)


def get_params(params: Iterable[Tensor], device: str, backend: str | None = None) -> list[Tensor]:
    """A copy of the parameters on `device`, ready to get gradients. Always a copy, also on the same device.

    `params` is a list of tensors, or anything that yields them, like `module.parameters()`, or `result.params`. The
    copy is in their own framework, that of `result.params` in the run's, or in the one called `backend`.

    >>> import numpy
    >>> params = [numpy.zeros(2)]
    >>> replica = get_params(params, "cpu:0")
    >>> replica[0] is params[0]
    False
    """
    if backend is None and isinstance(params, TrainedParams):
        backend = params.backend
    params = list(params.values() if isinstance(params, Mapping) else params)
    if not params:
        raise ConfigError("get_params got no parameters. Give it a list of tensors.")
    own = backend_of_all(params)
    wanted = own if backend is None else load_backend(backend)
    (found,) = named_devices(wanted, [device])
    if wanted is not own:
        params = [wanted.from_numpy(own.to_numpy(param), found) for param in params]
    return [wanted.with_gradient(wanted.copy_to(param, found)) for param in params]


def allreduce(data: list[Tensor], exchange: str = "sharded") -> list[Tensor]:
    """Makes every entry of `data`, one tensor for each device, the sum of them all; gives the list back.

    The entries are added in the fixed tree, so the sum has the same bits whichever exchange is used, except `ring`.

    >>> import numpy
    >>> data = [numpy.ones((1, 2)) * (i + 1) for i in range(2)]
    >>> allreduce(data)
    [array([[3., 3.]]), array([[3., 3.]])]
    """
    if not isinstance(data, list) or not data:
        raise ConfigError("allreduce changes the entries of a list, one tensor for each device. Give it such a list.")
    backend = backend_of_all(data)  # a gradient that is not there yet is None, which belongs to none
    shapes = {tuple(entry.shape) for entry in data}
    if len(shapes) > 1:
        raise ConfigError(f"allreduce adds tensors of one shape, and got {', '.join(map(str, sorted(shapes)))}.")
    check_exchange(exchange)
    return allreduce_in_place(backend, data, exchange)


def split_batch(X: Tensor, y: Tensor, devices: Sequence[str]) -> tuple[list[Tensor], list[Tensor]]:
    """`X` and `y` cut into a part for each device, and put there. Sizes differ by at most one; nothing is dropped.

    >>> import numpy
    >>> X_parts, y_parts = split_batch(numpy.arange(10).reshape(5, 2), numpy.arange(5), ["cpu:0", "cpu:1"])
    >>> y_parts
    [array([0, 1, 2]), array([3, 4])]
    """
    backend = backend_of_batch(X, y)
    places = named_devices(backend, devices)
    parts = list(zip(even_ranges(len(X), len(devices)), places, strict=True))
    X_parts = [backend.copy_to(backend.chunk(X, part.start, part.stop), place) for part, place in parts]
    y_parts = [backend.copy_to(backend.chunk(y, part.start, part.stop), place) for part, place in parts]
    return X_parts, y_parts


def train_batch(
    X: Tensor,
    y: Tensor,
    device_params: list[list[Tensor]],
    devices: Sequence[str],
    lr: float,
    num_shards: int = 8,
    *,
    net: Forward = lenet,
    exchange: str = "sharded",
) -> list[list[Tensor]]:
    """One update of every device's parameters on the whole batch; the same bits for any number of devices.

    Changes `device_params` (one list of parameters for each device) and gives it back. `net` is any function of
    (X, params) that gives class scores and draws no random numbers.

    >>> import numpy
    >>> two = ["cpu:0", "cpu:1"]
    >>> device_params = [get_params(init_lenet(seed=0), device) for device in two]
    >>> X, y = numpy.ones((10, 1, 28, 28), "float32"), numpy.arange(10)
    >>> _ = train_batch(X, y, device_params, two, lr=0.2)
    >>> bool((device_params[0][0] == device_params[1][0]).all())
    True
    """
    backend = backend_of_batch(X, y)
    y = as_labels(backend, y)
    check_exchange(exchange)
    found = check_replicas(X, device_params, devices)
    config = RunConfig(learning_rate=lr, num_shards=num_shards, exchange=exchange)
    check_ranks(len(found), num_shards)
    layout = layout_of_params(device_params[0])
    with InProcess(backend, found) as engine:
        spec = FlatTrainSpec(backend, _forward(net), layout, Sgd(config.learning_rate or lr))
        replicas = [FlatReplica(spec, flat) for flat in flat_replicas(engine, layout, device_params)]
        batch, drawn = batch_of(backend, X, y, found), backend.random_state()
        options = StepOptions(num_shards, exchange)
        losses = train_step(engine, replicas, options, Balance(), 1, batch).result()
        if backend.random_state() != drawn:
            raise RunError(
                "The model drew random numbers (dropout?): their order would depend on the devices, and so would the "
                "weights. Leave them out; the parameters are as they were."
            )
        if not all(map(math.isfinite, losses)):
            raise RunError(
                "The loss is not a number: a label may be larger than the last class, a sample or a parameter may not "
                "be a number, or the learning rate was too large before. The parameters are as they were."
            )

        def write_back(rank: int, device: Device, params: list[Tensor], replica: FlatReplica) -> None:
            updated = backend.unflatten(layout, replica.flat)
            params[:] = [backend.assign(param, new) for param, new in zip(params, updated, strict=True)]

        engine.each("update", write_back, device_params, replicas)
    return device_params


def evaluate_accuracy(
    X: Any, y: Any = None, device_params: Any = None, devices: Any = None, *, net: Forward = lenet
) -> float:
    """The share of samples that `net` classifies correctly. All devices work, each sample is counted once.

    `evaluate_accuracy(X, y, device_params, devices)`, or with an iterator over batches (X, y), like the text's:
    `evaluate_accuracy(test_iter, device_params, devices)`.

    >>> import numpy
    >>> two = ["cpu:0", "cpu:1"]
    >>> X, y = numpy.ones((500, 1, 28, 28), "float32"), numpy.arange(500) % 10
    >>> evaluate_accuracy(X, y, [get_params(init_lenet(seed=0), device) for device in two], two)
    0.1
    """
    if devices is None:  # evaluate_accuracy(test_iter, device_params, devices)
        y, device_params, devices = None, y, device_params
    first, pairs = labelled_batches(X, y)
    found = check_replicas(first, device_params, devices)
    backend, layout = backend_of(first), layout_of_params(device_params[0])
    with InProcess(backend, found) as engine:
        spec = FlatTrainSpec(backend, _forward(net), layout, Sgd(1.0))
        replicas = [FlatReplica(spec, flat) for flat in flat_replicas(engine, layout, device_params)]
        batches = (batch_of(backend, X, as_labels(backend, y), found) for X, y in pairs)
        return evaluate_batches(ReplicaSet(engine, replicas), batches, EvalSpec(EVAL_BATCH_SIZE))["accuracy"]


def _forward(net: Forward) -> Forward:
    """LeNet, or a function of the user's; the same function again is compiled once, where the framework compiles."""
    if net is lenet:
        return faster(net)
    found = next((each for each in RECENT if each.net is net), None)
    if found is None:
        RECENT.append(found := OneAtATime(net))
    return found


class OneAtATime:
    """A function for one rank at a time, as it may write to what all ranks have in common.

    (A functional call of a module does: it puts the parameters into the module, and takes them out again.)
    """

    _lock = threading.Lock()  # of all: two functions may use one module

    def __init__(self, net: Forward) -> None:
        self.net = net

    def __call__(self, X: Tensor, params: list[Tensor]) -> Tensor:
        with self._lock:
            return self.net(X, params)


RECENT: deque[OneAtATime] = deque(maxlen=8)
