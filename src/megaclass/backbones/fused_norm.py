"""Batch norm with what stands beside it in a residual network (PReLU, the sum with the shortcut), in few passes on a GPU."""

from functools import cache
from typing import Any

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from megaclass.backbones import norm_programs
from megaclass.distributed.collectives import sum_over_ranks_
from megaclass.distributed.sync_batch_norm import SyncBatchNorm, moments_over_ranks

# Numbers that a program holds at a time.
_TILE = 4096


class FusedNorm(torch.autograd.Function):
    """(B, C, H, W) channels last, C a power of two up to 512. Statistics of the batch; for a SyncBatchNorm of all ranks'.

    Returns prelu(norm(x)) + skip, and x itself: who uses x in a second place takes that one, so that its gradient is added
    where the norm's is formed. Over ranks, forward all-reduces 2C + 1 float64 and backward 2C.
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
    ) -> tuple[Tensor, Tensor]:
        """weight and bias are those of the norm: a Function must see what it gives a gradient for."""
        num_rows, C = x.numel() // x.shape[1], x.shape[1]
        rows, num_programs = _tiling(num_rows, C, x.device)
        mean, variance, inverse = torch.empty(3, C, device=x.device).unbind()
        # A batch without images says nothing: nn.BatchNorm2d, too, leaves its running statistics as they are.
        follows = num_rows > 0 and not isinstance(norm, SyncBatchNorm)
        running = (norm.running_mean, norm.running_var, norm.num_batches_tracked) if follows else (None,) * 3
        norm_programs.image_moments[(num_programs,)](
            x,
            torch.empty(num_programs, 2, C, device=x.device),
            _arrivals(x.device),
            *(mean, variance, inverse, *running, num_rows, norm.eps, norm.momentum),
            C=C,
            ROWS=rows,
            num_warps=8,
        )
        count: Tensor | None = None
        if isinstance(norm, SyncBatchNorm):
            mean_64, variance_64, count = moments_over_ranks(mean, variance, num_rows, norm.group)
            mean, inverse = mean_64.float(), torch.rsqrt(variance_64 + norm.eps).float()
            norm.follow(mean_64, variance_64, count)
        y = torch.empty_like(x, memory_format=torch.channels_last)
        if num_rows:
            norm_programs.normalise[(triton.cdiv(num_rows, rows),)](
                x, skip, y, mean, inverse, weight, bias, slope, num_rows, C=C, ROWS=rows, num_warps=4
            )
        ctx.save_for_backward(x, weight, bias, slope, mean, inverse, count)
        ctx.group, ctx.has_skip = getattr(norm, "group", None), skip is not None
        ctx.set_materialize_grads(False)
        return y, x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor | None, through: Tensor | None) -> tuple[Tensor | None, ...]:
        x, weight, bias, slope, mean, inverse, count = ctx.saved_tensors
        if grad_y is None:
            return through, *(None,) * 5
        grad_y = grad_y.contiguous(memory_format=torch.channels_last)
        if through is not None:
            through = through.contiguous(memory_format=torch.channels_last)
        num_rows, C = x.numel() // x.shape[1], x.shape[1]
        rows, num_programs = _tiling(num_rows, C, x.device)
        K = 2 if slope is None else 3
        # Parameters get the sums over this rank's images, as from any layer; DDP averages them.
        sums, means = torch.empty(K, C, device=x.device), torch.empty(2, C, device=x.device)
        norm_programs.sum_gradients[(num_programs,)](
            *(grad_y, x, mean, inverse, weight, bias, slope),
            torch.empty(num_programs, K, C, device=x.device),
            _arrivals(x.device),
            *(sums, means, num_rows),
            C=C,
            K=K,
            ROWS=rows,
            num_warps=8,
        )
        if count is not None:
            means = (sum_over_ranks_(sums[:2].double(), ctx.group) / count).float()
        grad_x = torch.empty_like(x, memory_format=torch.channels_last)
        if num_rows:
            norm_programs.spread_gradients[(triton.cdiv(num_rows, rows),)](
                *(grad_y, x, through, grad_x, mean, inverse, weight, bias, slope, means, num_rows),
                C=C,
                ROWS=rows,
                num_warps=4,
            )
        grad_slope = None if slope is None else sums[2]
        return grad_x, sums[1], sums[0], grad_slope, grad_y if ctx.has_skip else None, None


def _tiling(num_rows: int, C: int, device: torch.device) -> tuple[int, int]:
    """Rows of a tile, and how many programs share the rows where each goes over several tiles and the last adds them up."""
    rows = max(1, _TILE // C)
    return rows, max(1, min(triton.cdiv(num_rows, rows), 2 * _multiprocessors(device)))


@cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def _arrivals(device: torch.device) -> Tensor:
    """A counter of the current stream, where one program follows the other; each leaves it at zero."""
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    return _counter(device, stream)


@cache
def _counter(device: torch.device, stream: int) -> Tensor:
    return torch.zeros((), dtype=torch.int32, device=device)
