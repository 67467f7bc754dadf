"""The gradients of a replica's shards: computed, looked at, and laid into one flat vector."""

from collections.abc import Iterable, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from lockstep.backends import Ready
from lockstep.backends.torch_gradient import Filling
from lockstep.core.errors import NotRecorded, RunError
from lockstep.core.layout import Layout
from lockstep.replicas.keyed_random import NoDraws
from lockstep.replicas.memory_format import flat_in_memory


class Gradients:
    """Those of the parameters that are trained."""

    def __init__(
        self, trained: list[tuple[str, Tensor]], layout: Layout, strangers: list[Tensor], place: torch.device
    ) -> None:
        """`strangers` are parameters that the first shard must not depend on: those of the module that was given."""
        self._names, self._params = [name for name, _ in trained], [param for _, param in trained]
        self._layout, self._strangers, self._place = layout, strangers, place
        sizes = layout.pieces[1::2]
        self._gaps = [torch.zeros(size, dtype=torch.float32, device=place) for size in sizes] + [None]
        self._filling: Filling | None = None  # of the shard that is in backward, where parts of it leave early
        self._has_hooks = False
        self._came: set[int] = set()  # numbers of the parameters that have their gradient, while nothing is filled
        self._comes_twice: int | None = None  # a parameter whose gradient is not complete when it comes first

    def of(self, loss: Tensor, ready: Ready | None) -> tuple[list[Tensor | None], Tensor]:
        """One for each parameter, and all of them as one vector; `ready` is told of what is there before."""
        self._came.clear()
        self._filling = None if ready is None else self._look_or_fill(ready)
        before = [param.grad for param in self._strangers]
        # from its edge: a call with a tensor would be one of those to watch, with all that it calls
        edge, one = get_gradient_edge(loss), torch.ones_like(loss)
        with NoDraws():
            torch.autograd.backward(edge, one)
        self._check(param.grad is not old for param, old in zip(self._strangers, before, strict=True))
        gradients = [param.grad for param in self._params]
        self.clear()
        filling, self._filling = self._filling, None
        if filling is None:
            return gradients, self.flat(gradients)
        if self._comes_twice is not None and filling.is_told:
            raise RunError(
                f"The gradient of {self._names[self._comes_twice]} has left for the exchange, and comes once more in "
                f"the same backward pass (a part that is computed again, with use_reentrant=True?). Use "
                f"use_reentrant=False, or let gradients leave when backward is over (--bucket-mb 0)."
            )
        self._check_dense(gradients)
        return gradients, filling.complete()

    def recorded(self, loss: Tensor, edges: Sequence[GradientEdge]) -> tuple[list[Tensor | None], Tensor]:
        """The same for a recording, of the parameters that these edges lead to."""
        strange = [get_gradient_edge(param) for param in self._strangers]
        edge, wanted, one = get_gradient_edge(loss), [*edges, *strange], torch.ones_like(loss)
        try:
            with NoDraws():
                found = torch.autograd.grad([edge], wanted, [one], allow_unused=True)
        except RuntimeError as problem:
            if "use_reentrant" not in str(problem):
                raise
            raise NotRecorded("parts of the model are computed again in backward (use_reentrant=True)") from problem
        self._check(gradient is not None for gradient in found[len(edges) :])
        gradients = list(found[: len(edges)])
        return gradients, self.flat(gradients)

    def flat(self, gradients: Sequence[Tensor | None]) -> Tensor:
        """All of them as one vector."""
        self._check_dense(gradients)
        pieces: list[Tensor] = []
        for param, gradient, gap in zip(self._params, gradients, self._gaps, strict=True):
            pieces.append(flat_in_memory(torch.zeros_like(param) if gradient is None else gradient, param))
            if gap is not None:
                pieces.append(gap)
        return torch.cat(pieces)

    def clear(self) -> None:
        """Takes them from the parameters; an optimizer may not have all of those."""
        for param in self._params:
            param.grad = None

    def _look_or_fill(self, ready: Ready) -> Filling | None:
        """The vector to fill, if gradients come once. The first time, that is seen."""
        if self._has_hooks and self._comes_twice is None:
            return Filling(self._layout, self._place, ready)
        if not self._has_hooks:
            for number, param in enumerate(self._params):
                param.register_post_accumulate_grad_hook(partial(self._arrived, number))
            self._has_hooks = True
        return None

    def _arrived(self, number: int, param: Tensor) -> None:
        gradient = param.grad
        if self._filling is None:
            is_first = number not in self._came
            self._came.add(number)
        elif gradient is None or gradient.is_sparse:
            return
        else:
            is_first = self._filling.put(number, flat_in_memory(gradient, param))
        if not is_first:
            self._comes_twice = number

    def _check(self, are_strange: Iterable[bool]) -> None:
        if any(are_strange):
            raise RunError(
                "The loss uses the module that you gave, and not the replica that is trained: what it adds has no "
                "effect. Let the model give what the loss needs, as an entry of a tuple."
            )
        self._strangers = []

    def _check_dense(self, gradients: Sequence[Tensor | None]) -> None:
        for name, gradient in zip(self._names, gradients, strict=True):
            if gradient is not None and gradient.is_sparse:
                raise RunError(
                    f"The gradient of {name} is sparse, which cannot be added up in the tree. Use sparse=False."
                )
