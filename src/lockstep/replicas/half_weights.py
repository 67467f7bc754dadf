"""bf16 copies of weights, made once a step and shared by all its shards.

Autocast casts a float32 weight for every shard anew, and its gradient back. A weight that is cast once in the forward
pass, and used in no other way, can as well be cast before: every number stays the same.
"""

from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class CastCounter(TorchDispatchMode):
    """While it is entered, counts how often each parameter is cast to bf16, and notes those used otherwise."""

    def __init__(self, params: dict[str, Tensor]) -> None:
        super().__init__()
        self._names = {id(param): name for name, param in params.items()}
        self._casts: Counter[str] = Counter()
        self._others: set[str] = set()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        used = [self._names[id(leaf)] for leaf in tree_leaves((args, kwargs)) if id(leaf) in self._names]
        if used and func is torch.ops.aten._to_copy.default and kwargs.get("dtype") is torch.bfloat16:
            self._casts[used[0]] += 1
        else:
            self._others.update(used)
        return func(*args, **kwargs)

    def cast_once(self) -> list[str]:
        """The parameters that were cast exactly once, and not used otherwise."""
        return [name for name, number in self._casts.items() if number == 1 and name not in self._others]


class HalfWeights:
    """The bf16 copies of these parameters."""

    def __init__(self, params: dict[str, nn.Parameter]) -> None:
        self._params = [param.detach() for param in params.values()]
        self._copies = [param.to(torch.bfloat16) for param in self._params]
        self.by_name = dict(zip(params, self._copies, strict=True))

    def refresh(self) -> None:
        """Copies the parameters again; the copies stay where they are."""
        if self._copies:
            torch._foreach_copy_(self._copies, self._params)
