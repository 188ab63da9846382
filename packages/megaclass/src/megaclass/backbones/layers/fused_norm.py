"""Batch norm fused with PReLU and the sum with the shortcut, in few passes over the images on a GPU."""

from functools import cache
from typing import Any

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from megaclass.backbones.layers import norm_programs
from megaclass.triton_launch import current_stream, launch
from megaclass_launch.ranks.collectives import sum_over_ranks_
from megaclass_launch.ranks.sync_batch_norm import SyncBatchNorm, moments_over_ranks

# Elements per tile: a program maps one tile, and sums several, of which it loads some ahead.
_MAP_TILE = 4096
_SUM_TILE = 1024
_STAGES = 6
_PROGRAMS_PER_MULTIPROCESSOR = 4
_SUM_OPTIONS = {"num_warps": 2, "maxnreg": 255}
_MAP_OPTIONS = {"num_warps": 4}
_WIDEST = 512
_MAX_PROGRAMS = norm_programs.GROUP.value * norm_programs.MAX_GROUPS.value


class FusedNorm(torch.autograd.Function):
    """Batch norm of (B, C, H, W), channels last, C a power of two up to 512, over the batch or (SyncBatchNorm) all ranks.

    Returns prelu(norm(x)) + skip, and x itself if `gives_input`: a second use of x takes that one, so its gradient is
    added in the kernel that computes that of the norm. Over ranks, forward all-reduces 2C + 1 float64 and backward 2C.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        slope: Tensor | None,
        skip: Tensor | None,
        norm: torch.nn.BatchNorm2d | SyncBatchNorm,
        gives_input: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """Takes weight and bias of the norm as arguments, because autograd needs them to return their gradients."""
        assert norm.momentum is not None
        C = x.shape[1]
        num_rows = x.numel() // C
        map_rows, num_tiles, sum_rows, num_programs = _tiling(num_rows, C, x.device)
        moments = torch.empty(3, C, device=x.device)
        # Like nn.BatchNorm2d, an empty batch leaves the running statistics unchanged.
        follows = num_rows > 0 and not isinstance(norm, SyncBatchNorm)
        running = (norm.running_mean, norm.running_var, norm.num_batches_tracked) if follows else (None,) * 3
        launch(
            norm_programs.image_moments,
            num_programs,
            *(x, *scratch(x.device), moments, *running),
            *(num_rows, norm.eps, norm.momentum),
            C=C,
            ROWS=sum_rows,
            STAGES=_STAGES,
            **_SUM_OPTIONS,
        )
        count: Tensor | None = None
        if isinstance(norm, SyncBatchNorm):
            mean_64, variance_64, count = moments_over_ranks(moments[0], moments[1], num_rows, norm.sum_over_ranks)
            moments = torch.stack([mean_64, variance_64, torch.rsqrt(variance_64 + norm.eps)]).float()
            norm.follow(mean_64, variance_64, count)
        y = torch.empty_like(x, memory_format=torch.channels_last)
        if num_rows:
            tensors = (x, skip, y, moments, weight, bias, slope)
            launch(norm_programs.normalise, num_tiles, *tensors, num_rows, C=C, ROWS=map_rows, **_MAP_OPTIONS)
        ctx.save_for_backward(x, weight, bias, slope, moments, count)
        ctx.group, ctx.has_skip = getattr(norm, "group", None), skip is not None
        ctx.set_materialize_grads(False)
        return y, x.view_as(x) if gives_input else None

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor | None, through: Tensor | None) -> tuple[Tensor | None, ...]:
        x, weight, bias, slope, moments, count = ctx.saved_tensors
        if grad_y is None:
            return through, *(None,) * 6
        grad_y = grad_y.contiguous(memory_format=torch.channels_last)
        if through is not None:
            through = through.contiguous(memory_format=torch.channels_last)
        C = x.shape[1]
        num_rows = x.numel() // C
        map_rows, num_tiles, sum_rows, num_programs = _tiling(num_rows, C, x.device)
        K = 2 if slope is None else 3
        # Parameters get the sums over this rank's images, as in any layer; DDP averages them.
        sums = torch.empty(K + 2, C, device=x.device)
        launch(
            norm_programs.sum_gradients,
            num_programs,
            *(grad_y, x, moments, weight, bias, slope, *scratch(x.device), sums),
            num_rows,
            C=C,
            ROWS=sum_rows,
            STAGES=_STAGES,
            K=K,
            **_SUM_OPTIONS,
        )
        means = sums[K:] if count is None else (sum_over_ranks_(sums[:2].double(), ctx.group) / count).float()
        grad_x = torch.empty_like(x, memory_format=torch.channels_last)
        if num_rows:
            tensors = (grad_y, x, through, grad_x, moments, weight, bias, slope, means)
            launch(norm_programs.spread_gradients, num_tiles, *tensors, num_rows, C=C, ROWS=map_rows, **_MAP_OPTIONS)
        grad_slope = None if slope is None else sums[2]
        return grad_x, sums[1], sums[0], grad_slope, grad_y if ctx.has_skip else None, None, None


@cache
def _tiling(num_rows: int, C: int, device: torch.device) -> tuple[int, int, int, int]:
    """Returns rows per tile and number of tiles for mapping, then rows per tile and number of programs for summing."""
    map_rows, sum_rows = max(1, _MAP_TILE // C), max(1, _SUM_TILE // C)
    at_most = min(_PROGRAMS_PER_MULTIPROCESSOR * _multiprocessors(device), _MAX_PROGRAMS)
    return map_rows, triton.cdiv(num_rows, map_rows), sum_rows, max(1, min(triton.cdiv(num_rows, sum_rows), at_most))


def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def scratch(device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns partial sums and counters of the current stream. Its programs run one after another; each resets the counters."""
    return _scratch_of(device, current_stream(device))


@cache
def _scratch_of(device: torch.device, stream: int) -> tuple[Tensor, Tensor]:
    num_groups = norm_programs.MAX_GROUPS.value
    partial = torch.empty((_MAX_PROGRAMS + num_groups) * 3 * _WIDEST, device=device)
    return partial, torch.zeros(1 + num_groups, dtype=torch.int32, device=device)
