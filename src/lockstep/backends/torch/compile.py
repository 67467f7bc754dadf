"""torch.compile with settings that keep the bits: no autotuning, and never a fall back to eager code."""

import os
import threading
from functools import cache
from typing import Any

import torch

MAX_COMPILED = 1000  # shapes of one function
# A compiler's option: sums over rows and columns in a norm layer's backward pass go through memory together, for small
FUSE_SMALL = "mix_order_reduction_non_strict_mode"  # shards, too. One by one, GPT-2's took 29 and 12 us on an H200.
_PREPARING = threading.Lock()  # threads of several ranks would import PyTorch's compiler at the same time


def compiled(function: Any) -> Any:
    """The function, compiled when it is first called with arguments of some shape; one for all replicas."""
    with _PREPARING:
        return _compiled(function)


@cache
def _compiled(function: Any) -> Any:
    # without worker processes: with them compiling took as long, and the program waited for them at its end
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    import torch._dynamo.config as limits  # slow to import
    import torch._functorch.config as functorch
    import torch._inductor.config as inductor

    # no autotuning: another process could choose another kernel, with other bits
    options: dict[str, Any] = {"deterministic": True}
    if hasattr(inductor.triton, FUSE_SMALL):
        options[f"triton.{FUSE_SMALL}"] = True
    found = torch.compile(function, dynamic=False, options=options)
    is_prepared = threading.local()

    def call(*args: Any, **kwargs: Any) -> Any:
        if not hasattr(is_prepared, "value"):  # settings belong to a thread
            # beyond these limits torch.compile falls back to eager, with other bits
            limits.recompile_limit = limits.accumulated_recompile_limit = MAX_COMPILED
            # the backward pass is compiled together with the forward pass, while no other rank draws random numbers
            functorch.force_non_lazy_backward_lowering = True
            is_prepared.value = True
        return found(*args, **kwargs)

    return call
