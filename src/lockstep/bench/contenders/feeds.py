"""Where a contender's batches come from: memory, or a loader. The samples of a step are those of our own run."""

from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from PIL import Image  # which matplotlib brings along
from torch import Tensor
from torch.utils.data import DataLoader

from lockstep.bench.work import Work
from lockstep.data import Dataset
from lockstep.data.order import sample_order

Batches = Callable[[int], Iterator[tuple[Tensor, Tensor]]]  # number of steps -> a batch for each of them


class SampleNumbers:
    """The sample numbers of one step after the other: those of the whole batch, or of a rank's part of it."""

    def __init__(self, work: Work, num_samples: int, part: range) -> None:
        self._seed, self._num_samples, self._batch_size = work.seed, num_samples, work.batch_size
        self._part, self._step = part, 0
        self._order = lru_cache(maxsize=2)(self._order_of)

    def _order_of(self, epoch: int) -> Tensor:
        return torch.from_numpy(sample_order(self._seed, epoch, self._num_samples))

    def next_step(self) -> Tensor:
        """The numbers for the next step."""
        epoch, step = divmod(self._step, self._num_samples // self._batch_size)
        self._step += 1
        first = step * self._batch_size
        return self._order(epoch)[first + self._part.start : first + self._part.stop]


def in_memory(work: Work, data: Dataset, part: range, place: torch.device, channels_last: bool = False) -> Batches:
    """All samples are on the device, as the model takes them; a batch is gathered there."""
    X, y = torch.from_numpy(data.X_train).to(place), torch.from_numpy(data.y_train).to(place)
    X = X.float() / 255 if X.dtype == torch.uint8 else X
    if channels_last:
        X = X.contiguous(memory_format=torch.channels_last)
    numbers_of = SampleNumbers(work, len(X), part)

    def batches(num_steps: int) -> Iterator[tuple[Tensor, Tensor]]:
        for numbers in [numbers_of.next_step().to(place) for _ in range(num_steps)]:
            yield X.index_select(0, numbers), y.index_select(0, numbers)

    return batches


def loaded(work: Work, data: Dataset, part: range, num_workers: int, stays: bool, pin_memory: bool) -> Batches:
    """Samples are prepared one by one in processes of their own, which may stay; a batch is in the CPU's memory.

    Once the batches of a trial have been taken, nothing is left to prepare: they do not disturb the others.
    """
    steps: list[list[int]] = []  # the sample numbers of each step of a trial
    loader = DataLoader(
        Samples(data),
        batch_sampler=steps,
        num_workers=num_workers,
        persistent_workers=stays,
        pin_memory=pin_memory,
    )
    numbers_of = SampleNumbers(work, data.num_train, part)

    def batches(num_steps: int) -> Iterator[tuple[Tensor, Tensor]]:
        steps[:] = [numbers_of.next_step().tolist() for _ in range(num_steps)]
        yield from loader

    return batches


class Samples:
    """Samples as a loader's processes prepare them: an image, then its numbers from 0 to 1, as torchvision does it."""

    def __init__(self, data: Dataset) -> None:
        self._X, self._y = data.X_train, data.y_train
        self._are_images = self._X.dtype == np.uint8

    def __len__(self) -> int:
        return len(self._X)

    def __getitem__(self, number: int) -> tuple[Tensor, Any]:
        if not self._are_images:
            return torch.from_numpy(self._X[number]), torch.from_numpy(self._y[number])
        image = Image.fromarray(self._X[number, 0])
        numbers = torch.from_numpy(np.array(image, np.uint8, copy=True)).view(image.size[1], image.size[0], 1)
        return numbers.permute(2, 0, 1).contiguous().to(torch.float32).div(255), int(self._y[number])
