"""Convolutions that cuDNN does slowly on channels-last images of 16 bits, asked for in another way. Results are the same.

On an H200, batch 512: 64 channels, 1 x 1 with stride 2 on 112 x 112, forward 1.9 ms, because it goes by way of NCHW and
without tensor cores; the first convolution, of 3 channels, 1.8 ms, with zeros beside them 0.9.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F  # noqa: N812

_CHANNELS_OF_TENSOR_CORES = 8


def strided_pointwise(conv: nn.Conv2d, x: Tensor) -> Tensor:
    """conv(x), a 1 x 1 convolution with a stride, without bias: forward takes the pixels it needs first."""
    is_narrow = x.dtype.itemsize == 2 and _is_channels_last_on_gpu(x)
    if not is_narrow or conv.kernel_size != (1, 1) or conv.stride[0] == 1 or torch.compiler.is_compiling():
        plain: Tensor = conv(x)
        return plain
    result: Tensor = StridedPointwise.apply(x, conv.weight.to(x.dtype), conv.stride[0])  # type: ignore[no-untyped-call]
    return result


def few_channels(conv: nn.Conv2d, x: Tensor) -> Tensor:
    """conv(x), without bias, for images of three channels: under autocast, with channels of zeros beside them."""
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
    """(N, C, H, W) -> (N, C + missing, H, W)."""
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
    return x.is_cuda and x.is_contiguous(memory_format=torch.channels_last)
