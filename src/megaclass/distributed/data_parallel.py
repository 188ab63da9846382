"""The backbone, the same on every rank."""

from inspect import signature

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from megaclass.distributed.collectives import group_size, sum_over_ranks_

# torch 2.13 renamed the option and warns about the name that 2.11 and 2.12 know.
_NEW_NAME = "forward_sync_buffers"
_SYNC_BUFFERS = _NEW_NAME if _NEW_NAME in signature(DistributedDataParallel).parameters else "broadcast_buffers"


def data_parallel(backbone: nn.Module, group: dist.ProcessGroup | None = None) -> DistributedDataParallel:
    """Averages gradients over ranks during backward; batch statistics stay each rank's own between `average_buffers_`."""
    device = next(backbone.parameters()).device
    return DistributedDataParallel(
        backbone,
        device_ids=[device.index] if device.type == "cuda" else None,
        process_group=group,
        gradient_as_bucket_view=True,
        **{_SYNC_BUFFERS: False},  # type: ignore[arg-type]
    )


def exact_average(
    group: dist.ProcessGroup | None,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[torch.Tensor]:
    """Hook for DDP on CPUs: the mean of the gradients, summed in float64. An all-reduce of 8 bytes a number.

    DDP lays its buckets out anew after the first step, and in gloo's ring the place of a number decides the order in which
    the ranks' parts are added. In float64 the sum of a few float32 is exact but for extreme ranges, so that a resumed run,
    whose first step comes later, still goes on bit for bit.
    """
    gradients: torch.Tensor = bucket.buffer()
    gradients.copy_(sum_over_ranks_(gradients.double(), group) / group_size(group))
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(gradients)
    return done


@torch.no_grad()
def average_buffers_(backbone: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """Makes the running statistics of batch norm the same on all ranks: their mean. One all-reduce of all of them."""
    buffers = [buffer for buffer in backbone.buffers() if buffer.is_floating_point()]
    if not buffers:
        return
    flat = sum_over_ranks_(torch.cat([buffer.flatten().float() for buffer in buffers]), group) / group_size(group)
    for buffer, part in zip(buffers, flat.split([buffer.numel() for buffer in buffers]), strict=True):
        buffer.copy_(part.view_as(buffer))
