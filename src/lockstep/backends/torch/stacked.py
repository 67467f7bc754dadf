"""The tensors of several shards as one: an operation on a `StackedTensor` is that operation on each shard.

Kernels for the few samples of a shard do not fill a GPU. A kernel that treats every number alike (relu, +), or that was
written for it (convolutions, batch norm), computes all shards in one launch; any other operation is launched once for
each. So every shard has the bits that it has alone, and a model needs no change:

    X = StackedTensor(torch.stack([X0, X1, X2]))   # of three shards; has the shape of X0
    loss = loss_of(model(X), y)                    # has the shape of a shard's loss
    loss.stack                                     # three losses
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

ALIGNMENT = 256  # bytes: libraries choose kernels by it, and a shard alone has new memory, which is aligned
ATEN = torch.ops.aten


class CannotStack(Exception):
    """An operation that cannot be done for several shards at once."""


@dataclass
class Launches:
    """How often kernels were launched for all shards at once, and how often for each of them."""

    together: int = 0
    repeated: int = 0


class StackedTensor(Tensor):
    """`stack` has one dimension more than each shard's tensor: the first, over the shards."""

    stack: Tensor
    launches: Launches

    @staticmethod
    def __new__(cls, stack: Tensor, launches: Launches | None = None) -> "StackedTensor":
        how: dict[str, Any] = {"strides": stack.stride()[1:], "dtype": stack.dtype, "device": stack.device}
        made: StackedTensor = Tensor._make_wrapper_subclass(cls, stack.shape[1:], **how)
        made.stack, made.launches = stack, launches or Launches()
        torch._C._set_throw_on_mutable_data_ptr(made)  # a kernel that wants its address must not get none
        return made

    def __repr__(self) -> str:
        return f"StackedTensor({self.stack!r})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        stacked = _stacked_among((args, kwargs))
        view = _VIEWS.get(func)
        if view is not None and args[0] is stacked[0]:
            return StackedTensor(view(stacked[0].stack, *args[1:], **kwargs), stacked[0].launches)
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise CannotStack("random numbers")
        if (torch.Tag.pointwise in func.tags or func in _COPIES) and _is_one_launch(func, args, kwargs):
            stacked[0].launches.together += 1
            return _pointwise(func, args, kwargs)
        stacked[0].launches.repeated += 1
        return _each(func, args, kwargs)


def num_shards_of(tensor: Tensor) -> int:
    """How many shards a tensor is that of; 1 where it is a plain one."""
    return len(tensor.stack) if isinstance(tensor, StackedTensor) else 1


def joined(tensor: Tensor) -> Tensor:
    """The samples of all shards as one plain tensor, for a kernel that treats every sample alike."""
    if not isinstance(tensor, StackedTensor):
        return tensor
    stack = tensor.stack
    has_gaps = stack.stride(0) != stack.shape[1] * stack.stride(1)  # a slice: flattened, it would lose its order
    return (stack.clone() if has_gaps else stack).flatten(0, 1)


def parted(tensor: Tensor, like: Tensor) -> Tensor:
    """The same the other way round, with as many shards as `like` has."""
    if not isinstance(like, StackedTensor):
        return tensor
    like.launches.together += 1
    return StackedTensor(tensor.unflatten(0, (len(like.stack), -1)), like.launches)


def of_shards(stack: Tensor, like: Tensor) -> Tensor:
    """One tensor for each shard as what `like` is: a stacked tensor, or a plain one."""
    return StackedTensor(stack, like.launches) if isinstance(like, StackedTensor) else stack[0]


