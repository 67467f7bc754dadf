"""A weight that is looked up in and multiplied by, like a language model's embedding that is its output layer, too.

In bf16 its gradient comes in two parts: that of the bf16 copy that is multiplied by, and that of the rows that were
looked up. PyTorch would make each a float32 matrix of the size of the weight, and add them: four passes over 154 MB for
each shard of GPT-2, 2 of 71 ms of its step on an H200. Here both are taken as they come.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from lockstep.backends.torch.gradient_pieces import Piece

CAST, LOOK_UP = "ToCopyBackward0", "EmbeddingBackward0"  # PyTorch's names of the two uses
SAVED = ("indices", "weight_sym_argsize_0", "padding_idx", "scale_grad_by_freq", "sparse")  # of the second


class TiedWeight(NamedTuple):
    """The edges of a graph at which the two parts of a gradient arrive, and what the second part is made of."""

    copy: GradientEdge
    rows: GradientEdge
    saved: dict[str, Any]

    def parts(self, of_copy: Tensor | None, of_rows: Tensor | None) -> Piece:
        """The gradient of the weight, from those that arrived."""
        if of_rows is None:
            return of_copy
        indices, num_rows, padding, scales, _ = self.saved.values()
        padding -= (padding >= 1 << 63) << 64  # PyTorch shows -1, none, without its sign
        looked_up = torch.ops.aten.embedding_dense_backward(of_rows, indices, num_rows, padding, scales)
        if of_copy is not None and of_copy.dtype != torch.bfloat16:  # other kinds are not added as they are
            of_copy = of_copy.to(looked_up.dtype)
        return looked_up if of_copy is None else (of_copy, looked_up)


def tied_weights(loss: Tensor, edges: Sequence[GradientEdge]) -> dict[int, TiedWeight]:
    """Those among the parameters of these edges, by number, that the loss depends on in just these two ways."""
    uses = _uses(loss, edges)
    found: dict[int, TiedWeight] = {}
    for number, nodes in uses.items():
        kinds = {type(node).__name__: node for node in nodes}
        if len(nodes) == 2 and kinds.keys() == {CAST, LOOK_UP}:
            saved = {name: getattr(kinds[LOOK_UP], f"_saved_{name}", None) for name in SAVED}
            if None not in saved.values() and not saved["sparse"]:
                found[number] = TiedWeight(GradientEdge(kinds[CAST], 0), GradientEdge(kinds[LOOK_UP], 0), saved)
    return found


def _uses(loss: Tensor, edges: Sequence[GradientEdge]) -> dict[int, list[Any]]:
    """The nodes of the loss's graph that use each parameter, by its number."""
    numbers = {edge.node: number for number, edge in enumerate(edges)}
    found: dict[int, list[Any]] = {}
    ahead, seen = [loss.grad_fn], {loss.grad_fn}
    while ahead:
        node = ahead.pop()
        for after, _ in node.next_functions if node is not None else ():
            if after in numbers:
                found.setdefault(numbers[after], []).append(node)
            elif after is not None and after not in seen:
                seen.add(after)
                ahead.append(after)
    return found
