"""Batch norm with its neighbours as one operation, in plain PyTorch or, in training on a GPU, by fused programs."""

import importlib.util
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megaclass.backbones.layers.prelu import prelu
from megaclass_launch.ranks.sync_batch_norm import SyncBatchNorm

_HAS_TRITON = importlib.util.find_spec("triton") is not None
# Numbers of channels for which the programs are written.
_WIDTHS = (16, 32, 64, 128, 256, 512)


def norm_act(norm: nn.Module, x: Tensor, *, slope: Tensor | None = None, skip: Tensor | None = None) -> Tensor:
    """Returns prelu(norm(x)) + skip for images (B, C, H, W); slope (C,) is the weight of PReLU."""
    if _is_fused(norm, x):
        return _fused(norm, x, slope, skip, gives_input=False)[0]
    y: Tensor = norm(x)
    y = y if slope is None else prelu(y, slope)
    return y if skip is None else y + skip


def norm_and_input(norm: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns norm(x), and x for the shortcut, whose gradient is then added in the kernel that computes that of the norm."""
    return _fused(norm, x, None, None, gives_input=True) if _is_fused(norm, x) else (norm(x), x)


def prepare_stream(device: torch.device) -> None:
    """Allocates what the fused programs need on the current stream of a GPU; comes before a capture on that stream."""
    if _HAS_TRITON:
        from megaclass.backbones.layers.fused_norm import scratch  # needs Triton

        scratch(device)


def _is_fused(norm: nn.Module, x: Tensor) -> bool:
    return (
        (x.is_meta or (x.is_cuda and _HAS_TRITON))
        and x.dtype != torch.float64
        and isinstance(norm, (nn.BatchNorm2d, SyncBatchNorm))
        and norm.training
        and norm.affine
        and norm.track_running_stats
        and norm.momentum is not None
        and x.shape[1] in _WIDTHS
        and x.is_contiguous(memory_format=torch.channels_last)
        and not torch.compiler.is_compiling()
    )


def _fused(
    norm: nn.Module, x: Tensor, slope: Tensor | None, skip: Tensor | None, *, gives_input: bool
) -> tuple[Tensor, Tensor]:
    assert isinstance(norm, (nn.BatchNorm2d, SyncBatchNorm))
    if skip is not None:
        skip = skip.to(x.dtype).contiguous(memory_format=torch.channels_last)
    function: type[torch.autograd.Function] = NormOnPaper
    if not x.is_meta:
        from megaclass.backbones.layers.fused_norm import FusedNorm  # needs Triton

        function = FusedNorm
    outputs: tuple[Tensor, Tensor] = function.apply(x, norm.weight, norm.bias, slope, skip, norm, gives_input)
    return outputs


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
