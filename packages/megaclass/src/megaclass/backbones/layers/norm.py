"""Batch norm with its neighbours as one operation, in plain PyTorch or, in training on a GPU, by fused programs."""

import importlib.util

import torch
from torch import Tensor, nn

from megaclass.backbones.layers.norm_on_paper import NormOnPaper
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
    """Returns norm(x), and x for the shortcut, whose gradient is then added where that of the norm is computed."""
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
