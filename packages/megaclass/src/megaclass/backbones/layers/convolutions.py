"""Equivalents of convolutions for which cuDNN is slow on 16-bit channels-last images.

On an H200 with batch 512, the forward pass of a 1 x 1 convolution of 64 channels with stride 2 on 112 x 112 takes 1.9 ms,
because cuDNN converts to NCHW and does not use tensor cores. The first convolution, of 3 channels, takes 1.8 ms, and 0.9 ms
with channels of zeros added.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F  # noqa: N812

_CHANNELS_OF_TENSOR_CORES = 8


def strided_pointwise(conv: nn.Conv2d, x: Tensor) -> Tensor:
    """Returns conv(x) for a strided 1 x 1 convolution without bias; forward selects the pixels that it needs first."""
    is_narrow = x.dtype.itemsize == 2 and _is_channels_last_on_gpu(x)
    if not is_narrow or conv.kernel_size != (1, 1) or conv.stride[0] == 1 or torch.compiler.is_compiling():
        plain: Tensor = conv(x)
        return plain
    result: Tensor = StridedPointwise.apply(x, conv.weight.to(x.dtype), conv.stride[0])  # type: ignore[no-untyped-call]
    return result


def few_channels(conv: nn.Conv2d, x: Tensor) -> Tensor:
    """Returns conv(x), without bias, for images of three channels; under autocast with channels of zeros added."""
    dtype = torch.get_autocast_dtype("cuda")
    missing = _CHANNELS_OF_TENSOR_CORES - conv.in_channels
    is_narrow = torch.is_autocast_enabled("cuda") and dtype.itemsize == 2 and _is_channels_last_on_gpu(x)
    if not is_narrow or missing <= 0 or torch.compiler.is_compiling():
        plain: Tensor = conv(x)
        return plain
    wide_x, wide_weight = with_zeros(x.to(dtype), missing), with_zeros(conv.weight.to(dtype), missing)
    assert not isinstance(conv.padding, str)
    return F.conv2d(wide_x, wide_weight, None, conv.stride, conv.padding)


def with_zeros(tensor: Tensor, missing: int) -> Tensor:
    """Appends channels of zeros: (N, C, H, W) -> (N, C + missing, H, W)."""
    return F.pad(tensor, (0, 0, 0, 0, 0, missing))


class StridedPointwise(torch.autograd.Function):
    """x (B, C, H, W), weight (D, C, 1, 1) of the same dtype; gradients as of any convolution with this stride."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, stride: int) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.stride = stride
        return F.conv2d(x[:, :, ::stride, ::stride].contiguous(memory_format=torch.channels_last), weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        wanted = [ctx.needs_input_grad[0], ctx.needs_input_grad[1], False]
        strides = [ctx.stride, ctx.stride]
        grad_x, grad_weight, _ = torch.ops.aten.convolution_backward(
            grad_y, x, weight, None, strides, [0, 0], [1, 1], False, [0, 0], 1, wanted
        )
        return grad_x, grad_weight, None


def _is_channels_last_on_gpu(x: Tensor) -> bool:
    # Tensors of the meta device stand for those of a GPU when `megaclass plan` counts bytes.
    return (x.is_cuda or x.is_meta) and x.is_contiguous(memory_format=torch.channels_last)
