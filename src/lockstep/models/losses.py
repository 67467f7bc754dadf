"""Losses and metrics: one number for each sample. The caller adds them up; nothing is averaged over samples here."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from lockstep.backends.torch.kernels.cross_entropy import can_fuse, fused_cross_entropy
from lockstep.core.errors import ConfigError, RunError

IGNORED = -100  # the label of positions that do not count, in PyTorch
PerSample = Callable[[Any, Any], Any]  # (the model's output, targets) -> one number for each sample, or a pair


class LossSum(NamedTuple):
    """A loss or metric, summed over samples."""

    total: Tensor
    weight: Tensor | None = None  # what the sum of all samples is to be divided by; None: their number


def cross_entropy(scores: Any, y: Tensor) -> Tensor:
    """Of scores (samples, classes, ...), as a mean over the positions whose label is not -100, as in PyTorch."""
    scores = first(scores)
    if scores.ndim > 2 and scores.shape[:-1] == y.shape and scores.shape[2:] != y.shape[1:]:
        raise RunError(
            f"The model gives scores of shape {tuple(scores.shape)} for labels of shape {tuple(y.shape)}. Classes come "
            f"second, as in PyTorch: (samples, classes, positions). Use scores.transpose(1, 2) in the model."
        )
    can_ask = not y.is_cuda and not torch.compiler.is_compiling()
    if can_ask and y.ndim == 1 and not y.is_floating_point() and bool((y == IGNORED).any()):
        raise RunError(
            "There are samples with labels of -100, which do not count: a mean over all samples would count them. Use "
            "loss=nn.CrossEntropyLoss(), which divides by the samples that count."
        )
    rows, labels = _rows(scores, y)
    values = _cross_entropy_of_rows(rows, labels)
    return _over_positions(values if labels is y else values.view(y.shape), _counts(y))


def has_own_kernel(loss: Any, output: Any, y: Any) -> bool:
    """Whether a loss is computed by a kernel of ours, which is faster than what a compiler makes of it."""
    return loss is cross_entropy and isinstance(y, Tensor) and can_fuse(*_rows(first(output), y))


def _rows(scores: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Scores and labels with one row for each label: classes last, as most models compute them."""
    if scores.ndim > 2 and y.ndim == scores.ndim - 1:
        return scores.movedim(1, -1).flatten(0, -2), y.flatten()
    return scores, y


def _cross_entropy_of_rows(scores: Tensor, y: Tensor) -> Tensor:
    if can_fuse(scores, y):
        return fused_cross_entropy(scores, y, IGNORED)
    return F.cross_entropy(scores if scores.dtype.itemsize >= 4 else scores.float(), y, reduction="none")


def mse(predicted: Any, y: Tensor) -> Tensor:
    """The squared difference, as a mean over the entries of a sample."""
    return _over_positions(F.mse_loss(shaped_like(first(predicted), y), y, reduction="none"))


def l1(predicted: Any, y: Tensor) -> Tensor:
    """The absolute difference, as a mean over the entries of a sample."""
    return _over_positions(F.l1_loss(shaped_like(first(predicted), y), y, reduction="none"))


def bce(scores: Any, y: Tensor) -> Tensor:
    """Binary cross-entropy, from scores before the sigmoid, as a mean over the entries of a sample."""
    y = y.float()
    return _over_positions(F.binary_cross_entropy_with_logits(shaped_like(first(scores), y), y, reduction="none"))


def accuracy(scores: Any, y: Tensor) -> Any:
    """1 where the highest score is that of the label (of the highest soft label), else 0; a mean over positions."""
    labels = y.argmax(dim=1) if y.is_floating_point() else y
    if labels.ndim == 1:
        return (first(scores).argmax(dim=1) == labels).sum(dtype=torch.float64), (labels != IGNORED).sum()
    return _over_positions((first(scores).argmax(dim=1) == labels).double(), _counts(labels))


MODEL = "model"  # the name of the loss that a model computes itself
LOSSES: dict[str, PerSample] = {"cross_entropy": cross_entropy, "mse": mse, "l1": l1, "bce": bce}
METRICS: dict[str, PerSample] = {"accuracy": accuracy, **LOSSES}


