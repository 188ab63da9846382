"""Batch norm over the global batch, on CPU and GPU: the same statistics on any number of ranks.

Traffic per layer and step: one all-reduce of 2 x channels + 1 float64 forward and one of 2 x channels float64 backward.
In evaluation nothing is sent. How sums over ranks are made is a method, for packages with collectives of their own.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megaclass_launch.ranks.collectives import sum_over_ranks_

SumOverRanks = Callable[[Tensor], Tensor]
"""Replaces a float64 tensor by its sum over ranks and returns it."""


class SyncBatchNorm(nn.modules.batchnorm._BatchNorm):
    """nn.BatchNorm of any dimension whose statistics in training are those of all ranks' images.

    A rank may contribute an empty batch. Gradients of weight and bias are those of this rank's images, as from any other
    layer: data-parallel training averages them.
    """

    def __init__(self, num_features: int, *, group: dist.ProcessGroup | None = None, **options: Any) -> None:
        super().__init__(num_features, **options)
        self.group = group

    def sum_over_ranks(self, sums: Tensor) -> Tensor:
        """Adds the tensor over the ranks of the group, in place, and returns it."""
        return sum_over_ranks_(sums, self.group)

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")

    def forward(self, x: Tensor) -> Tensor:
        """Normalises (B, channels, ...) and returns the same shape."""
        self._check_input_dim(x)
        if not self.training and self.running_mean is not None:
            return nn.functional.batch_norm(
                x, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, self.eps
            )
        y, mean, variance, count = _Normalise.apply(x, self.weight, self.bias, self.eps, self.sum_over_ranks)  # type: ignore[no-untyped-call]
        if self.training and self.track_running_stats:
            self.follow(mean, variance, count)
        result: Tensor = y
        return result

    @torch.no_grad()
    def follow(self, mean: Tensor, variance: Tensor, count: Tensor) -> None:
        """Moves the running statistics towards those of a batch of `count` values per channel, over all ranks."""
        assert self.running_mean is not None and self.running_var is not None and self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        factor = self.momentum if self.momentum is not None else 1.0 / float(self.num_batches_tracked)
        # As in nn.BatchNorm, images are normalised by the biased variance, while the unbiased one is remembered.
        unbiased = variance * (count / (count - 1).clamp_min(1))
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), factor)
        self.running_var.lerp_(unbiased.to(self.running_var.dtype), factor)


def synchronise_batch_norm(module: nn.Module, group: dist.ProcessGroup | None = None) -> nn.Module:
    """Replaces every nn.BatchNorm1d and 2d in the module; parameters, buffers and their names stay."""
    for name, child in module.named_children():
        if isinstance(child, (nn.BatchNorm1d, nn.BatchNorm2d)):
            new = SyncBatchNorm(
                child.num_features,
                group=group,
                eps=child.eps,
                momentum=child.momentum,
                affine=child.affine,
                track_running_stats=child.track_running_stats,
            )
            new._parameters, new._buffers = child._parameters, child._buffers
            setattr(module, name, new.train(child.training))
        else:
            synchronise_batch_norm(child, group)
    return module


def moments_over_ranks(
    mean: Tensor, variance: Tensor, count: int, sum_over_ranks: SumOverRanks
) -> tuple[Tensor, Tensor, Tensor]:
    """Combines the ranks' own moments (C,), each of `count` values per channel.

    Returns mean, biased variance and count of all values, in float64. The sums of x and x² are formed here, in float64,
    because a rank's own mean and variance are exact in float32; a sum of x² is not.
    """
    mean, variance = mean.double(), variance.double()
    sums = sum_over_ranks(torch.cat([count * mean, count * (variance + mean * mean), mean.new_full((1,), count)]))
    total = sums[-1].clamp_min(1)
    mean, square = (sums[:-1] / total).chunk(2)
    return mean, (square - mean * mean).clamp_min(0), total


class _Normalise(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, sum_over_ranks: SumOverRanks
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        dims = [0, *range(2, x.ndim)]
        # Statistics of 16-bit images are computed in float32.
        values = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
        own_count = x.numel() // x.shape[1]
        own_variance, own_mean = (
            torch.var_mean(values, dims, correction=0) if own_count else values.new_zeros(2, x.shape[1]).unbind()
        )
        mean, variance, count = moments_over_ranks(own_mean, own_variance, own_count, sum_over_ranks)
        inverse = torch.rsqrt(variance + eps).to(values.dtype)
        shape = [1, -1, *[1] * (x.ndim - 2)]
        unit = (values - mean.to(values.dtype).view(shape)) * inverse.view(shape)
        ctx.save_for_backward(unit, weight, inverse, count)
        ctx.sum_over_ranks, ctx.has_bias = sum_over_ranks, bias is not None
        y = unit if weight is None else unit * weight.view(shape)
        y = y if bias is None else y + bias.view(shape)
        ctx.mark_non_differentiable(mean, variance, count)
        return y.to(x.dtype), mean, variance, count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor, *unused: Any) -> tuple[Tensor | None, ...]:
        unit, weight, inverse, count = ctx.saved_tensors
        dims = [0, *range(2, unit.ndim)]
        shape = [1, -1, *[1] * (unit.ndim - 2)]
        grad = grad_y.to(unit.dtype)
        own = torch.cat([grad.sum(dims), (grad * unit).sum(dims)])
        # A copy is summed over ranks: the parameters' gradients below are sums over this rank's images only.
        means = (ctx.sum_over_ranks(own.to(torch.float64, copy=True)) / count).to(unit.dtype)
        mean_grad, mean_product = means.chunk(2)
        grad_x = grad - mean_grad.view(shape) - unit * mean_product.view(shape)
        factor = inverse if weight is None else inverse * weight
        own_sum, own_product = own.chunk(2)
        grad_weight = None if weight is None else own_product.to(weight.dtype)
        grad_bias = own_sum if ctx.has_bias else None
        return (grad_x * factor.view(shape)).to(grad_y.dtype), grad_weight, grad_bias, None, None
