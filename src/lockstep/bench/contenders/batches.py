"""Where a contender's batches come from: memory, or a DataLoader. Every step has the samples that it has in our run."""

from collections.abc import Callable, Iterator
from itertools import count, islice
from typing import Any

import numpy as np
import torch
from PIL import Image  # which matplotlib depends on
from torch import Tensor
from torch.utils.data import DataLoader

from lockstep.bench.workload import Workload
from lockstep.data import Dataset
from lockstep.data.order import sample_order
from lockstep.data.resident import bytes_of_sample

Batches = Callable[[int], Iterator[tuple[Tensor, Tensor]]]  # number of steps -> a batch for each of them


def sample_indices(workload: Workload, num_samples: int, part: range) -> Iterator[Tensor]:
    """The indices of the samples of one step after the other: those of the whole batch, or of a rank's `part` of it."""
    for epoch in count():
        order = torch.from_numpy(sample_order(workload.seed, epoch, num_samples))
        for batch in order.split(workload.batch_size):
            yield batch[part.start : part.stop]


def resident_bytes(data: Dataset) -> int:
    """The memory of all training samples on a device, where bytes have become floats."""
    return sum(len(array) * bytes_of_sample(array) for array in (data.X_train, data.y_train))


def from_memory(
    workload: Workload, data: Dataset, part: range, device: torch.device, channels_last: bool = False
) -> Batches:
    """All samples are on the device as floats; a batch is gathered there."""
    X, y = torch.from_numpy(data.X_train).to(device), torch.from_numpy(data.y_train).to(device)
    X = X.float() / 255 if X.dtype == torch.uint8 else X
    if channels_last:
        X = X.contiguous(memory_format=torch.channels_last)
    indices = sample_indices(workload, len(X), part)

    def batches(num_steps: int) -> Iterator[tuple[Tensor, Tensor]]:
        for chosen in [step.to(device) for step in islice(indices, num_steps)]:
            yield X.index_select(0, chosen), y.index_select(0, chosen)

    return batches


def from_loader(workload: Workload, data: Dataset, part: range, **options: Any) -> Batches:
    """Samples are prepared one by one by worker processes; a batch is in the CPU's memory.

    The workers prepare the batches of one trial only, so they are idle while others are measured.
    """
    steps: list[list[int]] = []  # the sample indices of each step of a trial
    loader = DataLoader(LoaderSamples(data), batch_sampler=steps, **options)
    indices = sample_indices(workload, data.num_train, part)

    def batches(num_steps: int) -> Iterator[tuple[Tensor, Tensor]]:
        steps[:] = [step.tolist() for step in islice(indices, num_steps)]
        yield from loader

    return batches


class LoaderSamples:
    """Samples as a worker prepares them: an image becomes a float tensor as by torchvision's ToTensor."""

    def __init__(self, data: Dataset) -> None:
        self._X, self._y = data.X_train, data.y_train

    def __len__(self) -> int:
        return len(self._X)

    def __getitem__(self, index: int) -> tuple[Tensor, Any]:
        if self._X.dtype != np.uint8:
            return torch.from_numpy(self._X[index]), torch.from_numpy(self._y[index])
        image = Image.fromarray(self._X[index, 0])
        pixels = torch.from_numpy(np.array(image, np.uint8, copy=True)).view(image.size[1], image.size[0], 1)
        return pixels.permute(2, 0, 1).contiguous().to(torch.float32).div(255), int(self._y[index])
