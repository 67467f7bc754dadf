"""What a model is to Lockstep: initial parameters, and a function of samples and parameters."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from lockstep.backends import LayerFunction, Tensor, backend_of
from lockstep.core.entry_points import load_entry_point
from lockstep.core.errors import ConfigError
from lockstep.core.layout import Array
from lockstep.data import Dataset

Forward = Callable[[Tensor, list[Tensor]], Tensor]  # (X, params) -> one row of class scores for each sample


class Layer(NamedTuple):
    """One of the layers that a model calls one after the other."""

    name: str
    function: LayerFunction  # (ops, X, params) -> its output; the units are the second axis
    params: tuple[str, ...]  # names of its parameters
    units: tuple[int, ...]  # the axis of each that has the output units
    cost: float  # multiplications and additions for a sample


@dataclass(frozen=True)
class Model:
    """A model by name. Its initial parameters come from numpy, so every framework starts from the same values."""

    name: str
    init: Callable[[int], dict[str, Array]]  # seed -> named parameters, in model order
    forward: Forward
    sample_shape: tuple[int, ...]
    num_classes: int
    layers: tuple[Layer, ...] = ()  # which compute what `forward` does, bit for bit, where it can be split

    def checked(self, data: Dataset) -> Dataset:
        """The dataset, if the model can take it; images without a channel dimension get one."""
        shape = data.sample_shape
        if shape is None:
            raise ConfigError(f"{self.name} takes one array of samples, and those of {data.name} have several parts.")
        if (1, *shape) == self.sample_shape:
            X_train, X_test = (X if X is None else X[:, None] for X in (data.X_train, data.X_test))
            data = replace(data, X_train=X_train, X_test=X_test)
        elif shape != self.sample_shape:
            expected, found = ("x".join(map(str, sizes)) for sizes in (self.sample_shape, shape))
            raise ConfigError(
                f"{self.name} takes samples of shape {expected}, and those of {data.name} have {found}. Resize the "
                f"data, or use another model."
            )
        for y in (data.y_train,) if data.y_test is None else (data.y_train, data.y_test):
            if isinstance(y, (tuple, list, dict)) or y.ndim != 1 or y.dtype.kind != "i" or y.min() < 0:
                raise ConfigError(f"{self.name} needs one label for each sample of {data.name}: integers from 0 on.")
        if data.num_classes > self.num_classes:
            raise ConfigError(
                f"{self.name} has {self.num_classes} classes, and {data.name} has labels up to {data.num_classes - 1}."
            )
        return data


class BuiltIn(NamedTuple):
    """A model that is a module of one framework: the entry point of a function that makes it for a dataset."""

    entry_point: str

    def load(self) -> Callable[[Dataset], Any]:
        """The function."""
        return load_entry_point(self.entry_point, "model")


@dataclass(frozen=True)  # equal for equal models, so that it is compiled once
class CrossEntropySum:
    """The loss of a model: softmax cross-entropy, summed (never averaged) over the samples."""

    forward: Forward

    @property
    def layers(self) -> tuple[Layer, ...]:
        """The layers of the model, if it says them."""
        return getattr(self.forward, "layers", ())

    def __call__(self, params: list[Tensor], X: Tensor, y: Tensor) -> Tensor:
        return backend_of(X).ops.cross_entropy_sum(self.forward(X, params), y)
