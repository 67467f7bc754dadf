"""What our kernels need: the GPUs that they were measured on, a compiler, and tensors that have memory."""

import importlib.util
import os
import shutil
from collections.abc import Callable
from functools import cache, wraps
from typing import Any

import torch
from torch import Tensor

HOPPER = 9, 0  # compute capability


@cache
def can_replace() -> bool:
    """Whether the kernels run here: on all GPUs of this machine, or on none, so that all have the same bits."""
    gpus = range(torch.cuda.device_count())
    return (
        bool(gpus)
        and importlib.util.find_spec("triton") is not None
        and any(map(shutil.which, (os.environ.get("CC", "gcc"), "gcc", "clang")))  # with which Triton builds launchers
        and all(torch.cuda.get_device_capability(gpu) == HOPPER for gpu in gpus)
    )


def has_memory(tensor: Any) -> bool:
    """Whether a kernel can be given it.

    Code that is being compiled is traced with tensors that are only described, and within `torch.func` a tensor may
    stand for several, or for one with a tangent.
    """
    is_plain = type(tensor) in (Tensor, torch.nn.Parameter)
    return is_plain and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def on_its_gpu(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, with the GPU of its first tensor as the thread's current one, on which Triton launches."""

    @wraps(function)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        tensor = next(each for each in args if isinstance(each, Tensor))
        with torch.cuda.device(tensor.get_device()):  # -1, of a CPU's tensor, is none
            return function(*args, **kwargs)

    return guarded