def per_shard(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The function, computed for each shard by itself where its arguments are of several."""

    @wraps(function)
    def computed(*args: Any, **kwargs: Any) -> Tensor:
        leaves, spec = tree_flatten((args, kwargs))
        stacked = _stacked_among(leaves)
        if not stacked:
            return function(*args, **kwargs)
        number, launches = len(stacked[0].stack), stacked[0].launches
        launches.repeated += 1

        def of_each(leaf: Any) -> Any:
            is_tensor = isinstance(leaf, Tensor)  # a gradient of what all have in common is another in each
            return _Unstack.apply(leaf, number, launches) if is_tensor else (leaf,) * number

        split = [of_each(leaf) for leaf in leaves]
        found = []
        for of_shard in zip(*split, strict=True):
            own_args, own_kwargs = tree_unflatten(list(of_shard), spec)
            found.append(function(*own_args, **own_kwargs))
        result: Tensor = _Stack.apply(launches, *found)
        return result

    return computed


class _Unstack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, number: int, launches: Launches) -> tuple[Tensor, ...]:
        ctx.launches = launches
        is_stacked = isinstance(tensor, StackedTensor)
        return tuple(_slices(tensor)) if is_stacked else tuple(tensor.view_as(tensor) for _ in range(number))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return _stacked(gradients, ctx.launches), None, None


class _Stack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, launches: Launches, *tensors: Tensor) -> Tensor:
        return _stacked(tensors, launches)

    @staticmethod
    def backward(ctx: Any, gradient: StackedTensor) -> tuple[Tensor | None, ...]:
        return (None, *_slices(gradient))


def _stacked_among(tree: Any) -> list[StackedTensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, StackedTensor)]


def _slices(tensor: StackedTensor) -> list[Tensor]:
    """The tensor of each shard, in memory that is aligned as that of a new tensor."""
    return [part if part.data_ptr() % ALIGNMENT == 0 else part.clone() for part in tensor.stack.unbind()]


def _stacked(tensors: Sequence[Tensor], launches: Launches) -> StackedTensor:
    """Tensors of one shape, each in the order in memory that a copy of it would have."""
    first = tensors[0]
    strides = torch.empty_like(first, device="meta").stride()
    stack = first.new_empty_strided((len(tensors), *first.shape), (first.numel(), *strides))
    for place, tensor in zip(stack.unbind(), tensors, strict=True):
        place.copy_(tensor)
    return StackedTensor(stack, launches)


def _each(func: Any, args: Any, kwargs: Any) -> Any:
    """The operation once for each shard; what it writes to is written to in every shard."""
    stacked, is_written = _stacked_among((args, kwargs)), func._schema.is_mutable
    if is_written and not (isinstance(args[0], StackedTensor) and _writes_to_first_only(func)):
        raise CannotStack(f"{func} writes to a tensor that all shards have in common, or to several")
    if func in _OTHER_VIEWS:
        raise CannotStack(f"{func} would be a copy, and not a view")
    writes_stats = func in _BATCH_NORMS  # without saying so

    def parts_of(tensor: StackedTensor) -> Sequence[Tensor]:
        return tensor.stack.unbind() if is_written or (writes_stats and tensor.ndim == 1) else _slices(tensor)

    parts = {id(tensor): parts_of(tensor) for tensor in stacked}
    found = []
    for shard in range(len(stacked[0].stack)):

        def own(leaf: Any, at: int = shard) -> Any:
            return parts[id(leaf)][at] if id(leaf) in parts else leaf

        own_args, own_kwargs = tree_map(own, (args, kwargs))
        found.append(func(*own_args, **own_kwargs))
    if is_written:
        return args[0]
    first, spec = tree_flatten(found[0])
    if not all(leaf is None or isinstance(leaf, Tensor) for leaf in first):
        raise CannotStack(f"{func} has a result on the host")
    columns = zip(*(tree_leaves(result, is_leaf=_is_none) for result in found), strict=True)
    return tree_unflatten([None if each[0] is None else _stacked(each, stacked[0].launches) for each in columns], spec)


def _writes_to_first_only(func: Any) -> bool:
    """In place, and not to the shape."""
    written = [each.alias_info is not None and each.alias_info.is_write for each in func._schema.arguments]
    return written[0] and not any(written[1:]) and torch.Tag.inplace_view not in func.tags


def _is_none(leaf: Any) -> bool:
    return leaf is None


def _is_one_launch(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether all shards can be done at once: not where types, or what is written to, are another matter for each."""
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    ndim = max(tensor.ndim for tensor in tensors)
    has_numbers = any(isinstance(each, StackedTensor) and each.ndim == 0 for each in tensors)
    if has_numbers and len({each.dtype for each in tensors}) > 1:
        return False  # as a number, it does not decide the type of the result
    is_written = func._schema.is_mutable
    return not is_written or (isinstance(args[0], StackedTensor) and args[0].ndim == ndim and "out" not in kwargs)


def _pointwise(func: Any, args: Any, kwargs: Any) -> Any:
    """One launch for all shards."""
    ndim = max(leaf.ndim for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))
    if kwargs.get("memory_format") is torch.channels_last:
        plain = func(joined(args[0]), *args[1:], **kwargs)
        return StackedTensor(plain.unflatten(0, (len(args[0].stack), -1)), args[0].launches)

    def wide(leaf: Any) -> Any:
        """With as many dimensions as the others have, so that the first is that of the shards."""
        if not isinstance(leaf, StackedTensor):
            return leaf
        return (
            leaf.stack.view(len(leaf.stack), *[1] * (ndim - leaf.ndim), *leaf.shape) if leaf.ndim < ndim else leaf.stack
        )

    own_args, own_kwargs = tree_map(wide, (args, kwargs))
    found, (first, *_) = func(*own_args, **own_kwargs), _stacked_among((args, kwargs))
    if func._schema.is_mutable:
        return args[0]
    return tree_map(lambda leaf: StackedTensor(leaf, first.launches) if isinstance(leaf, Tensor) else leaf, found)


