"""Metrics that are no mean over samples (F1, AUROC): computed once, from the outputs for all test samples in order.

Every object with `reset`, `update(output, y)` and `compute` is one, as those of torchmetrics are.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lockstep.core.errors import ConfigError, RunError
from lockstep.core.layout import Array
from lockstep.models.losses import first


class WholeSetMetric:
    """A function of (output, y) that is called once, with those of all test samples.

    >>> metric = WholeSetMetric(lambda output, y: (output.argmax(1) == y).float().mean())
    >>> metric.update(torch.eye(3), torch.tensor([0, 1, 1]))
    >>> metric.update(torch.eye(3), torch.tensor([0, 1, 2]))
    >>> round(float(metric.compute()), 3)
    0.833
    """

    def __init__(self, function: Callable[[Tensor, Tensor], Any]) -> None:
        self._function = function
        self.__name__ = getattr(function, "__name__", type(function).__name__)
        self.reset()

    def reset(self) -> None:
        """Forgets all samples."""
        self._seen: list[tuple[Tensor, Tensor]] = []

    def update(self, output: Tensor, y: Tensor) -> None:
        """Takes more samples."""
        self._seen.append((output, y))

    def compute(self) -> Any:
        """The metric of all of them."""
        output, y = zip(*self._seen, strict=True)
        return self._function(torch.cat(output), torch.cat(y))


def is_whole_set(metric: Any) -> bool:
    """Whether it is such a metric, and not a function of samples."""
    return all(callable(getattr(metric, name, None)) for name in ("reset", "update", "compute"))


def arrays_for(output: Any, y: Any) -> tuple[Array, Array]:
    """The scores and the targets of some samples, which the metrics get."""
    scores = output.get("logits", output) if isinstance(output, Mapping) else getattr(output, "logits", output)
    targets = y.get("labels", y) if isinstance(y, Mapping) else y
    if not isinstance(targets, (Tensor, tuple, list)):
        raise ConfigError(
            f"The targets are a {type(targets).__name__}, and a metric of all samples needs a tensor: where samples "
            f"are dicts, their labels. Call them that, or give a metric of samples: a function of (output, y)."
        )
    return _array(first(scores)), _array(first(targets))


def values_of(metrics: Mapping[str, Any], outputs: Sequence[tuple[Array, Array]]) -> dict[str, float]:
    """The value of each metric, from the outputs and targets of all samples, in order. The objects stay as they are."""
    found: dict[str, float] = {}
    for name, metric in metrics.items():
        own = copy.deepcopy(metric)
        try:
            own.reset()
            for output, y in outputs:
                own.update(torch.from_numpy(output), torch.from_numpy(y))
            value = own.compute()
        except Exception as problem:
            shapes = sorted({str(output.shape) for output, _ in outputs})[:2]
            got = f"It got outputs of shape {' and '.join(shapes)}"
            raise RunError(f"The metric {name} failed: {type(problem).__name__}: {problem}. {got}.") from problem
        values = value if isinstance(value, Mapping) else {name: value}  # a collection of torchmetrics
        found |= {str(key): _number(str(key), each) for key, each in values.items()}
    return found


def _array(tensor: Tensor) -> Array:
    tensor = tensor.detach().cpu()
    array: Array = (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()
    return array


def _number(name: str, value: Any) -> float:
    if isinstance(value, Tensor) and value.numel() != 1:
        raise ConfigError(f"The metric {name} gives {value.numel()} numbers. Let it give one, as a mean over classes.")
    return float(value)
