"""The gradients of a replica's shards: computed, checked, and packed into one flat vector."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from lockstep.backends import OnReady, Pieces
from lockstep.backends.torch.gradient_pieces import GradientPieces, Piece, parts_of
from lockstep.backends.torch.gradient_vector import GradientVector
from lockstep.backends.torch.kernels.nvrtc import can_compile_kernels
from lockstep.backends.torch.stacked import StackedTensor
from lockstep.core.errors import CaptureError, RunError
from lockstep.core.layout import Layout
from lockstep.replicas.keyed_random import KeyedRandom, NoDraws
from lockstep.replicas.memory_format import flat_in_memory_order, shaped_like
from lockstep.replicas.sliced_layers import SliceContext
from lockstep.replicas.tied_weights import tied_weights


class Gradients:
    """Gradients of the trained parameters. The first shard must not depend on `originals`, the user's own module's."""

    def __init__(
        self,
        trained: list[tuple[str, Tensor]],
        layout: Layout,
        originals: list[Tensor],
        device: torch.device,
        random: KeyedRandom | None = None,
    ) -> None:
        self._random = random  # of the shards
        self._names, self._params = [name for name, _ in trained], [param for _, param in trained]
        self._layout, self._originals, self._device = layout, originals, device
        self._vector: GradientVector | None = None  # of the shard in the backward pass, where the exchange overlaps it
        self._has_hooks = False
        self._seen: set[int] = set()  # numbers of the parameters that have got a gradient, in the first step
        self._accumulated_twice: int | None = None  # a parameter whose gradient comes more than once in a backward pass

    def of(self, loss: Tensor, on_ready: OnReady | None = None) -> tuple[list[Tensor | None], Tensor | Pieces]:
        """The gradient of each parameter, and all together; `on_ready` is called as entries become complete."""
        self._seen.clear()
        self._vector = None if on_ready is None else self._vector_to_fill(on_ready)
        self._backward([(loss, torch.ones_like(loss))])
        return self._found()

    def of_part(
        self, passes: Sequence[list[tuple[Tensor, Tensor]]], slices: SliceContext | None, after_pass: Callable[[], None]
    ) -> tuple[list[Tensor | None], Tensor | Pieces]:
        """The same for a part of a model: backward starts several times, from tensors with their gradients.

        Where layers are sliced, it starts again at each of them. `after_pass` is called after each time. What reaches
        a tensor in several passes is not added up before it goes on: so it does not matter where a model is cut.
        """
        keeps_graph = slices is not None or len(passes) > 1
        for starts in passes:
            if starts:
                self._backward(starts, keeps_graph)
            after_pass()
        if slices is not None:
            slices.backward(after_pass, self._random)
        return self._found()

    def _backward(self, starts: Sequence[tuple[Tensor, Tensor]], keeps_graph: bool = False) -> None:
        # from their edges: `NoDraws` would intercept a call with a tensor, and all that it calls
        edges, gradients = [get_gradient_edge(tensor) for tensor, _ in starts], [gradient for _, gradient in starts]
        with self.watch_originals(), NoDraws(self._random):
            torch.autograd.backward(edges, gradients, retain_graph=keeps_graph)

    def _found(self) -> tuple[list[Tensor | None], Tensor | Pieces]:
        gradients = [param.grad for param in self._params]
        self.clear()
        vector, self._vector = self._vector, None
        if vector is None:
            is_on_cpu = self._device.type == "cpu"  # a GPU would wait for the launches of many small additions
            return gradients, self._pieces(gradients) if is_on_cpu else self.flat(gradients)
        if self._accumulated_twice is not None and vector.is_shared:
            raise RunError(
                f"The gradient of {self._names[self._accumulated_twice]} is being exchanged, and comes once more in "
                f"the same backward pass. Use use_reentrant=False in checkpointing, or no overlap (--bucket-mb 0)."
            )
        self._check_dense(gradients)
        return gradients, vector.complete()

    def captured_together(
        self, loss: StackedTensor, edges: Sequence[GradientEdge]
    ) -> list[tuple[list[Tensor | None], Tensor | Pieces]]:
        """The same for each of several shards, whose losses are stacked."""
        edge, one = get_gradient_edge(loss), torch.ones_like(loss)
        with NoDraws():
            found = torch.autograd.grad([edge], edges, [one], allow_unused=True)
        own = [each.stack.unbind() if isinstance(each, StackedTensor) else [each] * len(loss.stack) for each in found]
        return [(list(gradients), self._pieces(gradients)) for gradients in zip(*own, strict=True)]

    def captured(self, loss: Tensor, edges: Sequence[GradientEdge]) -> tuple[list[Tensor | None], Tensor | Pieces]:
        """The same in a CUDA graph capture, for the parameters of these edges; in pieces, where these can be added."""
        originals = [get_gradient_edge(param) for param in self._originals]
        can_add = self._device.type == "cpu" or can_compile_kernels()
        tied = tied_weights(loss, edges) if can_add else {}
        own = [tied[number].copy if number in tied else edge for number, edge in enumerate(edges)]
        wanted = [*own, *originals, *(weight.rows for weight in tied.values())]
        edge, one = get_gradient_edge(loss), torch.ones_like(loss)
        try:
            with NoDraws():
                found = torch.autograd.grad([edge], wanted, [one], allow_unused=True)
        except RuntimeError as problem:
            if "use_reentrant" not in str(problem):
                raise
            raise CaptureError("the model uses activation checkpointing with use_reentrant=True") from problem
        gradients, of_rows = list(found[: len(own)]), found[len(own) + len(originals) :]
        self._check_originals(gradient is not None for gradient in found[len(own) : len(own) + len(originals)])
        pieces: list[Piece] = list(gradients)
        for (number, weight), of_row in zip(tied.items(), of_rows, strict=True):
            pieces[number] = weight.parts(gradients[number], of_row)
            gradients[number] = gradients[number] if of_row is None else of_row  # there is one
        return gradients, self._pieces(pieces) if can_add else self.flat(gradients)

    def flat(self, gradients: Sequence[Tensor | None]) -> Tensor:
        """All of them as one vector."""
        return self._pieces(gradients).flat()

    def _pieces(self, gradients: Sequence[Piece]) -> GradientPieces:
        self._check_dense(gradients)
        pieces = [
            tuple(flat_in_memory_order(part, param) for part in parts_of(gradient))
            for gradient, param in zip(gradients, self._params, strict=True)
        ]
        return GradientPieces(self._layout, pieces, self._device)

    def put(self, vector: Tensor, used: frozenset[int], owned: range | None = None) -> None:
        """Makes the entries of a vector the gradients of the parameters with the numbers `used`; the others have none.

        The vector is that of all parameters, or of those with the numbers `owned`.
        """
        owned = range(len(self._params)) if owned is None else owned
        pieces = vector.split(self._layout.pieces[2 * owned.start : 2 * owned.stop])[::2]
        for number, piece in zip(owned, pieces, strict=True):
            param = self._params[number]
            param.grad = shaped_like(param, piece) if number in used else None  # PyTorch's optimizers skip None

    def clear(self) -> None:
        """Removes them from all parameters; an optimizer may not have all of those."""
        for param in self._params:
            param.grad = None

    def _vector_to_fill(self, on_ready: OnReady) -> GradientVector | None:
        """The vector to fill, if every gradient comes once; the first step finds out whether they do."""
        if self._has_hooks:
            return GradientVector(self._layout, self._device, on_ready) if self._accumulated_twice is None else None
        for number, param in enumerate(self._params):
            param.register_post_accumulate_grad_hook(partial(self._on_accumulated, number))
        self._has_hooks = True
        return None

    def _on_accumulated(self, number: int, param: Tensor) -> None:
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

    @contextmanager
    def watch_originals(self) -> Iterator[None]:
        """Refuses a first backward pass that reaches the user's own module."""
        before = [(param.grad, _version_of(param.grad)) for param in self._originals]
        yield
        self._check_originals(
            param.grad is not gradient or _version_of(gradient) != version
            for param, (gradient, version) in zip(self._originals, before, strict=True)
        )

    def _check_originals(self, has_gradient: Iterable[bool]) -> None:
        if any(has_gradient):
            raise RunError(
                "The loss, or a function that the model keeps, uses the module that you gave, and not the replica that "
                "is trained: what it computes has no effect. Return what the loss needs from the model, as an entry of "
                "a tuple; make such functions methods of the model."
            )
        self._originals = []

    def _check_dense(self, gradients: Sequence[Piece]) -> None:
        for name, gradient in zip(self._names, gradients, strict=True):
            if any(part.is_sparse for part in parts_of(gradient)):
                raise RunError(f"The gradient of {name} is sparse, and only dense ones are added. Use sparse=False.")


def _version_of(gradient: Tensor | None) -> int:
    """What grows when a backward pass adds to it."""
    return 0 if gradient is None or gradient.is_inference() else gradient._version
