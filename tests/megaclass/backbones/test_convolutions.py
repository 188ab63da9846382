"""Convolutions asked for in another way give what nn.Conv2d gives, and the same gradients."""

import pytest
import torch
from torch import Tensor, nn

from megaclass.backbones.layers import convolutions
from megaclass.backbones.layers.convolutions import StridedPointwise, with_zeros


@pytest.mark.parametrize("size", [(8, 8), (7, 5), (1, 1)])
@pytest.mark.parametrize("stride", [2, 3])
def test_a_pointwise_convolution_with_a_stride_is_that_of_the_pixels_it_takes(size: tuple[int, int], stride: int):
    torch.manual_seed(0)
    conv = nn.Conv2d(6, 4, 1, stride, bias=False).double()
    x = torch.randn(3, 6, *size).double().to(memory_format=torch.channels_last).requires_grad_()
    y, truth = StridedPointwise.apply(x, conv.weight, stride), conv(x)
    assert y.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(y, truth, rtol=1e-13, atol=1e-13)
    grad = torch.randn_like(truth)
    ours = torch.autograd.grad(y, [x, conv.weight], grad)
    theirs = torch.autograd.grad(truth, [x, conv.weight], grad)
    for one, two in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-13, atol=1e-13)


def test_a_gradient_that_nobody_wants_is_not_formed():
    x, weight = torch.randn(2, 6, 4, 4), torch.randn(4, 6, 1, 1, requires_grad=True)
    StridedPointwise.apply(x, weight, 2).sum().backward()
    assert x.grad is None and weight.grad is not None


def test_channels_of_zeros_change_nothing():
    torch.manual_seed(0)
    conv = nn.Conv2d(3, 4, 3, padding=1, bias=False).double()
    x = torch.randn(2, 3, 5, 5).double().to(memory_format=torch.channels_last)
    wide = with_zeros(x, 5)
    assert wide.shape == (2, 8, 5, 5) and wide.is_contiguous(memory_format=torch.channels_last)
    y = nn.functional.conv2d(wide, with_zeros(conv.weight, 5), padding=1)
    torch.testing.assert_close(y, conv(x), rtol=1e-13, atol=1e-13)
    (grad,) = torch.autograd.grad(y.square().sum(), conv.weight)
    (truth,) = torch.autograd.grad(conv(x).square().sum(), conv.weight)
    torch.testing.assert_close(grad, truth, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("name", "conv"), [("few_channels", nn.Conv2d(3, 4, 3)), ("strided_pointwise", nn.Conv2d(3, 4, 1, 2))]
)
def test_on_a_cpu_the_layer_itself_is_called(name: str, conv: nn.Module):
    called: list[Tensor] = []
    conv.register_forward_hook(lambda module, given, output: called.append(output))
    x = torch.randn(2, 3, 6, 6)
    with torch.autocast("cpu", torch.bfloat16):
        result = getattr(convolutions, name)(conv, x)
    assert called == [result]
