"""The fused batch norm, run by Triton's interpreter on the CPU, against plain float64.

tests/megaclass/test_triton_interpreter.py starts the interpreter's tests.
"""

import copy
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("triton", reason="Triton is not installed")

from tests.triton_interpreter import interpreted

from megaclass.backbones.iresnet import IBasicBlock
from megaclass.backbones.layers import fused_norm, norm
from megaclass.backbones.layers.fused_norm import FusedNorm
from megaclass_launch.ranks.sync_batch_norm import synchronise_batch_norm


def reference(x: Tensor, weight: Tensor, bias: Tensor, slope: Tensor | None, skip: Tensor | None) -> Tensor:
    dims, shape = (0, 2, 3), (1, -1, 1, 1)
    unit = (x - x.mean(dims, keepdim=True)) / torch.sqrt(x.var(dims, keepdim=True, correction=0) + 1e-5)
    y = unit * weight.view(shape) + bias.view(shape)
    y = y if slope is None else torch.where(y > 0, y, y * slope.view(shape))
    return y if skip is None else y + skip


@interpreted
@pytest.mark.parametrize(
    ("has_slope", "has_skip", "is_used_twice", "width"),
    [
        *itertools.product([False, True], [False, True], [False, True], [16]),
        (False, False, False, 512),
        (True, True, True, 512),
    ],
)
def test_values_and_gradients_are_those_of_float64(has_slope, has_skip, is_used_twice, width):
    torch.manual_seed(width)
    # 51 rows: several tiles and a part of one. A mean of ten deviations: sums of squares alone would lose it.
    x = (torch.randn(3, width, 17, 1) * 2 + 20).to(memory_format=torch.channels_last).requires_grad_()
    layer = nn.BatchNorm2d(width)
    nn.init.normal_(layer.weight)
    nn.init.normal_(layer.bias)
    slope = torch.randn(width).requires_grad_() if has_slope else None
    skip = torch.randn_like(x).requires_grad_() if has_skip else None
    grad, grad_x = torch.randn_like(x), torch.randn_like(x)

    y, same = FusedNorm.apply(x, layer.weight, layer.bias, slope, skip, layer, is_used_twice)
    assert (same is not None) == is_used_twice
    ((y * grad).sum() + ((same * grad_x).sum() if is_used_twice else 0)).backward()
    leaves = [x, layer.weight, layer.bias, slope, skip]
    exact = [None if leaf is None else leaf.detach().double().requires_grad_() for leaf in leaves]
    truth = reference(*exact)
    ((truth * grad).sum() + is_used_twice * (exact[0] * grad_x).sum()).backward()

    assert relative_error(y, truth) < 1e-6
    for leaf, exact_leaf in zip(leaves, exact, strict=True):
        if leaf is not None:
            assert relative_error(leaf.grad, exact_leaf.grad) < 1e-5
    moments = x.detach().double().transpose(0, 1).flatten(1)
    assert relative_error(layer.running_mean, 0.1 * moments.mean(1)) < 1e-6
    assert relative_error(layer.running_var, 0.9 + 0.1 * moments.var(1)) < 1e-6
    assert layer.num_batches_tracked == 1


