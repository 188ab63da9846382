"""FusedNorm for tensors of the meta device: saves the same tensors and moves the same bytes, for `megaclass plan` to count."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class NormOnPaper(torch.autograd.Function):
    """Takes and returns what FusedNorm does. Each operation here stands for one program with the same reads and writes."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        slope: Tensor | None,
        skip: Tensor | None,
        norm: object,
        gives_input: bool,
    ) -> tuple[Tensor, Tensor | None]:
        torch.amax(x, (0, 2, 3))
        moments = torch.empty(3, x.shape[1], device=x.device)
        y = torch.neg(x) if skip is None else torch.add(x, skip)
        ctx.save_for_backward(x, weight, bias, slope, moments)
        ctx.has_skip = skip is not None
        ctx.set_materialize_grads(False)
        return y, x.view_as(x) if gives_input else None

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor | None, through: Tensor | None) -> tuple[Tensor | None, ...]:
        x, weight, bias, slope, _ = ctx.saved_tensors
        if grad_y is None:
            return through, *(None,) * 6
        torch.nn.functional.mse_loss(grad_y, x)
        grad_x = torch.add(grad_y, x) if through is None else torch.addcmul(grad_y, x, through)
        grad_weight, grad_bias = torch.empty_like(weight), torch.empty_like(bias)
        grad_slope = None if slope is None else torch.empty_like(slope)
        return grad_x, grad_weight, grad_bias, grad_slope, grad_y if ctx.has_skip else None, None, None
