"""Batch norm over the global batch, on CPU and GPU: the same statistics on any number of ranks.

Forward: one all-reduce of 2 x channels + 1 float64. Backward: one all-reduce of 2 x channels. Evaluation sends nothing.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megaclass.distributed.collectives import sum_over_ranks_


class SyncBatchNorm(nn.modules.batchnorm._NormBase):
    """nn.BatchNorm1d or 2d that computes its training statistics over the images of all ranks; a rank may have no images."""

    def __init__(self, num_features: int, *, group: dist.ProcessGroup | None = None, **options: Any) -> None:
        super().__init__(num_features, **options)
        self.group = group

    def forward(self, x: Tensor) -> Tensor:
        """Normalises (B, channels) or (B, channels, H, W); returns the same shape."""
        if not self.training:
            return nn.functional.batch_norm(
                x, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, self.eps
            )
        y, mean, variance, count = _Normalise.apply(x, self.weight, self.bias, self.eps, self.group)  # type: ignore[no-untyped-call]
        if self.track_running_stats:
            self.follow(mean, variance, count)
        result: Tensor = y
        return result

    @torch.no_grad()
    def follow(self, mean: Tensor, variance: Tensor, count: Tensor) -> None:
        """Updates the running statistics with those of a global batch of `count` values per channel."""
        assert self.running_mean is not None and self.running_var is not None and self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        factor = self.momentum if self.momentum is not None else 1.0 / float(self.num_batches_tracked)
        # Like nn.BatchNorm: the biased variance normalises, the unbiased one enters the running statistics.
        unbiased = variance * (count / (count - 1).clamp_min(1))
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), factor)
        self.running_var.lerp_(unbiased.to(self.running_var.dtype), factor)


def synchronise_batch_norm(module: nn.Module, group: dist.ProcessGroup | None = None) -> nn.Module:
    """Replaces every nn.BatchNorm in the module; parameters, buffers and their names stay the same."""
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
    mean: Tensor, variance: Tensor, count: int, group: dist.ProcessGroup | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Combines each rank's moments (C,) of its `count` values per channel into mean, biased variance and count of all ranks.

    The sums of x and x² are formed in float64 from the rank's mean and variance, because a float32 sum of x² loses digits
    where mean and variance do not. One all-reduce of 2C + 1 float64.
    """
    mean, variance = mean.double(), variance.double()
    sums = torch.cat([count * mean, count * (variance + mean * mean), mean.new_full((1,), count)])
    sum_over_ranks_(sums, group)
    total = sums[-1].clamp_min(1)
    mean, square = (sums[:-1] / total).chunk(2)
    return mean, (square - mean * mean).clamp_min(0), total


class _Normalise(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, group: dist.ProcessGroup | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        dims = [0, *range(2, x.ndim)]
        values = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
        own_count = x.numel() // x.shape[1]
        own_variance, own_mean = (
            torch.var_mean(values, dims, correction=0) if own_count else values.new_zeros(2, x.shape[1]).unbind()
        )
        mean, variance, count = moments_over_ranks(own_mean, own_variance, own_count, group)
        inverse = torch.rsqrt(variance + eps).to(values.dtype)
        shape = [1, -1, *[1] * (x.ndim - 2)]
        unit = (values - mean.to(values.dtype).view(shape)) * inverse.view(shape)
        ctx.save_for_backward(unit, weight, inverse, count)
        ctx.group, ctx.has_bias = group, bias is not None
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
        means = (sum_over_ranks_(own.to(torch.float64, copy=True), ctx.group) / count).to(unit.dtype)
        mean_grad, mean_product = means.chunk(2)
        grad_x = grad - mean_grad.view(shape) - unit * mean_product.view(shape)
        factor = inverse if weight is None else inverse * weight
        own_sum, own_product = own.chunk(2)
        grad_weight = None if weight is None else own_product.to(weight.dtype)
        grad_bias = own_sum if ctx.has_bias else None
        return (grad_x * factor.view(shape)).to(grad_y.dtype), grad_weight, grad_bias, None, None
