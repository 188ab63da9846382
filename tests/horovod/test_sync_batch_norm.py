"""SyncBatchNorm of horovod.torch and of megaclass.distributed: one arithmetic, and the truth of the whole batch."""

from typing import Any

import pytest
import torch
from tests.horovod.jobs import error_of, in_job
from torch import Tensor, nn

import horovod.torch as hvd
from megaclass_launch.ranks.sync_batch_norm import SyncBatchNorm

PARTS = [[9], [4, 5], [1, 6, 2], [0, 4, 1, 4]]
C = 5


def _whole(shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """The images of all ranks, far from zero, where sums of squares would lose everything; and their gradients."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(shape, generator=generator) * 2 + 1000, torch.randn(shape, generator=generator)


def _step(norm: nn.Module, x: Tensor, grad: Tensor) -> list[Tensor]:
    """Output, input gradient, parameters' gradients and running statistics."""
    x = x.clone().requires_grad_()
    y = norm(x)
    y.backward(grad)
    assert x.grad is not None
    return [y.detach(), x.grad, norm.weight.grad, norm.bias.grad, norm.running_mean, norm.running_var]


def _counting(norm: Any) -> list[int]:
    """Numbers in each all-reduce that the norm makes from now on."""
    counts: list[int] = []
    plain = norm.sum_over_ranks

    def counted(sums: Tensor) -> Tensor:
        counts.append(sums.numel())
        return plain(sums)

    norm.sum_over_ranks = counted
    return counts


def _both(rank: int, size: int, parts: list[int], shape: tuple[int, ...]) -> list[Tensor]:
    x, grad = (tensor.split(parts)[rank] for tensor in _whole(shape))
    ours, horovods = SyncBatchNorm(C), hvd.SyncBatchNorm(C)
    results = []
    for norm in (ours, horovods):
        with torch.no_grad():
            norm.weight.copy_(torch.linspace(0.5, 2, C))
        counts = _counting(norm)
        results.append(_step(norm, x, grad))
        assert counts == [2 * C + 1, 2 * C]
    for one, two in zip(*results, strict=True):
        # gloo and hvd add the ranks' float64 in different orders; what is left of that in float32 is a last bit.
        torch.testing.assert_close(one, two, rtol=3e-7, atol=1e-7)
    ours.eval(), horovods.eval()
    assert torch.allclose(ours(x), horovods(x), rtol=1e-6, atol=1e-5)
    return results[1]


@pytest.mark.parametrize("shape", [(9, C), (9, C, 4, 3)], ids=["rows", "images"])
@pytest.mark.parametrize("parts", PARTS, ids=str)
def test_both_norms_compute_the_same_numbers_and_the_truth_with_one_all_reduce_each_way(run_ranks, parts, shape):
    results = run_ranks(len(parts), in_job, _both, parts, shape)
    plain = (nn.BatchNorm1d(C) if len(shape) == 2 else nn.BatchNorm2d(C)).double()
    with torch.no_grad():
        plain.weight.copy_(torch.linspace(0.5, 2, C))
    x, grad = _whole(shape)
    y, grad_x, grad_weight, grad_bias, mean, variance = _step(plain, x.double(), grad.double())

    def close(got: Tensor, expected: Tensor, atol: float) -> None:
        torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=atol)

    close(torch.cat([result[0] for result in results]), y, 2e-4)
    close(torch.cat([result[1] for result in results]), grad_x, 1e-4)
    # Each rank's gradients are of its own images: their sum is the gradient of the whole batch.
    close(torch.stack([result[2].double() for result in results]).sum(0), grad_weight, 2e-3)
    close(torch.stack([result[3].double() for result in results]).sum(0), grad_bias, 1e-4)
    for result in results:
        close(result[4], mean, 1e-5)
        close(result[5], variance, 1e-4)


def _options(rank: int, size: int) -> None:
    x = torch.arange(4.0 * C).view(4, C) + 10 * rank
    everything = torch.cat([torch.arange(4.0 * C).view(4, C) + 10 * r for r in range(size)])
    # Without running statistics, evaluation uses the batch of all ranks too.
    norm = hvd.SyncBatchNorm(C, affine=False, track_running_stats=False).eval()
    expected = nn.functional.batch_norm(everything, None, None, training=True)
    torch.testing.assert_close(norm(x), expected[4 * rank : 4 * rank + 4])
    assert norm.running_mean is None and norm.weight is None
    # Without a momentum the running statistics are the mean over batches, as in nn.BatchNorm.
    norm, plain = hvd.SyncBatchNorm(C, 1e-3, None), nn.BatchNorm1d(C, 1e-3, None)
    for step in range(3):
        norm(x * step), plain(everything * step)
    assert int(norm.num_batches_tracked) == 3
    torch.testing.assert_close(norm.running_mean, plain.running_mean)
    torch.testing.assert_close(norm.running_var, plain.running_var, rtol=1e-5, atol=1e-3)
    # Half precision goes in and comes out; the statistics are float32's.
    half = hvd.SyncBatchNorm(C)
    got = half(x.half().requires_grad_())
    got.sum().backward()
    assert got.dtype is torch.float16 and half.running_mean.dtype is torch.float32
    assert error_of(lambda: hvd.SyncBatchNorm(C)(torch.ones(C))) == (
        "ValueError",
        "expected at least 2D input (got 1D input)",
    )
    # Scripts leave the parameters of norms out of weight decay by this class.
    assert isinstance(norm, nn.modules.batchnorm._BatchNorm)


@pytest.mark.parametrize("size", [1, 2])
def test_horovods_options_do_what_they_do_in_batch_norm(run_ranks, size):
    run_ranks(size, in_job, _options)