def _viewed(stack: Tensor, size: Sequence[int], *strides: Any) -> Tensor:
    numel, known = stack.numel() // len(stack), 1
    for each in size:
        known *= max(each, 1)
    return stack.view(len(stack), *[each if each >= 0 else numel // known for each in size])


def _expanded(stack: Tensor, size: Sequence[int], *, implicit: bool = False) -> Tensor:
    missing = len(size) - (stack.ndim - 1)
    return (stack.view(len(stack), *[1] * missing, *stack.shape[1:]) if missing else stack).expand(-1, *size)


def _strided(stack: Tensor, size: Sequence[int], stride: Sequence[int], offset: int | None = None) -> Tensor:
    if offset:
        raise CannotStack("a place in memory")
    return stack.as_strided((len(stack), *size), (stack.stride(0), *stride), stack.storage_offset())


def _at(stack: Tensor, dim: int) -> int:
    """The dimension of a stack that is number `dim` of each shard's tensor."""
    return dim % max(stack.ndim - 1, 1) + 1


_OTHER_VIEWS = {ATEN.diagonal.default, ATEN.unfold.default}
_BATCH_NORMS = {ATEN.native_batch_norm.default, ATEN.cudnn_batch_norm.default}
_COPIES = {
    ATEN.clone.default, ATEN._to_copy.default, ATEN.copy_.default, ATEN.fill_.Scalar, ATEN.zero_.default,
    ATEN.ones_like.default, ATEN.zeros_like.default, ATEN.empty_like.default, ATEN.full_like.default,
}  # fmt: skip
_VIEWS: dict[Any, Callable[..., Tensor]] = {
    ATEN.view.default: _viewed,
    ATEN._unsafe_view.default: _viewed,
    ATEN._reshape_alias.default: _viewed,
    ATEN.as_strided.default: _strided,
    ATEN.expand.default: _expanded,
    ATEN.detach.default: lambda stack: stack.detach(),
    ATEN.alias.default: lambda stack: stack.view_as(stack),
    ATEN.t.default: lambda stack: stack.transpose(1, 2) if stack.ndim > 2 else stack.view_as(stack),
    ATEN.transpose.int: lambda stack, one, other: stack.transpose(_at(stack, one), _at(stack, other)),
    ATEN.permute.default: lambda stack, dims: stack.permute(0, *[_at(stack, dim) for dim in dims]),
    ATEN.unsqueeze.default: lambda stack, dim: stack.unsqueeze(dim % stack.ndim + 1),
    ATEN.squeeze.dim: lambda stack, dim: stack.squeeze(_at(stack, dim)) if stack.ndim > 1 else stack.view_as(stack),
    ATEN.squeeze.dims: lambda stack, dims: stack.squeeze([_at(stack, dim) for dim in dims]),
    ATEN.select.int: lambda stack, dim, index: stack.select(_at(stack, dim), index),
    ATEN.slice.Tensor: lambda stack, dim=0, *how: ATEN.slice.Tensor(stack, _at(stack, dim), *how),
}
