"""The memory format of images and convolution kernels: channels-first, or channels-last.

Convolutions on a CPU and in low precision on a GPU are faster channels-last (1.4 times for LeNet on a CPU). The choice
depends on the module, the kind of device and the precision. No autotuning: two runs must choose the same.
"""

import torch
from torch import Tensor, nn

from lockstep.backends.torch.lenet_cpu import channels_last as channels_last_images
from lockstep.core.device import Device


def wants_channels_last(module: nn.Module, device: Device, precision: str) -> bool:
    """Whether images and convolution kernels should be channels-last."""
    has_convolutions = any(isinstance(layer, nn.Conv2d) for layer in module.modules())
    return has_convolutions and (device.kind == "cpu" or precision != "fp32")


def channels_last(tensor: Tensor) -> Tensor:
    """Images channels-last; other tensors as they are."""
    return channels_last_images(tensor) if tensor.ndim == 4 and tensor.is_floating_point() else tensor


def flat_in_memory_order(tensor: Tensor, param: Tensor) -> Tensor:
    """The entries of `tensor` in the order in which those of `param` are in memory."""
    return (tensor.permute(0, 2, 3, 1) if _is_channels_last(param) else tensor).reshape(-1)


def shaped_like(param: Tensor, flat: Tensor) -> Tensor:
    """A vector in the order of `flat_in_memory_order`, in the shape of `param`."""
    if _is_channels_last(param):
        samples, channels, height, width = param.shape
        return flat.view(samples, height, width, channels).permute(0, 3, 1, 2)
    return flat.view(param.shape)


def _is_channels_last(param: Tensor) -> bool:
    return param.ndim == 4 and not param.is_contiguous() and param.is_contiguous(memory_format=torch.channels_last)
