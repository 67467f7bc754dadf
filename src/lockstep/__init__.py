"""Lockstep trains one model on k devices and gives the same weights, bit for bit, whatever k is.

The functions of the text "Training on Multiple GPUs" are the public API; they work on tensors of the framework that
they are given:

>>> import lockstep, numpy
>>> data = [numpy.ones(2), 2 * numpy.ones(2)]
>>> lockstep.allreduce(data)
[array([3., 3.]), array([3., 3.])]
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lockstep.api import (
        Comparison,
        Explanation,
        Plan,
        Result,
        allreduce,
        compare,
        devices,
        evaluate_accuracy,
        explain,
        get_params,
        init_lenet,
        lenet,
        load_data_fashion_mnist,
        plan,
        split_batch,
        train,
        train_batch,
        try_gpu,
    )
    from lockstep.core.errors import Interrupted, LockstepError
    from lockstep.models.whole_set_metrics import WholeSetMetric
    from lockstep.training.callbacks import RunState
    from lockstep.training.trainer import Trainer

__version__ = "0.8.0"  # the one place: pyproject.toml reads it from here

__all__ = [
    "Comparison",
    "Explanation",
    "Interrupted",
    "LockstepError",
    "Plan",
    "Result",
    "RunState",
    "Trainer",
    "WholeSetMetric",
    "allreduce",
    "compare",
    "devices",
    "evaluate_accuracy",
    "explain",
    "get_params",
    "init_lenet",
    "lenet",
    "load_data_fashion_mnist",
    "plan",
    "split_batch",
    "train",
    "train_batch",
    "try_gpu",
]


def __getattr__(name: str) -> Any:
    """Loads a public name when it is first used, so that `lockstep --help` and `import lockstep` cost nothing."""
    if name not in __all__:
        raise AttributeError(f"module 'lockstep' has no attribute {name!r}. It offers: {', '.join(__all__)}.")
    from lockstep import api
    from lockstep.core import errors

    value = getattr(errors if name in ("Interrupted", "LockstepError") else api, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
