"""Batch norm over the batches of all ranks, on the CPU as on GPUs."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from megaclass.hvd.collectives.allreduce import allreduce
from megaclass.hvd.collectives.ops import Sum
from megaclass.hvd.lifecycle import size

__all__ = ["SyncBatchNorm"]


class SyncBatchNorm(_BatchNorm):
    """Like nn.BatchNorm, with statistics over all ranks in training.

    Forward:  one allreduce of 2 x channels + 1 numbers, of which nothing is lost: sums, then differences.
    Backward: one allreduce of 2 x channels numbers. Gradients of weight and bias are each rank's own, as the optimizer
    averages them.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats)

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")

    def forward(self, input: Tensor) -> Tensor:
        self._check_input_dim(input)
        factor = self.momentum
        if self.training and self.track_running_stats:
            assert self.num_batches_tracked is not None
            self.num_batches_tracked.add_(1)
            if factor is None:
                factor = 1.0 / float(self.num_batches_tracked)
        uses_batch = self.training or self.running_mean is None
        if not uses_batch or size() == 1:
            keeps = self.track_running_stats or not self.training
            return nn.functional.batch_norm(
                input,
                self.running_mean if keeps else None,
                self.running_var if keeps else None,
                self.weight,
                self.bias,
                uses_batch,
                factor or 0.0,
                self.eps,
            )
        output, mean, variance, count = _Normalise.apply(input, self.weight, self.bias, self.eps)  # type: ignore[no-untyped-call]
        if self.training and self.track_running_stats:
            assert self.running_mean is not None and self.running_var is not None and factor is not None
            with torch.no_grad():
                self.running_mean.lerp_(mean.to(self.running_mean.dtype), factor)
                unbiased = variance * (count / (count - 1).clamp(min=1))
                self.running_var.lerp_(unbiased.to(self.running_var.dtype), factor)
        result: Tensor = output
        return result


class _Normalise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, given: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Any:
        numbers = given.double() if given.dtype is torch.float64 else given.float()
        dims = [0, *range(2, given.dim())]
        own_count = numbers.numel() // numbers.shape[1]
        own_sum = numbers.sum(dims)
        own_mean = own_sum / max(own_count, 1)
        # Squares of distances to the own mean: no difference of large numbers, however far from zero the data are.
        own_spread = (numbers - _wide(own_mean, given)).square().sum(dims)
        parts = torch.stack([torch.full_like(own_sum, own_count), own_sum]).contiguous()
        totals = allreduce(parts, op=Sum, name=f"sync_batch_norm.sums.{tuple(parts.shape)}")
        count, mean = totals[0, 0], totals[1] / totals[0]
        spread = own_spread + own_count * (own_mean - mean).square()
        variance = allreduce(spread, op=Sum, name=f"sync_batch_norm.spread.{tuple(spread.shape)}") / count
        scale = torch.rsqrt(variance + eps)
        normal = (numbers - _wide(mean, given)) * _wide(scale, given)
        ctx.save_for_backward(normal, weight, scale, count)
        output = normal if weight is None else normal * _wide(weight.to(normal.dtype), given)
        if bias is not None:
            output = output + _wide(bias.to(normal.dtype), given)
        ctx.mark_non_differentiable(mean, variance, count)
        return output.to(given.dtype), mean, variance, count

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor, *dead_gradients: Any) -> Any:
        normal, weight, scale, count = ctx.saved_tensors
        gradient = grad_output.to(normal.dtype)
        dims = [0, *range(2, gradient.dim())]
        sums = torch.stack([gradient.sum(dims), (gradient * normal).sum(dims)])
        grad_weight = sums[1].to(weight.dtype) if weight is not None and ctx.needs_input_grad[1] else None
        grad_bias = sums[0].to(weight.dtype) if weight is not None and ctx.needs_input_grad[2] else None
        grad_input = None
        if ctx.needs_input_grad[0]:
            means = allreduce(sums, op=Sum, name=f"sync_batch_norm.gradients.{tuple(sums.shape)}") / count
            factor = scale if weight is None else scale * weight.to(scale.dtype)
            centred = gradient - _wide(means[0], gradient) - normal * _wide(means[1], gradient)
            grad_input = (centred * _wide(factor, gradient)).to(grad_output.dtype)
        return grad_input, grad_weight, grad_bias, None


def _wide(channels: Tensor, like: Tensor) -> Tensor:
    """(C) as (1, C, 1, ...)."""
    return channels.view(1, -1, *[1] * (like.dim() - 2))
