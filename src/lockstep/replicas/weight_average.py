"""A moving average of the weights, which often generalizes better than the weights themselves."""

import torch
from torch import Tensor, nn

from lockstep.core.layout import Array
from lockstep.replicas.module_state import saved_tensors, to_numpy


class WeightAverage:
    """average = decay * average + (1 - decay) * weights, after every update; integers are taken over."""

    def __init__(self, module: nn.Module, decay: float) -> None:
        self._decay = decay
        self._tensors = {name: tensor.detach().clone() for name, tensor in saved_tensors(module).items()}

    def add(self, module: nn.Module) -> None:
        """Moves it towards the weights of `module`."""
        for name, tensor in saved_tensors(module).items():
            average: Tensor = self._tensors[name]
            if tensor.is_floating_point():
                average.lerp_(tensor.detach(), 1 - self._decay)
            else:
                average.copy_(tensor.detach())

    def arrays(self) -> dict[str, Array]:
        """Copies of it, by name."""
        return {name: to_numpy(tensor) for name, tensor in self._tensors.items()}

    def load(self, arrays: dict[str, Array]) -> None:
        """Continues from a checkpoint."""
        for name, tensor in self._tensors.items():
            tensor.copy_(torch.from_numpy(arrays[name]))
