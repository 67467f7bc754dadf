"""`loss="model"`: the loss that a model computes itself, like those of Hugging Face, as an exact sum and weight.

Such a loss is a mean over what counts in a few samples: tokens whose label is not -100, or samples. Which of them is
found out by trying: the mean over some rows, times their weight, must be the sum of the same for each row.
"""

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.core.errors import RunError

IGNORED = -100
MAX_ERROR = 1e-4
Weight = Callable[[Mapping[str, Any]], Tensor | int]


def _num_samples(batch: Mapping[str, Any]) -> int:
    return next(len(part) for part in batch.values() if isinstance(part, Tensor) and part.ndim)


def _num_labels(batch: Mapping[str, Any]) -> Tensor:
    return (batch["labels"] != IGNORED).sum()


def _num_shifted_labels(batch: Mapping[str, Any]) -> Tensor:
    return (batch["labels"][:, 1:] != IGNORED).sum()


class ModelLoss:
    """The entry `loss` of a model's output, with the weight that it is a mean over."""

    __name__ = "model"

    def __init__(self) -> None:
        self._weight: Weight | None = None  # not known yet

    def __call__(self, output: Any, batch: Any) -> tuple[Tensor, Tensor]:
        assert self._weight is not None, "it is found first"
        weight = torch.as_tensor(self._weight(batch), dtype=torch.float64)
        if not weight:  # nothing counts, and the mean over nothing is not a number
            return sum(x.float().sum() for x in _floats(output)) * 0.0, weight
        return loss_of(output) * float(weight), weight

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def find_weight(self, module: nn.Module, batch: Any) -> None:
        """Finds out what the loss is a mean over, from a few samples of a batch."""
        if self._weight is not None:
            return
        if not isinstance(batch, Mapping):
            raise RunError(
                "loss='model' needs batches that are dicts, with the model's arguments by name, labels among them. "
                "Else give a loss of your own: loss=lambda output, y: ..., one number for each sample."
            )
        module = copy.deepcopy(module).eval()
        rows, candidates = _probes(batch)
        try:
            losses, whole, mean = _tried(module, rows)
        except Exception:  # labels of -100 mean nothing to it
            rows, candidates = [_row(batch, number) for number in range(3)], [_num_samples]
            losses, whole, mean = _tried(module, rows)
        errors = []
        for weight in candidates:
            parts, total = [float(weight(row)) for row in rows], float(weight(whole))
            expected = sum(part * loss for part, loss in zip(parts, losses, strict=True) if part)
            errors.append(abs(mean * total - expected) / max(abs(expected), 1e-9))
        best = min(range(len(errors)), key=errors.__getitem__)
        if not errors[best] <= MAX_ERROR:
            raise RunError(
                "The model's own loss is not a mean over its labels or samples, so it cannot be put together exactly "
                "from the shards of a batch. Give a loss of your own: loss=lambda output, batch: (sum, weight), or "
                "one number for each sample; or over='batch', if it looks across the batch."
            )
        self._weight = candidates[best]


def _tried(module: nn.Module, rows: list[dict[str, Any]]) -> tuple[list[float], dict[str, Any], float]:
    """The loss of each row, all rows as one batch, and its loss."""
    whole = {name: torch.cat([row[name] for row in rows]) if _is_tensor(x) else x for name, x in rows[0].items()}
    return [float(loss_of(module(**row))) for row in rows], whole, float(loss_of(module(**whole)))


def loss_of(output: Any) -> Tensor:
    """The loss in a model's output."""
    found = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if not isinstance(found, Tensor):
        raise RunError(
            "loss='model' needs a model whose output has a loss, as output.loss or output['loss']: give it the labels "
            "with the batch. Else give a loss of your own."
        )
    return found.float().mean() if found.numel() > 1 else found.float().reshape(())


def _probes(batch: Mapping[str, Any]) -> tuple[list[dict[str, Any]], list[Weight]]:
    """Rows of which different numbers of labels count, and what the loss may be a mean over."""
    rows, labels = [_row(batch, number) for number in range(3)], batch.get("labels")
    if not isinstance(labels, Tensor) or not labels.ndim or labels.is_floating_point():
        return rows, [_num_samples]
    if labels.ndim < 2 or labels.shape[1] < 4:
        rows[1]["labels"] = torch.full_like(rows[1]["labels"], IGNORED)
        return rows, [_num_labels, _num_samples]
    for row, kept in zip(rows, (labels.shape[1], labels.shape[1] // 2, 2), strict=True):
        row["labels"] = torch.where(row["labels"] == IGNORED, 0, row["labels"])  # all of them count
        row["labels"][:, : labels.shape[1] - kept] = IGNORED
    return rows, [_num_shifted_labels, _num_labels, _num_samples]


def _row(batch: Mapping[str, Any], number: int) -> dict[str, Any]:
    """One sample of a batch, as a batch; they come again, if there are fewer."""
    at = number % _num_samples(batch)
    return {name: part[at : at + 1] if _is_tensor(part) else part for name, part in batch.items()}


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor) and value.ndim > 0


def _floats(output: Any) -> list[Tensor]:
    parts = output.values() if isinstance(output, Mapping) else vars(output).values()
    return [x for x in parts if isinstance(x, Tensor) and x.is_floating_point() and x.numel() > 1]