@interpreted
@pytest.mark.parametrize("num_images", [1, 32, 33])
def test_programs_add_up_in_groups_and_leave_their_counters_at_zero(num_images, monkeypatch):
    """One row per program: groups of 32 programs, the last of one program only."""
    monkeypatch.setattr(fused_norm, "_SUM_TILE", 16)
    monkeypatch.setattr(fused_norm, "_multiprocessors", lambda device: 40)
    fused_norm._tiling.cache_clear()
    try:
        x = torch.randn(num_images, 16, 1, 1).to(memory_format=torch.channels_last).requires_grad_()
        layer, slope = nn.BatchNorm2d(16), torch.randn(16).requires_grad_()
        leaves = [x, layer.weight, layer.bias, slope]
        exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
        grad = torch.randn_like(x)
        FusedNorm.apply(*leaves, None, layer, False)[0].backward(grad)
        reference(*exact, None).backward(grad.double())
        assert fused_norm._tiling(num_images, 16, x.device)[3] == num_images
    finally:
        fused_norm._tiling.cache_clear()
    for leaf, exact_leaf in zip(leaves[1:], exact[1:], strict=True):
        torch.testing.assert_close(leaf.grad.double(), exact_leaf.grad, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(layer.running_mean.double(), 0.1 * x.detach().double().mean((0, 2, 3)))
    assert not fused_norm.scratch(x.device)[1].any()


@interpreted
def test_no_images_give_no_gradient_and_leave_the_statistics_alone():
    layer = nn.BatchNorm2d(16)
    x = torch.zeros(0, 16, 2, 2).to(memory_format=torch.channels_last).requires_grad_()
    y, _ = FusedNorm.apply(x, layer.weight, layer.bias, None, None, layer, False)
    y.sum().backward()
    assert y.shape == x.grad.shape == x.shape and not layer.weight.grad.any() and not layer.bias.grad.any()
    assert torch.equal(layer.running_mean, torch.zeros(16)) and torch.equal(layer.running_var, torch.ones(16))


@interpreted
@pytest.mark.parametrize("stride", [1, 2])
def test_frozen_parameters_get_no_gradient_and_images_and_the_others_the_same(stride, monkeypatch):
    """As backbone.freeze leaves them; and without any gradient, in training mode, the output is the same."""
    monkeypatch.setattr(norm, "_is_fused", lambda layer, images: True)
    torch.manual_seed(0)
    block = IBasicBlock(16, 16, stride).to(memory_format=torch.channels_last)
    frozen = copy.deepcopy(block)
    for parameter in [*frozen.bn1.parameters(), *frozen.bn2.parameters(), *frozen.prelu.parameters()]:
        parameter.requires_grad = False
    x = torch.randn(2, 16, 4, 4).to(memory_format=torch.channels_last)
    with torch.no_grad():
        expected = copy.deepcopy(block)(x)
    grads = []
    for one in (block, frozen):
        images = x.clone().requires_grad_(one is block)
        y = one(images)
        assert torch.equal(y, expected)
        y.sum().backward()
        grads.append({name: parameter.grad for name, parameter in one.named_parameters()})
    assert [name for name in grads[1] if grads[1][name] is None] == [
        *("bn1.weight", "bn1.bias", "bn2.weight", "bn2.bias", "prelu.weight")
    ]
    for name, grad in grads[1].items():
        assert grad is None or torch.equal(grad, grads[0][name]), name


@interpreted
@pytest.mark.parametrize("stride", [1, 2])
def test_a_block_of_an_iresnet_is_the_same_with_it(stride, monkeypatch):
    torch.manual_seed(0)
    block = IBasicBlock(16, 16, stride).double().to(memory_format=torch.channels_last)
    x = torch.randn(2, 16, 4, 4).to(memory_format=torch.channels_last)
    fused = IBasicBlock(16, 16, stride).to(memory_format=torch.channels_last)
    fused.load_state_dict(block.state_dict())
    exact_x, x = x.double().requires_grad_(), x.requires_grad_()
    truth = block(exact_x)
    calls = []
    monkeypatch.setattr(norm, "_is_fused", lambda layer, images: calls.append(layer) or True)
    y = fused(x)
    assert len(calls) == (3 if stride == 1 else 4)
    grad = torch.randn_like(truth)
    truth.backward(grad)
    y.backward(grad.float())
    assert relative_error(y, truth) < 1e-5
    assert relative_error(x.grad, exact_x.grad) < 1e-5
    for (name, parameter), (_, exact) in zip(fused.named_parameters(), block.named_parameters(), strict=True):
        assert relative_error(parameter.grad, exact.grad) < 1e-5, name
    for (name, buffer), (_, exact) in zip(fused.named_buffers(), block.named_buffers(), strict=True):
        assert relative_error(buffer, exact) < 1e-5, name


@interpreted
@pytest.mark.parametrize("parts", [[5], [2, 3], [0, 4, 1]], ids=str)
def test_over_ranks_the_statistics_are_those_of_the_whole_batch(run_ranks, parts):
    (truth,) = run_ranks(1, _on_ranks, [5], False)
    results = run_ranks(len(parts), _on_ranks, parts, True)
    for place in (0, 1):
        assert relative_error(torch.cat([result[place] for result in results]), truth[place]) < 1e-6
    assert relative_error(sum(result[2] for result in results), truth[2]) < 1e-5
    for result in results:
        assert relative_error(result[3], truth[3]) < 1e-6


def _on_ranks(parts: list[int], is_synchronised: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Output, gradient of the images, of weight and bias of this rank; running statistics."""
    import torch.distributed as dist

    generator = torch.Generator().manual_seed(3)
    x, grad = torch.randn(2, sum(parts), 16, 3, 1, generator=generator).split(parts, 1)[dist.get_rank()]
    x = x.contiguous(memory_format=torch.channels_last).requires_grad_()
    layer: Any = nn.BatchNorm2d(16)
    if is_synchronised:
        layer = synchronise_batch_norm(nn.Sequential(layer))[0]
    y, _ = FusedNorm.apply(x, layer.weight, layer.bias, None, None, layer, False)
    y.backward(grad)
    running = torch.cat([layer.running_mean, layer.running_var])
    return y.detach(), x.grad, torch.cat([layer.weight.grad, layer.bias.grad]), running


def relative_error(value: Tensor, truth: Tensor) -> float:
    return float((value.double() - truth.double()).norm() / truth.double().norm().clamp_min(1e-30))