def first(output: Any) -> Tensor:
    """The scores of a model with several outputs: by convention the first of them."""
    while isinstance(output, (tuple, list)) and output:
        output = output[0]
    if not isinstance(output, Tensor):
        raise ConfigError(
            f"The model returns a {type(output).__name__}, and a named loss needs a tensor, or a tuple that begins "
            f"with one. Give a loss of your own: loss=lambda output, y: ..., one number for each sample."
        )
    return output


OF_ONE_LOSS = (
    " It seems to be averaged, or added up, already. For a mean over samples, use reduction='none'; for one over "
    "tokens or with class weights, return a pair (sum, weight); if it looks across the batch, use over='batch'."
)
OF_ONE_METRIC = (
    " Leave .mean() out: it is averaged over all test samples. What is no mean over samples goes into "
    "lockstep.WholeSetMetric(function)."
)


def summed(per_sample: PerSample, what: str, output: Any, y: Any, num_samples: int) -> LossSum:
    """The sum over the samples; refuses anything but one number for each sample, or a pair (sum, weight)."""
    values = per_sample(output, y)
    got, hint = f"a {type(values).__name__}", ""
    if isinstance(values, tuple) and len(values) == 2:
        return _pair(values, what)
    if isinstance(values, Tensor):
        if values.shape == (num_samples,):
            return LossSum(_exact_enough(values).sum())
        hints = {0: OF_ONE_METRIC if what.startswith("metric") else OF_ONE_LOSS, 1: ""}
        hint = hints.get(values.ndim, " Average over what is not a sample: .flatten(1).mean(1).")
        got = f"a tensor of shape {tuple(values.shape)}"
    raise RunError(f"The {what} returned {got} for {num_samples} samples. It must return one number for each.{hint}")


def over_batch(loss: PerSample, output: Any, y: Any, num_samples: int) -> LossSum:
    """The loss of a whole batch: one number, or what `summed` takes."""
    value = loss(output, y)
    if isinstance(value, Tensor) and value.ndim == 0:
        value = _exact_enough(value)
        return LossSum(value, torch.ones_like(value))
    found = summed(lambda *_: value, "loss over the batch", output, y, num_samples)
    return found if found.weight is not None else LossSum(found.total, torch.full_like(found.total, num_samples))


def _pair(values: tuple[Any, Any], what: str) -> LossSum:
    """A sum, and the weight that it is divided by in the end: each a number of this shard."""
    total, weight = values
    if not isinstance(total, Tensor) or total.numel() != 1:
        raise RunError(
            f"The {what} returned a pair whose first entry is not one number. Return (sum, weight): the sum over all "
            f"that counts in these samples, and how much that is; the batch's sum is divided by its weight once."
        )
    weight = torch.as_tensor(weight, dtype=torch.float64, device=total.device)
    if weight.numel() != 1 or weight.requires_grad:
        raise RunError(f"The {what} returned a pair (sum, weight) whose weight is not one number without a gradient.")
    return LossSum(_exact_enough(total).reshape(()), weight.reshape(()))


def _exact_enough(values: Tensor) -> Tensor:
    return values if values.dtype.itemsize >= 4 else values.float()  # nothing is summed in low precision


def _counts(y: Tensor) -> Tensor | None:
    """Which positions count; None where all do, or where there is only one."""
    return None if y.is_floating_point() or y.ndim < 2 else y != IGNORED


def _over_positions(values: Tensor, counts: Tensor | None = None) -> Tensor:
    if values.ndim < 2:
        return values
    if counts is None:
        return values.flatten(1).mean(dim=1)
    return (values * counts).flatten(1).sum(dim=1) / counts.flatten(1).sum(dim=1).clamp(min=1)


def shaped_like(predicted: Tensor, y: Tensor) -> Tensor:
    """The prediction in the shape of its target. Other shapes are refused, which PyTorch would broadcast."""
    if {predicted.shape, y.shape} == {y.shape[:1], (*y.shape[:1], 1)}:  # a column and a vector
        return predicted.reshape(y.shape)
    if predicted.shape != y.shape:
        raise RunError(
            f"The model returns a shape of {tuple(predicted.shape)} for targets of shape {tuple(y.shape)}. They must "
            f"be the same: reshape one of them."
        )
    return predicted
