"""PReLU on a CPU against PyTorch's, the gradient of x bit for bit, and against plain float64."""

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from megaclass.backbones import build_backbone
from megaclass.backbones.layers.prelu import PReLU, prelu


def numbers(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x, grad_y = (torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for _ in range(2))
    slope = torch.linspace(-0.5, 1.5, shape[1], dtype=dtype)
    # Zeros and the smallest numbers of both signs.
    for place, value in enumerate((0.0, -0.0, 2.0**-149, -(2.0**-149))):
        x.view(-1)[place] = value
    return x, slope, grad_y


def gradients(function, x: Tensor, slope: Tensor, grad_y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    x, slope = x.detach().requires_grad_(), slope.detach().requires_grad_()
    y = function(x, slope)
    return y, *torch.autograd.grad(y, (x, slope), grad_y)


@pytest.mark.parametrize(
    ("shape", "layout"),
    [
        ((7, 5), torch.contiguous_format),
        ((7, 5, 6), torch.contiguous_format),
        ((4, 8, 9, 11), torch.contiguous_format),
        ((4, 8, 9, 11), torch.channels_last),
        ((3, 16, 32, 32), torch.channels_last),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_it_gives_the_bits_of_pytorch(shape, layout, dtype):
    x, slope, grad_y = numbers(shape, dtype)
    x = x.contiguous(memory_format=layout)
    # The gradient that comes from a linear layer has the other layout.
    for given in (grad_y, grad_y.contiguous(memory_format=layout)):
        ours, theirs = (gradients(function, x, slope, given) for function in (prelu, F.prelu))
        assert torch.equal(ours[0], theirs[0])
        assert torch.equal(ours[1], theirs[1])
        torch.testing.assert_close(ours[2], theirs[2])
        assert ours[1].stride() == x.stride()


def test_an_infinite_gradient_stays_where_it_is():
    x, slope, _ = numbers((2, 3, 2, 2))
    grad_y = torch.full_like(x, math.inf)
    ours, theirs = (gradients(function, x, slope, grad_y) for function in (prelu, F.prelu))
    assert torch.equal(ours[1].isnan(), theirs[1].isnan())
    assert torch.equal(ours[1].isinf(), theirs[1].isinf())


def test_the_gradient_of_the_slope_agrees_with_float64():
    x, slope, grad_y = numbers((32, 16, 40, 40))
    exact = (x.double().clamp(max=0) * grad_y.double()).sum((0, 2, 3))
    torch.testing.assert_close(gradients(prelu, x, slope, grad_y)[2].double(), exact, rtol=1e-5, atol=1e-4)


def test_torch_checks_the_gradients():
    x = torch.tensor([[-2.0, 0.3], [1.5, -0.7]], dtype=torch.float64, requires_grad=True)
    slope = torch.tensor([0.25, -0.5], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(prelu, (x, slope))


@pytest.mark.parametrize("name", ["slim", "mbf", "iresnet18"])
def test_backbones_use_it(name):
    torch.manual_seed(0)
    backbone = build_backbone(name, embedding_dim=8, image_size=32)
    nodes, seen, names = [backbone(torch.randn(2, 3, 32, 32)).grad_fn], set(), set()
    while nodes:
        node = nodes.pop()
        if node is not None and node not in seen:
            seen.add(node)
            names.add(node.name())
            nodes += [following for following, _ in node.next_functions]
    assert "_PReLUOnCPUBackward" in names
    assert "PreluKernelBackward0" not in names


def test_inference_and_exports_use_the_operator_of_pytorch():
    layer = PReLU(3)
    program = torch.export.export(layer, (torch.randn(2, 3, 4, 4),))
    assert any("prelu" in str(node.target) for node in program.graph.nodes)
    with torch.no_grad():
        assert torch.equal(layer(torch.full((1, 3, 2, 2), -4.0)), torch.full((1, 3, 2, 2), -1.0))
