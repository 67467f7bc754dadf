"""PyTorch's own optimizers on a GPU: one fused kernel where there is one, and nothing that the host has to know.

Then an update can be captured as a CUDA graph. The learning rate is a tensor on the device during the update only: to
schedulers and checkpoints it is the number that it is on a CPU.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

FUSED = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)  # that have one on a GPU


class GpuOptimizer:
    """An optimizer of one of PyTorch's classes; the settings that its user has chosen stay."""

    def __init__(self, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
        self._optimizer, self._device = optimizer, device
        kind = type(optimizer)
        self._rates: list[Tensor | None] = [None for _ in optimizer.param_groups]
        self.is_capturable = False
        if not kind.__module__.startswith("torch.optim."):  # the user's own may read numbers on the host
            return
        for group in optimizer.param_groups:
            if kind in FUSED and group.get("fused") is None and group.get("foreach") is None:
                group["fused"] = True
            if "capturable" in group:
                group["capturable"] = True
        self.is_capturable = all(group.get("capturable") or group.get("fused") for group in optimizer.param_groups)
        for state in optimizer.state.values():  # of a checkpoint, which a CPU may have written
            if isinstance(state.get("step"), Tensor):
                state["step"] = state["step"].to(device)

    def set_rates(self) -> None:
        """Copies the learning rates to the device; nobody waits for it."""
        for number, group in enumerate(self._optimizer.param_groups):
            if self.is_capturable and isinstance(group.get("lr"), (int, float)):
                if self._rates[number] is None:
                    self._rates[number] = torch.empty((), device=self._device)
                self._rates[number].fill_(group["lr"])  # type: ignore[union-attr]

    def settings(self) -> list[dict[str, Any]]:
        """All but parameters and learning rates: a captured update has these built in."""
        groups = self._optimizer.param_groups
        return [{name: value for name, value in group.items() if name not in ("params", "lr")} for group in groups]

    @contextmanager
    def rates_on_device(self) -> Iterator[None]:
        """Within it, the optimizer's learning rates are those tensors."""
        groups: list[dict[str, Any]] = self._optimizer.param_groups
        before = [group.get("lr") for group in groups]
        for group, rate in zip(groups, self._rates, strict=True):
            if rate is not None:
                group["lr"] = rate
        try:
            yield
        finally:
            for group, rate, number in zip(groups, self._rates, before, strict=True):
                if rate is not None:
                    group["lr"] = number
