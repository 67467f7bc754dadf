"""The gradients of a replica's shards: computed, looked at, and laid into one flat vector."""

from collections.abc import Iterable, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from lockstep.backends import OnReady
from lockstep.backends.torch_gradient_vector import GradientVector
from lockstep.core.errors import CaptureError, RunError
from lockstep.core.layout import Layout
from lockstep.replicas.keyed_random import NoDraws
from lockstep.replicas.memory_format import flat_in_memory_order


class Gradients:
    """Those of the parameters that are trained."""

    def __init__(
        self, trained: list[tuple[str, Tensor]], layout: Layout, originals: list[Tensor], device: torch.device
    ) -> None:
        """`originals` are the parameters of the user's own module: the first shard must not depend on them."""
        self._names, self._params = [name for name, _ in trained], [param for _, param in trained]
        self._layout, self._originals, self._device = layout, originals, device
        sizes = layout.pieces[1::2]
        self._gaps = [torch.zeros(size, dtype=torch.float32, device=device) for size in sizes] + [None]
        self._vector: GradientVector | None = None  # of the shard that is in backward, where it is exchanged early
        self._has_hooks = False
        self._seen: set[int] = set()  # numbers of the parameters that have got a gradient, in the first step
        self._accumulated_twice: int | None = None  # a parameter whose gradient comes more than once in a backward pass

    def of(self, loss: Tensor, on_ready: OnReady | None) -> tuple[list[Tensor | None], Tensor]:
        """One for each parameter, and all of them as one vector; `on_ready` is told of entries that come early."""
        self._seen.clear()
        self._vector = None if on_ready is None else self._vector_to_fill(on_ready)
        before = [param.grad for param in self._originals]
        # from its edge: a call with a tensor would be one of those to watch, with all that it calls
        edge, one = get_gradient_edge(loss), torch.ones_like(loss)
        with NoDraws():
            torch.autograd.backward(edge, one)
        self._check(param.grad is not old for param, old in zip(self._originals, before, strict=True))
        gradients = [param.grad for param in self._params]
        self.clear()
        vector, self._vector = self._vector, None
        if vector is None:
            return gradients, self.flat(gradients)
        if self._accumulated_twice is not None and vector.is_shared:
            raise RunError(
                f"The gradient of {self._names[self._accumulated_twice]} is being exchanged, and comes once more in "
                f"the same backward pass (activation checkpointing with use_reentrant=True?). Use use_reentrant=False, "
                f"or exchange gradients when backward is over (--bucket-mb 0)."
            )
        self._check_dense(gradients)
        return gradients, vector.complete()

    def captured(self, loss: Tensor, edges: Sequence[GradientEdge]) -> tuple[list[Tensor | None], Tensor]:
        """The same in a CUDA graph capture, of the parameters that these edges lead to."""
        originals = [get_gradient_edge(param) for param in self._originals]
        edge, wanted, one = get_gradient_edge(loss), [*edges, *originals], torch.ones_like(loss)
        try:
            with NoDraws():
                found = torch.autograd.grad([edge], wanted, [one], allow_unused=True)
        except RuntimeError as problem:
            if "use_reentrant" not in str(problem):
                raise
            raise CaptureError("the model uses activation checkpointing with use_reentrant=True") from problem
        self._check(gradient is not None for gradient in found[len(edges) :])
        gradients = list(found[: len(edges)])
        return gradients, self.flat(gradients)

    def flat(self, gradients: Sequence[Tensor | None]) -> Tensor:
        """All of them as one vector."""
        self._check_dense(gradients)
        pieces: list[Tensor] = []
        for param, gradient, gap in zip(self._params, gradients, self._gaps, strict=True):
            pieces.append(flat_in_memory_order(torch.zeros_like(param) if gradient is None else gradient, param))
            if gap is not None:
                pieces.append(gap)
        return torch.cat(pieces)

    def clear(self) -> None:
        """Takes them from the parameters; an optimizer may not have all of those."""
        for param in self._params:
            param.grad = None

    def _vector_to_fill(self, on_ready: OnReady) -> GradientVector | None:
        """The vector to fill, if every gradient comes once; whether they do is found out in the first step."""
        if self._has_hooks and self._accumulated_twice is None:
            return GradientVector(self._layout, self._device, on_ready)
        if not self._has_hooks:
            for number, param in enumerate(self._params):
                param.register_post_accumulate_grad_hook(partial(self._accumulated, number))
            self._has_hooks = True
        return None

    def _accumulated(self, number: int, param: Tensor) -> None:
        gradient = param.grad
        if self._vector is None:
            is_first = number not in self._seen
            self._seen.add(number)
        elif gradient is None or gradient.is_sparse:
            return
        else:
            is_first = self._vector.put(number, flat_in_memory_order(gradient, param))
        if not is_first:
            self._accumulated_twice = number

    def _check(self, depends: Iterable[bool]) -> None:
        if any(depends):
            raise RunError(
                "The loss uses the module that you gave, and not the replica that is trained: what it adds has no "
                "effect. Let the model give what the loss needs, as an entry of a tuple."
            )
        self._originals = []

    def _check_dense(self, gradients: Sequence[Tensor | None]) -> None:
        for name, gradient in zip(self._names, gradients, strict=True):
            if gradient is not None and gradient.is_sparse:
                raise RunError(
                    f"The gradient of {name} is sparse, which cannot be added up in the tree. Use sparse=False."
                )
